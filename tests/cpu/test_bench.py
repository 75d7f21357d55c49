"""bench: what is asked for, the arithmetic on times, how they are shown, and a whole run on the CPU."""

from __future__ import annotations

import json
import shlex
import sys
import types
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from repository import ROOT

from tilegym_fx.backend import tilegym_fx_backend
from tilegym_fx.bench import patches, profile, run
from tilegym_fx.bench.__main__ import main, make_jobs, parser
from tilegym_fx.bench.calls import Decode, Generate, Prefill
from tilegym_fx.bench.cases import Case, get_variant, parse_cases
from tilegym_fx.bench.clock import Clock
from tilegym_fx.bench.job import Job
from tilegym_fx.bench.models import cut_layers, make_model, random_tokens, read_bytes
from tilegym_fx.bench.picture import draw
from tilegym_fx.bench.record import append_record
from tilegym_fx.bench.report import plain_table, report_lines, summary_lines
from tilegym_fx.bench.results import (
    KernelTime,
    Result,
    Samples,
    as_json,
    best,
    from_json,
    latest,
    speedup,
    subject,
)
from tilegym_fx.bench.worker import Worker
from tilegym_fx.errors import UsageError
from tilegym_fx.model_source import shipped_models


def timed(variant: str, milliseconds: float, case: str = "decode:1@2048", **more: Any) -> Result:
    samples = Samples((milliseconds / 1e3,) * 3)
    return Result(case, variant, samples, samples, **more)


KERNELS = (KernelTime("linear_gemv_kernel_Kt2", 0.003, 7, True), KernelTime("memcpy", 0.001, 1, False))


# What is asked for


def test_phases_are_read_as_they_are_written() -> None:
    words = ["prefill:1x2048,4x4096", "decode:8@8192", "generate:1x2048+64"]
    cases = parse_cases(words)
    assert cases == (Case("prefill", 1, 2048), Case("prefill", 4, 4096), Case("decode", 8, 8192),
                     Case("generate", 1, 2048, 64))  # fmt: skip
    assert [str(case) for case in cases] == ["prefill:1x2048", "prefill:4x4096", *words[1:]]
    assert [case.tokens_per_call for case in cases] == [2048, 16384, 8, 64]


@pytest.mark.parametrize("word", ["prefill", "prefill:2048", "decode:1x2", "generate:1x2", "prefill:0x8", "walk:1x2"])
def test_a_phase_that_is_none_is_refused_with_an_example(word: str) -> None:
    with pytest.raises(UsageError, match="decode:1@2048"):
        parse_cases([word])


def test_an_unknown_variant_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"graphs\+fx"):
        get_variant("fastest")


def test_modes_and_backends_are_those_of_the_variant() -> None:
    assert patches.compile_options(get_variant("compile"), tiny=False) == {}
    assert patches.compile_options(get_variant("graphs"), tiny=False) == {"mode": "reduce-overhead"}
    both = {"mode": "reduce-overhead", "backend": tilegym_fx_backend}
    assert patches.compile_options(get_variant("graphs+fx"), tiny=False) == both
    assert patches.generation_options(get_variant("eager+fx"), tiny=False) == {}
    options = patches.generation_options(get_variant("graphs+fx"), tiny=False)
    assert options["cache_implementation"] == "static"
    config = options["compile_config"]
    assert (config.backend, config.mode) == (tilegym_fx_backend, "reduce-overhead")


def test_a_job_survives_the_way_to_another_process() -> None:
    job = Job("llama", "eager+fx", ("decode:1@8",), "folder", layers=3, trace="out/trace.json")
    assert Job.from_json(json.loads(json.dumps(job.as_json()))) == job
    assert job.trace_file(job.parsed_cases()[0]) == Path("out/trace.eager+fx.decode-1at8.json")


# Arithmetic


def test_spread_leaves_out_the_outermost_tenth() -> None:
    samples = Samples((9.0, *[1.0] * 9, *[2.0] * 9, 0.1))
    assert samples.median == pytest.approx(1.5)
    assert samples.spread == pytest.approx((2.0 - 1.0) / 1.5)


def test_a_rate_is_the_mean_over_calls_with_its_deviation() -> None:
    assert Samples((0.5, 1.0)).rate(10) == (15.0, pytest.approx(7.0711, rel=1e-4))
    assert Samples((0.5,)).rate(10) == (20.0, 0.0)


def test_a_result_is_compared_with_the_best_baseline_of_its_own_phase() -> None:
    ours = timed("eager+fx", 4.0)
    results = [
        ours,
        timed("eager", 9.0),
        timed("graphs", 6.0),
        timed("graphs", 1.0, "prefill:1x8"),
        timed("liger", 2.0),
    ]
    assert speedup(ours, results) == pytest.approx(1.5)
    assert speedup(timed("eager+fx", 4.0, "decode:8@8"), results) is None
    assert best(results, ours=True) == ours


def test_a_later_result_replaces_an_earlier_one() -> None:
    results = [timed("graphs", 5.0), timed("eager", 3.0), timed("graphs", 4.0)]
    assert latest(results) == [timed("eager", 3.0), timed("graphs", 4.0)]


def test_the_summary_speaks_of_our_fastest_generation() -> None:
    generations = [timed(v, t, "generate:1x8+4") for v, t in (("graphs", 1.0), ("eager+fx", 9.0), ("graphs+fx", 3.0))]
    decode = timed("eager+fx", 0.1)
    assert subject([decode, *generations]) == generations[2]
    assert subject([decode, generations[0]]) == generations[0]
    assert subject([replace(decode, wall=None)]) is None


def test_results_survive_the_way_through_a_file() -> None:
    result = timed("eager+fx", 4.0, kernels=KERNELS, prepare={"build": 1.0}, verdict="near")
    line = as_json(result)
    assert from_json(json.loads(json.dumps(line))) == result
    assert (line["coverage"], line["wall_ms"], line["tokens_per_second"]) == (0.75, 4.0, 250.0)


# Coverage


def test_kernel_functions_are_found_by_their_decorator_without_an_import(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "import absent\n@ct.kernel\ndef one_kernel(x): ...\n"
        "@ct.kernel(occupancy=2)\ndef two(x): ...\ndef helper(x): ...\n"
    )
    assert profile.kernel_functions(tmp_path) == {"one_kernel", "two"}
    assert "gated_activation_kernel" in profile.kernel_functions()


@pytest.mark.parametrize(
    ("name", "is_ours"),
    [
        ("norm", True),
        ("norm_Kt2_A4bf16_A1", True),
        ("normal_Kt2", False),
        ("at::native::norm_Kt2", False),
        ("norms", False),
    ],
)
def test_a_kernel_is_ours_by_the_name_of_its_function(name: str, is_ours: bool) -> None:
    assert (profile.our_kernels(["norm", "rope"]).fullmatch(name) is not None) is is_ours


def event(name: str, cat: str, dur: float) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": cat, "dur": dur}


def one_after_the_other(*events: dict[str, Any]) -> dict[str, Any]:
    starts = accumulate((e.get("dur", 0.0) for e in events), initial=0.0)
    return {"traceEvents": [{**e, "ts": ts} for e, ts in zip(events, starts, strict=False)]}


def test_coverage_counts_copies_and_counts_nothing_twice() -> None:
    trace = one_after_the_other(
        event("norm_Kt2", "kernel", 30.0), event("norm_Kt2", "kernel", 30.0),
        event("cutlass", "kernel", 30.0),
        event("Memcpy DtoD", "gpu_memcpy", 6.0), event("Memset", "gpu_memset", 4.0),
        event("norm_Kt2", "gpu_user_annotation", 500.0), event("cudaLaunchKernel", "cuda_runtime", 500.0),
        event("aten::linear", "cpu_op", 500.0), {"ph": "f", "name": "norm_Kt2", "cat": "kernel"},
    )  # fmt: skip
    times = profile.kernel_times(trace, profile.our_kernels(["norm"]), calls=2)
    assert times[0] == KernelTime("norm_Kt2", pytest.approx(30e-6), 1.0, True)
    assert timed("eager+fx", 1.0, kernels=times).coverage == pytest.approx(0.6)


def test_a_kernel_that_starts_early_counts_from_the_end_of_its_predecessor() -> None:
    early = {**event("norm", "kernel", 8.0), "ts": 6.0}
    hidden = {**event("norm", "kernel", 1.0), "ts": 7.0}
    elsewhere = {**event("norm", "kernel", 2.0), "ts": 1.0, "tid": "another stream"}
    trace = {"traceEvents": [early, hidden, elsewhere, {**event("cutlass", "kernel", 10.0), "ts": 0.0}]}
    times = profile.kernel_times(trace, profile.our_kernels(["norm"]))
    assert {t.name: t.seconds for t in times} == {"cutlass": pytest.approx(10e-6), "norm": pytest.approx(6e-6)}


def test_short_kernels_are_added_up_and_still_count() -> None:
    trace = one_after_the_other(*(event(f"k{i}", "kernel", 1.0) for i in range(100)), event("norm", "kernel", 0.5))
    times = profile.kernel_times(trace, profile.our_kernels(["norm"]))
    assert sum(t.seconds for t in times) == pytest.approx(100.5e-6)
    assert [t.is_ours for t in times[40:]] == [True, False]


# Rendering


def test_the_summary_has_the_two_lines_that_scripts_look_for() -> None:
    result = timed(
        "eager+fx",
        20.0,
        "generate:1x8+4",
        kernels=(KernelTime("a", 0.4921, 1, True), KernelTime("b", 0.5079, 1, False)),
    )
    assert summary_lines([result])[1:] == [
        "Average throughput: 200.00 ± 0.00 tokens/sec",
        ">>> cuTile Kernel Coverage (GPU Time):    49.21% <<<",
    ]


def test_a_report_tells_what_was_not_timed_and_what_fell_back() -> None:
    fallbacks = {"rms_norm no Solution": 3}
    results = [timed("eager", 9.0), timed("eager+fx", 4.5, kernels=KERNELS, fallbacks=fallbacks),
               Result("decode:1@2048", "graphs", error="it differs")]  # fmt: skip
    header = {
        "model": "m",
        "about": {"copy_rate": 4e12, "read_bytes": 16e9},
        "machine": {"device": "H200", "driver": "580"},
    }
    text = "\n".join(report_lines(header, results))
    assert "graphs is not timed in decode:1@2048: it differs" in text
    assert "3 calls ran a reference: rms_norm no Solution" in text
    assert "to read the weights takes 4.000 ms" in text
    assert "device H200, driver 580" in text
    row = next(line for line in text.splitlines() if line.startswith("decode:1@2048  eager+fx"))
    assert row.split()[2:] == ["4.500", "0.0%", "4.500", "0.0%", "222.2", "2.00", "2.00", "75.0%", "0", "-"]


@pytest.mark.parametrize(("variant", "seconds", "told"), [("graphs", 0.001, True), ("graphs", 0.0035, False),
                                                          ("eager", 0.001, False)])  # fmt: skip
def test_a_report_tells_where_a_graph_seems_not_to_be_replayed(variant: str, seconds: float, told: bool) -> None:
    result = timed(variant, 4.0, kernels=(KernelTime("a", seconds, 1, False),))
    assert ("was the graph captured at all?" in "\n".join(report_lines({}, [result]))) is told


def test_columns_of_numbers_end_together() -> None:
    assert plain_table(("a", "ms"), [("xyz", "1.0"), ("b", "10.0")], (0,)) == [
        "a      ms",
        "---  ----",
        "xyz   1.0",
        "b    10.0",
    ]


def test_the_picture_is_a_drawing_of_both_on_one_scale() -> None:
    root = ElementTree.fromstring(draw([timed("graphs", 8.0, kernels=(KernelTime("a<b>", 0.008, 1, False),)),
                                        timed("eager+fx", 4.0, kernels=KERNELS)]))  # fmt: skip
    names = "{http://www.w3.org/2000/svg}"
    bars = [bar for bar in root.iter(f"{names}rect") if bar.find(f"{names}title") is not None]
    titles = [str(bar.findtext(f"{names}title")) for bar in bars]
    assert titles == ["a<b>: 8.000 ms", "linear_gemv_kernel_Kt2: 3.000 ms", "memcpy: 1.000 ms"]
    widths = [float(bar.attrib["width"]) for bar in bars]
    assert widths[1] + widths[2] == pytest.approx(widths[0] / 2, abs=0.2)


def test_a_picture_without_times_says_so() -> None:
    assert "nothing was timed on a GPU" in draw([Result("decode:1@8", "eager", error="x")])


def test_records_of_one_day_go_into_one_file(tmp_path: Path) -> None:
    header = {"model": "m", "date": "2026-11-29T10:00:00+00:00", "machine": {"device": "NVIDIA H200"}}
    for _ in range(2):
        file = append_record(tmp_path, header, [timed("eager", 1.0)])
    assert file.name == "2026-11-29-nvidia-h200.md"
    text = file.read_text()
    assert text.count("# Measured on 2026-11-29") == 1
    assert text.count("Average throughput") == 2


# The model and its calls


def tiny(tmp_path: Path, variant: str = "eager", *cases: str, model: str = "llama") -> Job:
    return Job(model, variant, cases, str(tmp_path), device="cpu", dtype="float32", tiny=True, repeats=3)


def test_weights_and_tokens_are_the_same_each_time(tmp_path: Path) -> None:
    first, second = (make_model(tiny(tmp_path)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert first.lm_head.weight.std() > 0
    assert torch.equal(random_tokens(first, 2, 5), random_tokens(second, 2, 5))


def test_the_embedding_is_not_read_in_a_step_unless_it_is_the_head(tmp_path: Path) -> None:
    model = make_model(tiny(tmp_path))
    total = sum(p.nbytes for p in model.parameters())
    assert read_bytes(model) == total - model.model.embed_tokens.weight.nbytes
    assert read_bytes(make_model(tiny(tmp_path, model="qwen3_moe"))) is None


def test_cutting_layers_cuts_every_list_of_layers() -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model("gemma3_text", num_hidden_layers=6)
    cut_layers(config, 2)
    assert (config.num_hidden_layers, len(config.layer_types)) == (2, 2)
    with pytest.raises(UsageError, match="--layers 3"):
        cut_layers(config, 3)


@pytest.mark.parametrize("model", ["llama", "gemma3_text"])
@torch.no_grad()
def test_after_rewinding_a_step_gives_the_same_again(tmp_path: Path, model: str) -> None:
    built = make_model(tiny(tmp_path, model=model))
    step = Decode(built, built, Case("decode", 2, 5))
    first, second = step().clone(), step().clone()
    assert not torch.equal(first, second)
    step.rewind()
    assert torch.equal(step(), first)


@torch.no_grad()
def test_a_step_against_the_static_cache_is_the_pass_over_the_whole_text(tmp_path: Path) -> None:
    model = make_model(tiny(tmp_path))
    case = Case("decode", 2, 5)
    text = torch.cat([random_tokens(model, 2, 5), random_tokens(model, 2, 1)], dim=1)
    torch.testing.assert_close(Decode(model, model, case)(), model(text).logits[:, -1])


@torch.no_grad()
def test_tokens_of_a_generation_are_judged_by_a_pass_without_cache(tmp_path: Path) -> None:
    model = make_model(tiny(tmp_path))
    call = Generate(model, {}, Case("generate", 2, 5, 4))
    tokens = call()
    assert tokens.shape == (2, 4)
    gap, allowed = call.worst_gap(tokens)
    assert gap <= allowed
    gap, allowed = call.worst_gap((tokens + 7) % 256)
    assert gap > allowed


# Workers


def work(job: Job) -> list[dict[str, Any]]:
    sent: list[dict[str, Any]] = []
    Worker(job, sent.append, lambda: None).run()
    return sent


CASES = ("prefill:1x6", "decode:1@6", "generate:1x6+3")


def test_a_worker_times_what_agrees_with_the_original(tmp_path: Path) -> None:
    about, *messages = work(tiny(tmp_path, "eager", *CASES))
    assert about["class"] == "LlamaForCausalLM"
    assert [m["kind"] for m in messages] == ["ready", "result"] * 3
    assert messages[1]["verdict"] == "the original"
    for message in work(tiny(tmp_path, "compile+fx", *CASES[1:]))[2::2]:
        assert message["error"] is None
        assert message["wall_ms"] > 0


def test_a_worker_refuses_to_time_what_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work(tiny(tmp_path, "eager", *CASES[:2]))

    def spoil(variant: Any, model: Any) -> None:
        model.model.norm.weight.data *= 1.5

    monkeypatch.setattr(patches, "patch_model", spoil)
    messages = work(tiny(tmp_path, "eager+fx", *CASES[:2]))
    assert [m["kind"] for m in messages] == ["about", "result", "result"]
    assert all("off by" in m["error"] and m["wall"] is None for m in messages[1:])


def test_a_baseline_that_differs_is_timed_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work(tiny(tmp_path, "eager", CASES[0]))
    forward_of = patches.forward_of

    def spoilt(variant: Any, model: Any, *, tiny: bool) -> Any:
        model.model.norm.weight.data *= 1.5
        return forward_of(variant, model, tiny=tiny)

    monkeypatch.setattr(patches, "forward_of", spoilt)
    message = work(tiny(tmp_path, "compile", CASES[0]))[2]
    assert message["error"] is None
    assert message["wall_ms"] > 0
    assert message["verdict"].endswith("torch.compile itself")


def test_without_the_original_nothing_is_timed(tmp_path: Path) -> None:
    assert "the original gave no logits" in work(tiny(tmp_path, "compile", CASES[0]))[1]["error"]


def test_a_failing_phase_leaves_the_next_one_its_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Prefill, "__init__", fail)
    messages = work(tiny(tmp_path, "eager", *CASES[:2]))
    assert messages[1]["error"] == "RuntimeError: out of memory"
    assert messages[-1]["error"] is None


def test_a_worker_asked_for_the_original_only_times_nothing(tmp_path: Path) -> None:
    kinds = [m["kind"] for m in work(replace(tiny(tmp_path, "eager", CASES[0]), timed=False))]
    assert kinds == ["about", "judged"]


def test_a_step_that_no_graph_holds_still_has_its_time_on_the_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Clock, call: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(Clock, "captured", refuse)
    result = work(tiny(tmp_path, "eager", CASES[1]))[-1]
    assert result["gpu"] is None
    assert result["wall_ms"] > 0
    assert "cannot be captured" in result["note"]


class FakeChild:
    """Answers what a script says."""

    def __init__(self, job: Job, seconds: float) -> None:
        self.job = job
        self.script = {"eager": ["about", "ready", "result", "ready", "result"],
                       "compile": ["about", "ready", "dead"],
                       "graphs": ["about", "ready", "result", "result"]}[job.variant]  # fmt: skip
        self.log: list[str] = []
        logs[job.variant] = self.log

    def answer(self) -> dict[str, Any]:
        kind = self.script.pop(0)
        self.log.append(kind)
        order.append((self.job.variant, kind))
        if kind == "result":
            return as_json(timed(self.job.variant, 1.0, self.job.cases[self.log.count("result") - 1]))
        return {"kind": kind, "why": "no answer within 5 s"} if kind == "dead" else {"kind": kind}

    def say(self, line: str) -> None:
        order.append((self.job.variant, f"told {line}"))

    def end(self) -> None: ...


logs: dict[str, list[str]] = {}
order: list[tuple[str, str]] = []


def test_workers_prepare_together_wait_for_each_other_and_one_may_die(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "Child", FakeChild)
    order.clear()
    jobs = [Job("m", v, ("decode:1@4", "decode:1@8"), "") for v in ("eager", "compile", "graphs")]
    got: list[dict[str, Any]] = []
    run.run(jobs, got.append, run.Limits(5.0, at_once=2))
    results = {(m["variant"], m["case"]): m["error"] for m in got if m["kind"] == "result"}
    assert results == {
        ("eager", "decode:1@4"): None, ("eager", "decode:1@8"): None,
        ("compile", "decode:1@4"): "no answer within 5 s", ("compile", "decode:1@8"): "no answer within 5 s",
        ("graphs", "decode:1@4"): None, ("graphs", "decode:1@8"): None,
    }  # fmt: skip
    rounds = order[order.index(("compile", "about")) :]
    assert [" ".join(step) for step in rounds] == [
        "compile about", "graphs about", "compile ready", "graphs ready",
        "compile told go", "compile dead", "graphs told go", "graphs result",
        "graphs told next", "graphs result",
    ]  # fmt: skip


def test_a_worker_that_hangs_tells_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    listen = "import faulthandler, signal, time; faulthandler.register(signal.SIGUSR1)"
    code = f'{listen}; print("{{}}", flush=True); time.sleep(60)'
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{code}'\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    hanging = run.Child(tiny(tmp_path, "eager", CASES[0]), 20.0)
    hanging.answer()  # it listens from now on
    hanging._seconds = 0.2
    assert hanging.answer()["why"] == "no answer within 0.2 s"
    hanging.end()
    assert "most recent call first" in capsys.readouterr().err


def test_a_worker_that_hangs_or_crashes_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = tiny(tmp_path, "eager", CASES[0])
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\nread job\ncase $0 in *) echo not good >&2; exit 3;; esac\n")
    script.chmod(0o755)
    crashed = run.Child(job, 20.0)
    assert crashed.answer() == {"kind": "refused", "why": "ended with status 3: not good"}
    script.write_text("#!/bin/sh\nexec sleep 60\n")
    hanging = run.Child(job, 0.2)
    assert hanging.answer()["why"] == "no answer within 0.2 s"
    hanging.end()
    crashed.end()


# Peers


def test_a_peer_patches_by_the_model_type(monkeypatch: pytest.MonkeyPatch) -> None:
    done = []
    fake = types.ModuleType("tilegym.transformers.monkey_patch")
    vars(fake)["MODEL_TYPE_TO_APPLY_TILEGYM_FN"] = {"gemma3": lambda **options: done.append(options)}
    monkeypatch.setattr(patches.importlib, "import_module", lambda name: {fake.__name__: fake}[name])
    patches.patch_process(get_variant("tilegym"), "gemma3_text")
    assert done == [{"use_cutile": True}]
    with pytest.raises(UsageError, match="no patch for the model type 'falcon'"):
        patches.patch_process(get_variant("tilegym"), "falcon")


def test_a_peer_that_is_not_installed_is_left_out_aloud(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(patches, "is_installed", lambda peer: False)
    assert main(["llama", "--dry-run", "--peers", "liger", "--variants", "nothing"]) == 1
    assert main(["llama", "--dry-run", "--peers", "ligre"]) == 1
    said = capsys.readouterr().err
    assert "liger is not installed, so it is left out" in said
    assert "'ligre' is no peer. Give some of liger, tilegym; did you mean `liger`." in said


# The command


def test_without_a_gpu_it_says_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["llama"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == "error: there is no CUDA device to time on. Run it on a GPU machine, or with --dry-run.\n"


def test_a_dry_run_goes_all_the_way_in_processes_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {name: tmp_path / name for name in ("out.jsonl", "picture.svg", "trace.json")}
    arguments = ["llama", "--dry-run", "--variants", "eager,graphs+fx",
                 "--phases", "prefill:1x2048", "generate:1x9+64",
                 "--repeats", "3", "--out", str(files["out.jsonl"]), "--svg", str(files["picture.svg"]),
                 "--trace", str(files["trace.json"]), "--record", str(tmp_path)]  # fmt: skip
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "Average throughput: " in printed
    assert ">>> cuTile Kernel Coverage (GPU Time):    n/a (no GPU) <<<" in printed
    assert "dry run" in printed
    kinds = [json.loads(line)["kind"] for line in files["out.jsonl"].read_text().splitlines()]
    assert kinds.count("result") == 4
    assert files["picture.svg"].read_text().startswith("<svg")
    assert (tmp_path / "trace.graphs+fx.generate-1x9+4.json").is_file()
    assert len(list(tmp_path.glob("*.md"))) == 1

    assert main(["--from", str(files["out.jsonl"]), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["model"] == "llama"
    assert {r["case"] for r in report["results"]} == {"prefill:1x12", "generate:1x9+4"}


@pytest.mark.parametrize("option", ["--out", "--svg", "--record"])
def test_a_place_that_cannot_be_written_is_told_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["no-such", "--dry-run", option, str(tmp_path / "file" / "inside")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: '{tmp_path}/file")
    assert line.endswith(" Name another place.")


@pytest.mark.parametrize(
    "arguments", ["--dry-run", "no-such --dry-run", "llama --layers 999 --dry-run", "--from no-such-file"]
)
def test_bad_input_is_one_line(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments.split()) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1


LISTED = (ROOT / "benchmarks" / "h200_models.txt").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("line", [line for line in LISTED if not line.startswith("#")], ids=lambda s: s.split(":")[0])
def test_the_listed_commands_are_ones_that_bench_takes(line: str) -> None:
    _, _, command = line.partition(": ")
    start, words = "python -m tilegym_fx.bench", shlex.split(command)
    assert command.startswith(start)
    args = parser().parse_args(words[len(start.split()) :])
    assert args.model in shipped_models()
    assert [str(case) for case in make_jobs(args, args.variants.split(","), "folder")[0].cases] == args.phases
