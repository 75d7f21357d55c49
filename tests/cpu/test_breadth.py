"""Every causal language model: small configurations, places counted, workers that may die, and what is written."""

from __future__ import annotations

import csv
import io
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tilegym_fx import scan
from tilegym_fx.breadth import pool, run, shrink, sites, steps, table, worker
from tilegym_fx.breadth.configs import realistic_trial, tiny_trial, trial_key
from tilegym_fx.breadth.judge import is_sequential
from tilegym_fx.breadth.page import as_page
from tilegym_fx.breadth.record import Row
from tilegym_fx.errors import UsageError
from tilegym_fx.export import build, export_module, export_phase, phase_inputs
from tilegym_fx.inventory import load
from tilegym_fx.model_source import causal_model_types
from tilegym_fx.normalize import normalize

GOOD = Row(
    "llama", "LlamaForCausalLM", 3.0, {"prefill": "whole", "decode": "whole"}, {"norm": (5, 5), "rotary": (2, 2)},
    {"prefill": 0.99, "decode": 0.9}, (("aten.embedding", 0.02),), {"norm": (5, 5)}, 22, True, ("prefill",), 0.0, True,
)  # fmt: skip
HALF = replace(GOOD, model_type="half", places={"norm": (2, 5)}, coverage={"prefill": 0.5}, difference=1e-3)
NOT = Row("not", exported={"prefill": "NotModel cannot be exported: a loop | a split"}, problem="crash: a loop")
WRONG = replace(GOOD, model_type="wrong", verified=False, problem="prefill: off by 3")
ROWS = [GOOD, HALF, NOT, WRONG]


class TestShrink:
    def test_one_layer_of_each_kind_is_kept(self) -> None:
        fields = {"num_hidden_layers": 6, "layer_types": ["a", "a", "b", "a", "a", "b"], "hidden_size": 512}
        assert shrink.layers_only(fields) == {"num_hidden_layers": 2, "layer_types": ["a", "b"]}

    def test_kinds_come_from_every_field_that_tells_layers_apart(self) -> None:
        fields = {
            "n_layer": 8, "first_k_dense_replace": 2, "layer_types": ["a", "b"] * 4, "moe_layers": [4, 5],
            "per_layer_config": {"7": {"head_dim": 64}},
        }  # fmt: skip
        assert shrink.kept_layers(fields) == [0, 1, 2, 3, 4, 5]
        assert len(set(shrink.layer_kinds(fields))) == 7

    def test_lists_of_layer_numbers_are_renumbered(self) -> None:
        fields = {"num_hidden_layers": 9, "full_attn_idxs": [2, 5, 8]}
        assert shrink.layers_only(fields) == {"num_hidden_layers": 2, "full_attn_idxs": [1]}

    def test_two_layers_are_kept_where_all_are_equal(self) -> None:
        assert shrink.layers_only({"num_hidden_layers": 32}) == {"num_hidden_layers": 2}

    def test_a_kept_layer_stands_for_those_of_its_kind(self) -> None:
        fields = {"num_hidden_layers": 6, "layer_types": ["a", "a", "b", "a", "a", "b"]}
        assert shrink.layer_weights(fields, {**fields, **shrink.layers_only(fields)}) == [4.0, 2.0]

    def test_widths_keep_their_ratios(self) -> None:
        fields = {"num_hidden_layers": 2, "hidden_size": 512, "lru_width": 1024, "vocab_size": 32000}
        small = shrink.tiny(fields)
        assert (small["hidden_size"], small["lru_width"], small["vocab_size"]) == (64, 128, 120)

    def test_nothing_grows(self) -> None:
        small = shrink.tiny({"num_hidden_layers": 2, "hidden_size": 512, "num_experts": 4, "intermediate_size": 96})
        assert (small["num_experts"], small["intermediate_size"]) == (4, 96)

    def test_every_head_with_its_own_keys_stays_so(self) -> None:
        fields = {"num_hidden_layers": 2, "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8}
        assert shrink.tiny(fields)["num_key_value_heads"] == shrink.HEADS
        assert shrink.tiny({**fields, "num_key_value_heads": 2})["num_key_value_heads"] == 2

    def test_encoders_become_decoders(self) -> None:
        assert tiny_trial("bert").config.is_decoder


class TestTrials:
    @pytest.mark.parametrize("name", causal_model_types())
    def test_each_type_has_a_tiny_model_and_a_realistic_one(self, name: str) -> None:
        small, large = build(tiny_trial(name).config), build(realistic_trial(name).config)
        sizes = [sum(p.numel() for p in model.parameters()) for model in (small, large)]
        assert sizes[0] < sizes[1]
        assert sizes[0] < 16_000_000

    def test_a_model_of_several_parts_is_tried_as_its_text_part_is(self) -> None:
        assert trial_key("gemma3") == trial_key("gemma3_text")
        assert trial_key("gemma3") != trial_key("gemma2")

    def test_a_cache_that_a_model_copies_is_filled_without_memory(self) -> None:
        """Dory deep-copies layers of its cache; torch once gave up the whole process there."""
        model = build(tiny_trial("dory").config, torch.float32, device="cpu")
        assert "cache" in phase_inputs(model, "decode", 1, 8)

    def test_the_realistic_one_has_the_default_widths(self) -> None:
        trial = realistic_trial("qwen3_next")
        assert trial.config.hidden_size == 2048
        assert trial.weights == (36.0, 12.0)


class Gated(nn.Module):
    """A norm, a gated MLP, a plain one, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.act = nn.Embedding(50, 8), nn.RMSNorm(8), nn.SiLU()
        self.gate, self.up, self.down = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)
        self.one, self.two, self.head = nn.Linear(8, 32), nn.Linear(32, 8), nn.Linear(8, 50)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        y = self.norm(x)
        x = x + self.down(self.act(self.gate(y)) * self.up(y))
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.head(x + self.two(nn.functional.gelu(self.one(x))))


def counted(module: nn.Module, *inputs: Tensor, vocabulary: int = 50) -> dict[str, int]:
    graph = export_module(module.eval(), inputs).graph_module.graph
    normalize(graph)
    return {name: every for name, (_, every) in sites.matched(sites.places(graph, vocabulary), ()).items()}


class TestWorker:
    def test_the_same_models_are_tried_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        tried: list[str] = []

        def judged(name: str, inventory: object) -> Row:
            tried.append(name)
            return replace(GOOD, model_type=name)

        monkeypatch.setattr(worker, "judge", judged)
        known: dict[str, Row] = {}
        rows = [worker._row(name, load(), known) for name in ("gemma3_text", "gemma3", "gemma2")]
        assert tried == ["gemma3_text", "gemma2"]
        assert [row.model_type for row in rows] == ["gemma3_text", "gemma3", "gemma2"]
        assert rows[1].coverage == rows[0].coverage


class TestPlaces:
    def test_each_kind_is_counted_once(self) -> None:
        assert counted(Gated(), torch.zeros(2, 3, dtype=torch.long)) == {
            "norm": 2,
            "gated MLP": 1,
            "MLP": 1,
            "linears": 5,
            "head": 1,
        }

    def test_a_product_of_two_linears_is_no_gate(self) -> None:
        class Product(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

            def forward(self, x: Tensor) -> Tensor:
                return self.c(self.a(x) * self.b(x))

        assert counted(Product(), torch.randn(2, 8)) == {"linears": 3}

    def test_a_norm_of_a_scale_alone_is_none(self) -> None:
        class Scaled(nn.Module):
            def forward(self, x: Tensor, y: Tensor) -> Tensor:
                return x * torch.rsqrt(y)

        assert counted(Scaled(), torch.randn(2, 8), torch.rand(2, 8)) == {}

    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("llama", {"norm": 5, "rotary": 2, "gated MLP": 2, "attention": 2, "linears": 14, "head": 1}),
            ("gpt2", {"norm": 5, "MLP": 2, "attention": 2, "linears": 8, "head": 1}),
            ("gptj", {"norm": 3, "rotary": 2, "MLP": 2, "attention": 2, "linears": 12, "head": 1}),
            ("bloom", {"norm": 6, "MLP": 2, "attention": 2, "linears": 8, "head": 1}),
            ("llama4_text", {"norm": 7, "rotary": 1, "gated MLP": 2, "attention": 2, "linears": 16, "MoE router": 2,
                             "experts": 2, "head": 1}),
            ("qwen3_moe", {"norm": 9, "rotary": 2, "attention": 2, "linears": 10, "MoE router": 2, "experts": 2,
                           "head": 1}),
        ],
    )  # fmt: skip
    def test_models(self, name: str, expected: dict[str, int]) -> None:
        trial = tiny_trial(name)
        graph = export_phase(build(trial.config), "prefill", 1, 16).graph_module.graph
        normalize(graph)
        found = sites.matched(sites.places(graph, trial.vocabulary), ())
        assert {category: every for category, (_, every) in found.items()} == expected

    def test_a_place_is_matched_when_all_of_it_is_taken(self) -> None:
        graph = export_module(Gated().eval(), (torch.zeros(2, dtype=torch.long),)).graph_module.graph
        normalize(graph)
        found = sites.places(graph, 50)
        norms = [place for place in found if place.category == "norm"]
        assert sites.matched(found, norms[0].keys)["norm"] == (1, 2)
        assert sites.matched(found, {node for place in norms for node in place.keys})["norm"] == (2, 2)

    def test_a_loop_over_tokens_is_noticed(self) -> None:
        assert is_sequential(build(tiny_trial("mamba").config, torch.float32, device="cpu"))
        assert not is_sequential(build(tiny_trial("llama").config, torch.float32, device="cpu"))


class TestSteps:
    def test_a_wrong_attention_shows_in_the_logits(self) -> None:
        model = build(tiny_trial("llama").config, torch.float32, device="cpu")
        steps.randomize(model)
        before = steps.run_steps(model)
        model.model.layers[1].self_attn.scaling *= 1.01
        assert list(before) == ["prefill", *(f"decode {step}" for step in range(1, 5))]
        assert steps.difference(before, before) == 0.0
        assert steps.difference(before, steps.run_steps(model)) > 1e-4

    def test_a_model_that_keeps_no_cache_gets_longer_prompts(self) -> None:
        model = build(tiny_trial("openai-gpt").config, torch.float32, device="cpu")
        assert list(steps.run_steps(model))[-1] == "longer prompt 4"

    def test_a_number_that_is_none_counts_as_infinitely_far(self) -> None:
        fine, broken = torch.ones(3), torch.tensor([1.0, float("nan"), 1.0])
        assert steps.difference({"prefill": fine}, {"prefill": broken}) == float("inf")


WORKER = """
import os, sys, time
print("ready", flush=True)
for line in sys.stdin:
    name = line.strip()
    if name == "dies":
        print("about to die", file=sys.stderr, flush=True)
        time.sleep(0.2)
        sys.exit(3)
    time.sleep(60 if name == "hangs" else 0)
    searched = int(os.environ.get("TILEGYM_FX_PLANS") == "0")
    print('{"model_type": "%s", "applied": %d}' % (name, searched), flush=True)
"""


@pytest.fixture
def fake_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that run a few lines instead of models."""
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    monkeypatch.setattr(pool, "WORKER", (str(script),))


@pytest.mark.usefixtures("fake_worker")
class TestPool:
    def test_a_hang_and_a_death_cost_one_type_each(self) -> None:
        started = time.monotonic()
        rows = {row.model_type: row for row in pool.judged(["a", "hangs", "b", "dies", "c"], jobs=2, limit=2.0)}
        assert {name for name, row in rows.items() if row.applied} == {"a", "b", "c"}
        assert rows["hangs"].problem.startswith("took more than 2 s")
        assert rows["dies"].problem == "the process died: about to die"
        assert time.monotonic() - started < 30

    def test_places_that_an_earlier_start_kept_are_searched_anew(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TILEGYM_FX_PLANS", "1")
        (row,) = pool.judged(["a"], jobs=1, limit=20.0)
        assert row.applied == 1

    def test_a_run_goes_on_where_it_stopped(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(run, "causal_model_types", lambda: ("a", "b", "c"))
        run.run_all(tmp_path, ["a"])
        tried: list[str] = []
        monkeypatch.setattr(run, "judged", lambda types, **_: tried.extend(types) or iter(()))
        run.run_all(tmp_path)
        assert tried == ["b", "c"]

    def test_rows_of_other_versions_are_not_taken(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(run, "causal_model_types", lambda: ("a",))
        (tmp_path / run.ROWS).write_text('{"torch": "1.0"}\n' + Row("b").line() + "\n")
        assert [row.model_type for row in run.run_all(tmp_path)] == ["a"]

    def test_the_command_writes_every_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(run, "causal_model_types", lambda: ("a", "b"))
        assert scan.main(["--all", "--out", str(tmp_path), "--jobs", "1"]) == scan.EXIT_OK
        assert {path.name for path in tmp_path.glob("coverage.*")} == {
            f"coverage.{kind}" for kind in ("jsonl", "json", "csv", "md")
        }
        shown = capsys.readouterr()
        assert "model types: 2" in shown.out
        assert "[2/2]" in shown.err


class TestRecords:
    @pytest.mark.parametrize("row", ROWS, ids=lambda row: row.model_type)
    def test_a_row_is_a_line_of_json(self, row: Row) -> None:
        assert Row.of_line(row.line()) == row

    def test_what_counts_as_right(self) -> None:
        assert [row.is_right for row in ROWS] == [True, True, False, False]
        assert not replace(GOOD, restored=False).is_right
        assert not replace(GOOD, applied=0).is_right

    def test_the_summary(self) -> None:
        found = table.summary(ROWS)
        assert found["exported"] == 3
        assert found["kernelized, equal and restored"] == 2
        assert found["wrong"] == 1
        assert found["bit for bit equal"] == 1
        assert found["median of the lower coverage"] == 0.7
        assert found["every norm, gated MLP and rotary place matched"] == 2

    def test_the_table_marks_what_is_wrong(self) -> None:
        assert table.cells(WRONG)["kernelize"] == "WRONG"
        assert table.cells(HALF)["norm"] == "2/5"
        assert [line["model type"] for line in csv.DictReader(io.StringIO(table.as_csv(ROWS)))] == [
            row.model_type for row in ROWS
        ]

    def test_the_page_has_every_reason(self) -> None:
        page = as_page(ROWS, {"torch": "2.13"})
        assert "| not | kernelize | crash: a loop |" in page
        assert "a loop \\| a split" in page
        assert "| norm | 12 of 15 | 2 of 3 |" in page


class TestFloor:
    def floor(self, folder: Path, *rows: Row) -> Path:
        path = folder / "floor.json"
        path.write_text(table.as_json(rows, {}))
        return path

    def test_no_less_than_before_is_fine(self, tmp_path: Path) -> None:
        assert run.dropped([replace(GOOD, applied=30), NOT], self.floor(tmp_path, GOOD)) == []

    @pytest.mark.parametrize(
        ("row", "line"),
        [
            (replace(GOOD, places={"norm": (4, 5), "rotary": (2, 2)}), "llama: matched norm 5 -> 4"),
            (replace(GOOD, places={"norm": (5, 5)}), "llama: matched rotary 2 -> 0"),
            (replace(GOOD, applied=21), "llama: places that run kernels 22 -> 21"),
            (replace(GOOD, restored=False), "llama: right True -> False"),
            (NOT, "llama: gone"),
        ],
    )
    def test_any_count_that_drops_is_named(self, tmp_path: Path, row: Row, line: str) -> None:
        assert run.dropped([row], self.floor(tmp_path, GOOD)) == [line]

    def test_a_file_without_rows_is_one_clear_error(self, tmp_path: Path) -> None:
        path = tmp_path / "floor.json"
        path.write_text(json.dumps([1]))
        with pytest.raises(UsageError, match="holds no earlier rows"):
            run.dropped(ROWS, path)


class TestCommand:
    def test_a_type_that_is_none_is_one_clear_error(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert scan.main(["--all", "t5", "--out", str(tmp_path)]) == scan.EXIT_ERROR
        assert "'t5' is no model type of a causal language model" in capsys.readouterr().err

    def test_without_all_one_model_is_wanted(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert scan.main([]) == scan.EXIT_ERROR
        assert "or --all for every model type" in capsys.readouterr().err


@pytest.mark.parametrize("options", [{"limit": -1.0}, {"limit": 0.0}, {"jobs": 0}], ids=str)
def test_numbers_that_leave_nothing_to_run_are_refused_before_anything_starts(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    with pytest.raises(UsageError, match="leave nothing to run"):
        run.run_all(tmp_path / "out", ["llama"], **options)
    assert not (tmp_path / "out").exists()
