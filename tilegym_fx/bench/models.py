"""The model that is timed: random weights made where they are needed, or a local checkpoint's."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tilegym_fx.errors import UnknownModelError, UsageError
from tilegym_fx.export.caches import cache_name
from tilegym_fx.export.trace import MODEL_ERRORS, describe
from tilegym_fx.model_source import ModelSource, resolve_model

from .job import Job

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

SEED = 0
#: Entries that a static cache has beyond the context, so that a step can be repeated without going back.
MARGIN = 64
_TINY = {
    "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256, "n_embd": 64,
    "n_head": 4, "n_layer": 2, "sliding_window": 8, "pad_token_id": 0,
}  # fmt: skip


def find_source(job: Job) -> ModelSource:
    """The model's configuration as the job wants it; nothing is built.

    Raises:
        UnknownModelError: It cannot be found.
        UsageError: ``layers`` is more than the model has.
    """
    source = resolve_model(job.model, trust_remote_code=job.trust_remote_code)
    if job.layers is not None:
        cut_layers(source.config, job.layers)
    if job.tiny:
        _shrink(source.config)
    return source


def make_model(job: Job) -> Any:
    """The model of a job in eval mode on its device; the same weights in every process.

    Raises:
        UnknownModelError: It cannot be found or built.
        UsageError: ``layers`` is more than the model has, or it keeps no cache.
    """
    source = find_source(job)
    torch.manual_seed(SEED)
    try:
        model = _from_checkpoint(source, job) if _has_weights(source, job) else _from_config(source, job)
    except MODEL_ERRORS as error:
        raise UnknownModelError(
            f"{job.model!r} cannot be built on {job.device}: {describe(error)}",
            advice="Try fewer layers with --layers, or check the sizes in its config.json",
        ) from error
    if cache_name(model) is None:
        raise UsageError(f"{type(model).__name__} takes no cache", advice="Time a language model that generates")
    return model.eval()


def _from_config(source: ModelSource, job: Job) -> Any:
    from transformers import AutoModelForCausalLM

    with torch.device(job.device):
        return AutoModelForCausalLM.from_config(
            source.config, dtype=getattr(torch, job.dtype), trust_remote_code=job.trust_remote_code
        )


def _from_checkpoint(source: ModelSource, job: Job) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        source.name, config=source.config, dtype=getattr(torch, job.dtype), local_files_only=True,
        trust_remote_code=job.trust_remote_code,
    )  # fmt: skip
    return model.to(job.device)  # type: ignore[arg-type]


def _has_weights(source: ModelSource, job: Job) -> bool:
    return source.provenance == "folder" and not job.tiny and any(Path(source.name).glob("*.safetensors"))


def _shrink(config: PreTrainedConfig) -> None:
    sizes = dict(_TINY)
    if hasattr(config, "qk_rope_head_dim"):  # latent attention has head sizes of its own, and no groups
        sizes = {**sizes, "num_key_value_heads": sizes["num_attention_heads"], "head_dim": config.head_dim}
    for name, value in sizes.items():
        if name != "num_hidden_layers" and isinstance(vars(config).get(name), int):
            setattr(config, name, value)
    if isinstance(getattr(config, "num_hidden_layers", None), int):
        cut_layers(config, min(_TINY["num_hidden_layers"], config.num_hidden_layers))


def cut_layers(config: PreTrainedConfig, layers: int) -> None:
    """Leave a model its first layers only, in every field of the configuration that counts them.

    Raises:
        UsageError: It has fewer.
    """
    had = config.num_hidden_layers
    if not 1 <= layers <= had:
        raise UsageError(f"--layers {layers} of a model that has {had}", advice=f"Give 1 to {had}")
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == had:
            setattr(config, name, value[:layers])
    config.num_hidden_layers = layers


def random_tokens(model: Any, batch: int, length: int) -> torch.Tensor:
    """Token ids [batch, length], the same in every process; those of fewer rows are the first of more."""
    vocabulary = int(getattr(model.config, "vocab_size", 0) or 2)
    generator = torch.Generator().manual_seed(SEED)
    ids = torch.randint(min(3, vocabulary - 1), vocabulary, (batch, length), generator=generator)
    return ids.to(next(model.parameters()).device)


def last_only(model: Any, count: int = 1) -> dict[str, int]:
    """The argument that keeps the logits of the last positions only, where the model takes one."""
    parameters = inspect.signature(model.forward).parameters
    return {"logits_to_keep": count} if "logits_to_keep" in parameters else {}


class FilledCache:
    """A static cache that a prompt has filled, and that can be taken back to the end of that prompt.

    Args:
        model: Reads the prompt.
        prompt: Token ids.
    """

    def __init__(self, model: Any, prompt: torch.Tensor) -> None:
        from transformers import StaticCache

        cache = StaticCache(config=model.config, max_cache_len=prompt.shape[1] + MARGIN)
        self.argument: dict[str, Any] = {cache_name(model) or "": cache}
        model(input_ids=prompt, use_cache=True, **self.argument, **last_only(model))
        self._counters = [(layer, _counters(layer)) for layer in cache.layers]

    def rewind(self) -> None:
        """Forget how many steps there have been; their keys stay, and are overwritten by the next ones."""
        for layer, counters in self._counters:
            for name, value in counters.items():
                if isinstance(value, torch.Tensor):
                    getattr(layer, name).copy_(value)
                else:
                    setattr(layer, name, value)


def _counters(layer: Any) -> dict[str, Any]:
    """What says how full a cache's layer is: its integers, as numbers or as tensors without axes."""
    found: dict[str, Any] = {}
    for name, value in vars(layer).items():
        if isinstance(value, torch.Tensor) and value.dim() == 0 and not value.is_floating_point():
            found[name] = value.clone()
        elif isinstance(value, int) and not isinstance(value, bool):
            found[name] = value
    return found


def read_bytes(model: Any) -> int | None:
    """Bytes of weights that a decode step reads; None where it chooses between experts."""
    names = [name for name, _ in model.named_parameters()]
    if any("expert" in name for name in names):
        return None
    table = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    tied = head is not None and head.weight is table
    total = sum(p.nbytes for p in model.parameters())
    return total if tied else total - table.nbytes
