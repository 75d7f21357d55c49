"""Builds a model without weights, and captures the two calls that generation is made of."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map

from tilegym_fx.errors import ExportError, UnknownModelError
from tilegym_fx.export import caches
from tilegym_fx.export.holes import Holes, with_holes
from tilegym_fx.export.trace import (
    MODEL_ERRORS,
    ExportedGraph,
    copies_as_clones,
    describe,
    enter_transformers,
    export_module,
    unchanged,
    without_torch_errors,
)
from tilegym_fx.results import Phase

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

#: Rows that a table of learned positions may have before its first one.
_SPARE_ROWS = 4


def build(
    config: PreTrainedConfig,
    dtype: torch.dtype = torch.bfloat16,
    *,
    trust_remote_code: bool = False,
    device: str = "meta",
) -> nn.Module:
    """The model of a configuration in eval mode; on ``meta`` it has all shapes and takes no memory.

    It is the causal language model of that type where there is one, else the encoder-decoder with a language
    model head, else the bare model, as encoders are.

    Args:
        config: What :func:`tilegym_fx.model_source.resolve_model` gave.
        dtype: Dtype of the parameters. Buffers that a model keeps in float32, such as ``inv_freq``, stay so.
        trust_remote_code: Allow code that comes with the configuration to be executed.
        device: Where the parameters are; elsewhere than on ``meta`` they get the model's own random values.

    Raises:
        UnknownModelError: The model cannot be built from this configuration.
    """
    try:
        with torch.device(device):
            model = _from_config(config, dtype, trust_remote_code)
    except MODEL_ERRORS as error:
        raise UnknownModelError(
            f"no {config.model_type!r} model can be built from this configuration: {describe(error)}",
            advice="Check the sizes in its config.json",
        ) from error
    return model.eval()


def _from_config(config: PreTrainedConfig, dtype: torch.dtype, trust_remote_code: bool) -> nn.Module:
    """A model without weights, of the first kind that transformers has for a configuration."""
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    def is_known_to(kind: Any) -> bool:
        return type(config) in kind._model_mapping or kind.__name__ in (getattr(config, "auto_map", None) or {})

    kind = next((k for k in (AutoModelForCausalLM, AutoModelForSeq2SeqLM) if is_known_to(k)), AutoModel)
    if type(config) in kind._model_mapping:
        wanted: Any = kind._model_mapping[type(config)]
        parts = [vars(config).get(name) for name in getattr(config, "sub_configs", {})]
        part = next((p for p in parts if p is not None and type(p) is wanted.config_class), None)
        if part is not None:  # the class wants a part of a composite configuration
            return cast(nn.Module, wanted._from_config(part, dtype=dtype))
    return cast(nn.Module, kind.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code))


def export_phase(model: nn.Module, phase: Phase, batch: int = 1, seq: int = 2048) -> ExportedGraph:
    """Capture what ``generate()`` calls: the prompt, or one more token.

    Prefill is ``batch`` x ``seq`` tokens with a cache that is still empty, and the logits of the last
    position alone; decode is one token a row against the cache that such a prefill leaves. There is no
    padding, hence no mask but that of sliding windows. The cache is whichever kind the model itself makes:
    dynamic, sliding, recurrent or a mixture.

    Raises:
        ExportError: The sizes make no sense for this model, it keeps no cache, or it cannot be traced.
    """
    started = time.perf_counter()
    kwargs = phase_inputs(model, phase, batch, seq)
    prepared = time.perf_counter() - started
    graph = export_module(model, (), kwargs, phase=phase)
    stages = MappingProxyType({"inputs": prepared, **graph.stages})
    return dataclasses.replace(graph, seconds=prepared + graph.seconds, stages=stages)


def phase_inputs(model: nn.Module, phase: Phase, batch: int, seq: int, *, padded: bool = False) -> dict[str, Any]:
    """The keyword arguments with which ``generate()`` calls a model in a phase, for :func:`export_module`.

    Args:
        model: A language model of transformers: causal, encoder-decoder, or an encoder (prefill alone).
        phase: Which call.
        batch: Sequences.
        seq: Tokens of the prompt, and entries of the cache in decode.
        padded: Give an attention mask, as for prompts of unequal length.

    Raises:
        ExportError: The sizes make no sense for this model, or it keeps no cache.
    """
    if batch < 1 or seq < 1:
        raise ExportError(f"batch {batch} and seq {seq} leave nothing to export", advice="Give sizes of 1 and more")
    _check_length(model, phase, seq)
    device = next(model.parameters()).device
    accepted = inspect.signature(model.forward).parameters
    if "input_ids" not in accepted:
        raise ExportError(
            f"{type(model).__name__} is not called with token ids",
            advice="Capture it with inputs of its own: kernelize(model, inputs=...)",
        )
    kwargs: dict[str, Any] = {}
    if "use_cache" in accepted or caches.cache_name(model):
        kwargs["use_cache"] = True
    if "logits_to_keep" in accepted:
        kwargs["logits_to_keep"] = 1
    if "decoder_input_ids" in accepted:
        return _two_sided_inputs(model, phase, batch, seq, kwargs, padded=padded)
    length, total = seq, seq
    if phase == "decode":
        length, total = 1, seq + 1
        name, cache = caches.cache_of(model, _after_prompt(model, {"input_ids": _tokens(batch, seq, device), **kwargs}))
        kwargs[name] = cache
    if padded:
        kwargs["attention_mask"] = torch.ones(batch, total, dtype=torch.long, device=device)
    kwargs["input_ids"] = _tokens(batch, length, device)
    return kwargs


def _two_sided_inputs(
    model: nn.Module, phase: Phase, batch: int, seq: int, kwargs: dict[str, Any], *, padded: bool
) -> dict[str, Any]:
    """Of an encoder-decoder: the prompt is encoded and the first token decoded; then one more token."""
    device = next(model.parameters()).device
    first = {"input_ids": _tokens(batch, seq, device), "decoder_input_ids": _tokens(batch, 1, device), **kwargs}
    if padded:
        first["attention_mask"] = torch.ones(batch, seq, dtype=torch.long, device=device)
    if phase == "prefill":
        return first
    results = _after_prompt(model, first)
    name, cache = caches.cache_of(model, results)
    del first["input_ids"]
    return {**first, name: cache, "encoder_outputs": (results.encoder_last_hidden_state,)}


def _tokens(batch: int, length: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(batch, length, dtype=torch.long, device=device)


def positions(model: nn.Module) -> int | None:
    """How many positions a model has if it has a table of them, as learned ones are; rotary ones go on."""
    config: Any = getattr(model, "config", None)
    limit = getattr(config, "n_positions", None)
    if isinstance(limit, int):
        return limit
    limit = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int) or not hasattr(model, "get_input_embeddings"):
        return None
    words = cast(Any, model).get_input_embeddings()
    tables = [part for part in model.modules() if isinstance(part, nn.Embedding) and part is not words]
    ends = [_end(table) for table in tables if 0 <= table.num_embeddings - limit <= _SPARE_ROWS]
    return min(limit, *ends) if ends else None


def _end(table: nn.Embedding) -> int:
    """How many positions a table has; where it has a row for padding, counting starts behind that."""
    return table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1)


def longest(model: nn.Module, phase: Phase) -> int | None:
    """The largest ``seq`` that a model has positions for in a phase; None if there is no limit."""
    limit = positions(model)
    return None if limit is None else limit - (phase == "decode")


def _check_length(model: nn.Module, phase: Phase, seq: int) -> None:
    limit = positions(model)
    total = seq + (phase == "decode")
    if limit is not None and total > limit:
        raise ExportError(
            f"{type(model).__name__} has {limit} positions, and {phase} with seq {seq} needs {total}",
            advice=f"Give a seq of at most {longest(model, phase)}",
        )


@contextmanager
def without_memory(model: nn.Module, mode: AbstractContextManager[Any]) -> Iterator[None]:
    """Lets a model be called for what its calls look like, as a trace would run it, and leaves it as it was.

    Args:
        model: The model.
        mode: The fake mode of its inputs, or a null context for a model on ``meta``.
    """
    with (
        torch.no_grad(),
        numbers_kept(model),
        mode,
        copies_as_clones(),
        without_torch_errors(),
        unchanged(model),
        caches.code_for_tracing(),
    ):
        yield


@contextmanager
def numbers_kept(model: nn.Module) -> Iterator[None]:
    """Puts back what the body writes into buffers and other tensors of modules.

    Where every operand of an operation in place is real, it is carried out, even where nothing else has memory:
    ``self.count.add_(1)`` counts.
    """
    parts = (tensor for module in model.modules() for tensor in (*vars(module).values(), *module._buffers.values()))
    tensors = {id(tensor): tensor for tensor in parts if _can_be_kept(tensor)}
    kept = [(tensor, tensor._version, once(tensor.detach()).clone()) for tensor in tensors.values()]
    try:
        yield
    finally:
        for tensor, version, numbers in kept:
            if tensor._version != version:
                once(tensor.detach()).copy_(numbers)


def _can_be_kept(value: Any) -> bool:
    plain = isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor | nn.Parameter)
    return plain and not value.is_meta and not value.is_inference() and value.layout == torch.strided


def once(tensor: torch.Tensor) -> torch.Tensor:
    """A view of a tensor without what ``expand`` repeats, which torch refuses to write to."""
    if tensor.layout is torch.strided:
        for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            tensor = tensor.narrow(dim, 0, 1) if size > 1 and stride == 0 else tensor
    return tensor


def run_without_memory(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Calls a model for what its calls look like, as a trace would run it. Nothing is computed.

    Raises:
        ExportError: The model does not run so.
    """
    with ExitStack() as stack:
        enter_transformers(stack, model, kwargs, static=True)
        fake = detect_fake_mode((args, kwargs)) or FakeTensorMode(allow_non_fake_inputs=True)
        stack.enter_context(without_memory(model, nullcontext() if _is_on_meta(model) else fake))
        try:
            args, kwargs = copies((args, kwargs))
            model(*args, **kwargs)
        except MODEL_ERRORS as error:
            raise ExportError(f"{type(model).__name__} cannot be run: {describe(error)}") from error


def copies(values: Any) -> Any:
    """Arguments again, for a call that may change them."""
    return tree_map(_copied, values)


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def _is_on_meta(model: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in model.parameters())


def _after_prompt(model: nn.Module, kwargs: dict[str, Any]) -> Any:
    """What a call gives, the cache that it leaves among it; nothing is computed."""
    if caches.cache_name(model) is None:
        raise ExportError(f"{type(model).__name__} takes no cache", advice="Scan its prefill phase alone")
    on_meta = next(model.parameters()).device.type == "meta"

    def attempt(holes: Holes) -> Any:
        mode = nullcontext() if on_meta else FakeTensorMode(allow_non_fake_inputs=True)
        try:
            with without_memory(model, mode), holes.made(model):
                return model(**kwargs)
        except MODEL_ERRORS as error:
            raise ExportError(f"{type(model).__name__} cannot fill its cache: {describe(error)}") from error

    return with_holes(model, ((), kwargs), attempt)
