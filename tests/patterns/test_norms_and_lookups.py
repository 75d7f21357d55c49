"""Norms without a weight, with a gate or of a length, grouped and batched linears, embedding."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pass_checks import BATCH, FP32, LENGTH, check_pass, everywhere, rand

EPS = 1e-6
NORMS = ("rms_norm_unweighted", "rms_norm_gated", "layer_norm_no_bias", "l2_norm", "l2_clip")
check = partial(check_pass, only=NORMS)


def unweighted(x: Any) -> Any:
    wide = x.float()
    return (wide * torch.pow(wide.pow(2).mean(-1, keepdim=True) + EPS, -0.5)).type_as(x)


def gated(x: Any, gate: Any, weight: Any, *, act: Any = F.silu) -> Any:
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return ((weight * wide.to(x.dtype)) * act(gate.to(torch.float32))).to(x.dtype)


def manual(x: Any, weight: Any) -> Any:
    wide = x.to(torch.float32)
    mean = wide.mean(-1, keepdim=True)
    variance = (wide - mean).pow(2).mean(-1, keepdim=True)
    return (weight.to(torch.float32) * ((wide - mean) * torch.rsqrt(variance + EPS))).to(x.dtype)


@everywhere
def test_hits(dtype: torch.dtype, dynamic: bool) -> None:
    x, weight = rand(BATCH, LENGTH, 48, dtype=dtype), rand(48, dtype=dtype)
    check(unweighted, [x], {"rms_norm_unweighted": 1}, dynamic=dynamic)
    check(gated, [x, x + 1, weight], {"rms_norm_gated": 1}, dynamic=dynamic)
    check(lambda x, w: F.layer_norm(x, (48,), w, None, EPS), [x, weight], {"layer_norm_no_bias": 1}, dynamic=dynamic)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_a_layer_norm_written_out(dynamic: bool) -> None:
    """In float32 PyTorch's own layer norm on a CPU sums in another order, by more than the check allows."""
    check(manual, [rand(BATCH, LENGTH, 48), rand(48)], {"layer_norm_no_bias": 1}, dynamic=dynamic)


def test_near_miss_another_gate() -> None:
    code = partial(gated, act=torch.sigmoid)
    inputs = [rand(5, 48), rand(5, 48), rand(48)]
    check(code, inputs, {"rms_norm_unweighted": 1}, left=None)


@everywhere
def test_a_root_mean_square_norm_in_one_operation(dtype: torch.dtype, dynamic: bool) -> None:
    x = rand(BATCH, LENGTH, 48, dtype=dtype)
    check(lambda x: F.rms_norm(x, (48,), None, EPS), [x], {"rms_norm_unweighted": 1}, dynamic=dynamic)


def test_near_miss_over_two_dimensions() -> None:
    check(lambda x: F.rms_norm(x, (5, 48), None, EPS), [rand(4, 5, 48)], {}, left=None)


def length(x: Any) -> Any:
    return (x * x).sum(-1, keepdim=True) + EPS


def clipped(x: Any, *, least: float | None = None, most: float | None = 1.0, order: float = 2) -> Any:
    wide = x.float()
    norm = torch.linalg.vector_norm(wide, ord=order, dim=-1, keepdim=True)
    return (wide * (4.0 / (norm + EPS)).clamp(min=least, max=most)).to(x.dtype)


@everywhere
def test_rows_of_a_greatest_length(dtype: torch.dtype, dynamic: bool) -> None:
    outcome = check(clipped, [rand(BATCH, LENGTH, 48, dtype=dtype)], {"l2_clip": 1}, dynamic=dynamic)
    assert outcome.chosen[0].match.inputs["threshold"] == 4.0


@pytest.mark.parametrize("other", [{"most": 2.0}, {"least": 1.0, "most": None}, {"order": 1}], ids=str)
def test_near_miss_rows_clipped_otherwise(other: dict[str, Any]) -> None:
    check(partial(clipped, **other), [rand(5, 48)], {}, left=None)


@everywhere
def test_rows_of_length_one(dtype: torch.dtype, dynamic: bool) -> None:
    """By a product or a division; of a sum rms_norm_unweighted makes nothing, whatever is rounded after it."""
    for code in (lambda x: x * length(x).rsqrt(), lambda x: x / length(x).sqrt()):
        wide = lambda x, code=code: code(x.transpose(1, 2).float())  # noqa: E731
        check(wide, [rand(BATCH, LENGTH, 4, 48, dtype=dtype)], {"l2_norm": 1}, left=None, dynamic=dynamic)
    check(lambda x: (x * length(x.float()).rsqrt()).type_as(x), [rand(5, 48, dtype=FP32)], {"l2_norm": 1})


@pytest.mark.parametrize(
    "code",
    [
        lambda x: x.float() / (length(x.float()) - EPS).sqrt().clamp(min=EPS),
        lambda x: x * length(x).rsqrt(),
        lambda x: x.float() * ((x.float() ** 2).sum(-2, keepdim=True) + EPS).rsqrt(),
        lambda x: x.float() * (x.float().sum(-1, keepdim=True) + EPS).rsqrt(),
    ],
    ids=["a floor instead of eps", "in 16 bits", "another dimension", "a sum of no squares"],
)
def test_near_miss_rows_of_another_length(code: Any) -> None:
    check(code, [rand(5, 48).abs()], {}, left=None)


def test_near_miss_rounded_before_the_product() -> None:
    def code(x: Any) -> Any:
        return x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS).to(x.dtype)

    check(code, [rand(5, 48)], {}, left=None)


def test_guard_the_gate_is_one_row() -> None:
    refused = {"rms_norm_gated": "gate"}
    inputs = [rand(5, 48), rand(48), rand(48)]
    check(gated, inputs, {"rms_norm_unweighted": 1}, left=None, refused=refused)


ENDS = torch.tensor([3, 3, 8], dtype=torch.int32)
grouped = partial(check_pass, only=("grouped_linear",))


def test_grouped_linears() -> None:
    code = lambda x, w, ends: torch._grouped_mm(x, w.transpose(-2, -1), offs=ends)  # noqa: E731
    grouped(code, [rand(8, 16), rand(3, 24, 16), ENDS], {"grouped_linear": 1}, left=1)  # the view


def test_grouped_linears_with_matrices_stored_input_first() -> None:
    code = lambda x, w, ends: torch._grouped_mm(x, w, offs=ends)  # noqa: E731
    grouped(code, [rand(8, 16), rand(3, 16, 24), ENDS], {"grouped_linear": 1})


def test_near_miss_matrices_for_batches_of_rows() -> None:
    code = lambda x, w: torch._grouped_mm(x, w)  # noqa: E731
    grouped(code, [rand(3, 8, 16), rand(3, 16, 24)], {}, left=None)


@pytest.mark.parametrize("divisor", [8.0, 0.25])
def test_a_power_of_two_scales_eager_attention_by_division(divisor: float) -> None:
    def code(q: Any, k: Any, v: Any, mask: Any) -> Any:
        scores = torch.matmul(q, k.transpose(-1, -2)) / divisor + mask
        return torch.matmul(torch.softmax(scores, dim=-1), v).permute(0, 2, 1, 3)

    inputs = [rand(2, 4, 5, 16, seed=s) for s in range(3)]
    outcome = check_pass(code, [*inputs, rand(2, 1, 5, 5)], {"gqa_attention_masked": 1})
    assert outcome.chosen[0].match.inputs["scale"] == 1 / divisor


def test_embeddings_of_any_shape_with_their_padding() -> None:
    ids = torch.tensor([[1, 2, 0], [3, 3, 4]])
    for padding in (None, 3):
        outcome = check_pass(
            lambda i, w, p=padding: F.embedding(i, w, p), [ids, rand(5, 16)], {"embedding": 1}, only=("embedding",)
        )
        assert outcome.chosen[0].match.inputs["padding_idx"] == (-1 if padding is None else padding)


def test_a_stack_of_matrices_and_near_miss_transposed_keys() -> None:
    only = ("batched_linear",)
    check_pass(torch.bmm, [rand(3, 5, 16), rand(3, 16, 24)], {"batched_linear": 1}, only=only)
    refused = {"batched_linear": "not contiguous"}
    code = lambda q, k: torch.bmm(q, k.transpose(1, 2))  # noqa: E731
    check_pass(code, [rand(3, 5, 16), rand(3, 7, 16)], {}, left=None, only=only, refused=refused)


@pytest.mark.parametrize("length", [5, 1])
def test_attention_with_heads_in_the_batch(length: int) -> None:
    def code(q: Any, k: Any, v: Any, mask: Any) -> Any:
        left, right, values = (x.reshape(8, -1, 16) for x in (q, k, v))
        scores = torch.bmm(left, right.transpose(1, 2)).view(2, 4, length, 7) + mask
        attended = torch.bmm(torch.softmax(scores.view(8, length, 7), dim=-1), values)
        return attended.view(2, 4, length, 16).transpose(1, 2)

    inputs = [rand(2, 4, length, 16), rand(2, 4, 7, 16, seed=1), rand(2, 4, 7, 16, seed=2), rand(2, 1, length, 7)]
    outcome = check_pass(code, inputs, {"gqa_attention_masked": 1})
    assert outcome.chosen[0].match.inputs["scale"] == 1.0


def test_attention_with_heads_in_the_batch_and_queries_scaled_before() -> None:
    def code(rows: Any, k: Any, v: Any, mask: Any) -> Any:
        q = (rows * 0.3).view(2, 5, 4, 16).transpose(1, 2)
        left, right, values = (x.reshape(8, -1, 16) for x in (q, k, v))
        scores = torch.bmm(left, right.transpose(1, 2)).view(2, 4, 5, 7) + mask
        attended = torch.bmm(torch.softmax(scores.view(8, 5, 7), dim=-1), values)
        return attended.view(2, 4, 5, 16).transpose(1, 2)

    inputs = [rand(2, 5, 64), rand(2, 4, 7, 16, seed=1), rand(2, 4, 7, 16, seed=2), rand(2, 1, 5, 7)]
    outcome = check_pass(code, inputs, {"gqa_attention_masked": 1}, left=2)  # the views
    assert outcome.chosen[0].match.inputs["scale"] == 0.3


def test_near_miss_heads_in_the_batch_scaled_after_the_product() -> None:
    def code(q: Any, k: Any, v: Any, mask: Any) -> Any:
        left, right, values = (x.reshape(8, -1, 16) for x in (q, k, v))
        scores = (torch.bmm(left, right.transpose(1, 2)) * 0.3).view(2, 4, 5, 7) + mask
        return torch.bmm(torch.softmax(scores.view(8, 5, 7), dim=-1), values).view(2, 4, 5, 16).transpose(1, 2)

    inputs = [rand(2, 4, 5, 16), rand(2, 4, 7, 16, seed=1), rand(2, 4, 7, 16, seed=2), rand(2, 1, 5, 7)]
    check_pass(code, inputs, {}, left=None)
