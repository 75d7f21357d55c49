"""The two configurations that each model type is tried with: a tiny one that runs, a realistic one that does not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..model_source import configuration
from .recipes import BASE, LAYERS, TINY, Recipes
from .shrink import NESTED, Overrides, layer_count, layer_weights, layers_only, tiny

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class Trial:
    """A configuration of a model type, shrunk.

    Attributes:
        config: The configuration.
        weights: For each of its layers, how many layers of the default configuration it stands for.
    """

    config: PreTrainedConfig
    weights: tuple[float, ...]

    @property
    def vocabulary(self) -> int:
        """Width of the logits."""
        return int(self.config.get_text_config(decoder=True).vocab_size)


def tiny_trial(model_type: str) -> Trial:
    """Some ten thousand parameters, one layer of each kind: for a model that is run.

    Raises:
        UnknownModelError: transformers has no causal language model of that type, or no valid configuration
            comes out.
    """
    return _trial(model_type, tiny, (LAYERS, TINY))


def realistic_trial(model_type: str) -> Trial:
    """The default widths and one layer of each kind: for a model that exists on ``meta`` alone.

    Raises:
        UnknownModelError: As for :func:`tiny_trial`.
    """
    return _trial(model_type, layers_only, (LAYERS,))


def trial_key(model_type: str) -> str:
    """Equal for model types that are tried with the very same models: one with several parts, and its text part."""
    configs = (tiny_trial(model_type).config, realistic_trial(model_type).config)
    return "\n".join(f"{type(config).__qualname__} {config.to_json_string(use_diff=False)}" for config in configs)


def _trial(model_type: str, shrink: Callable[[Mapping[str, Any]], Overrides], corrections: Sequence[Recipes]) -> Trial:
    default = configuration(model_type, BASE.get(model_type, {}))
    if default.model_type != model_type:  # the text part of a model with several
        return _trial(default.model_type, shrink, corrections)
    fields = default.to_dict()
    corrected = {key: value for recipes in corrections for key, value in recipes.get(model_type, {}).items()}
    overrides = _merged(_merged(BASE.get(model_type, {}), shrink(fields)), corrected)
    taken_back = {key for key, value in corrected.items() if value is None}
    config = configuration(model_type, {key: v for key, v in overrides.items() if key not in taken_back})
    return Trial(config, tuple(layer_weights(_main(fields), _main(config.to_dict()))))


def _merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> Overrides:
    """The second over the first; of sub-configurations field by field."""
    both = {key for key in first.keys() & second.keys() if NESTED.search(key) and "layer" not in key}
    nested = {key: _merged(first[key], second[key]) for key in both}
    return {**first, **second, **nested}


def _main(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a configuration that counts the layers."""
    return fields if layer_count(fields) else fields.get("text_config", fields)
