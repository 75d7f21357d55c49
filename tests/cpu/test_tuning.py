"""The cache of configurations, and the tuner that fills it, on a kernel and a clock of the test's own."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tilegym_fx import tune, tuning
from tilegym_fx.errors import KernelError, UsageError
from tilegym_fx.tune import OpCall, TensorSpec, Trial, Tuner, calls_of, entry_for
from tilegym_fx.tuning import Entry, TuningError

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of this test's own, and shipped files that are not the real ones."""
    monkeypatch.setenv("TILEGYM_FX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tuning, "shipped_file", lambda arch: tmp_path / "shipped" / f"{arch}.json")
    monkeypatch.setattr(tuning, "_tables", {})
    return tmp_path


def entry(config: dict[str, Any] | None, kernel: str = "linear", shape: tuple[Any, ...] = (1, 8)) -> Entry:
    return Entry(kernel, shape, "bfloat16", config, 5.0, 9.0, (({"a": 9}, "it crashed"),))


# The cache


def test_nothing_is_tuned_until_something_is() -> None:
    assert tuning.best("linear", (1, 8), BF16, "sm_90") is None


def test_what_is_saved_is_found_by_dtype_or_by_its_name() -> None:
    tuning.save(tuning.user_file("sm_90"), "sm_90", {"device": "H200"}, [entry({"features": 64})])
    assert tuning.best("linear", (1, 8), BF16, "sm_90") == {"features": 64}
    assert tuning.best("linear", (1, 8), "bfloat16", "sm_90") == {"features": 64}
    for other in (("linear", (2, 8), BF16, "sm_90"), ("linear", (1, 8), torch.float16, "sm_90"),
                  ("norm", (1, 8), BF16, "sm_90"), ("linear", (1, 8), BF16, "sm_80")):  # fmt: skip
        assert tuning.best(*other) is None


def test_what_this_machine_measured_is_above_what_is_shipped() -> None:
    shipped, own = tuning.shipped_file("sm_90"), tuning.user_file("sm_90")
    tuning.save(shipped, "sm_90", {}, [entry({"a": 1}), entry({"a": 2}, shape=(2,)), entry({"a": 3}, shape=(3,))])
    tuning.save(own, "sm_90", {}, [entry({"a": 10}), entry(None, shape=(2,))])
    assert [tuning.best("linear", shape, BF16, "sm_90") for shape in ((1, 8), (2,), (3,))] == [
        {"a": 10},
        None,
        {"a": 3},
    ]


def test_saving_again_replaces_only_the_same_question() -> None:
    file = tuning.user_file("sm_90")
    tuning.save(file, "sm_90", {"device": "A"}, [entry({"a": 1}), entry({"a": 2}, shape=(2,))])
    tuning.save(file, "sm_90", {"device": "B"}, [entry({"a": 3})])
    assert tuning.entries(file) == (entry({"a": 3}), entry({"a": 2}, shape=(2,)))
    stored = json.loads(file.read_text())
    assert (stored["arch"], stored["device"]) == ("sm_90", "B")
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize("text", ["", "[]", '{"entries": [{"kernel": "x"}]}', '{"entries": 3}'])
def test_a_broken_file_is_refused_by_name(text: str) -> None:
    file = tuning.user_file("sm_90")
    file.parent.mkdir(parents=True)
    file.write_text(text)
    with pytest.raises(TuningError, match=r"sm_90\.json holds no tuned configurations"):
        tuning.best("linear", (1, 8), BF16, "sm_90")


@pytest.mark.parametrize(("size", "rounded"), [(0, 1), (1, 1), (2, 2), (3, 4), (17, 32), (64, 64)])
def test_sizes_are_rounded_up_to_powers_of_two(size: int, rounded: int) -> None:
    assert tuning.size_class(size) == rounded


def test_recording_hides_the_files_and_puts_them_back() -> None:
    tuning.save(tuning.user_file("sm_90"), "sm_90", {}, [entry({"a": 1})])
    with tuning.recording("sm_90", {("norm", (3,), BF16): {"b": 2}}) as asked:
        assert tuning.best("linear", (1, 8), BF16, "sm_90") is None
        assert tuning.best("norm", (3,), BF16, "sm_90") == {"b": 2}
    assert list(asked) == [("linear", (1, 8), BF16), ("norm", (3,), BF16)]
    assert tuning.best("linear", (1, 8), BF16, "sm_90") == {"a": 1}


def test_the_shipped_files_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    files = sorted((Path(tuning.__file__).parent / "tuned").glob("*.json"))
    assert tuning.shipped_file("sm_90") in files
    for file in files:
        assert json.loads(file.read_text())["arch"] == file.stem
        tuning.entries(file)


def test_no_gpu_is_an_architecture_of_its_own() -> None:
    assert tuning.arch_of(torch.device("cpu")) == tuning.arch_of(torch.device("meta")) == tuning.NO_GPU


# Choosing

KEY = ("linear", (1, 8), BF16)


@pytest.mark.parametrize(("seconds", "config"), [(5e-6, {"a": 1}), (9.9e-6, None), (20e-6, None)])
def test_a_candidate_must_be_clearly_faster_than_the_own_choice(seconds: float, config: dict[str, int] | None) -> None:
    made = entry_for(KEY, 10e-6, [Trial({"a": 1}, seconds), Trial({"a": 2}, None, "too slow to compile")])
    assert made.config == config
    assert made.default_microseconds == 10.0
    assert made.microseconds == (5.0 if config else 10.0)
    assert made.disabled == (({"a": 2}, "too slow to compile"),)


def test_where_every_candidate_fails_the_own_choice_stays() -> None:
    assert entry_for(KEY, 1e-6, [Trial({"a": 1}, None, "crash")]).config is None


# The tuner

KERNEL = textwrap.dedent(
    """
    import torch
    from tilegym_fx import tuning

    CANDIDATES = {"twice": [{"way": way} for way in ("good", "slow", "wrong", "crash", "hang")]}
    ran = []

    def double(x):
        key = (tuning.size_class(x.shape[0]),)
        config = tuning.best("twice", key, x.dtype, tuning.arch_of(x.device)) or {"way": "own"}
        ran.append(config["way"])
        if config["way"] == "crash":
            raise RuntimeError("illegal address\\nmore")
        return x * (3 if config["way"] == "wrong" else 2)
    """
)


class FakeInventory:
    """One Definition, `double`, whose kernel is the text above."""

    def __init__(self) -> None:
        self.scope: dict[str, Any] = {}
        exec(KERNEL, self.scope)

    def entry_point(self, solution: str) -> Callable[..., Any]:
        found: Callable[..., Any] = self.scope["double"]
        return found

    def reference(self, definition: str) -> Callable[..., Any]:
        return lambda x: 2 * x


def make_tuner(inventory: FakeInventory, tried: list[str]) -> Tuner:
    def clock(calls: Sequence[Callable[[], object]]) -> float:
        calls[0]()
        return {"own": 10e-6, "good": 5e-6, "slow": 30e-6}[inventory.scope["ran"][-1]]

    def precompile(entry: Any, call: OpCall, key: tuning.Key, config: dict[str, Any], arch: str, limit: float) -> None:
        tried.append(config["way"])
        if config["way"] == "hang":
            raise KernelError(f"took longer than {limit:g} s")

    return Tuner(inventory, "cpu", tuning.NO_GPU, 7.0, clock=clock, precompile=precompile)


CALL = OpCall("double", "double", (TensorSpec((3, 4), (4, 1), torch.float32),))


def test_the_fastest_right_candidate_wins_and_failures_are_disabled() -> None:
    inventory, tried = FakeInventory(), []
    (made,) = make_tuner(inventory, tried).tune(CALL)
    assert sorted(tried) == ["crash", "good", "hang", "slow", "wrong"]
    assert (made.kernel, made.shape_class, made.dtype, made.config) == (
        "twice",
        (4,),
        "float32",
        {"way": "good"},
    )
    assert (made.microseconds, made.default_microseconds) == (5.0, 10.0)
    reasons = {config["way"]: why for config, why in made.disabled}
    assert reasons["crash"] == "illegal address"
    assert reasons["hang"].startswith("took longer than 7 s")
    assert reasons["wrong"].startswith("off by 0.5")
    assert "hang" not in inventory.scope["ran"]


def test_a_question_is_answered_once() -> None:
    tuner = make_tuner(FakeInventory(), [])
    longer = OpCall("double", "double", (TensorSpec((4, 4), (4, 1), torch.float32),))
    assert [len(list(tuner.tune(call))) for call in (CALL, longer)] == [1, 0]


def test_a_kernel_without_candidates_is_left_as_it_is() -> None:
    inventory = FakeInventory()
    del inventory.scope["CANDIDATES"]
    assert list(make_tuner(inventory, []).tune(CALL)) == []


def test_candidates_may_depend_on_the_shape_class() -> None:
    inventory = FakeInventory()
    inventory.scope["CANDIDATES"] = {"twice": lambda shape: [{"way": "good", "rows": shape[0]}]}
    (made,) = make_tuner(inventory, []).tune(CALL)
    assert made.config == {"way": "good", "rows": 4}


def test_launches_are_compiled_under_the_forced_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    import tilegym_fx.compile as compiler
    from tilegym_fx import launch

    compiled = []
    monkeypatch.setattr(
        compiler, "compile_kernel", lambda kernel, args, arch, **how: compiled.append((args, arch, how))
    )

    def wrapper(x: torch.Tensor) -> None:
        config = tuning.best("k", (x.shape[0],), x.dtype, tuning.arch_of(x.device))
        launch.launch(object(), (1,), (x, config and config["a"]))

    call = OpCall("d", "s", (TensorSpec((2,), (1,), BF16),))
    tune.compile_apart(wrapper, call, ("k", (2,), BF16), {"a": 5}, "sm_90", 9.0)
    ((args, arch, how),) = compiled
    assert (args[1], arch, how) == (5, "sm_90", {"timeout": 9.0, "isolated": True})
    assert args[0].is_meta


def test_tensors_are_made_with_the_strides_of_the_model() -> None:
    tensor = TensorSpec((2, 3), (1, 2), BF16).make("cpu")
    assert (tensor.shape, tensor.stride(), tensor.dtype) == ((2, 3), (1, 2), BF16)
    assert tensor.float().std() > 0
    assert TensorSpec((4,), (1,), torch.bool).make("cpu").all()


# The command


def test_calls_are_those_of_the_plan_and_each_is_there_once() -> None:
    from tilegym_fx.cost import get_device
    from tilegym_fx.inventory import load
    from tilegym_fx.plan import Policy

    calls = calls_of(
        "HuggingFaceTB/SmolLM2-135M", load(), Policy(get_device("h200"), {"silu_mul"}), ["prefill:1x16,2x8"]
    )
    assert [str(call) for call in calls] == ["silu_mul(1x16x1536, 1x16x1536)", "silu_mul(2x8x1536, 2x8x1536)"]
    with pytest.raises(UsageError, match="generate:1x8"):
        calls_of("llama", load(), Policy(get_device("h200")), ["generate:1x8+2"])


def test_without_a_gpu_it_says_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tune.main(["llama"]) == 1
    assert capsys.readouterr().err == (
        "error: there is no CUDA device to tune on. Run it on a GPU machine, or with --list.\n"
    )


def test_the_calls_can_be_listed_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert tune.main(["HuggingFaceTB/SmolLM2-135M", "--list", "--phases", "decode:2@16", "--only", "silu_mul"]) == 0
    assert capsys.readouterr().out.startswith("silu_mul(2x1x1536, 2x1x1536): ")
