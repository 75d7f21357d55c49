"""Models that other libraries have been at: adapters, quantised linears, offloading, code from a folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import peft
import pytest
import torch
from small_models import small
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from tilegym_fx.apply import is_applied
from tilegym_fx.live import kernelize, report, restore

LLAMA = "meta-llama/Llama-3.2-1B"
IDS = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(4))


@pytest.fixture
def model() -> nn.Module:
    return small(LLAMA, num_hidden_layers=1)


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def assert_near(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def with_adapters(model: nn.Module) -> nn.Module:
    """LoRA on two linears, and a copy of the head that is trained; none of it starts at zero."""
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"], init_lora_weights=False
    )
    adapted = peft.get_peft_model(model, config).eval()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lm_head" in name and "modules_to_save" in name:
                parameter.mul_(1.5)
    return adapted


class TestAdapters:
    def test_from_before_on_and_off(self, model: nn.Module) -> None:
        adapted = with_adapters(model)
        with adapted.disable_adapter():
            off = logits(adapted)
        on = logits(adapted)
        assert not torch.allclose(on, off)
        kernelize(adapted, strict=True)
        assert report(adapted).counts()["rotary_embedding"] == 1
        assert_near(logits(adapted), on)
        with adapted.disable_adapter():
            assert_near(logits(adapted), off)
        assert_near(logits(adapted), on)

    def test_put_on_afterwards_and_merged(self, model: nn.Module) -> None:
        off = logits(model)
        kernelize(model, strict=True)
        with pytest.warns(UserWarning, match="runs its author's code again"):
            adapted = with_adapters(model)
        on = logits(adapted)
        assert not torch.allclose(on, off)
        with adapted.disable_adapter():
            assert_near(logits(adapted), off)
        kernelize(adapted, strict=True)
        assert_near(logits(adapted), on)
        merged = adapted.merge_and_unload()
        torch.testing.assert_close(logits(merged), on, rtol=1e-4, atol=1e-4)

    def test_are_trained_through_the_kernels(self, model: nn.Module) -> None:
        adapted = kernelize(with_adapters(model), strict=True, verify=False)
        adapted.train()
        adapted(input_ids=IDS, labels=IDS).loss.backward()
        gradients = {n: p.grad for n, p in adapted.named_parameters() if p.requires_grad}
        assert any("lora_A" in name for name in gradients)
        assert all(gradient is not None and bool(gradient.abs().sum() > 0) for gradient in gradients.values())


@torch.library.custom_op("tilegym_fx_tests::int8_linear", mutates_args=())
def int8_linear(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x @ (weight.to(x.dtype) * scale).T


@int8_linear.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


class Int8Linear(nn.Linear):
    """A quantised linear as libraries make them: a subclass of nn.Linear with whole numbers for weights."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False)
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        whole = (linear.weight.detach() / scale).round().to(torch.int8)
        self.weight = nn.Parameter(whole, requires_grad=False)
        self.register_buffer("scale", scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return int8_linear(x, self.weight, self.scale)


class TestQuantised:
    def test_linears_are_left_alone_and_the_rest_runs_kernels(self, model: nn.Module) -> None:
        for name in ("gate_proj", "up_proj", "down_proj"):
            setattr(model.model.layers[0].mlp, name, Int8Linear(getattr(model.model.layers[0].mlp, name)))
        want = logits(model)
        kernelize(model, strict=True)
        mlp = model.model.layers[0].mlp
        assert all(type(module) is Int8Linear for module in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
        assert_near(logits(model), want)
        made = report(model)
        assert not any("mlp" in w.module_path and "linear" in w.match.definition for w in made.written)
        assert any("silu_mul" in w.match.definition for w in made.written)
        assert any("linear" in name for name in made.counts()), "the attention's are written"

    def test_linears_quantised_afterwards_are_run(self, model: nn.Module) -> None:
        kernelize(model, strict=True)
        want_not = logits(model)
        attention = model.model.layers[0].self_attn
        with pytest.warns(UserWarning, match="runs its author's code again"):
            attention.q_proj = Int8Linear(attention.q_proj)
        got = logits(model)
        assert not torch.equal(got, want_not)
        assert_near(logits(restore(model)), got)


def test_layers_on_several_devices_are_rewritten_beneath_their_hooks(model: nn.Module) -> None:
    """As `device_map` puts a model on two GPUs: hooks move the inputs of each part to where its weights are."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    want = logits(model)
    for part in (model.model.embed_tokens, *model.model.layers, model.model.norm, model.lm_head):
        add_hook_to_module(part, AlignDevicesHook(execution_device="cpu", io_same_device=True))
    forward = vars(model.model.layers[0])["forward"]
    kernelize(model, strict=True)
    counts = report(model).counts()
    assert counts["rotary_embedding"] == 1
    assert any("silu_mul" in name for name in counts)
    assert vars(model.model.layers[0])["forward"] is forward
    assert_near(logits(model), want)


def test_a_model_with_weights_on_disk_is_left_alone_with_a_reason(model: nn.Module, tmp_path: Path) -> None:
    from accelerate import dispatch_model

    want = logits(model)
    places = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.layers": "disk", "model.norm": "cpu"}
    dispatch_model(model, {**places, "lm_head": "cpu"}, main_device="cpu", offload_dir=tmp_path, force_hooks=True)
    assert next(model.model.layers[0].parameters()).is_meta
    with pytest.warns(UserWarning, match="is unchanged: .*hooks that bring in its weights"):
        assert kernelize(model) is model
    assert not is_applied(model)
    assert next(model.model.layers[0].parameters()).is_meta
    assert_near(logits(model), want)


def test_code_from_a_folder(tmp_path: Path) -> None:
    shutil.copytree(Path(__file__).parents[1] / "support" / "remote_model", tmp_path, dirs_exist_ok=True)
    named = {"AutoConfig": "configuration_plain.PlainConfig", "AutoModelForCausalLM": "modeling_plain.PlainForCausalLM"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "plain_remote", "auto_map": named}))
    config = AutoConfig.from_pretrained(tmp_path, trust_remote_code=True)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=True).eval()
    want = logits(model)
    kernelize(model, strict=True)
    counts = report(model).counts()
    assert is_applied(model)
    assert sum(n for name, n in counts.items() if "norm" in name) == 2
    assert_near(logits(model), want)
    assert "transformers_modules" in report(model).text
