"""The scan command: each option, what it prints, and how it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_folder

from tilegym_fx import scan
from tilegym_fx.model_source import resolve_model, shipped_models
from tilegym_fx.schema import Definition

pytestmark = pytest.mark.xdist_group("scan")  # its patterns are traced once
PLAIN = ("rms_norm", "add_rms_norm", "silu_mul", "rotary_embedding", "gqa_attention_causal", "gqa_attention", "linear")
ONLY = [flag for name in PLAIN for flag in ("--only", name)]
SMALL_GPT2 = {"model_type": "gpt2", "n_positions": 24, "n_embd": 32, "n_layer": 1, "n_head": 2}
Said = tuple[int, str, str]
Scan = Callable[..., Said]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Scan:
    """Scan a tiny Llama, or the model that the options begin with; gives status, output and errors."""
    model = tiny_folder.write(tmp_path)

    def command(*options: str, model: str = model, short: bool = True) -> Said:
        status = scan.main([model, *(("--seq", "16", *ONLY) if short else ()), *options])
        return (status, *capsys.readouterr())

    return command


def of(said: Said, phase: str = "prefill") -> dict[str, Any]:
    """One phase of what --json printed."""
    return next(p for p in json.loads(said[1])["phases"] if p["phase"] == phase)


def sites(phase: dict[str, Any]) -> dict[str, int]:
    return {row["name"]: row["sites"] for row in phase["definitions"]}


class TestOutput:
    def test_a_person_reads_header_table_coverage_and_what_is_left(self, run: Scan) -> None:
        status, out, _ = run()
        assert status == scan.EXIT_OK
        assert "LlamaForCausalLM" in out
        assert "batch 1, 16 tokens, times estimated for h200; torch " in out
        lines = [line.split() for line in out.splitlines()]
        assert ["rms_norm", "1", "exact"] in [line[:3] for line in lines]
        assert ["add_rms_norm", "4", "exact"] in [line[:3] for line in lines]
        assert out.count("estimated coverage") == 2
        assert "uncovered, by estimated time" in out
        assert "modeling_llama.py:" in out

    def test_json_has_the_documented_keys_and_nothing_else_on_stdout(self, run: Scan) -> None:
        said = run("--json")
        found = json.loads(said[1])
        assert {"model", "model_type", "class", "versions", "phases"} <= found.keys()
        assert (found["model_type"], found["class"]) == ("llama", "LlamaForCausalLM")
        assert {"torch", "transformers", "tilegym-fx", "python"} <= found["versions"].keys()
        assert [p["phase"] for p in found["phases"]] == ["prefill", "decode"]
        for phase in found["phases"]:
            assert {"export", "normalize", "match", "plan"} == phase["seconds"].keys()
            assert 0 < phase["coverage_estimated"] < 1
            assert phase["nodes"] > 0
            for row in phase["definitions"]:
                keys = {"name", "op_type", "sites", "kind", "solution", "time_share", "where"}
                assert row.keys() == keys
                assert row["kind"] in ("exact", "compatible")
            assert all(row.keys() == {"op", "count", "time_share", "where"} for row in phase["uncovered"])
            assert all(row.keys() == {"definition", "where", "reason"} for row in phase["near_misses"])
            shares = [row["time_share"] for row in (*phase["definitions"], *phase["uncovered"])]
            assert sum(shares) == pytest.approx(1, abs=1e-4)

    def test_counts_are_those_of_both_layers(self, run: Scan) -> None:
        said = run("--json")
        assert sites(of(said)) == {
            "linear": 15, "add_rms_norm": 4, "rms_norm": 1, "silu_mul": 2, "rotary_embedding": 2,
            "gqa_attention_causal": 2,
        }  # fmt: skip
        assert sites(of(said, "decode"))["gqa_attention"] == 2

    def test_a_name_is_no_markup(self, run: Scan, tmp_path: Path) -> None:
        folder = tmp_path / "[" / "x]"
        folder.mkdir(parents=True)
        status, out, _ = run("--phase", "prefill", model=tiny_folder.write(folder))
        assert status == scan.EXIT_OK
        assert f"{folder} LlamaForCausalLM" in " ".join(out.split())
        assert "quantised" not in out

    def test_a_quantised_checkpoint_is_told(self, run: Scan, tmp_path: Path) -> None:
        model = tiny_folder.write(tmp_path, quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 128})
        assert "weights quantised (gptq) in the checkpoint, not here" in run("--phase", "prefill", model=model)[1]

    def test_a_shipped_id_says_so_of_its_checkpoint_too(self) -> None:
        quantised = {name: resolve_model(name).quantised for name in shipped_models()}
        assert {name: how for name, how in quantised.items() if how} == {"openai/gpt-oss-20b": "mxfp4"}

    def test_explain_shows_what_is_taken_and_what_is_not_in_a_class(self, run: Scan) -> None:
        _, out, _ = run("--phase", "prefill", "--explain", "LlamaRMSNorm")
        assert "taken     add_rms_norm (reference, exact)" in out
        assert "not taken rms_norm (reference) at" in out
        assert "overlaps add_rms_norm, which saves more" in out
        assert "silu_mul" not in out

    def test_explain_of_a_definition_shows_its_places_and_its_misses(self, run: Scan) -> None:
        _, out, _ = run("--phase", "prefill", "--explain", "rms_norm")
        lines = out.splitlines()[1:]
        assert sum(line.startswith("  taken     rms_norm (") for line in lines) == 1
        assert all(line.split()[1] == "rms_norm" or line.split()[2] == "rms_norm" for line in lines)
        assert any("not taken rms_norm" in line and "overlaps add_rms_norm" in line for line in lines)

    def test_explain_of_a_definition_or_class_that_nothing_comes_near_says_so(self, run: Scan) -> None:
        for name in ("layer_norm", "LlamaModel"):
            status, out, _ = run("--phase", "prefill", "--explain", name)
            assert (status, out) == (scan.EXIT_OK, "prefill\n  nothing matches or comes near\n")

    @pytest.mark.parametrize(
        ("wanted", "near"), [("LlamaMPL", "`LlamaMLP`"), ("silu_mull", "`silu_mul`"), ("NoSuchClass", "or file:line")]
    )
    def test_explain_of_what_is_not_there_names_the_nearest(self, run: Scan, wanted: str, near: str) -> None:
        status, out, err = run("--phase", "prefill", "--explain", wanted)
        assert (status, out) == (scan.EXIT_ERROR, "")
        assert f"is called {wanted!r}. Give a Definition, a class" in err
        assert near in err

    def test_it_fits_80_columns_without_broken_words(self, run: Scan, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("COLUMNS", "80")
        lines = run("--forms")[1].splitlines()
        tables = [line for line in lines if not line.startswith(("/", "batch"))]
        assert max(map(len, tables)) <= 80
        assert all(line == line.rstrip() for line in lines)
        words = " ".join(lines).split()
        assert {"modeling_llama.py:", "(LlamaAttention)", "gqa_attention_causal"} <= {
            w.rstrip("0123456789") for w in words
        }
        assert not any("/models/" in word for line in tables for word in line.split())


class TestOptions:
    def test_one_phase(self, run: Scan) -> None:
        assert [p["phase"] for p in json.loads(run("--json", "--phase", "decode")[1])["phases"]] == ["decode"]

    def test_batch_seq_and_dtype_are_what_is_captured(self, run: Scan) -> None:
        found = json.loads(run("--json", "--phase", "prefill", "--batch", "3", "--seq", "24", "--dtype", "float32")[1])
        assert (found["batch"], found["seq"], found["dtype"]) == (3, 24, "float32")
        assert {row["kind"] for row in found["phases"][0]["definitions"]} == {"compatible"}

    def test_without_dtype_the_checkpoints_is_taken(self, run: Scan, tmp_path: Path) -> None:
        options = ("--json", "--phase", "prefill")
        assert json.loads(run(*options)[1])["dtype"] == "bfloat16"
        full = tiny_folder.write(tmp_path, dtype="float32")
        found = json.loads(run(*options, model=full)[1])
        assert found["dtype"] == "float32"
        assert {row["kind"] for row in found["phases"][0]["definitions"]} == {"compatible"}
        assert json.loads(run(*options, "--dtype", "float16", model=full)[1])["dtype"] == "float16"

    def test_without_seq_a_model_with_few_positions_is_scanned_at_all_of_them(self, run: Scan, tmp_path: Path) -> None:
        few = tiny_folder.write(tmp_path, **SMALL_GPT2)
        status, out, _ = run("--only", "linear_bias", model=few, short=False)
        assert status == scan.EXIT_OK
        assert "batch 1, 24 tokens (all that it has positions for), times" in out
        assert [line.split(":")[0] for line in out.splitlines() if " nodes; " in line] == ["prefill", "decode"]
        _, out, _ = run("--only", "linear_bias", "--seq", "16", model=few, short=False)
        assert "batch 1, 16 tokens, times" in out

    def test_rotary_positions_go_on(self, run: Scan, tmp_path: Path) -> None:
        model = tiny_folder.write(tmp_path, max_position_embeddings=24)
        _, out, _ = run("--phase", "prefill", "--only", "silu_mul", model=model, short=False)
        assert "batch 1, 2048 tokens, times" in out

    def test_another_device_has_other_times(self, run: Scan) -> None:
        here, there = (of(run("--json", "--phase", "prefill", *more)) for more in ((), ("--device", "a100")))
        assert here["milliseconds_estimated"] != there["milliseconds_estimated"]
        assert sites(here) == sites(there)

    def test_only_and_skip(self, run: Scan) -> None:
        phase = of(run("--json", "--phase", "prefill", "--only", "silu_mul", "--only", "linear", short=False))
        assert sites(phase) == {"silu_mul": 2, "linear": 15}
        phase = of(run("--json", "--phase", "prefill", "--skip", "add_rms_norm"))
        assert sites(phase)["rms_norm"] == 5

    def test_strict_fails_where_nothing_matches_and_nowhere_else(self, run: Scan) -> None:
        options = ("--phase", "prefill", "--strict", "--json", "--seq", "16")
        assert run(*options, "--only", "layer_norm", short=False)[0] == scan.EXIT_NO_MATCH
        assert run(*options, "--only", "linear", short=False)[0] == scan.EXIT_OK
        assert run(*options[:2], "--json", "--only", "layer_norm", short=False)[0] == scan.EXIT_OK

    def test_drafts_are_definitions_that_cite_the_lines(self, run: Scan, tmp_path: Path) -> None:
        status, _, err = run("--phase", "prefill", "--skip", "silu_mul", "--draft", str(tmp_path / "drafts"))
        assert status == scan.EXIT_OK
        drafts = [Definition.model_validate_json(p.read_text()) for p in (tmp_path / "drafts").rglob("*.json")]
        assert f"{len(drafts)} draft Definitions in" in err
        assert all("status:draft" in draft.tags for draft in drafts)
        assert any("silu" in d.reference and "/activations.py#L" in d.reference for d in drafts)

    def test_emit_writes_the_patch(self, run: Scan, tmp_path: Path) -> None:
        status, out, err = run("--json", "--forms", "--emit", str(tmp_path))
        rows = [row for phase in json.loads(out)["phases"] for row in phase["definitions"]]
        both, graph = (sum(row["sites"] for row in rows if row["form"] == form) for form in ("both", "graph"))
        assert graph
        assert status == scan.EXIT_OK
        file = tmp_path / "modeling_llama.py"
        assert f"wrote {file}: {both} of {both + graph} places; the others need graph form (--forms tells which)" in err
        assert "to apply it: import modeling_llama; modeling_llama.apply(model)" in err
        assert "PATCHES" in (tmp_path / "modeling_llama.py").read_text()

    @pytest.mark.parametrize(("layout", "below"), [("file", ""), ("tilegym", "llama/")])
    def test_emit_writes_over_no_file_that_is_not_ours(
        self, run: Scan, tmp_path: Path, layout: str, below: str
    ) -> None:
        file = tmp_path / "out" / f"{below}modeling_llama.py"
        file.parent.mkdir(parents=True)
        file.write_text("# precious\n")
        places = ("--emit", str(tmp_path / "out"), "--layout", layout, "--draft", str(tmp_path / "drafts"))
        status, out, err = run("--phase", "prefill", *places)
        assert (status, out) == (scan.EXIT_ERROR, "")
        assert err.count("\n") == 1
        assert "modeling_llama.py' was not written by tilegym_fx and is not written over. Name another place" in err
        assert [p for place in ("out", "drafts") for p in (tmp_path / place).rglob("*") if p.is_file()] == [file]
        assert file.read_text() == "# precious\n"

    def test_emit_of_nothing_is_one_clear_line(self, run: Scan, tmp_path: Path) -> None:
        options = ("--phase", "prefill", "--only", "layer_norm", "--emit", str(tmp_path / "out"))
        status, _, err = run(*options, short=False)
        assert status == scan.EXIT_ERROR
        assert "can be written in source form" in err

    def test_forms_tell_what_meets_only_in_the_loop_over_layers(self, run: Scan) -> None:
        """The sum that ends a layer and the norm that begins the next, or the last one."""
        rows = of(run("--json", "--phase", "prefill", "--forms"))["definitions"]
        found = {(row["name"], row["form"]): row["sites"] for row in rows}
        assert found["add_rms_norm", "both"] == 2
        assert found["add_rms_norm", "graph"] == 2
        assert found["rms_norm", "source"] == 2
        assert found["silu_mul", "both"] == 2
        assert ("silu_mul", "graph") not in found

    def test_forms_have_a_column(self, run: Scan) -> None:
        _, out, _ = run("--phase", "prefill", "--forms")
        assert ["add_rms_norm", "2", "exact", "graph"] in [line.split()[:4] for line in out.splitlines()]

    def test_a_further_inventory(self, run: Scan, tmp_path: Path) -> None:
        status, _, err = run("--inventory", str(tmp_path / "none"))
        assert status == scan.EXIT_ERROR
        assert str(tmp_path / "none") in err


class TestRefusals:
    """One line that says what to do, status 1, nothing on stdout and no traceback."""

    @staticmethod
    def refused(said: Said, *words: str) -> None:
        status, out, err = said
        assert ".. " not in err
        assert not err.endswith("..\n")
        (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
        assert (status, out) == (scan.EXIT_ERROR, "")
        assert "Traceback" not in err
        for word in words:
            assert word in line

    def test_an_id_that_is_nowhere(self, run: Scan) -> None:
        said = run(model="nobody/nothing")
        self.refused(said, "'nobody/nothing'", "no network", "a local folder with its config.json")
        assert "Give a hub id" not in said[2]

    def test_a_misspelt_id_names_the_nearest(self, run: Scan) -> None:
        self.refused(run(model="meta-llama/Llama-3.1-8C"), "did you mean `meta-llama/Llama-3.1-8B`")

    def test_a_folder_without_a_configuration(self, run: Scan, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        self.refused(run(model=str(tmp_path / "empty")), "without a config.json")

    def test_a_type_that_transformers_does_not_know(self, run: Scan, tmp_path: Path) -> None:
        self.refused(run(model=tiny_folder.write(tmp_path, model_type="nonesuch")), "'nonesuch'", "does not know")

    def test_a_model_that_is_no_language_model(self, run: Scan) -> None:
        self.refused(run(model="vit"), "not called with token ids")

    def test_code_that_is_not_trusted(self, run: Scan, tmp_path: Path) -> None:
        model = tiny_folder.write(tmp_path, model_type="own", auto_map={"AutoConfig": "own.OwnConfig"})
        self.refused(run(model=model), "--trust-remote-code")

    def test_sizes_that_no_model_can_have(self, run: Scan, tmp_path: Path) -> None:
        self.refused(run(model=tiny_folder.write(tmp_path, hidden_size=0)), "config.json")

    def test_a_device_that_has_no_table(self, run: Scan) -> None:
        self.refused(run("--device", "abacus"), "abacus", "h200")

    @pytest.mark.parametrize("option", ["--only", "--skip"])
    def test_a_definition_that_does_not_exist(self, run: Scan, option: str) -> None:
        self.refused(run(option, "rms_nrom"), "rms_nrom", "inventory list")

    @pytest.mark.parametrize("option", ["--batch", "--seq"])
    def test_no_tokens(self, run: Scan, option: str) -> None:
        self.refused(run(option, "0"), "Give sizes of 1 and more.")

    def test_a_prompt_longer_than_the_positions(self, run: Scan) -> None:
        said = run("--seq", "2000", model="gpt2")
        self.refused(said, "1024 positions", "needs 2000. Give a seq of at most 1024.")
        assert "Leave that part out" not in said[2]

    def test_no_model(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.refused((scan.main([]), *capsys.readouterr()), "no MODEL is named", "a hub id such as", "--all")

    def test_two_models(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.refused((scan.main(["gpt2", "llama"]), *capsys.readouterr()), "2 models are named. Give one")

    @pytest.mark.parametrize("option", ["--draft", "--emit"])
    @pytest.mark.parametrize("below", ["", "/inside"])
    def test_a_place_that_cannot_be_written_is_told_before_the_scan(
        self, run: Scan, tmp_path: Path, option: str, below: str
    ) -> None:
        (tmp_path / "file").write_text("")
        said = run(option, f"{tmp_path}/file{below}", model="a model that nobody looks for")
        self.refused(said, "file", "cannot be written", "Name another place.")

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            (("--jobs", "3"), ("--jobs belongs to --all",)),
            (("--layout", "file"), ("Give --emit DIR too",)),
            (("--all", "--emit", "there"), ("--emit", "--seq", "all model types at once")),
        ],
    )
    def test_an_option_that_would_do_nothing(self, run: Scan, options: tuple[str, ...], words: tuple[str, ...]) -> None:
        self.refused(run(*options), *words)

    def test_an_option_that_does_not_exist_is_a_usage_error(self, run: Scan) -> None:
        with pytest.raises(SystemExit) as stopped:
            run("--frobnicate")
        assert stopped.value.code == 2
