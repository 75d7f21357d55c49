"""Drafts of what no kernel covers: regions for one kernel each, as readable PyTorch that means the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from pass_checks import capture
from torch import nn

from tilegym_fx.draft import draft_of, draft_variants, free_sizes
from tilegym_fx.normalize import normalize
from tilegym_fx.region import Region, reference_of, regions
from tilegym_fx.results import Site
from tilegym_fx.schema import Definition
from tilegym_fx.synth import can_write

BATCH, SEQ, HIDDEN = 3, 37, 64


def found(code: Any, *shapes: tuple[int, ...], synth: bool = True) -> list[Region]:
    """The regions of a function or module at bfloat16 tensors of these shapes."""
    graph = capture(code, [torch.randn(s).bfloat16() for s in shapes]).graph
    normalize(graph)
    seconds = {n: 1e-6 for n in graph.nodes if n.op == "call_function"}
    return regions(graph, [], seconds, allowed=can_write if synth else None)


def run(region: Region, *inputs: torch.Tensor) -> Any:
    scope: dict[str, Any] = {}
    exec(reference_of(region), scope)
    return scope["run"](*inputs)


def test_a_region_ends_at_what_no_kernel_can_be_written_for() -> None:
    def code(x: Any, w: Any) -> Any:
        return torch.tanh(torch.sigmoid(x) * 2 @ w) + 1

    both = found(code, (4, HIDDEN), (HIDDEN, HIDDEN))
    assert len(both) == 2
    assert len(found(code, (4, HIDDEN), (HIDDEN, HIDDEN), synth=False)) == 1
    assert all("matmul" not in reference_of(r) and "linear" not in reference_of(r) for r in both)


def test_a_region_has_no_views_at_its_edges() -> None:
    def code(x: Any) -> Any:
        return torch.tanh(x.view(BATCH, SEQ, 4, 16)).transpose(1, 2)

    (region,) = found(code, (BATCH, SEQ, HIDDEN))
    assert [str(n.target) for n in region.nodes] == ["aten.tanh.default"]


def test_a_value_is_never_called_like_a_word_of_python() -> None:
    def code(x: Any, y: Any) -> Any:
        return torch.where((x > 0).__and__(y > 0).__or__(y < -1), x, y)

    (region,) = found(code, (4, HIDDEN), (4, HIDDEN))
    inputs = torch.randn(4, HIDDEN).bfloat16(), torch.randn(4, HIDDEN).bfloat16()
    assert torch.equal(run(region, *inputs), code(*inputs))
    assert " and = " not in reference_of(region)
    assert "torch.ops" not in reference_of(region)


def test_casts_alone_are_no_region() -> None:
    assert found(lambda x: x.float(), (4, HIDDEN)) == []


def test_a_region_that_occurs_twice_is_counted_once() -> None:
    class Layer(nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.tanh(x) * 3

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = Layer(), Layer()

        def forward(self, x: Any, w: Any) -> Any:
            return self.two(self.one(x) @ w)

    (region,) = found(Model(), (HIDDEN, HIDDEN), (HIDDEN, HIDDEN))
    assert region.count == 2


def test_the_reference_reads_well_and_computes_the_same() -> None:
    def code(x: Any, w: Any) -> Any:
        wide = x.float()
        return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)

    (region,) = found(code, (4, HIDDEN), (HIDDEN,))
    text = reference_of(region)
    assert "torch.ops" not in text
    assert ".mean(-1, keepdim=True)" in text
    assert "to(x0.dtype)" in text
    inputs = torch.randn(4, HIDDEN).bfloat16(), torch.randn(HIDDEN).bfloat16()
    torch.testing.assert_close(run(region, *inputs), code(*inputs), rtol=0, atol=0)


def test_sizes_of_the_call_become_axes_and_sizes_in_the_code_do_not() -> None:
    def code(x: Any) -> Any:
        return torch.cat([-x[..., 32:], x[..., :32]], dim=-1) * 2

    (region,) = found(code, (BATCH, SEQ, HIDDEN))
    assert free_sizes(region, BATCH, SEQ) == {SEQ: "S", BATCH: "B"}
    draft = draft_of(region, "some", "prefill", set(), free_sizes(region, BATCH, SEQ))
    assert draft["inputs"]["x0"]["shape"] == ["B", "S", "d64"]
    definition = Definition.model_validate(draft)
    assert definition.axes["B"].type == "var"


def test_a_width_that_the_code_does_not_name_is_an_axis_too() -> None:
    (region,) = found(lambda x: torch.tanh(x) * 2, (BATCH, SEQ, HIDDEN))
    assert free_sizes(region, BATCH, SEQ) == {HIDDEN: "H", SEQ: "S", BATCH: "B"}


def test_variants_go_from_general_to_fixed() -> None:
    (region,) = found(lambda x: torch.tanh(x) * 2, (BATCH, SEQ, HIDDEN))
    taken: set[str] = set()
    drafts = draft_variants(region, "some", "prefill", taken, BATCH, SEQ)
    free = [sum(axis["type"] == "var" for axis in draft["axes"].values()) for draft in drafts]
    assert free == [3, 2, 0]
    assert taken == {drafts[0]["name"]}
    assert {draft["name"] for draft in drafts} == taken


def test_names_are_new() -> None:
    (region,) = found(lambda x: torch.tanh(x) * 2, (BATCH, SEQ, HIDDEN))
    taken: set[str] = set()
    first, second = (draft_of(region, "some", "prefill", taken)["name"] for _ in range(2))
    assert second == f"{first}_2"


@pytest.mark.parametrize(
    ("module_class", "stem"),
    [("GPTNeoXLayer", "gpt_neo_x_layer"), ("LlamaMLP", "llama_mlp"), ("XIELUActivation", "xielu_activation"),
     ("Olmo2RMSNorm", "olmo2_rms_norm"), ("", "model")],
)  # fmt: skip
def test_a_draft_is_named_by_the_words_of_its_class(module_class: str, stem: str) -> None:
    (region,) = found(lambda x: torch.tanh(x) * 2, (BATCH, SEQ, HIDDEN))
    region = replace(region, site=Site(module_class=module_class))
    assert draft_of(region, "some", "prefill", set())["name"] == f"{stem}_tanh_mul"
