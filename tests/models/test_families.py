"""The torch.compile backend on tiny models: what it takes over, and that the logits are as good as before."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from fresh_compiler import fresh_compiler
from parts import PLAIN, parts
from pass_checks import BF16, FP32, assert_as_exact
from tiny_models import build, tokens
from torch import nn

from tilegym_fx.pipeline import Outcome
from tilegym_fx.reports import recent_reports

LLAMA = {
    "rms_norm": 1,
    "add_rms_norm": 4,
    "rotary_embedding": 2,
    "gqa_attention_causal": 2,
    "silu_mul": 2,
    "linear": 15,
}
GEMMA = {"rotary_embedding": 2, "rms_norm_plus_one_add": 4, "gelu_tanh_mul": 2, "linear": 15}
OLMO = {
    "rms_norm_cast_last": 5,
    "rms_norm_cast_last_add": 4,
    "rotary_embedding_fp32": 2,
    "silu_mul": 2,
    "linear": 15,
}

#: Family -> what two layers have in bfloat16.
EXPECTED: dict[str, dict[str, int]] = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": {**LLAMA, "linear_bias": 6, "linear": 9},
    "qwen3": {**LLAMA, "rms_norm": 5},
    "phi3": {**{k: v for k, v in LLAMA.items() if k != "silu_mul"}, "silu_mul_packed": 2, "linear": 9},
    "gemma2": {**GEMMA, "rms_norm_plus_one": 5, "softcap_attention_masked": 2},
    "gemma3_text": {**GEMMA, "rms_norm_plus_one": 9, "gqa_attention_masked": 1, "gqa_attention_causal": 1},
    "olmo2": {**OLMO, "gqa_attention_causal": 2},
    "olmo3": {**OLMO, "gqa_attention_masked": 1, "gqa_attention_causal": 1},
    "gpt2": {
        "layer_norm": 1,
        "add_layer_norm": 4,
        "gqa_attention_causal": 2,
        "gelu_new": 2,
        "linear_bias": 8,
        "linear": 1,
    },
    "gpt_neox": {
        "layer_norm": 3,
        "add_layer_norm": 2,
        "rotary_embedding_partial": 2,
        "gqa_attention_causal": 2,
        "gelu": 2,
        "linear_bias": 8,
        "linear": 1,
    },
    "falcon": {
        "layer_norm": 1,
        "add_layer_norm": 2,
        "rotary_embedding": 2,
        "gqa_attention_masked": 2,
        "gelu": 2,
        "linear": 7,
        "linear_add": 2,
    },
}
#: In float32 no cast tells these apart, and the first of each pair is taken.
SAME_IN_FP32 = {
    "rms_norm_cast_last": "rms_norm",
    "rms_norm_cast_last_add": "rms_norm_add",
    "rotary_embedding_fp32": "rotary_embedding",
}


def expected(family: str, dtype: torch.dtype, dynamic: bool) -> dict[str, int]:
    wanted = dict(EXPECTED[family])
    if dtype == FP32:
        wanted = {SAME_IN_FP32.get(name, name): count for name, count in wanted.items()}
    if dynamic:  # Dynamo then makes math.pi a symbol
        wanted.pop("gelu_new", None)
    return wanted


def compiled(
    model: nn.Module, dynamic: bool | None, inner: str = "eager", only: Sequence[str] | None = None
) -> nn.Module:
    fresh_compiler()
    options = {"inner": inner, "only": only or PLAIN}  # unverified Definitions are used where they are named
    return torch.compile(model, backend="tilegym_fx", dynamic=dynamic, options=options)


def counts(outcomes: tuple[Outcome, ...]) -> dict[str, int]:
    return dict(Counter(planned.match.definition for outcome in outcomes for planned in outcome.chosen))


def assert_logits(rewritten: nn.Module, model: nn.Module, dtype: torch.dtype, *shapes: tuple[int, int]) -> None:
    """As near to a wider run as the original's are."""
    wide = copy.deepcopy(model).to(FP32 if dtype == BF16 else torch.float64)
    for shape in shapes:
        ids = tokens(*shape)
        with torch.no_grad():
            got, want, exact = (m(ids).logits for m in (rewritten, model, wide))
        assert_as_exact(got, want, exact)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("family", EXPECTED)
def test_logits_and_parts(family: str, dtype: torch.dtype, dynamic: bool) -> None:
    """With all Definitions: whatever is fused, nothing that there was is missing."""
    model = build(family, dtype)
    rewritten = compiled(model, dynamic)
    assert_logits(rewritten, model, dtype, *((2, 16), (3, 11)) if dynamic else ((2, 16),))
    outcomes = recent_reports()
    assert len(outcomes) == 1, "one graph for every size"
    assert parts(counts(outcomes)) == parts(expected(family, dtype, dynamic))


@pytest.mark.parametrize("family", EXPECTED)
def test_counts(family: str) -> None:
    """With the plain Definitions alone every count is known."""
    dtype = BF16
    model = build(family, dtype)
    assert_logits(compiled(model, False, only=PLAIN), model, dtype, (2, 16))
    assert counts(recent_reports()) == expected(family, dtype, False)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_inductor_compiles_the_rest(family: str) -> None:
    model = build(family, BF16, num_hidden_layers=1)
    assert_logits(compiled(model, False, "inductor"), model, BF16, (2, 16))


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
def test_training_has_the_same_gradients(family: str) -> None:
    model = build(family, FP32, num_hidden_layers=1)
    ids = tokens(2, 16)
    gradients = []
    for run in (model, compiled(model, False)):
        model.zero_grad()
        run(ids, labels=ids).loss.backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_attention_in_eager_code() -> None:
    model = build("llama", BF16, attn_implementation="eager")
    assert_logits(compiled(model, False), model, BF16, (2, 16))
    assert counts(recent_reports())["gqa_attention_masked"] == 2


def test_a_padded_batch() -> None:
    model = build("llama", BF16)
    ids, mask = tokens(2, 16), torch.ones(2, 16, dtype=torch.long)
    mask[1, :5] = 0
    rewritten = compiled(model, False)
    wide = copy.deepcopy(model).to(FP32)
    with torch.no_grad():
        got, want, exact = (m(ids, attention_mask=mask).logits for m in (rewritten, model, wide))
    assert_as_exact(got[mask.bool()], want[mask.bool()], exact[mask.bool()])


def test_greedy_text_with_a_cache() -> None:
    """Prefill and every decode step run the rewritten graphs."""
    model = build("llama", FP32)
    settings = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    want = model.generate(tokens(1, 5), **settings)
    forward = model.forward
    fresh_compiler()
    model.forward = torch.compile(forward, backend="tilegym_fx", dynamic=True, options={"inner": "eager"})
    try:
        got = model.generate(tokens(1, 5), **settings)
    finally:
        model.forward = forward
    assert torch.equal(got, want)
