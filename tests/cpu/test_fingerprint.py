"""A fingerprint is the same in every process, and another for every change that a capture could see."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import tiny_models
import torch
import torch.nn.functional as F
from torch import nn
from transformers.integrations import sdpa_attention
from transformers.models.llama import modeling_llama

from tilegym_fx import kernelize, restore
from tilegym_fx.fingerprint import NoFingerprintError, fingerprint

BUILD = "import torch, tiny_models; from tilegym_fx.fingerprint import fingerprint; "
PRINT = "print(fingerprint(tiny_models.build('{}', torch.float32)))"
GATE = """
import torch

def act(x):
    return {}

class Gate(torch.nn.Module):
    def forward(self, x):
        return act(x)
"""


def llama() -> Any:
    return tiny_models.build("llama", torch.float32)


def found_by_a_process(family: str, seed: str, *, before: str = "") -> str:
    """What a new process finds, which has done something before."""
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "ignore", "-c", BUILD + before + PRINT.format(family)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2"])
def test_other_processes_find_the_same(family: str) -> None:
    assert found_by_a_process(family, "1") == found_by_a_process(family, "2")


def test_a_process_that_has_kernelized_and_run_another_model_finds_the_same() -> None:
    before = (
        "import tilegym_fx; other = tilegym_fx.kernelize(tiny_models.build('gpt2', torch.float32)); "
        "other.generate(torch.ones(1, 4, dtype=torch.long), max_new_tokens=2); "
    )
    assert found_by_a_process("llama", "1", before=before) == found_by_a_process("llama", "2")


def test_a_process_that_has_compiled_a_model_finds_the_same() -> None:
    model = llama()
    before = fingerprint(model)
    with torch.no_grad():
        torch.compile(llama(), backend="eager")(torch.ones(1, 4, dtype=torch.long))
    assert fingerprint(llama()) == fingerprint(model) == before


def test_it_is_not_of_the_numbers_in_the_weights() -> None:
    model = llama()
    before = fingerprint(model)
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    assert fingerprint(model) == before


def _patch_a_method(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(model.model.norm), "forward", lambda self, hidden_states: hidden_states)


def _patch_a_class_attribute(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(model.model.layers[0].self_attn), "is_looked_at", True, raising=False)


CHANGES: dict[str, Callable[[Any], object]] = {
    "number": lambda m: setattr(m.model.layers[1].input_layernorm, "variance_epsilon", 1e-3),
    "configuration": lambda m: setattr(m.config, "use_cache", False),
    "attention": lambda m: m.set_attn_implementation("eager"),
    "dtype": lambda m: m.half(),
    "dtype of one weight": lambda m: m.model.norm.half(),
    "training": lambda m: m.train(),
    "training of one module": lambda m: m.model.norm.train(),
    "gradient": lambda m: m.model.norm.weight.requires_grad_(False),
    "another class": lambda m: setattr(m.model, "norm", nn.RMSNorm(64)),
    "a module more": lambda m: m.add_module("more", nn.Identity()),
    "a layer less": lambda m: m.model.layers.__delitem__(1),
    "tied": lambda m: setattr(m.lm_head, "weight", m.model.embed_tokens.weight),
    "one module twice": lambda m: m.model.layers[1].__setattr__("mlp", m.model.layers[0].mlp),
    "strides": lambda m: setattr(m.lm_head, "weight", nn.Parameter(m.lm_head.weight.detach().t().contiguous().t())),
    "own method": lambda m: setattr(m.model.norm, "forward", MethodType(lambda self, x: x, m.model.norm)),
    "a buffer": lambda m: m.model.register_buffer("more", torch.ones(1)),
    "partial": lambda m: setattr(m.model.norm, "scale", partial(torch.nn.functional.gelu, approximate="tanh")),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_a_capture_could_see_makes_another(what: str) -> None:
    model = llama()
    before = fingerprint(model)
    CHANGES[what](model)
    assert fingerprint(model) != before


def _patch_a_list_of_a_class(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(model.model.norm), "factors", [1.0], raising=False)


def _patch_a_class_of_the_configuration(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(model.config), "factors", {"a": [1.0]}, raising=False)


def _patch_a_function_of_the_file(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda q, k, cos, sin: (q, k))


def _patch_a_function_of_torch(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, k, v, **_: v)


def _patch_a_table_of_functions(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(modeling_llama.ALL_ATTENTION_FUNCTIONS, "sdpa", lambda *_, **__: None)


def _patch_what_a_function_in_a_table_calls(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdpa_attention, "repeat_kv", lambda x, n: x)


PATCHES = [
    _patch_a_method, _patch_a_class_attribute, _patch_a_list_of_a_class, _patch_a_class_of_the_configuration,
    _patch_a_function_of_the_file, _patch_a_function_of_torch, _patch_a_table_of_functions,
    _patch_what_a_function_in_a_table_calls,
]  # fmt: skip


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.__name__)
def test_a_class_that_was_patched_is_another(
    patch: Callable[[Any, pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = llama()
    before = fingerprint(model)
    patch(model, monkeypatch)
    assert fingerprint(model) != before
    monkeypatch.undo()
    assert fingerprint(model) == before


def test_the_text_of_a_file_belongs_to_its_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where only a function beside the class has changed, which its methods call."""
    monkeypatch.syspath_prepend(str(tmp_path))
    found = []
    for number, body in enumerate(("x.relu()", "x.relu()", "x.sigmoid()")):
        (tmp_path / f"gate_{number}.py").write_text(GATE.format(body))
        module = __import__(f"gate_{number}")
        module.Gate.__module__ = "gate"
        found.append(fingerprint(module.Gate()))
    assert found[0] == found[1]
    assert found[0] != found[2]


def test_code_without_a_file_is_told_apart() -> None:
    def made(body: str) -> nn.Module:
        scope: dict[str, Any] = {"nn": nn}
        exec(f"class Gate(nn.Module):\n    def forward(self, x):\n        return {body}\n", scope)
        module: nn.Module = scope["Gate"]()
        return module

    assert fingerprint(made("x.relu()")) == fingerprint(made("x.relu()"))
    assert fingerprint(made("x.relu()")) != fingerprint(made("x.sigmoid()"))
    assert fingerprint(made("x + 1")) != fingerprint(made("x + 2"))


FACTOR, FACTORS = 2.0, [2.0]


def _scaled(factors: list[float]) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return x * factors[0]

    return forward


class Scale(nn.Module):
    """Reads numbers that are no attributes of it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * FACTOR * self._more()

    def _more(self) -> float:
        return FACTORS[0]


def test_globals_that_a_method_reads_are_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [fingerprint(Scale())]
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    found.append(fingerprint(Scale()))
    monkeypatch.setitem(globals(), "FACTORS", [3.0])
    found.append(fingerprint(Scale()))
    for factor in (1.0, 2.0):
        monkeypatch.setattr(Scale, "forward", _scaled([factor]))
        found.append(fingerprint(Scale()))
    assert len(set(found)) == len(found)


class _Numbers(dict[str, float]):
    pass


def test_what_objects_of_classes_like_dict_hold_besides_is_part_of_them() -> None:
    module = nn.Identity()
    module.held = _Numbers(a=1.0)  # type: ignore[assignment]
    before = fingerprint(module)
    module.held.factor = 2.0
    assert fingerprint(module) != before


def test_the_dtype_of_autocast_is_part_of_it() -> None:
    module, found = nn.Linear(2, 2), []
    for dtype in (torch.float16, torch.bfloat16):
        with torch.autocast("cpu", dtype):
            found.append(fingerprint(module))
    assert found[0] != found[1]


def test_a_process_that_has_run_and_searched_a_model_finds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEGYM_FX_PLANS", "0")
    model = llama()
    before = fingerprint(model)
    model.generate(tiny_models.tokens(1, 4), max_new_tokens=2)
    fingerprint(tiny_models.build("gpt2", torch.float32))
    restore(kernelize(model))
    assert fingerprint(model) == before


def _closure() -> Callable[[torch.Tensor], torch.Tensor]:
    factor = 2.0
    return lambda x: factor * x


def _nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


class _Silent(float):
    def __repr__(self) -> str:
        raise ValueError("nothing")


UNDESCRIBED: dict[str, Callable[[Any], object]] = {
    "hook": lambda m: m.model.norm.register_forward_hook(lambda *_: None),
    "hook before": lambda m: m.model.norm.register_forward_pre_hook(lambda *_: None),
    "closure": lambda m: setattr(m.model.norm, "scale", _closure()),
    "object of C": lambda m: setattr(m, "generator", torch.Generator()),
    "too deep": lambda m: setattr(m.model.norm, "scale", _nested(5000)),
    "no description of itself": lambda m: setattr(m.model.norm, "scale", _Silent()),
    "module that is no part": lambda m: m.__dict__.__setitem__("other", nn.Linear(2, 2)),
}


@pytest.mark.parametrize("what", UNDESCRIBED)
def test_what_cannot_be_described_has_no_fingerprint(what: str) -> None:
    model = llama()
    fingerprint(model)
    UNDESCRIBED[what](model)
    with pytest.raises(NoFingerprintError):
        fingerprint(model)


def test_hooks_of_saving_and_the_way_to_sample_do_not_matter() -> None:
    model = llama()
    before = fingerprint(model)
    model.register_state_dict_post_hook(lambda *_: None)
    model.generation_config.temperature = 0.5
    assert fingerprint(model) == before
