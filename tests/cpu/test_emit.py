"""emit: what is written is right, what cannot be written is refused with a reason, and no text is wrong."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import adversarial_modules
import emit_modules
import pytest
import torch
from emit_support import counts, emitted, method
from torch import nn

from tilegym_fx import apply as patching
from tilegym_fx.errors import ApplyError
from tilegym_fx.results import EmitResult

WIDTH = emit_modules.WIDTH


def tensors(count: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(7)
    return tuple(torch.randn(2, 3, WIDTH, generator=generator) for _ in range(count))


def assert_same(model: nn.Module, result: EmitResult, *calls: Callable[[nn.Module], Any]) -> None:
    """Each call gives the same, to the last bit, before and after the text is applied, and again after
    restore."""
    before = [_flat(call(model)) for call in calls]
    module = patching.load(result.text)
    patching.apply(module, model)
    after = [_flat(call(model)) for call in calls]
    patching.restore(model)
    again = [_flat(call(model)) for call in calls]
    for one, two, three in zip(before, after, again, strict=True):
        assert len(one) == len(two) == len(three)
        for left, right, last in zip(one, two, three, strict=True):
            torch.testing.assert_close(left, right, rtol=0, atol=0)
            torch.testing.assert_close(left, last, rtol=0, atol=0)


def _flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value.detach().clone()]
    return [leaf for item in value for leaf in _flat(item)]


def run(*args: Any, seed: int = 0, train: bool = False, **kwargs: Any) -> Callable[[nn.Module], Any]:
    """A call with fresh copies of the tensors."""

    def call(model: nn.Module) -> Any:
        torch.manual_seed(seed)
        model.train(train)
        return model(*copy.deepcopy(args), **copy.deepcopy(kwargs))

    return call


def test_add_and_norm_become_one_statement_with_the_authors_expressions() -> None:
    model = emit_modules.Plain()
    x, residual = tensors(2)
    result = emitted(model, (x, residual))
    assert counts(result) == {"add_rms_norm": 1}
    assert (
        "tilegym_fx.ops.add_rms_norm(x, residual, self.norm.weight, self.norm.variance_epsilon)\n"
        in method(result, "Plain").partition("x, residual = ")[2]
    )
    assert_same(model, result, run(x, residual))


def test_norm_alone_becomes_one_return() -> None:
    model = emit_modules.TwoEps()
    (x,) = tensors(1)
    result = emitted(model, (x,))
    assert counts(result) == {"rms_norm": 2}
    assert method(result, "Norm").endswith(
        "return tilegym_fx.ops.rms_norm(hidden_states, self.weight, self.variance_epsilon)"
    )
    assert_same(model, result, run(x))


def test_gate_in_three_statements_keeps_the_statement_in_between() -> None:
    model = emit_modules.Separate()
    (x,) = tensors(1)
    result = emitted(model, (x,))
    assert counts(result) == {"linear": 2, "silu_mul": 1}
    assert "up = tilegym_fx.ops.linear(x, self.up.weight)" in method(result, "Separate")
    assert "return tilegym_fx.ops.silu_mul(tilegym_fx.ops.linear(x, self.gate.weight), up)" in method(
        result, "Separate"
    )
    assert_same(model, result, run(x))


def test_argument_whose_name_is_bound_anew_does_not_move_past_that() -> None:
    model = emit_modules.Rebound()
    (x,) = tensors(1)
    result = emitted(model, (x,))
    assert counts(result) == {"linear": 2}
    assert_same(model, result, run(x))


def test_starred_arguments_are_no_expressions_of_their_own() -> None:
    model = emit_modules.StarredCall()
    (x,) = tensors(1)
    result = emitted(model, (x,))
    assert sum(counts(result).values()) >= 1
    assert_same(model, result, run(x))


def test_other_bytes_of_a_function_are_kept() -> None:
    model = emit_modules.NoGrad()
    (x,) = tensors(1)
    result = emitted(model, (x,))
    text = method(result, "NoGrad")
    assert "    @torch.no_grad()\n    def forward(self, x: Tensor) -> Tensor:\n        # keep this comment\n" in text
    assert text.endswith("return tilegym_fx.ops.rms_norm(x, self.weight, 1e-06)  # and this one")
    assert_same(model, result, run(x))


def test_class_with_two_kinds_of_constants_gets_two_methods() -> None:
    model = emit_modules.TwoKinds()
    (x,) = tensors(1)
    result = emitted(model, (x,))
    assert counts(result) == {"rms_norm": 3}
    assert "class EpsByName(" in result.text
    assert "class EpsByName2(" in result.text
    assert 'paths=("parts.0", "parts.2"),' in result.text
    assert_same(model, result, run(x))


def test_text_is_the_same_twice() -> None:
    x, residual = tensors(2)
    one = emitted(emit_modules.Plain(), (x, residual)).text
    two = emitted(emit_modules.Plain(), (x, residual)).text
    assert one == two


def test_module_shared_by_two_parents_is_rewritten_once() -> None:
    model = emit_modules.Shared()
    (x,) = tensors(1)
    result = emitted(model, (x,))
    assert_same(model, result, run(x))


#: Module, arguments of the example, further calls that must agree, and what must be said when nothing is
# written.
CASES: dict[str, tuple[Callable[[], nn.Module], int, list[dict[str, Any]]]] = {
    "in place after": (emit_modules.InPlaceAfter, 1, []),
    "in place between": (emit_modules.InPlaceBetween, 2, []),
    "untaken reader": (emit_modules.UntakenReader, 1, [{"debug": True}]),
    "untaken writer": (emit_modules.UntakenWriter, 2, [{"skip": True}]),
    "conditional alias": (emit_modules.ConditionalAlias, 1, [{"flag": True}]),
    "two streams": (emit_modules.TwoStreams, 3, []),
    "loop over layers": (emit_modules.Loop, 1, []),
    "loop on an argument": (emit_modules.InlineLoop, 1, [{"times": 3}, {"times": 0}]),
    "walrus": (emit_modules.Walrus, 2, []),
    "multi-line call": (emit_modules.MultiLine, 2, []),
    "decorator of the author's": (emit_modules.Decorated, 1, []),
    "decorator of torch's": (emit_modules.NoGrad, 1, []),
    "property": (emit_modules.Property, 1, []),
    "super": (emit_modules.Child, 1, []),
    "lambda": (emit_modules.Lambda, 1, []),
    "nested function": (emit_modules.Nested, 2, []),
    "shadowed names": (emit_modules.Shadowed, 2, []),
    "local named tilegym_fx": (emit_modules.NamedLikeUs, 1, []),
    "rebound in a with block": (emit_modules.WithBlock, 2, []),
    "inside a with block": (emit_modules.InsideWith, 2, []),
    "shared module": (emit_modules.Shared, 1, []),
    "two eps": (emit_modules.TwoEps, 1, []),
    "two kinds": (emit_modules.TwoKinds, 1, []),
    "flag into a helper": (emit_modules.Flag, 1, [{"plus_one": True}, {"eps": 0.1}]),
    "dropout before": (emit_modules.Dropped, 2, [{"train": True}]),
    "dropout inside": (emit_modules.DroppedInside, 1, [{"train": True}]),
    "early return": (emit_modules.EarlyReturn, 2, [{"stop": True}]),
    "try block": (emit_modules.Guarded, 2, [{"fail": True}]),
    "augmented assignment": (emit_modules.Augmented, 2, []),
    "locals()": (emit_modules.Locals, 2, []),
    "call with an effect": (emit_modules.Counting, 1, []),
    "module run twice": (emit_modules.Twice, 1, []),
    "arm of a choice": (emit_modules.Choice, 1, [{"raw": True}]),
    "generator": (emit_modules.Generator, 1, []),
}


@pytest.mark.parametrize("case", CASES)
def test_adversarial_module_is_right_or_refused_with_a_reason(case: str) -> None:
    build, count, variants = CASES[case]
    model = build().eval()
    args = tensors(count)
    result = emitted(model, args)
    assert all(rejection.reason for rejection in result.refused)
    assert result.written or result.refused
    if result.written:
        assert_same(model, result, run(*args), *(run(*args, **variant) for variant in variants))


def test_pair_of_tensors_is_unpacked_by_the_author() -> None:
    for build in (emit_modules.Unpacked, emit_modules.TupleElement):
        model = build().eval()
        pair = tensors(2)
        result = emitted(model, (pair,))
        assert counts(result), build
        assert_same(model, result, run(pair))


def test_call_with_an_effect_is_not_dropped() -> None:
    model = emit_modules.Counting()
    (x,) = tensors(1)
    result = emitted(model, (x,))
    assert not result.written
    assert "self.seen.append" in result.refused[0].reason or "effect" in result.refused[0].reason


def test_value_stored_between_the_statements_of_a_region_is_kept() -> None:
    model = emit_modules.CachedBetween().eval()
    x, residual = tensors(2)
    result = emitted(model, (x, residual, {"last": x}))
    cache = {"last": torch.zeros(())}
    if result.written:
        patching.apply(patching.load(result.text), model)
    model(x, residual, cache)
    torch.testing.assert_close(cache["last"], residual + x)


def test_argument_that_chooses_the_maths_becomes_a_condition() -> None:
    model = emit_modules.Flag().eval()
    (x,) = tensors(1)
    result = emitted(model, (x,))
    text = method(result, "Flag")
    assert "        if not plus_one:\n            return tilegym_fx.ops.rms_norm_add(x, x, self.weight, eps)\n" in text
    assert text.endswith(
        "        else:\n            y = chosen(x, self.weight, plus_one, eps)\n            return y + x"
    )


def test_a_docstring_does_not_hide_what_a_helper_chooses() -> None:
    model = emit_modules.HelperWithDocstring().eval()
    (x,) = tensors(1)
    result = emitted(model, (x,))
    assert "        if not plus_one:\n" in method(result, "HelperWithDocstring")
    assert_same(model, result, lambda each: each(x), lambda each: each(x, plus_one=True))


@pytest.mark.parametrize(
    ("cls", "guard"), [(emit_modules.AddsItsMask, "if mask.dtype == q.dtype:"), (emit_modules.HandsItsMaskOn, None)]
)
def test_a_mask_of_another_kind_does_what_its_author_does_with_it(cls: type[nn.Module], guard: str | None) -> None:
    """A boolean mask says who attends to torch's attention and to the kernel; code that adds it adds ones."""
    q, k, v = (torch.linspace(-1, 1, 64).roll(i).reshape(1, 2, 4, 8) for i in range(3))
    boolean = torch.ones(4, 4).tril().bool()[None, None]
    added = torch.zeros(1, 1, 4, 4).masked_fill(~boolean, -1e9)
    result = emitted(cls().eval(), (q, k, v, added))
    assert counts(result) == {"gqa_attention_masked": 1}
    assert guard in result.text if guard else "if " not in method(result, cls.__name__)
    model = patching.apply(patching.load(result.text), cls().eval())
    for mask in (added, boolean):
        torch.testing.assert_close(model(q, k, v, mask), cls()(q, k, v, mask))  # to rounding: eager code is not torch's


def test_a_mask_is_made_one_to_add_where_no_condition_can_be_written() -> None:
    """Other statements stand inside the region; a boolean mask means there what it means to the author."""
    q, k, v = (torch.linspace(-1, 1, 64).roll(i).reshape(1, 2, 4, 8) for i in range(3))
    boolean = torch.ones(4, 4).tril().bool()[None, None]
    added = torch.zeros(1, 1, 4, 4).masked_fill(~boolean, -1e9)
    cls = adversarial_modules.AddsItsMaskBetween
    result = emitted(cls().eval(), (q, k, v, added))
    assert counts(result) == {"gqa_attention_masked": 1}
    assert "mask.to(q.dtype)" in result.text
    assert "if " not in method(result, cls.__name__)
    model = patching.apply(patching.load(result.text), cls().eval())
    for mask in (added, boolean, boolean.long()):
        torch.testing.assert_close(model(q, k, v, mask), cls()(q, k, v, mask))


def test_number_out_of_a_dict_is_read_in_each_call() -> None:
    (x,) = tensors(1)
    model = emit_modules.EpsFromElsewhere().eval()
    result = emitted(model, (x,))
    assert 'self.weight, self.cfg["eps"])' in method(result, "EpsFromElsewhere")
    original = copy.deepcopy(model)
    patching.apply(patching.load(result.text), model)
    model.cfg["eps"] = original.cfg["eps"] = 0.5
    torch.testing.assert_close(model(x), original(x))


def test_number_of_a_global_is_written_by_its_name() -> None:
    (x,) = tensors(1)
    result = emitted(emit_modules.EpsFromAGlobal().eval(), (x,))
    assert "self.weight, EPS)" in method(result, "EpsFromAGlobal")
    assert_same(emit_modules.EpsFromAGlobal().eval(), result, lambda each: each(x))


def test_item_of_a_dict_that_chose_is_compared() -> None:
    (x,) = tensors(1)
    model = emit_modules.KindFromADict().eval()
    result = emitted(model, (x,))
    assert '"cfg.kind": "rms"' in result.text
    assert_same(model, result, lambda each: each(x))
    model.cfg["kind"] = "other"
    with pytest.raises(ApplyError, match=r"cfg\.kind = 'other'"):
        patching.apply(patching.load(result.text), model)


def test_dropped_dropout_becomes_a_condition() -> None:
    model = emit_modules.DroppedInside().eval()
    (x,) = tensors(1)
    result = emitted(model, (x,))
    if "silu_mul" in counts(result):
        assert "if not self.training" in result.text


TINY: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3_text": {"head_dim": 16, "sliding_window": 8},
    "gpt2": {"n_embd": 64, "n_head": 4, "n_layer": 2},
    "qwen3_moe": {
        "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    },
}  # fmt: skip


def tiny(kind: str) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    more = {"num_key_value_heads": 2, "vocab_size": 128}
    config = AutoConfig.for_model(kind, **{**sizes, **more, **TINY[kind]})
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.fixture(scope="module", params=TINY)
def model_and_text(request: pytest.FixtureRequest) -> tuple[str, nn.Module, EmitResult]:
    """A tiny model with the text from a plain prefill and a padded one."""
    model = tiny(request.param)
    ids = torch.arange(34).reshape(2, 17)
    mask = torch.ones_like(ids)
    padded = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    return request.param, model, emitted(model, (), {"input_ids": ids, "use_cache": False}, padded)


def test_model_gives_the_same_logits_and_tokens(model_and_text: tuple[str, nn.Module, EmitResult]) -> None:
    _, model, result = model_and_text
    ids = torch.arange(34).reshape(2, 17)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0

    def generated(each: Any) -> torch.Tensor:
        return each.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0)

    with torch.no_grad():
        assert_same(
            model,
            result,
            lambda each: each(input_ids=ids).logits,
            lambda each: each(input_ids=ids, attention_mask=mask).logits[mask.bool()],
            generated,
        )


def test_emitted_model_is_what_the_golden_file_holds(
    model_and_text: tuple[str, nn.Module, EmitResult], golden: Callable[[str, str], None]
) -> None:
    import transformers

    name, _, result = model_and_text
    if transformers.__version__ != "5.24.0":
        pytest.skip("the golden files are of transformers 5.24.0, whose lines they repeat")
    text = "".join(result.text.partition("Definitions, and the Solution ")[1:])
    golden(f"modeling_{name}.py.txt", text)


def test_emitted_text_keeps_the_layout_of_its_authors_formatter(
    model_and_text: tuple[str, nn.Module, EmitResult],
) -> None:
    _, _, result = model_and_text
    compile(result.text, "modeling.py", "exec")
    assert all(len(line) <= 119 or "https://" in line for line in result.text.split("\n"))
    assert not any(line != line.rstrip() for line in result.text.split("\n"))


def test_llama_decoder_layer_has_add_and_norm_in_one_call() -> None:
    model = tiny("llama")
    ids = torch.arange(34).reshape(2, 17)
    result = emitted(model, (), {"input_ids": ids, "use_cache": False})
    text = method(result, "LlamaDecoderLayer")
    assert "hidden_states, residual = tilegym_fx.ops.add_rms_norm(\n            hidden_states,\n" in text
    assert "self.post_attention_layernorm.variance_epsilon,\n" in text
    assert "residual + hidden_states\n        return hidden_states" in text


def test_gradient_checkpointing_still_wraps_a_rewritten_layer() -> None:
    model: Any = tiny("llama")
    ids = torch.arange(34).reshape(2, 17)
    result = emitted(model, (), {"input_ids": ids, "use_cache": False})
    patching.apply(patching.load(result.text), model)
    model.train()
    losses = []
    for enabled in (False, True):
        if enabled:
            model.gradient_checkpointing_enable()
        losses.append(model(input_ids=ids, labels=ids, use_cache=False).loss)
        losses[-1].backward()
    torch.testing.assert_close(losses[0], losses[1])
    assert model.model.layers[0].gradient_checkpointing


#: The body of a norm whose statements share lines in some way.
SHARED_LINES = {
    "one line": ["v = x.pow(2).mean(-1, keepdim=True); return self.weight * (x * torch.rsqrt(v + 1e-6))"],
    "after another": [
        "y = x + 1; v = y.pow(2).mean(-1, keepdim=True)",
        "return self.weight * (y * torch.rsqrt(v + 1e-6))",
    ],
    "before another": [
        "v = x.pow(2).mean(-1, keepdim=True); z = x * 2",
        "return self.weight * (x * torch.rsqrt(v + 1e-6)) + z",
    ],
    "between two": [
        "a = x + 1; v = a.pow(2).mean(-1, keepdim=True); z = a * 2",
        "return self.weight * (a * torch.rsqrt(v + 1e-6)) + z",
    ],
    "with a comment": [
        "v = x.pow(2).mean(-1, keepdim=True);  # squares",
        "return self.weight * (x * torch.rsqrt(v + 1e-6))",
    ],
    "over lines": [
        "v = x.pow(",
        "    2",
        ").mean(-1, keepdim=True); return self.weight * (",
        "x * torch.rsqrt(v + 1e-6))",
    ],
}
SHARED_NORM = """
import torch


class Norm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand({width}))

    def forward(self, x):
        {body}
"""


@pytest.mark.parametrize("case", SHARED_LINES)
def test_statements_that_share_a_line_are_told_apart(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What goes with the region goes alone: what stands beside it is kept."""
    name, body = f"shared_{case.replace(' ', '_')}", "\n        ".join(SHARED_LINES[case])
    (tmp_path / f"{name}.py").write_text(SHARED_NORM.format(width=WIDTH, body=body))
    monkeypatch.syspath_prepend(str(tmp_path))
    model = importlib.import_module(name).Norm().eval()
    (x,) = tensors(1)
    result = emitted(model, (x,))
    assert list(counts(result)) in (["rms_norm"], ["rms_norm_add"])
    assert_same(model, result, run(x))
