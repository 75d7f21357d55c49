"""python -m tilegym_fx.scan: the printed object, the tables, the exit codes, and one line for every error."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import config_of

from tilegym_fx.scan import EXIT_ERROR, EXIT_NO_MATCH, EXIT_OK, main

KEYS = {
    "": {"model", "model_type", "class", "versions", "phases"},
    "phase": {"phase", "nodes", "seconds", "coverage_estimated", "definitions", "uncovered", "near_misses"},
    "definitions": {"name", "op_type", "sites", "kind", "solution", "time_share"},
    "uncovered": {"op", "count", "time_share", "where"},
    "near_misses": {"definition", "where", "reason"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("llama")
    config_of("llama").save_pretrained(path)
    return str(path)


def scan(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    status = main([*arguments, "--seq", "24"])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


class TestJson:
    """--json prints one object of the documented form."""

    @pytest.fixture(scope="class")
    def report(self, folder: str) -> dict[str, Any]:
        command = [sys.executable, "-m", "tilegym_fx.scan", folder, "--json", "--seq", "24"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        parsed: dict[str, Any] = json.loads(done.stdout)
        return parsed

    def test_has_the_documented_keys(self, report: dict[str, Any]) -> None:
        assert report.keys() >= KEYS[""]
        for phase in report["phases"]:
            assert phase.keys() >= KEYS["phase"]
            assert phase["seconds"].keys() >= {"export", "normalize", "match", "plan"}
            for name in ("definitions", "uncovered", "near_misses"):
                assert all(row.keys() >= KEYS[name] for row in phase[name]), name

    def test_has_values_of_the_documented_types(self, report: dict[str, Any]) -> None:
        assert (report["model_type"], report["class"]) == ("llama", "LlamaForCausalLM")
        assert [phase["phase"] for phase in report["phases"]] == ["prefill", "decode"]
        for phase in report["phases"]:
            assert 0 < phase["coverage_estimated"] <= 1
            assert isinstance(phase["nodes"], int)
            for row in phase["definitions"]:
                assert row["kind"] in ("exact", "compatible")
                assert isinstance(row["sites"], int)
                assert isinstance(row["solution"], str)
        assert report["versions"]["torch"] == torch.__version__


def test_tables_for_a_person(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = scan(folder, capsys=capsys)
    assert status == EXIT_OK
    for text in ("LlamaForCausalLM", "prefill", "decode", "estimated coverage", "H200", "gqa_attention_causal"):
        assert text in out
    assert "modeling_llama.py:" in out


def test_explain_a_class(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = scan(folder, "--explain", "LlamaRMSNorm", "--phase", "prefill", capsys=capsys)
    assert status == EXIT_OK
    assert "taken" in out
    assert "rms_norm" in out
    assert "LlamaMLP" not in out


def test_explain_what_is_not_there(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = scan(folder, "--explain", "NoSuchClass", "--phase", "prefill", capsys=capsys)
    assert "nothing at NoSuchClass" in out


def test_device_changes_the_estimate(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    times = []
    for device in ("h200", "a100"):
        _, out, _ = scan(folder, "--device", device, "--json", "--phase", "prefill", capsys=capsys)
        times.append(json.loads(out)["phases"][0]["milliseconds_estimated"])
    assert times[0] < times[1]


def test_only_and_skip(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = scan(folder, "--only", "rms_norm", "--only", "linear", "--skip", "linear", "--json", capsys=capsys)
    for phase in json.loads(out)["phases"]:
        assert {row["name"] for row in phase["definitions"]} == {"rms_norm"}


@pytest.mark.parametrize("strict", [False, True])
def test_strict_is_about_finding_nothing(folder: str, strict: bool, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--only", "rotary_embedding_half_width", "--phase", "prefill", *(["--strict"] if strict else [])]
    status, *_ = scan(folder, *options, capsys=capsys)
    assert status == (EXIT_NO_MATCH if strict else EXIT_OK)


def test_drafts_can_be_run_and_cite_their_source(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = scan(folder, "--draft", str(tmp_path), "--only", "linear", "--phase", "prefill", capsys=capsys)
    files = sorted(tmp_path.glob("*.json"))
    assert status == EXIT_OK
    assert files
    assert f"{len(files)} draft Definitions in {tmp_path}" in err
    for file in files:
        draft = json.loads(file.read_text(encoding="utf-8"))
        assert file.stem == draft["name"]
        assert "status:draft" in draft["tags"]
        first, *_ = draft["reference"].splitlines()
        assert first.startswith("# Source: https://github.com/huggingface/transformers/blob/v")
        assert "#L" in first
        run_draft(draft)


def run_draft(draft: dict[str, Any]) -> None:
    """The reference, at tensors of the declared sizes and dtypes, gives what is declared."""
    scope: dict[str, Any] = {}
    exec(draft["reference"], scope)
    sizes = {name: axis.get("value", 4) for name, axis in draft["axes"].items()}

    def made(spec: dict[str, Any]) -> torch.Tensor:
        return torch.ones([sizes[a] for a in spec["shape"]], dtype=getattr(torch, spec["dtype"]))

    results = scope["run"](*map(made, draft["inputs"].values()))
    results = results if isinstance(results, tuple) else (results,)
    for result, spec in zip(results, draft["outputs"].values(), strict=True):
        assert list(result.shape) == [sizes[a] for a in spec["shape"]], draft["name"]
        assert str(result.dtype) == f"torch.{spec['dtype']}"


class TestErrors:
    """One clear line on stderr, status 1, no traceback."""

    def check(self, *arguments: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
        status = main(list(arguments))
        printed = capsys.readouterr()
        (line,) = [line for line in printed.err.splitlines() if line.startswith("error: ")]
        assert status == EXIT_ERROR
        assert says in line
        assert "Traceback" not in printed.err
        assert printed.out == ""

    def test_an_unknown_id_without_a_network(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.check("some-org/no-such-model", says="some-org/no-such-model", capsys=capsys)

    def test_an_unknown_type(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.check("lama", says="lama", capsys=capsys)

    def test_a_folder_without_a_configuration(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.check(str(tmp_path), says="config.json", capsys=capsys)

    def test_a_configuration_that_is_no_json(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "config.json").write_text("{", encoding="utf-8")
        self.check(str(tmp_path), says=str(tmp_path), capsys=capsys)

    def test_a_class_that_is_no_language_model(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "config.json").write_text('{"model_type": "vit"}', encoding="utf-8")
        self.check(str(tmp_path), says="vit", capsys=capsys)

    def test_remote_code_without_leave(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        config = {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
        (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
        (tmp_path / "own.py").write_text("raise SystemExit('it ran')\n", encoding="utf-8")
        self.check(str(tmp_path), says="trust", capsys=capsys)

    def test_an_unknown_device(self, folder: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.check(folder, "--device", "h300", says="h300", capsys=capsys)

    def test_an_unknown_definition(self, folder: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.check(folder, "--only", "rms_nrom", "--seq", "8", says="rms_nrom", capsys=capsys)

    def test_an_inventory_that_is_not_there(self, folder: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.check(folder, "--inventory", "no-such-folder", says="no-such-folder", capsys=capsys)

    def test_no_model(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.check(says="0 models are named", capsys=capsys)
