"""What transformers models need to be traced: caches as inputs, and masks as they are when the model runs."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, cast

import torch
from torch import nn
from torch.utils import _pytree

from tilegym_fx.errors import ExportError

_EXPORTER = "transformers.exporters.exporter_dynamo"
#: Names of the cache among the arguments and the results of a model, newest first.
CACHE_NAMES = ("cache", "past_key_values", "cache_params", "state", "mems")


def register(model: nn.Module) -> None:
    """Let ``torch.export`` take and return the caches of a model, through transformers' own exporters."""
    _exporter().register_cache_pytrees_for_model(cast(Any, model))
    _register_dicts()


@cache
def _register_dicts() -> None:
    """The dicts of tensors that layers share a cache through, which transformers' exporters leave out."""
    from transformers import cache_utils

    for kind in vars(cache_utils).values():
        if isinstance(kind, type) and issubclass(kind, UserDict) and kind is not UserDict:
            _pytree.register_pytree_node(
                kind,
                lambda held: (list(held.values()), list(held)),
                lambda values, keys, kind=kind: kind(zip(keys, values, strict=True)),  # type: ignore[misc]
                serialized_type_name=f"{kind.__module__}.{kind.__qualname__}",
                flatten_with_keys_fn=lambda held: (
                    [(_pytree.MappingKey(key), value) for key, value in held.items()], list(held),
                ),
            )  # fmt: skip


def _exporter() -> Any:
    """The module of transformers' own exporter for ``torch.export``.

    Importing it imports its siblings for other formats. Where the packages of those are installed and broken,
    it is imported once more as if they were not there.
    """
    from transformers.utils import import_utils

    try:
        return importlib.import_module(_EXPORTER)
    except (ImportError, AttributeError):
        for name in [n for n in sys.modules if n.startswith("transformers.exporters")]:
            del sys.modules[name]
        original = import_utils.is_onnxscript_available
        import_utils.is_onnxscript_available = lambda: False
        try:
            return importlib.import_module(_EXPORTER)
        finally:
            import_utils.is_onnxscript_available = original


def cache_name(model: nn.Module) -> str | None:
    """Name of the argument that takes the cache, or None when the model takes none."""
    accepted = inspect.signature(model.forward).parameters
    return next((name for name in CACHE_NAMES if name in accepted), None)


def cache_of(model: nn.Module, results: Any) -> tuple[str, Any]:
    """The argument of a model that takes a cache, and the cache among the results of a call.

    Raises:
        ExportError: The model takes none, or has returned none.
    """
    name = cache_name(model)
    if name is None:
        raise ExportError(f"{type(model).__name__} takes no cache", advice="Scan its prefill phase alone")
    cache = next((value for key in CACHE_NAMES if (value := getattr(results, key, None)) is not None), None)
    if cache is None:
        raise ExportError(f"{type(model).__name__} returns no cache", advice="Scan its prefill phase alone")
    return name, cache


@contextmanager
def code_for_tracing() -> Iterator[None]:
    """Let models take the way that they take under a trace; not every other one works on meta."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


@contextmanager
def masks_as_when_run(inputs: Mapping[str, Any]) -> Iterator[None]:
    """Let transformers skip the attention masks that it skips outside of a trace, while the body runs.

    Run without padding, a model passes no mask to ``scaled_dot_product_attention``, which then takes its fast
    kernels. While exporting, transformers builds the mask all the same: a graph of symbolic sizes would need
    it. With static sizes that is not what the user runs. Masks given as inputs are still built, as their
    values are not known.
    """
    from transformers import masking_utils

    is_tracing: Callable[..., bool] = vars(masking_utils)["is_tracing"]
    stand_ins: dict[str, Callable[..., Any]] = {
        "is_torchdynamo_exporting": lambda: False,
        "is_tracing": lambda tensor=None: tensor is not None and is_tracing(tensor),
    }
    if inputs.get("position_ids") is None:
        # The positions that a model counts by itself never hold several packed sequences.
        stand_ins["find_packed_sequence_indices"] = lambda position_ids: None
    originals = {name: vars(masking_utils)[name] for name in stand_ins if name in vars(masking_utils)}
    vars(masking_utils).update({name: stand_ins[name] for name in originals})
    try:
        yield
    finally:
        vars(masking_utils).update(originals)
