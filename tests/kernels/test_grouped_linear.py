"""Grouped linears against float64, through the interpreter and, marked gpu, on a GPU."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from inputs import DTYPES, INVENTORY, make_inputs, worst
from torch._subclasses.fake_tensor import FakeTensorMode

from tilegym_fx.compile import ARCHITECTURES, compile_kernel
from tilegym_fx.recording import recorded

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_agrees_with_float64(dtype, device):
    name = "grouped_linear"

    def run(**inputs):
        return INVENTORY.entry_point(name)(**{k: v.to(device) for k, v in inputs.items()}).cpu()

    for sizes in ({"N": 12}, {"N": 70, "I": 24, "O": 72}, {"N": 1, "E": 9}, {"N": 300, "E": 2, "I": 72}):
        assert worst(run, name, make_inputs(name, dtype, "ordinary", "as trained", sizes), dtype) <= 1


@pytest.mark.parametrize("device", DEVICES)
def test_experts_without_rows_are_passed_over(device):
    rows, weight = torch.randn(6, 8), torch.randn(5, 16, 8)
    ends = torch.tensor([0, 4, 4, 6, 6], dtype=torch.int32)
    expected = torch.cat((rows[:4] @ weight[1].T, rows[4:] @ weight[3].T))
    for matrices in (weight.mT, weight.mT.contiguous(), torch.stack((weight.mT, weight.mT), dim=-1)[..., 1]):
        got = INVENTORY.entry_point("grouped_linear")(rows.to(device), matrices.to(device), ends.to(device)).cpu()
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_as_many_rows_for_every_expert(dtype, device):
    def run(**inputs):
        return INVENTORY.entry_point("batched_linear")(**{k: v.to(device) for k, v in inputs.items()}).cpu()

    for sizes in ({"N": 12}, {"N": 1, "E": 3, "I": 24}, {"N": 70, "E": 2, "O": 8}):
        assert (
            worst(run, "batched_linear", make_inputs("batched_linear", dtype, "ordinary", "as trained", sizes), dtype)
            <= 1
        )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [24, 2880])
def test_rows_of_a_table(width, device):
    table = torch.randn(50, width).to(torch.bfloat16)
    for ids in (torch.randint(0, 50, (2, 7)), torch.tensor([[3]]), torch.tensor([0, 49, 0], dtype=torch.int32)):
        got = INVENTORY.entry_point("embedding")(ids.to(device), table.to(device), -1).cpu()
        assert torch.equal(got, table[ids])


def kernels() -> ModuleType:
    return sys.modules[INVENTORY.entry_point("grouped_linear").__module__]


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the CPU were a GPU for which torch has a grouped kernel."""
    monkeypatch.setattr(kernels(), "has_grouped_kernel", lambda device: True)


def matrices(experts: int, width: int, columns: int, **kind) -> torch.Tensor:
    return torch.ones(experts, width, columns, **{"dtype": torch.bfloat16, **kind})


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16)


class TestWhoseProduct:
    """Torch's where that is the faster one and is not refused."""

    def test_with_more_than_16_rows_an_expert_on_a_gpu(self, on_a_gpu):
        assert not kernels().torch_groups(64, matrices(1, 1, 8)[0], matrices(4, 8, 16))
        assert kernels().torch_groups(65, matrices(1, 1, 8)[0], matrices(4, 8, 16))
        assert kernels().torch_groups(65, matrices(1, 1, 8)[0], matrices(4, 8, 16), matrices(4, 16, 8).mT)

    def test_never_elsewhere_nor_in_another_dtype(self, on_a_gpu):
        for dtype in (torch.float16, torch.float32):
            x, weight = matrices(1, 1, 8, dtype=dtype)[0], matrices(4, 8, 16, dtype=dtype)
            assert not kernels().torch_groups(1000, x, weight)
        assert not kernels().torch_groups(1000, matrices(1, 1, 8)[0], matrices(4, 8, 16, dtype=torch.float16))

    @pytest.mark.parametrize(("major", "one_launch"), [(8, False), (9, True), (10, True), (12, False)])
    def test_on_gpus_with_a_grouped_kernel_alone(self, major, one_launch, monkeypatch):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
        kernels().has_grouped_kernel.cache_clear()
        assert kernels().has_grouped_kernel(torch.device("cuda", 0)) is one_launch
        assert not kernels().has_grouped_kernel(torch.device("cpu"))
        assert not kernels().has_grouped_kernel(torch.device("meta"))
        kernels().has_grouped_kernel.cache_clear()

    @pytest.mark.parametrize("weight", [
        matrices(3, 8, 16), matrices(3, 16, 8).mT, matrices(3, 8, 32)[..., :16], matrices(3, 24, 16)[:, :8],
        matrices(6, 8, 16)[::2], matrices(1, 8, 16).expand(3, 8, 16), matrices(3, 24, 8).mT[..., 8:],
    ])  # fmt: skip
    def test_layouts_that_torch_takes(self, weight):
        assert kernels().is_grouped_weight(weight)
        F.grouped_mm(matrices(1, 9, 8)[0], weight, offs=torch.tensor([1, 4, 9], dtype=torch.int32))

    @pytest.mark.parametrize("weight", [
        matrices(3, 8, 12), matrices(3, 12, 8).mT, matrices(3, 12, 16), matrices(3, 8, 32)[..., ::2],
        matrices(3, 8, 20)[..., :16], matrices(3, 8, 1).expand(3, 8, 16), matrices(3, 8, 24)[..., 4:20],
        matrices(3, 9, 16).flatten(1)[:, 4:132].unflatten(1, (8, 16)), matrices(0, 8, 16), matrices(3, 0, 16),
        matrices(30, 1, 16).as_strided((3, 8, 16), (132, 16, 1)), matrices(1024, 8, 8),
        matrices(3, 8, 16, dtype=torch.float16),
    ])  # fmt: skip
    def test_layouts_that_it_does_not(self, weight):
        assert not kernels().is_grouped_weight(weight)

    @pytest.mark.parametrize("rows", [
        normal(90, 8), normal(90, 16)[:, :8], normal(90, 9)[:, :8], normal(8, 90).T, normal(8, 96).T[:90],
        normal(91, 8).flatten()[4:724].view(90, 8), normal(90, 1).expand(90, 8),
    ])  # fmt: skip
    @pytest.mark.parametrize("weight", [matrices(2, 8, 16), matrices(2, 24, 8).mT, matrices(2, 8, 18)[..., 1:17]])
    def test_whoever_multiplies_the_result_is_the_same(self, rows, weight, on_a_gpu):
        ends = torch.tensor([50, 80], dtype=torch.int32)
        got = INVENTORY.entry_point("grouped_linear")(rows, weight, ends)
        expected = torch.cat((rows[:50].double() @ weight[0].double(), rows[50:80].double() @ weight[1].double()))
        torch.testing.assert_close(got[:80].double(), expected, rtol=1e-2, atol=1e-2)

    def test_rows_that_there_are_not_are_left_out(self, on_a_gpu, monkeypatch):
        given = []
        monkeypatch.setattr(F, "grouped_mm", lambda *_, offs: given.append(offs.tolist()))
        for ends in ([20, 90], [70, 80], [0, 60]):
            weight = matrices(2, 8, 16)
            INVENTORY.entry_point("grouped_linear")(matrices(1, 70, 8)[0], weight, torch.tensor(ends).int())
        assert given == [[20, 70], [70, 70], [0, 60]]

    def test_batches_on_a_gpu(self):
        batched = INVENTORY.entry_point("batched_linear")
        with FakeTensorMode(), recorded() as launches:
            x, weight = (matrices(3, *shape, device="cuda") for shape in ((17, 8), (8, 16)))
            assert kernels().many_rows(51, x, 3)
            assert batched(x, weight).shape == (3, 17, 16)
        assert launches == []
        assert not kernels().many_rows(48, x, 3)
        assert not kernels().many_rows(51, matrices(3, 17, 8, dtype=torch.float16), 3)
        with recorded() as launches:
            batched(matrices(3, 17, 8, device="meta"), matrices(3, 8, 16, device="meta"))
        assert len(launches) == 1


def test_no_rows_launch_nothing():
    with recorded() as launches:
        ends = torch.zeros(3, dtype=torch.int32)
        assert INVENTORY.entry_point("batched_linear")(torch.ones(2, 0, 8), torch.ones(2, 8, 4)).shape == (2, 0, 4)
        assert INVENTORY.entry_point("embedding")(torch.ones(0, dtype=torch.long), torch.ones(3, 4), -1).shape == (0, 4)
        assert INVENTORY.entry_point("grouped_linear")(torch.ones(0, 8), torch.ones(3, 8, 4), ends).shape == (0, 4)
    assert launches == []


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles_for_every_architecture(arch):
    place = ARCHITECTURES.index(arch)
    dtype, rows = DTYPES[place % 3], (16, 4096)[place // 2]
    x, weight = torch.empty(rows, 256, dtype=dtype, device="meta"), torch.empty(8, 256, 256, dtype=dtype, device="meta")
    with recorded() as launches:
        INVENTORY.entry_point("embedding")(torch.empty(7, dtype=torch.long, device="meta"), x, -1)
        INVENTORY.entry_point("grouped_linear")(x, weight, torch.empty(8, dtype=torch.int32, device="meta"))
        many, narrow = x.new_empty(4096, 256, dtype=torch.bfloat16), weight.bfloat16()
        INVENTORY.entry_point("grouped_linear")(many, narrow, torch.empty(8, dtype=torch.int32, device="meta"))
    for made in launches:
        assert compile_kernel(made.kernel, made.args, arch)
