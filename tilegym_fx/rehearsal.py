"""What a rewritten model will launch, found out without memory and compiled side by side before it runs.

The calls are those of the verification (`verify.run_language_model`, or one call with the user's inputs), and what
comes after it: a long prompt. They are made of a copy, which shares the parameters alone, so that nothing of the model
remembers them. A call that cannot be made without memory, or takes too long, is left out; its kernels are compiled when
they are first launched, one after the other.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from . import settings
from .export import enter_transformers, longest, without_memory
from .inventory.layout import shipped_root
from .layers import Copies
from .ops.backends import has_cutile
from .recording import Launch, recorded
from .tuning import arch_of
from .verify import DECODE_STEPS

log = logging.getLogger("tilegym_fx")
#: Tokens of a long prompt: tiles for many rows, a multiple of 16 as the compiler likes to know of.
PROMPT = 2048
#: Seconds for all calls: a model that loops over the tokens of its prompt takes minutes over a long one.
BUDGET = 20.0
Call = Callable[[nn.Module], object]
CacheOf = Callable[[nn.Module, Any], "dict[str, Any] | None"]


@contextmanager
def compilers(model: nn.Module, text: str) -> Iterator[Callable[[Iterable[Call]], None]]:
    """Processes that compile while the body runs, if there is anything for them to do.

    Args:
        model: The model, on one GPU or none at all.
        text: The emitted module that it is to run. Where it has been compiled on this machine before, nothing is done.

    Yields:
        What compiles the kernels of some calls of the rewritten model, and waits for them.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if device.type != "cuda" or not has_cutile() or (done := _done(text, device)).exists():
        yield lambda calls: None
        return
    from .compile.ahead import Compilers

    with Compilers() as there:

        def compile_kernels(calls: Iterable[Call]) -> None:
            if there.compile(launches(model, calls), arch_of(device)):
                _note(done)

        yield compile_kernels


def _done(text: str, device: torch.device) -> Path:
    """The file that says that the kernels of an emitted module are compiled. Where it says so wrongly, because cuTile's
    cache has been emptied, say, time is lost and nothing else."""
    known = hashlib.sha256(text.encode())
    for file in sorted((shipped_root() / "kernels").glob("*.py")):
        known.update(file.read_bytes())
    known.update(arch_of(device).encode())
    return settings.cache_folder() / "compiled" / known.hexdigest()


def _note(file: Path) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    except OSError:  # a cache that cannot be written to saves nothing next time
        return


def launches(model: nn.Module, calls: Iterable[Call]) -> list[Launch]:
    """What the calls launch. First layers stand for those like them, as they do when a rewriting is planned.

    Args:
        model: The model.
        calls: Made one after the other of a copy of it, while no tensor has memory. Whatever one of them raises ends
            that call alone: what is found here saves time, and nothing hangs on it.
    """
    found: list[Launch] = []
    try:
        copied = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with Copies.in_model(copied).left_out(), without_memory(copied, fake), _Budget(), recorded() as found:
            copied.eval()
            for call in calls:
                with suppress(Exception):
                    call(copied)
    except Exception:  # a model that cannot be copied, or run so
        log.debug("%s is not rehearsed", type(model).__name__, exc_info=True)
    return found


class _Budget(TorchDispatchMode):
    """Ends calls that go on when the time is over."""

    def __init__(self) -> None:
        super().__init__()
        self._end = time.monotonic() + BUDGET

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if time.monotonic() > self._end:
            raise TimeoutError("the time for rehearsals is over")
        return func(*args, **(kwargs or {}))


def language_calls(model: nn.Module, ids: torch.Tensor, cache_of: CacheOf, steps: int = DECODE_STEPS) -> list[Call]:
    """The calls of :func:`.verify.run_language_model`, and a prompt of `PROMPT` tokens.

    Args:
        model: The model.
        ids: Token ids of the prompt that is verified, [batch, tokens].
        cache_of: Gives the model's cache, after a call, as the keyword argument of the next; None if it has none.
        steps: Cached steps without padding; with it they are half as many.
    """
    length = min(PROMPT, longest(model, "prefill") or PROMPT)
    return [
        lambda model: _speak(model, ids, None, cache_of, steps),
        lambda model: _speak(model, ids, torch.ones_like(ids), cache_of, steps // 2),
        lambda model: _speak(model, ids.new_zeros(1, length), None, cache_of, 0),
    ]


def _speak(model: nn.Module, ids: torch.Tensor, mask: torch.Tensor | None, cache_of: CacheOf, steps: int) -> None:
    tokens, cache = ids, dict[str, Any]()
    for step in range(steps + 1):
        given = {"input_ids": tokens, "use_cache": True, **({} if mask is None else {"attention_mask": mask}), **cache}
        with ExitStack() as stack:
            enter_transformers(stack, model, given, static=True)
            found = cache_of(model, model(**given))
        if found is None:
            return
        cache, tokens = found, ids[:, step % ids.shape[1], None]
        mask = None if mask is None else torch.cat([mask, mask[:, :1]], dim=-1)
