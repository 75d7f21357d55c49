"""What inductor needs to know of a graph's inputs to replay it as a CUDA graph survives the trace to ATen."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule

from tilegym_fx.backend import to_aten


class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * torch.tensor([2.0])


def captured() -> tuple[GraphModule, GraphModule]:
    graphs: list[GraphModule] = []

    def backend(gm: GraphModule, inputs: list[Any]) -> Any:
        graphs.extend((gm, to_aten(gm, inputs)))
        return gm

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(Scaled(), backend=backend)(torch.ones(2, 8))
    return graphs[0], graphs[1]


def test_every_input_keeps_its_source() -> None:
    before, after = captured()
    for old, new in zip(*(g.graph.find_nodes(op="placeholder") for g in (before, after)), strict=True):
        assert new._dynamo_source == old._dynamo_source


def test_parameters_count_as_static_inputs() -> None:
    _, after = captured()
    static = [
        n
        for n in after.graph.find_nodes(op="placeholder")
        if n.meta.get("tensor_dict", {}).get("_dynamo_static_input_type")
    ]
    assert len(static) == 2  # weight and bias, not x


def test_constants_of_the_trace_have_a_source_too() -> None:
    _, after = captured()
    held = [name for name, _ in (*after.named_parameters(), *after.named_buffers())]
    assert set(held) <= after._param_name_to_source.keys()
