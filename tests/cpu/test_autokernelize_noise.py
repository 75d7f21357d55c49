"""The kernel loop compares the GPU's time without the host's, and keeps nothing that noise could have decided."""

from __future__ import annotations

import json
import math
import types
from dataclasses import asdict, replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from planted_model import write_root

from tilegym_fx.autokernelize import ledger as book
from tilegym_fx.autokernelize import loop
from tilegym_fx.autokernelize.child import Answer
from tilegym_fx.autokernelize.experiment import Reply
from tilegym_fx.autokernelize.figures import TRUSTED, Figures
from tilegym_fx.autokernelize.ledger import Ledger, Row
from tilegym_fx.autokernelize.loop import run
from tilegym_fx.autokernelize.measuring import Bench, BenchError, figures_of
from tilegym_fx.autokernelize.options import Options
from tilegym_fx.autokernelize.page import page
from tilegym_fx.autokernelize.preflight import environment
from tilegym_fx.autokernelize.repository import Repository
from tilegym_fx.bench.results import Result, Samples
from tilegym_fx.errors import TilegymFxError, UsageError

CASES = ("prefill:1x2048", "decode:1@2048")


def measured(coverage: float, throughput: float, noise: float = 0.01, note: str = "") -> Figures:
    return Figures(coverage, throughput, noise, measured=True, note=note)


def played(folder: Path, monkeypatch: pytest.MonkeyPatch, *figures: Figures) -> tuple[Options, Ledger, list[str]]:
    """A run whose baseline and experiments come to these figures."""
    (folder / "root").mkdir()
    asked = Options("gpt2", write_root(folder / "root"), folder / "results", dry_run=True, alone=True)
    replies = [
        Reply("right" if n else "baseline", f"region {n}" * bool(n), f"op_{n}", figures=one.as_json())
        for n, one in enumerate(figures)
    ]
    left = iter([*replies, Reply("nothing")])
    monkeypatch.setattr(loop, "ask", lambda *_: Answer("answered", next(left)))
    told: list[str] = []
    return asked, run(asked, told.append), told


def ending(ledger: Ledger) -> list[tuple[str, str]]:
    """Status of each experiment, and what speaks against it."""
    return [(row.status, row.description.partition("not written: ")[2]) for row in ledger.rows[1:]]


# What is kept


def test_a_drop_beyond_the_noise_is_discarded_and_one_within_it_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, ledger, _ = played(
        tmp_path, monkeypatch, measured(0.90, 1000.0), measured(0.95, 950.0), measured(0.94, 992.0),
        measured(0.94, 1000.0),
    )  # fmt: skip
    assert ending(ledger) == [
        ("discard", "throughput would drop from 1,000.0 ± 1.0% to 950.0"),
        ("keep", ""),
        ("discard", "coverage stays at 94.00%"),
    ]


def test_the_noise_of_both_rows_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, ledger, _ = played(tmp_path, monkeypatch, measured(0.90, 1000.0, 0.025), measured(0.91, 980.0, 0.001))
    assert ending(ledger) == [("keep", "")]


@pytest.mark.parametrize("throughput", [500.0, 1000.0, 5000.0])
@pytest.mark.parametrize("noise", [0.031, 0.3, math.inf])
def test_what_is_too_noisy_is_never_kept_and_the_reason_names_the_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noise: float, throughput: float
) -> None:
    _, ledger, _ = played(tmp_path, monkeypatch, measured(0.90, 1000.0), measured(0.95, throughput, noise))
    (status, why), *_ = ending(ledger)
    assert status == "discard"
    assert why == f"noise: throughput is known to ± {noise:.1%} only, and beyond ± 3% nothing is kept"


def test_drops_within_the_noise_do_not_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [measured(0.5 + n / 100, 1000.0 * 0.994**n) for n in range(4)]
    _, ledger, _ = played(tmp_path, monkeypatch, *steps)
    assert [status for status, _ in ending(ledger)] == ["keep", "discard", "discard"]


def test_a_later_baseline_is_the_one_to_hold() -> None:
    rows = [Row(0, "keep", "baseline", throughput=9.0), Row(1, "keep", "one", throughput=8.0, key="1"),
            Row(2, "keep", "baseline", throughput=5.0), Row(3, "discard", "no", throughput=7.0, key="3"),
            Row(4, "keep", "two", throughput=6.0, key="4")]  # fmt: skip
    assert Ledger("m", {}, rows[:2]).fastest_kept is rows[0]
    assert Ledger("m", {}, rows).fastest_kept is rows[4]


def test_a_kernel_that_no_graph_holds_is_not_compared_with_a_model_that_one_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = "decode:1@2048: a step cannot be captured into a CUDA graph: RuntimeError: it waits"
    figures = measured(0.90, 1000.0), measured(0.95, 1000.0, note=note)
    (tmp_path / "one").mkdir()
    _, ledger, _ = played(tmp_path / "one", monkeypatch, *figures)
    assert ending(ledger) == [("discard", f"its throughput cannot be compared: {note}")]
    (tmp_path / "two").mkdir()
    asked, ledger, _ = played(tmp_path / "two", monkeypatch, replace(figures[0], note=note), figures[1])
    assert ending(ledger) == [("keep", "")]
    assert f"baseline ({note})" in book.table_file(asked.results, asked.model).read_text(encoding="utf-8")


def test_a_baseline_that_is_too_noisy_ends_the_run_before_anything_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match=r"baseline of gpt2: noise: .* ± 8.0% only.* when nothing else uses"):
        played(tmp_path, monkeypatch, measured(0.90, 1000.0, 0.08), measured(0.95, 2000.0))
    assert book.read(tmp_path / "results", "gpt2") is None  # a run without a row is no earlier run


@pytest.mark.parametrize("throughput", [math.nan, math.inf, -1000.0])
def test_what_is_no_throughput_is_neither_kept_nor_a_baseline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, throughput: float
) -> None:
    (tmp_path / "one").mkdir()
    _, ledger, _ = played(tmp_path / "one", monkeypatch, measured(0.90, 1000.0), measured(0.95, throughput))
    assert ending(ledger) == [("discard", f"throughput cannot be {throughput}")]
    (tmp_path / "two").mkdir()
    with pytest.raises(UsageError, match="throughput cannot be"):
        played(tmp_path / "two", monkeypatch, measured(0.90, throughput), measured(0.95, 1000.0))


@pytest.mark.parametrize("noise", [math.nan, -0.5, -math.inf])
def test_what_is_no_noise_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noise: float) -> None:
    _, ledger, _ = played(tmp_path, monkeypatch, measured(0.90, 1000.0), measured(0.95, 1e6, noise))
    ((status, why),) = ending(ledger)
    assert status == "discard"
    assert why.startswith("noise: ")


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_a_clock_that_fails_gives_no_figures(tmp_path: Path, seconds: float) -> None:
    failed = Samples((seconds, 0.02) * 20)
    assert failed.uncertainty == math.inf
    bench = Bench("m", None, tmp_path, tmp_path, 1.0)
    object.__setattr__(bench, "_results", lambda: [result(case, failed, steady(0.02)) for case in CASES])
    with pytest.raises(BenchError, match=r"gives no figures: prefill:1x2048"):
        bench.figures()


@pytest.mark.parametrize("end", [Answer("answered", Reply("baseline", figures=measured(0.9, 990.0, 0.2).as_json())),
                                 Answer("crashed", None, "no memory"), KeyboardInterrupt()],
                         ids=["noisy", "crashed", "interrupted"])  # fmt: skip
def test_a_run_that_ended_without_a_baseline_of_its_tree_takes_it_when_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: Answer | BaseException
) -> None:
    asked, _, _ = played(tmp_path, monkeypatch, measured(0.90, 1000.0))
    file = Path(asked.root) / "kernels" / "mine.py"
    file.write_text("", encoding="utf-8")
    repository = Repository(asked.root)
    repository.commit([file], "another tree")

    def ends(*_: Any) -> Answer:
        if isinstance(end, BaseException):
            raise end
        return end

    monkeypatch.setattr(loop, "ask", ends)
    with pytest.raises(TilegymFxError):
        run(asked, lambda line: None)
    left = iter([Reply("baseline", figures=measured(0.5, 500.0).as_json()), Reply("nothing")])
    monkeypatch.setattr(loop, "ask", lambda *_: Answer("answered", next(left)))
    ledger = run(asked, lambda line: None)
    assert [(row.description, row.throughput) for row in ledger.rows] == [("baseline", 1000.0), ("baseline", 500.0)]
    assert ledger.head == repository.head


# What is measured


def steady(seconds: float, count: int = 40) -> Samples:
    return Samples((seconds,) * count)


def shaken(seconds: float, share: float, count: int = 40) -> Samples:
    """Slow for half of the time, in one piece."""
    return Samples((seconds,) * (count // 2) + (seconds * (1 + share),) * (count - count // 2))


def result(case: str, gpu: Samples | None, wall: Samples, note: str = "") -> Result:
    return Result(case, "eager+fx", gpu, wall, note=note)


def test_the_hosts_time_is_in_no_figure() -> None:
    """A busy host: the clock of whoever waits is slower by a third now and then, the GPU does the same as ever."""
    gpu = steady(0.020), steady(0.005)
    quiet = figures_of([result(c, g, steady(0.030)) for c, g in zip(CASES, gpu, strict=True)])
    busy = figures_of([result(c, g, shaken(0.040, 0.33)) for c, g in zip(CASES, gpu, strict=True)])
    assert busy == quiet
    assert quiet.throughput == pytest.approx(math.sqrt(2048 / 0.020 * 1 / 0.005))
    assert quiet.noise == pytest.approx(0.01)  # between processes; each of them is steady
    assert quiet.note == ""


def test_where_there_is_no_graph_the_clock_counts_with_its_noise_and_a_note_says_so() -> None:
    found = figures_of([result(CASES[0], steady(0.02), steady(0.03)),
                        result(CASES[1], None, shaken(0.005, 0.3), note="a step cannot be captured")])  # fmt: skip
    assert found.note == "decode:1@2048: a step cannot be captured"
    assert found.throughput == pytest.approx(math.sqrt(2048 / 0.02 * 1 / (0.005 * 1.15)))
    assert found.noise > TRUSTED


def test_noise_is_the_mean_of_the_cases_and_what_processes_differ_by() -> None:
    gpu = shaken(0.02, 0.04)
    found = figures_of([result(CASES[0], gpu, gpu), result(CASES[1], steady(0.005), gpu)])
    assert found.noise == pytest.approx(math.hypot(gpu.uncertainty / 2, 0.01))


class Scripted(Bench):
    """Measures what it is told to."""

    def script(self, *shares: float) -> list[float]:
        left = list(shares)

        def results() -> list[Result]:
            gpu = shaken(0.02, left.pop(0))
            return [result(case, gpu, gpu) for case in self.cases]

        object.__setattr__(self, "_results", results)
        return left


def scripted(tmp_path: Path, until: float) -> Scripted:
    return Scripted("m", None, tmp_path, tmp_path, 1.0, until=until)


@pytest.mark.parametrize(
    ("shares", "left", "noisy"),
    [((0.0, 9.0), 1, False), ((0.5, 0.01, 9.0), 1, False), ((0.5, 0.4, 0.6, 9.0), 1, True)],
    ids=["quiet", "quiet at last", "never"],
)
def test_what_is_noisy_is_measured_again_but_not_for_ever(
    tmp_path: Path, shares: tuple[float, ...], left: int, noisy: bool
) -> None:
    bench = scripted(tmp_path, math.inf)
    unused = bench.script(*shares)
    found = bench.figures()
    assert len(unused) == left
    assert (found.noise > TRUSTED) is noisy
    best = min(shaken(0.02, share).uncertainty for share in shares[: len(shares) - left])
    assert found.noise == pytest.approx(math.hypot(best, 0.01))


def test_without_time_it_is_not_measured_again(tmp_path: Path) -> None:
    bench = scripted(tmp_path, 0.0)
    unused = bench.script(0.5, 0.0)
    assert bench.figures().noise > TRUSTED
    assert unused == [0.0]


def test_the_jobs_of_the_loop_ask_for_graphs(tmp_path: Path) -> None:
    assert Bench("m", None, tmp_path, tmp_path, 1.0)._job("eager+fx").graphed


# What a reader sees


def test_the_noise_is_in_the_table_on_the_page_and_in_the_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, ledger, told = played(tmp_path, monkeypatch, measured(0.9, 3089.1, 0.006), measured(0.95, 3100.0, 0.2))
    text = book.table_file(asked.results, asked.model).read_text(encoding="utf-8")
    assert "± is how far a throughput may be off" in text
    for shown in (text, unescape(page(ledger, asked.root, asked.results)), "\n".join(told)):
        assert "3,089.1 ± 0.6%" in shown
        assert "3,100.0 ± 20.0%" in shown
    assert book.read(asked.results, asked.model) == ledger


def test_an_estimate_has_no_noise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, ledger, _ = played(tmp_path, monkeypatch, Figures(0.9, 3089.1))
    assert "±" not in book.table(ledger) + page(ledger, asked.root, asked.results)


def test_the_state_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [asdict(Row(0, "keep", "baseline", coverage=0.9, throughput=3089.0))]
    for row in rows:
        del row["noise"], row["note"]
    file = book.state_file(tmp_path, "m")
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({**asdict(Ledger("m", {"figures": "measured"})), "rows": rows}), encoding="utf-8")
    known = book.read(tmp_path, "m")
    assert known is not None
    assert "| - | 90.00% | 3,089.0 | keep | baseline |" in book.table(known)
    assert "3,089.0" in page(known, tmp_path, tmp_path)


def test_a_run_that_was_measured_by_the_clock_is_not_continued_by_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    gpu = types.SimpleNamespace(name="a GPU", uuid="1")
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: gpu)
    found = environment(dry_run=False, device="h200")
    (tmp_path / "root").mkdir()
    asked = Options("gpt2", write_root(tmp_path / "root"), tmp_path / "results", alone=True)
    book.save(Ledger("gpt2", {**found, "figures": "measured on a GPU"}, [Row(0, "keep", "baseline")]), asked.results)
    with pytest.raises(UsageError, match="other figures: measured on a GPU"):
        run(asked, lambda line: None)
