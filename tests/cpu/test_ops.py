"""The ops: one per Definition, which implementation a call runs, and what it costs to ask."""

from __future__ import annotations

import threading
import timeit
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tilegym_fx import inventory, ops
from tilegym_fx.errors import TilegymFxError, UsageError
from tilegym_fx.ops import backends

X, WEIGHT = torch.randn(3, 40), torch.randn(40)


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(backends, "_registered", dict(backends._registered))
    yield
    ops.set_backend("auto")


def expected() -> torch.Tensor:
    return inventory.load().reference("rms_norm")(X, WEIGHT, 1e-6)


def marked(hidden_states: Any, weight: Any, eps: float) -> torch.Tensor:
    return torch.full_like(hidden_states, 7.0)


def test_every_definition_has_an_op_of_its_schema() -> None:
    ops.register(inventory.load())
    assert set(inventory.load().definitions) <= set(ops.names())
    for name, definition in inventory.load().definitions.items():
        arguments = [a.name for a in ops.overload(name)._schema.arguments]
        assert arguments == list(definition.inputs)


@pytest.mark.parametrize("backend", ["auto", "torch", "interpret"])
def test_a_call_chooses_its_backend(backend: str) -> None:
    torch.testing.assert_close(ops.rms_norm(X, WEIGHT, 1e-6, backend=backend), expected())


def test_the_interpreter_runs_the_kernel_and_torch_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilegym_fx import interpreter

    launched = []
    monkeypatch.setattr(interpreter, "interpret", lambda kernel, grid, args: launched.append(kernel))
    ops.rms_norm(X, WEIGHT, 1e-6, backend="torch")
    assert launched == []
    ops.rms_norm(X, WEIGHT, 1e-6, backend="interpret")
    assert [kernel._pyfunc.__name__ for kernel in launched] == ["rms_norm_kernel"]


def test_set_backend_reaches_every_plain_call_and_threads_too() -> None:
    ops.register_impl("rms_norm", "mine")(marked)
    ops.set_backend("mine")
    assert ops.get_current_backend() == "mine"
    seen = []
    thread = threading.Thread(target=lambda: seen.append(ops.rms_norm(X, WEIGHT, 1e-6)))
    thread.start()
    thread.join()
    assert (seen[0] == 7).all()
    assert (torch.ops.tilegym_fx.rms_norm(X, WEIGHT, 1e-6) == 7).all()


def test_a_calls_own_choice_beats_set_backend_and_ends_with_the_call() -> None:
    ops.register_impl("rms_norm", "mine")(marked)
    ops.set_backend("mine")
    torch.testing.assert_close(ops.rms_norm(X, WEIGHT, 1e-6, backend="auto"), expected())
    assert (ops.rms_norm(X, WEIGHT, 1e-6) == 7).all()


def test_an_op_without_an_implementation_names_itself_and_the_backend() -> None:
    ops.register_impl("rms_norm", "mine")(marked)
    with pytest.raises(NotImplementedError, match=r"'silu_mul'.*'mine'") as caught:
        ops.silu_mul(X, X, backend="mine")
    assert isinstance(caught.value, TilegymFxError)
    assert "\n" not in str(caught.value)


def test_cutile_on_cpu_tensors_is_refused_not_replaced() -> None:
    with pytest.raises(NotImplementedError, match=r"'rms_norm'.*'cutile'.*cpu"):
        ops.rms_norm(X, WEIGHT, 1e-6, backend="cutile")


@pytest.mark.parametrize(
    ("backend", "interpreted", "device", "said"),
    [
        ("auto", False, "cpu", "PyTorch references, as their tensors are on a CPU"),
        ("auto", False, "cuda", "kernels"),
        ("auto", False, "meta", "nothing, as their tensors are on meta"),
        ("auto", True, "cpu", "kernels in the CPU interpreter"),
        ("auto", True, "cuda", "kernels"),
        ("torch", True, "cuda", "PyTorch references, as the backend 'torch' is set"),
        ("interpret", False, "cuda", "kernels in the CPU interpreter"),
        ("cutile", False, "cuda", "kernels"),
        ("cutile", True, "cpu", "nothing, as their tensors are on cpu"),
        ("mine", False, "cpu", "what is registered for the backend 'mine'"),
    ],
)
def test_what_runs_is_told_as_it_is(
    monkeypatch: pytest.MonkeyPatch, backend: str, interpreted: bool, device: str, said: str
) -> None:
    monkeypatch.setenv("TILEGYM_FX_INTERPRET", str(int(interpreted)))
    monkeypatch.setattr(backends, "_everywhere", None if backend == "auto" else backend)
    assert ops.what_runs(torch.device(device)) == said


def test_a_third_party_may_bring_cutile_for_an_op() -> None:
    ops.register_impl("rms_norm", "cutile")(marked)
    assert (ops.rms_norm(X, WEIGHT, 1e-6, backend="cutile") == 7).all()


def test_a_second_registration_is_an_error_unless_it_says_so() -> None:
    ops.register_impl("rms_norm", "mine")(marked)
    with pytest.raises(UsageError, match="replace=True"):
        ops.register_impl("rms_norm", "mine")(marked)
    assert ops.register_impl("rms_norm", "mine", replace=True)(marked) is marked


@pytest.mark.parametrize("backend", ["auto", "torch", "interpret"])
def test_what_tilegym_fx_provides_itself_cannot_be_registered(backend: str) -> None:
    with pytest.raises(UsageError, match=backend):
        ops.register_impl("rms_norm", backend)


@pytest.mark.parametrize("call", [ops.set_backend, lambda name: ops.rms_norm(X, WEIGHT, 1e-6, backend=name)])
def test_an_unknown_backend_is_named_beside_the_known_ones(call: Any) -> None:
    with pytest.raises(UsageError, match=r"'trition'.*cutile, torch, interpret"):
        call("trition")


def test_available_backends_are_those_that_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert ops.get_available_backends() == ("auto", "torch", "interpret")
    assert not ops.is_backend_available("cutile")
    assert not ops.is_backend_available("nothing")
    ops.register_impl("rms_norm", "mine")(marked)
    assert ops.get_available_backends()[-1] == "mine"
    with pytest.raises(UsageError, match="CUDA device"):
        ops.set_backend("cutile")


def test_gradients_flow_on_every_backend() -> None:
    leaf = X.clone().requires_grad_()
    grads = []
    for backend in ("torch", "interpret", "auto"):
        grads += torch.autograd.grad(ops.rms_norm(leaf, WEIGHT, 1e-6, backend=backend).sum(), leaf)
    torch.testing.assert_close(grads[0], grads[1])
    torch.testing.assert_close(grads[0], grads[2])


def test_a_captured_graph_refuses_what_it_would_forget() -> None:
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(X), mode.from_tensor(WEIGHT)]
        with pytest.raises(UsageError, match="set_backend"):
            ops.rms_norm(*fakes, 1e-6, backend="torch")


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_a_plain_call_is_one_node_of_a_compiled_graph(compiler: str) -> None:
    compiled = torch.compile(lambda x: ops.rms_norm(x, WEIGHT, 1e-6) * 2, fullgraph=True, backend=compiler)
    torch.testing.assert_close(compiled(X), expected() * 2)


def test_a_plain_call_costs_what_the_overload_costs(capsys: pytest.CaptureFixture[str]) -> None:
    library = torch.library.Library("tilegym_fx_test", "FRAGMENT")
    library.define("nothing(Tensor x, Tensor y, float z) -> Tensor")
    library.impl("nothing", lambda x, y, z: WEIGHT, "CPU")
    bare = torch.ops.tilegym_fx_test.nothing.default
    named = type(ops.rms_norm)(bare)

    def seconds(op: Any) -> float:
        return min(timeit.repeat(lambda: op(X, WEIGHT, 1e-6), number=2000, repeat=15)) / 2000

    costs = seconds(bare), seconds(named)
    print(f"bare overload {costs[0] * 1e9:.0f} ns, tilegym_fx.ops {costs[1] * 1e9:.0f} ns")
    assert costs[1] < 1.15 * costs[0]
