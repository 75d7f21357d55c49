"""Linears fused with norm, gate and each other: which are taken together, and which are not."""

from __future__ import annotations

from functools import partial
from typing import Any

import blocks
import pytest
import torch
import torch.nn.functional as F
from pass_checks import BATCH, BF16, LENGTH, check_pass, everywhere, rand

WIDTH, INNER, QUERIES, KEYS = 64, 48, 64, 32
#: With every Definition allowed: these tests are about which of them wins.
check = partial(check_pass, only=None)

GATED = {
    "linear_silu_mul": lambda x, g, u: F.silu(F.linear(x, g)) * F.linear(x, u),
    "linear_gelu_tanh_mul": lambda x, g, u: F.gelu(F.linear(x, g), approximate="tanh") * F.linear(x, u),
}
NORMED_GATED = {
    "rms_norm_linear_silu_mul": (blocks.rms_norm, "linear_silu_mul"),
    "rms_norm_plus_one_linear_gelu_tanh_mul": (blocks.rms_norm_plus_one, "linear_gelu_tanh_mul"),
}


def packed(x: Any, w: Any) -> Any:
    gate, up = F.linear(x, w).chunk(2, dim=-1)
    return up * F.silu(gate)


def qkv(x: Any, *weights: Any) -> Any:
    return tuple(F.linear(x, weight) for weight in weights)


def qkv_bias(x: Any, *pairs: Any) -> Any:
    return tuple(F.linear(x, pairs[i], pairs[i + 1]) for i in (0, 2, 4))


def rows(dtype: torch.dtype = BF16) -> torch.Tensor:
    return rand(BATCH, LENGTH, WIDTH, dtype=dtype)


def matrices(*features: int, dtype: torch.dtype = BF16) -> list[torch.Tensor]:
    return [rand(size, WIDTH, dtype=dtype, seed=i) * WIDTH**-0.5 for i, size in enumerate(features)]


def with_biases(weights: list[torch.Tensor]) -> list[torch.Tensor]:
    return [t for w in weights for t in (w, rand(w.shape[0], dtype=w.dtype))]


@everywhere
def test_gate_and_up(dtype: torch.dtype, dynamic: bool) -> None:
    for name, code in GATED.items():
        check(code, [rows(dtype), *matrices(INNER, INNER, dtype=dtype)], {name: 1}, dynamic=dynamic)


@everywhere
def test_norm_gate_and_up(dtype: torch.dtype, dynamic: bool) -> None:
    for name, (norm, gated) in NORMED_GATED.items():
        inputs = [rows(dtype), rand(WIDTH, dtype=dtype), *matrices(INNER, INNER, dtype=dtype)]
        check(
            lambda x, w, g, u, norm=norm, gated=gated: GATED[gated](norm(x, w), g, u),
            inputs, {name: 1}, dynamic=dynamic,
        )  # fmt: skip


@everywhere
def test_packed_gate_and_up(dtype: torch.dtype, dynamic: bool) -> None:
    (weight,) = matrices(2 * INNER, dtype=dtype)
    check(packed, [rows(dtype), weight], {"linear_silu_mul_packed": 1}, dynamic=dynamic)
    inputs = [rows(dtype), rand(WIDTH, dtype=dtype), weight]
    expected = {"rms_norm_linear_silu_mul_packed": 1}
    check(lambda x, n, w: packed(blocks.rms_norm(x, n), w), inputs, expected, dynamic=dynamic)


@everywhere
def test_queries_keys_and_values(dtype: torch.dtype, dynamic: bool) -> None:
    weights = matrices(QUERIES, KEYS, KEYS, dtype=dtype)
    check(qkv, [rows(dtype), *weights], {"linear_qkv": 1}, dynamic=dynamic)
    check(qkv_bias, [rows(dtype), *with_biases(weights)], {"linear_qkv_bias": 1}, dynamic=dynamic)


@everywhere
@pytest.mark.parametrize(
    ("name", "norm", "code"),
    [
        ("rms_norm_linear_qkv", blocks.rms_norm, qkv),
        ("rms_norm_linear_qkv_bias", blocks.rms_norm, qkv_bias),
        ("rms_norm_linear_qkv_bias", blocks.rms_norm_cast_last, qkv_bias),
        ("rms_norm_plus_one_linear_qkv", blocks.rms_norm_plus_one, qkv),
        ("rms_norm_linear", blocks.rms_norm, F.linear),
        ("rms_norm_linear", blocks.rms_norm_cast_last, F.linear),
    ],
)
def test_norm_then_projections(name: str, norm: Any, code: Any, dtype: torch.dtype, dynamic: bool) -> None:
    weights = matrices(QUERIES, KEYS, KEYS, dtype=dtype)[: 1 if code is F.linear else 3]
    weights = with_biases(weights) if code is qkv_bias else weights
    inputs = [rows(dtype), rand(WIDTH, dtype=dtype), *weights]
    check(lambda x, n, *w: code(norm(x, n), *w), inputs, {name: 1}, dynamic=dynamic)


def test_the_sum_before_the_norm_goes_to_the_projection_that_made_it() -> None:
    def layer(x: Any, residual: Any, out: Any, norm: Any, gate: Any, up: Any) -> Any:
        residual = residual + F.linear(x, out)
        return GATED["linear_silu_mul"](blocks.rms_norm(residual, norm), gate, up), residual

    inputs = [rows(), rows() + 1, *matrices(WIDTH), rand(WIDTH), *matrices(INNER, INNER)]
    check(layer, inputs, {"linear_add": 1, "rms_norm_linear_silu_mul": 1})


def test_parallel_attention_and_feed_forward_share_their_rows() -> None:
    """Five linears read one value: the gate tells gate and up, the widths tell queries, keys and values."""

    def layer(x: Any, q: Any, k: Any, v: Any, gate: Any, up: Any) -> Any:
        return (*qkv(x, q, k, v), GATED["linear_silu_mul"](x, gate, up))

    inputs = [rows(), *matrices(QUERIES, KEYS, KEYS, INNER, INNER)]
    check(layer, inputs, {"linear_qkv": 1, "linear_silu_mul": 1})


def test_the_weights_of_equally_wide_projections_keep_their_places() -> None:
    outcome = check(qkv, [rows(), *matrices(WIDTH, WIDTH, WIDTH)], {"linear_qkv": 1})
    inputs = outcome.chosen[0].match.inputs
    names = [inputs[key].name for key in ("q_weight", "k_weight", "v_weight")]
    assert names == sorted(names)


def test_a_router_beside_gate_and_up_is_no_query_projection() -> None:
    def experts(x: Any, router: Any, gate: Any, up: Any) -> Any:
        return F.linear(x, router), GATED["linear_silu_mul"](x, gate, up)

    check(experts, [rows(), *matrices(8, INNER, INNER)], {"linear": 1, "linear_silu_mul": 1})


def test_two_projections_stay_two() -> None:
    check(qkv, [rows(), *matrices(QUERIES, KEYS)], {"linear": 2})


def test_guard_on_widths_that_are_no_heads() -> None:
    inputs = [rows(), *matrices(QUERIES, KEYS, 2 * KEYS)]
    check(qkv, inputs, {"linear": 3}, refused={"linear_qkv": r"v_weight is .*, not \[M, K\]"})
    check(
        qkv, [rows(), *matrices(48, 32, 32)], {"linear": 3}, refused={"linear_qkv": "48 and 32 features are no queries"}
    )


def test_near_miss_one_projection_reads_another_value() -> None:
    def code(x: Any, y: Any, q: Any, k: Any, v: Any) -> Any:
        return F.linear(x, q), F.linear(x, k), F.linear(y, v)

    check(code, [rows(), rows() + 1, *matrices(QUERIES, KEYS, KEYS)], {"linear": 3})


def test_near_miss_the_normed_rows_are_also_returned() -> None:
    def code(x: Any, n: Any, *weights: Any) -> Any:
        x = blocks.rms_norm(x, n)
        return (x, *qkv(x, *weights))

    inputs = [rows(), rand(WIDTH), *matrices(QUERIES, KEYS, KEYS)]
    refused = {"rms_norm_linear_qkv": "is also read by output"}
    check(code, inputs, {"rms_norm": 1, "linear_qkv": 1}, refused=refused)


def test_near_miss_the_gate_is_also_returned() -> None:
    def code(x: Any, g: Any, u: Any) -> Any:
        gate = F.silu(F.linear(x, g))
        return gate * F.linear(x, u), gate

    refused = {"linear_silu_mul": "is also read by"}
    check(code, [rows(), *matrices(INNER, INNER)], {"linear": 2}, left=2, refused=refused)


def test_near_miss_gate_and_up_of_different_rows() -> None:
    def code(x: Any, y: Any, g: Any, u: Any) -> Any:
        return F.silu(F.linear(x, g)) * F.linear(y, u)

    expected = {"linear": 2, "silu_mul": 1}
    check(code, [rows(), rows() + 1, *matrices(INNER, INNER)], expected)


def test_near_miss_the_exact_gelu() -> None:
    def code(x: Any, g: Any, u: Any) -> Any:
        return F.gelu(F.linear(x, g)) * F.linear(x, u)

    check(code, [rows(), *matrices(INNER, INNER)], {"linear": 2, "gelu_mul": 1})
