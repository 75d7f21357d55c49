"""Launching: device, stream, recording, and what is refused. The CUDA path runs on stand-ins."""

from __future__ import annotations

import contextlib
import importlib
import subprocess
import sys
import types

import cuda.tile as ct
import pytest
import torch

from tilegym_fx.errors import KernelError
from tilegym_fx.launch import launch
from tilegym_fx.recording import recorded

module = importlib.import_module("tilegym_fx.launch")


@ct.kernel
def double_kernel(x, out, TILE: ct.Constant[int]):
    place = ct.bid(0)
    ct.store(out, (place,), ct.load(x, (place,), (TILE,)) * 2.0)


def test_cpu_tensors_run_through_the_interpreter():
    x, out = torch.randn(32), torch.empty(32)
    launch(double_kernel, (2,), (x, out, 16))
    assert torch.equal(out, x * 2)


class OnGpu(torch.Tensor):
    """A CPU tensor that says it is on a GPU."""

    is_cuda = True
    index = 0

    def get_device(self):
        return self.index


def on_gpu(index: int) -> OnGpu:
    tensor = torch.zeros(16).as_subclass(OnGpu)
    tensor.index = index
    return tensor


@pytest.fixture
def cuda(monkeypatch):
    """Stand-ins for CUDA: what was launched, and the current device and streams to set."""

    state = types.SimpleNamespace(device=0, streams=[100, 200], launches=[], capability=(9, 0))

    @contextlib.contextmanager
    def entered(device):
        before, state.device = state.device, device
        yield
        state.device = before

    monkeypatch.setattr(module, "_current_device", lambda: state.device)
    monkeypatch.setattr(module, "_current_stream", lambda device: state.streams[device])

    def record(*call, **options):
        state.launches.append((state.device, *call, options))

    monkeypatch.setattr(module, "_cuda_launch", record)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: state.capability)
    module.may_start_early.cache_clear()
    monkeypatch.setattr(torch.cuda, "device", entered)
    return state


def test_a_cuda_launch_asks_for_the_current_stream_every_time(cuda):
    args = (on_gpu(0), 16)
    launch(double_kernel, (3,), args)
    cuda.streams[0] = 101
    launch(double_kernel, (3,), args)
    assert [call[:4] for call in cuda.launches] == [
        (0, 100, (3,), double_kernel),
        (0, 101, (3,), double_kernel),
    ]
    assert cuda.launches[0][4] is args


def test_a_launch_goes_to_the_tensor_s_device_and_leaves_the_current_one(cuda):
    launch(double_kernel, (1,), (7, on_gpu(1)))
    assert cuda.launches[0][:2] == (1, 200)
    assert cuda.device == 0


@ct.kernel
def patient_kernel(x):
    ct.grid_dependency_control_wait()
    ct.store(x, (0,), ct.load(x, (0,), (16,)) * 2)


@pytest.mark.parametrize(
    ("kernel", "capability", "early"),
    [(patient_kernel, (9, 0), True), (double_kernel, (9, 0), False), (patient_kernel, (8, 9), False)],
    ids=["waits", "does not wait", "the GPU cannot"],
)
def test_only_a_kernel_that_waits_by_itself_may_start_before_its_predecessor_has_ended(cuda, kernel, capability, early):
    cuda.capability = capability
    launch(kernel, (1,), (on_gpu(0),))
    assert cuda.launches[0][-1] == ({"programmatic_dependent_launch": True} if early else {})


def test_a_kernel_that_does_not_compile_is_one_error_line(cuda, monkeypatch):
    def fail(*_):
        raise ct.TileTypeError("Dimension #0 of shape (3,) is not a power of two")

    monkeypatch.setattr(module, "_cuda_launch", fail)
    with pytest.raises(KernelError, match="kernel double_kernel does not compile: Dimension #0 of shape"):
        launch(double_kernel, (1,), (on_gpu(0),))


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        (
            OSError("could not get source code"),
            "does not compile: could not get .*Keep the kernel's file",
        ),
        (FileNotFoundError("'tileiras' compiler not found"), "tileiras is not installed.*pip install"),
    ],
    ids=["source", "compiler"],
)
def test_a_kernel_that_misses_a_file_is_one_error_line_that_says_which(cuda, monkeypatch, problem, said):
    def fail(*_):
        raise problem

    monkeypatch.setattr(module, "_cuda_launch", fail)
    with pytest.raises(KernelError, match=said):
        launch(double_kernel, (1,), (on_gpu(0),))


def test_cutile_takes_a_raw_stream_as_an_integer():
    with pytest.raises((OSError, RuntimeError, TypeError, ValueError)) as no_gpu:
        ct.launch(0, (1,), double_kernel, (torch.zeros(16), torch.zeros(16), 16))
    with pytest.raises(TypeError, match="Unsupported stream type"):
        ct.launch("0", (1,), double_kernel, (torch.zeros(16), torch.zeros(16), 16))
    assert "stream" not in str(no_gpu.value).lower()


def test_recorded_launches_are_kept_and_not_run():
    x, out = torch.ones(32), torch.zeros(32)
    with recorded() as launches:
        launch(double_kernel, (2,), (x, out, 16))
    assert out.count_nonzero() == 0
    assert [(call.kernel, call.grid) for call in launches] == [(double_kernel, (2,))]
    assert launches[0].args[1] is out
    launch(double_kernel, (2,), (x, out, 16))
    assert out.sum() == 64
    assert len(launches) == 1


def test_meta_tensors_are_recorded_and_recording_ends_with_an_error():
    huge = torch.empty(1 << 40, device="meta")
    with recorded() as launches:
        launch(double_kernel, (1,), (huge, huge, 16))
    assert launches[0].args[0] is huge
    with pytest.raises(KeyError), recorded():
        raise KeyError
    with pytest.raises(KernelError, match="kernel double_kernel launched on a meta tensor"):
        launch(double_kernel, (1,), (huge, huge, 16))


def test_a_launch_without_tensors_is_refused():
    with pytest.raises(KernelError, match="kernel double_kernel launched without a tensor"):
        launch(double_kernel, (1,), (1, 2, 3))


def test_importing_launch_touches_neither_cuda_nor_the_interpreter():
    code = (
        "import sys, torch\n"
        "def refuse(): raise AssertionError('CUDA was initialised')\n"
        "torch.cuda._lazy_init = refuse\n"
        "import tilegym_fx.launch\n"
        "print('tilegym_fx.interpreter' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
