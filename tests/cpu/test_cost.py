"""The roofline: bytes, arithmetic and seconds of nodes and regions, and the table of devices."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Node

from tilegym_fx.cost import DEVICES, Device, _unlisted, device_of, get_device, node_seconds, region_seconds
from tilegym_fx.errors import UsageError

F = nn.functional
#: One byte and one operation a second, so that seconds are bytes or operations.
UNIT_BYTES = Device("bytes", "SM90", 1.0, 1e30, 1e30, "", launch_seconds=0.0)
UNIT_FLOPS = Device("flops", "SM90", 1e30, 1.0, 0.5, "", launch_seconds=0.0)


class Call(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Any:
        return self.function(*args)


def nodes_of(function: Callable[..., Any], *args: Tensor, dynamic_shapes: Any = None) -> list[Node]:
    with torch.no_grad():
        program = torch.export.export(Call(function), args, strict=False, dynamic_shapes=dynamic_shapes)
    return list(program.graph.nodes)


def calls_of(function: Callable[..., Any], *args: Tensor, **options: Any) -> list[Node]:
    return [node for node in nodes_of(function, *args, **options) if node.op == "call_function"]


def total(device: Device, function: Callable[..., Any], *args: Tensor) -> float:
    return sum(node_seconds(node, device) for node in nodes_of(function, *args))


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def test_an_elementwise_kernel_moves_its_inputs_and_its_output() -> None:
    assert total(UNIT_BYTES, torch.add, meta(4, 8), meta(8)) == 2 * (32 + 8 + 32)


def test_a_cast_moves_both_dtypes() -> None:
    assert total(UNIT_BYTES, lambda x: x.float(), meta(4, 8)) == 32 * (2 + 4)


def test_a_cast_to_the_same_dtype_is_free() -> None:
    assert total(UNIT_BYTES, lambda x: x.to(torch.bfloat16), meta(4, 8)) == 0


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.reshape(8, 4),
        lambda x: x.view(2, 2, 8),
        lambda x: x.transpose(0, 1),
        lambda x: x[:, 1:3],
        lambda x: x.unsqueeze(0).expand(3, 4, 8),
        lambda x: x.chunk(2)[0],
        lambda x: x.contiguous(),
        lambda x: x.detach_(),
    ],
    ids=["reshape", "view", "transpose", "slice", "expand", "chunk", "contiguous", "detach in place"],
)
def test_views_are_free(view: Callable[[Tensor], Tensor]) -> None:
    assert total(UNIT_BYTES, view, meta(4, 8)) == 0


def test_a_change_of_layout_is_a_copy() -> None:
    assert total(UNIT_BYTES, lambda x: x.transpose(0, 1).contiguous(), meta(4, 8)) == 2 * (32 + 32)


def test_an_expanded_input_is_read_once() -> None:
    assert total(UNIT_BYTES, lambda x: x.expand(4, 8).cos(), meta(1, 8)) == 2 * (8 + 32)


def test_an_embedding_reads_only_its_rows() -> None:
    index = torch.empty(3, dtype=torch.long, device="meta")
    assert total(UNIT_BYTES, F.embedding, index, meta(1000, 16)) == 2 * (48 + 48) + 3 * 8


def test_a_gather_of_rows_reads_only_these() -> None:
    index = torch.empty(3, dtype=torch.long, device="meta")
    assert total(UNIT_BYTES, lambda x, i: x[i], meta(1000, 16), index) == 2 * (48 + 48) + 3 * 8


def test_writing_into_a_tensor_moves_what_is_written() -> None:
    def write(cache: Tensor, new: Tensor) -> Tensor:
        return cache.clone().index_copy_(0, torch.arange(2, device="meta"), new)

    write_node = next(n for n in calls_of(write, meta(1000, 16), meta(2, 16)) if "index_copy" in n.name)
    assert node_seconds(write_node, UNIT_BYTES) == 2 * (2 * 16 * 2)


@pytest.mark.parametrize(
    ("function", "shapes", "expected"),
    [
        (F.linear, [(2, 3, 8), (16, 8)], 2 * 6 * 16 * 8),
        (torch.matmul, [(2, 3, 8), (8, 16)], 2 * 6 * 16 * 8),
        (torch.bmm, [(2, 3, 8), (2, 8, 16)], 2 * 6 * 16 * 8),
        (torch.addmm, [(16,), (3, 8), (8, 16)], 2 * 3 * 16 * 8),
        (lambda x, w: F.conv1d(x, w, groups=4), [(1, 4, 10), (4, 1, 3)], 2 * 4 * 8 * 3),
        (F.scaled_dot_product_attention, [(1, 4, 5, 8), (1, 4, 7, 8), (1, 4, 7, 6)], 2 * 4 * 5 * 7 * (8 + 6)),
        (torch.mul, [(4, 8), (4, 8)], 0),
    ],
    ids=["linear", "matmul", "bmm", "addmm", "conv1d", "sdpa", "mul"],
)
def test_floating_point_operations(
    function: Callable[..., Any], shapes: list[tuple[int, ...]], expected: float
) -> None:
    args = [meta(*shape) for shape in shapes]
    assert total(UNIT_FLOPS, function, *args) == pytest.approx(expected)


def test_causal_attention_counts_half() -> None:
    q = meta(1, 2, 16, 8)
    full = total(UNIT_FLOPS, F.scaled_dot_product_attention, q, q, q)
    causal = total(UNIT_FLOPS, lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True), q)
    assert causal == pytest.approx(full / 2)


def test_float32_products_run_at_their_own_rate() -> None:
    half = total(UNIT_FLOPS, F.linear, meta(2, 8), meta(4, 8))
    single = total(UNIT_FLOPS, F.linear, meta(2, 8, dtype=torch.float32), meta(4, 8, dtype=torch.float32))
    assert single == pytest.approx(2 * half)


def test_a_grouped_product_reads_no_more_experts_than_it_has_rows() -> None:
    offsets = torch.empty(16, dtype=torch.int32, device="meta")
    rows = 2
    nodes = calls_of(lambda x, w, o: F.grouped_mm(x, w, offs=o), meta(rows, 32), meta(16, 32, 64), offsets)
    expected = 2 * (rows * 32 + rows * 32 * 64 + rows * 64) + 16 * 4
    assert node_seconds(nodes[-1], UNIT_BYTES) == pytest.approx(expected)


def test_a_kernel_takes_the_longer_of_memory_and_arithmetic_and_its_launch() -> None:
    device = Device(
        "d", "SM90", bytes_per_second=10.0, half_flops=5.0, float32_flops=1.0, source="", launch_seconds=7.0
    )
    node = calls_of(F.linear, meta(1, 4), meta(4, 4))[0]
    assert node_seconds(node, device) == pytest.approx(7 + max(2 * (4 + 16 + 4) / 10, 2 * 16 / 5))
    assert node_seconds(node, replace(device, bytes_per_second=1.0)) == pytest.approx(7 + 48)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def test_a_region_reads_each_input_once_and_keeps_the_rest_on_chip() -> None:
    nodes = nodes_of(norm, meta(4, 8), meta(8))
    inputs = [node for node in nodes if node.op == "placeholder"]
    body = [node for node in nodes if node.op == "call_function"]
    assert region_seconds([*inputs, inputs[0], 1e-6], body[-1:], body, UNIT_BYTES) == 2 * (32 + 8 + 32)
    assert sum(node_seconds(node, UNIT_BYTES) for node in body) > 2 * 2 * (32 + 8 + 32)


def test_a_region_adds_up_its_arithmetic_and_launches_once() -> None:
    nodes = nodes_of(lambda x, w, v: F.linear(F.linear(x, w), v), meta(2, 8), meta(8, 8), meta(4, 8))
    body = [node for node in nodes if node.op == "call_function"]
    device = replace(UNIT_FLOPS, launch_seconds=3.0)
    assert region_seconds(nodes[:3], body[-1:], body, device) == pytest.approx(3 + 2 * 16 * 8 + 2 * 8 * 8)


def test_a_region_that_embeds_reads_only_the_rows_of_the_table() -> None:
    index = torch.empty(3, dtype=torch.long, device="meta")
    nodes = nodes_of(lambda i, table: F.embedding(i, table) * 2, index, meta(1000, 16))
    body = [node for node in nodes if node.op == "call_function"]
    assert region_seconds(nodes[:2], body[-1:], body, UNIT_BYTES) == 2 * (48 + 48) + 3 * 8


def test_symbolic_sizes_count_as_they_were_traced() -> None:
    x = torch.empty(6, 8)
    symbolic = calls_of(torch.relu, x, dynamic_shapes=(({0: torch.export.Dim.AUTO},),))[-1]
    assert isinstance(symbolic.meta["val"].shape[0], torch.SymInt)
    assert node_seconds(symbolic, UNIT_BYTES) == 4 * (48 + 48)


def test_inputs_and_outputs_of_a_graph_cost_nothing() -> None:
    nodes = nodes_of(torch.relu, meta(4))
    assert [node_seconds(node, UNIT_BYTES) for node in nodes if node.op != "call_function"] == [0.0, 0.0]


def test_several_results_are_all_written() -> None:
    nodes = calls_of(lambda x: torch.topk(x, 2, dim=-1)[0], meta(4, 8))
    assert node_seconds(nodes[0], UNIT_BYTES) == 4 * 8 * 2 + 4 * 2 * (2 + 8)


def test_a_large_graph_is_priced_at_once() -> None:
    def many(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(800):
            x = F.linear(x, w).transpose(0, 1).transpose(0, 1) + x
        return x

    nodes = nodes_of(many, meta(8, 8), meta(8, 8))
    node_seconds(nodes[-2], UNIT_BYTES)
    started = time.process_time()
    for node in nodes:
        node_seconds(node, UNIT_BYTES)
    assert len(nodes) > 3000
    assert time.process_time() - started < 0.1


@pytest.mark.parametrize("name", ["h200", "H200", "NVIDIA H200", "RTX 4090", "rtx_5090", "GeForce RTX 5090"])
def test_a_device_is_found_however_it_is_written(name: str) -> None:
    assert get_device(name) in DEVICES.values()


def test_an_unknown_device_is_one_clear_error() -> None:
    with pytest.raises(UsageError, match=r"unknown device 'h20o'\. Give one of h200, h100, b200.*did you mean `h200`"):
        get_device("h20o")


@pytest.mark.parametrize("device", DEVICES.values(), ids=lambda device: device.name)
def test_devices_have_plausible_figures(device: Device) -> None:
    assert 5e11 < device.bytes_per_second < 1e13
    assert device.float32_flops < device.half_flops < 1e16
    assert device.source
    assert device.arch.startswith("SM")


def test_without_a_gpu_the_default_device_stands_in() -> None:
    assert device_of(None).name == device_of(torch.device("cpu")).name == "h200"


def test_an_unlisted_gpu_gets_its_own_architecture_and_the_nearest_figures() -> None:
    device = _unlisted("rtxa6000", 86)
    assert (device.arch, device.half_flops) == ("SM86", DEVICES["l40s"].half_flops)
