"""Numbers that judge a rewritten model: its outputs beside the original's, and beside a wider run of the original.

A model is itself only an approximation. The rewritten one is right if it is about as far from a run in a wider dtype
as the original is; where that does not fit in memory, the two are compared with each other alone.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from .errors import VerifyError
from .export import MODEL_ERRORS, copies, describe, once
from .export.trace import unchanged

#: How much farther from the wider run than the original the rewritten model may be.
_WORSE = 2.0
#: Roundings of the model's dtype, relative to the largest output, that are always allowed.
_ROUNDINGS = 8.0
#: Cached steps that a verification makes.
DECODE_STEPS = 4
#: Elements of an output that are compared at a time, of which the float64 copies are the memory that it takes.
_AT_A_TIME = 1 << 24
#: Share of a GPU's free memory that one output may stay in.
_SHARE_OF_FREE = 16
#: How memory that ran out is told by what raises no error of its own for it: CUDA, cuBLAS, cuDNN, torch on a CPU.
_NO_MEMORY = re.compile(r"out of memory|alloc[a-z_ ]*failed|can't allocate memory|failed to allocate", re.IGNORECASE)

Call = Callable[[nn.Module], Any]
CacheOf = Callable[[nn.Module, Any], "dict[str, Any] | None"]
#: Name of a call -> what is entered while the model runs it.
Around = Callable[[str], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Check:
    """One output tensor of one call.

    Attributes:
        call: ``prefill``, ``decode 1``... or ``call``.
        error: Largest difference to the judge (the wider run, or the original where there is none).
        allowed: The largest that passes.
        original_error: The original's own distance to the judge; None without a wider run.
        verifiable: False where two runs of the original are `error` apart, so that nothing can be said.
    """

    call: str
    error: float
    allowed: float
    original_error: float | None
    verifiable: bool = True

    @property
    def passed(self) -> bool:
        return self.verifiable and self.error <= self.allowed  # a NaN does not pass

    def __str__(self) -> str:
        if not self.verifiable:
            return f"{self.call}: cannot be verified, as two runs of the original are {self.error:.3g} apart"
        own = "" if self.original_error is None else f", the original itself {self.original_error:.3g}"
        return f"{self.call}: off by {self.error:.3g}, {self.allowed:.3g} allowed{own}"


Outputs = dict[str, list[torch.Tensor]]


class CallError(Exception):
    """A model fails in a call that it has to make.

    Args:
        call: Which.
        problem: What it raised.
    """

    def __init__(self, call: str, problem: BaseException) -> None:
        super().__init__(f"{call} fails: {describe(problem)}")
        self.call = call
        self.problem = problem


class MemoryVerifyError(VerifyError, torch.OutOfMemoryError):
    """There is not enough memory to run the rewritten model, or to judge it."""

    advice = "Free memory, or pass verify=False to have nothing run; the model has been put back as it was"


def is_out_of_memory(problem: BaseException) -> bool:
    """Whether an error means that memory ran out, whatever its class."""
    if isinstance(problem, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(problem, RuntimeError) and bool(_NO_MEMORY.search(str(problem)))


def sample_inputs(model: nn.Module, *, batch: int = 1, seq: int = 12) -> dict[str, torch.Tensor]:
    """Token ids for a transformers language model, reproducible, on the model's device."""
    vocabulary = int(getattr(model.config, "vocab_size", 0) or 2)
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(min(3, vocabulary - 1), vocabulary, (batch, seq), generator=generator)
    return {"input_ids": ids.to(device)}


def run_language_model(
    model: nn.Module, inputs: dict[str, Any], cache_of: CacheOf, steps: int = DECODE_STEPS, *,
    of: Collection[str] | None = None, around: Around = nullcontext,
) -> Outputs:  # fmt: skip
    """Logits of the prompt and of cached steps, then the same with the first row padded on the left.

    The tokens do not depend on the model's own choice; what it gives at padding is not looked at. The prompt must
    run; the other calls end where the model itself refuses one: not every model can take one token against its own
    cache, or padding. What has been done to a model may not refuse more.

    Args:
        model: The model.
        inputs: What `sample_inputs` gave.
        cache_of: Gives the model's cache, after a call, as the keyword argument of the next; None if it has none.
        steps: Cached steps.
        of: The calls that the original made, each of which must run, and no other does.
        around: Entered while the model runs a call.

    Raises:
        CallError: A call of `of` fails.
    """
    ids = inputs["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, : ids.shape[1] // 3] = 0
    calls = _Calls(model, cache_of, of, around)
    with torch.no_grad(), _evaluating(model):
        return {**calls.run(ids, None, steps), **calls.run(ids, mask, steps // 2)}


@dataclass(frozen=True)
class _Calls:
    """The calls of a language model, one after the other.

    Attributes:
        model: The model.
        cache_of: See `run_language_model`, as for the others.
        of: The calls that must run, and alone do; None for as many as the model makes.
        around: Entered while the model runs a call.
    """

    model: nn.Module
    cache_of: CacheOf
    of: Collection[str] | None
    around: Around

    def run(self, ids: torch.Tensor, mask: torch.Tensor | None, steps: int) -> Outputs:
        outputs: Outputs = {}
        tokens, kept = ids, mask
        cache: dict[str, Any] = {}
        for step in range(steps + 1):
            call = ("" if mask is None else "padded ") + (f"decode {step}" if step else "prefill")
            if self.of is not None and call not in self.of:
                break
            masked = {} if kept is None else {"attention_mask": kept}
            try:
                with self.around(call):
                    result = self.model(input_ids=tokens, use_cache=True, **masked, **cache)
                logits = result.logits if kept is None else result.logits[kept[:, -tokens.shape[1] :].bool()]
            except MODEL_ERRORS as problem:
                if self.of is not None:
                    raise CallError(call, problem) from problem
                if is_out_of_memory(problem) or call == "prefill":
                    raise
                break
            outputs[call] = [_kept(logits)]
            found = self.cache_of(self.model, result)
            if found is None:
                break
            cache, tokens = found, ids[:, step % ids.shape[1], None]
            kept = None if kept is None else torch.cat([kept, torch.ones_like(kept[:, :1])], dim=-1)
        return outputs


def run_module(
    model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], *,
    of: Collection[str] | None = None, around: Around = nullcontext,
) -> Outputs:  # fmt: skip
    """Every tensor that one call of any module gives, or leaves in its inputs. It gets copies, which it may change.

    Args:
        model: The module.
        args: Positional arguments.
        kwargs: Keyword arguments.
        of: What the original's call gave, if it must run.
        around: Entered while the module runs.

    Raises:
        CallError: The call must run, and fails.
    """
    given = (tuple(args), kwargs)
    own_args, own_kwargs = own = copies(given)
    inputs = list(zip(tree_leaves(given), tree_leaves(own), strict=True))
    with torch.no_grad(), _evaluating(model):
        try:
            with around("call"):
                result = model(*own_args, **own_kwargs)
        except MODEL_ERRORS as problem:
            if of is None:
                raise
            raise CallError("call", problem) from problem
    outputs = {"call": [_kept(t) for t in tree_leaves(result) if isinstance(t, torch.Tensor)]}
    for place, (before, after) in enumerate(inputs):
        name = f"input {place} after the call"
        if isinstance(after, torch.Tensor) and (_is_changed(before, after) or (of is not None and name in of)):
            outputs[name] = [_kept(after)]
    return outputs


def _is_changed(before: torch.Tensor, after: torch.Tensor) -> bool:
    if (before.shape, before.dtype, before.layout) != (after.shape, after.dtype, after.layout):
        return True
    return before.layout is torch.strided and not torch.equal(_bytes(before), _bytes(after))


def _bytes(values: torch.Tensor) -> torch.Tensor:
    """What a tensor is to a comparison that also takes NaN, and dtypes without arithmetic."""
    return values.detach().resolve_conj().resolve_neg().reshape(-1).contiguous().view(torch.uint8)


def _kept(output: torch.Tensor) -> torch.Tensor:
    """A copy of an output to be compared later, where it is and in its own dtype.

    One that would take a good part of what is free there goes to the CPU, as does one on a device without float64.
    """
    output = output.detach()
    stays = output.device.type == "cpu" or (
        output.device.type == "cuda" and output.nbytes <= _free_bytes(output.device) // _SHARE_OF_FREE
    )
    return output.clone() if stays else output.cpu()


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Dropout off while outputs are compared; modes, attributes, buffers and random numbers are put back.

    A model that remembers something of a call, or draws in it, gives the same again only from the same start.
    """
    buffers = [(buffer, buffer.clone()) for buffer in map(once, model.buffers())]
    try:
        with unchanged(model), torch.random.fork_rng(_gpus(model)):
            model.eval()
            yield
    finally:
        for buffer, kept in buffers:
            buffer.copy_(kept)


def _gpus(model: nn.Module) -> list[int]:
    """The numbers of the CUDA devices that hold a model."""
    return sorted({p.get_device() for p in model.parameters() if p.is_cuda})


def with_other_numbers(model: nn.Module, run: Call) -> Outputs:
    """A run that draws other random numbers than the next one."""
    with torch.random.fork_rng(_gpus(model)):
        for device in ("cpu", *(f"cuda:{number}" for number in _gpus(model))):
            torch.rand(1, device=device)
        outputs: Outputs = run(model)
    return outputs


def apart(one: Outputs, other: Outputs, dtype: torch.dtype) -> list[Check]:
    """The outputs in which two runs of one model are farther from each other than rounding; none passes."""
    return [replace(check, verifiable=False) for check in compare(one, other, None, dtype) if not check.passed]


class Wider(NamedTuple):
    """What a model gives in a wider dtype.

    Attributes:
        outputs: The outputs; None where there is no such run.
        why_not: Why there is none.
    """

    outputs: Outputs | None
    why_not: str = ""


def wider_outputs(model: nn.Module, run: Call) -> Wider:
    """What a copy of the model in a wider dtype gives: float32 for 16 bits, float64 for float32."""
    dtype = wider_dtype(model)
    if dtype is None:
        return Wider(None, "it has no weights that a wider dtype is there for")
    if getattr(model, "is_quantized", False):
        return Wider(None, "its weights are quantised")
    weights = list(model.parameters())
    if (needed := sum(dtype.itemsize * p.numel() for p in weights)) > _free_bytes(weights[0].device) // 2:
        return Wider(None, f"a copy of it in {dtype} needs {needed / 2**30:.1f} GiB, which are not free")
    return Wider(run(copy.deepcopy(model).to(dtype)))


def wider_dtype(model: nn.Module) -> torch.dtype | None:
    """The dtype to judge a model in; None for one that has no weights or is in float64."""
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if not dtypes or dtypes == {torch.float64}:
        return None
    return torch.float64 if dtypes <= {torch.float32, torch.float64} else torch.float32


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return 8 << 30


def in_dtype(values: Any, dtype: torch.dtype) -> Any:
    """A nested structure with its floating-point tensors in a dtype."""
    return tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, values)


def compare(original: Outputs, rewritten: Outputs, wide: Outputs | None, dtype: torch.dtype) -> list[Check]:
    """One Check for each output tensor.

    Raises:
        ValueError: If the two have not the same calls, tensors, shapes or dtypes.
    """
    checks = []
    for call, before in original.items():
        after = rewritten.get(call, [])
        if [t.shape for t in before] != [t.shape for t in after]:
            raise ValueError(f"{call} gives tensors of other shapes than before")
        if [t.dtype for t in before] != [t.dtype for t in after]:
            raise ValueError(f"{call} gives tensors of other dtypes than before")
        is_wide = wide is not None and call in wide
        judge = wide[call] if wide is not None and is_wide else before
        checks += [_check(call, b, a, j, dtype, is_wide) for b, a, j in zip(before, after, judge, strict=True)]
    # What the original leaves alone, as an input that it does not write to, is to be left alone.
    return checks + [Check(call, float("inf"), 0.0, None) for call in rewritten if call not in original]


def _check(call: str, before: torch.Tensor, after: torch.Tensor, judge: torch.Tensor, dtype: torch.dtype,
           is_wide: bool) -> Check:  # fmt: skip
    if not (before.is_floating_point() or before.is_complex()):
        return Check(call, _unequal(before, after), 0.0, None)
    error = own = largest = 0.0
    for b, a, j in _in_float64(*map(_real, (before, after, judge))):
        finite = torch.isfinite(b)
        if not bool((finite & torch.isfinite(a) | (a == b) | a.isnan() & b.isnan()).all()):
            return Check(call, float("nan"), 0.0, None)
        j = torch.where(torch.isfinite(j), j, b)  # where the judge has no number, the original's own is to be met
        error, own = _larger(error, a - j, finite), _larger(own, b - j, finite)
        largest = _larger(largest, j, finite)
    return Check(call, error, allowed(largest, own, dtype), own if is_wide else None)


def _unequal(before: torch.Tensor, after: torch.Tensor) -> float:
    """How far integers are apart, 0 only for equal ones: float64 does not tell all of them from each other."""
    after = after.to(before.device)
    if torch.equal(before, after):
        return 0.0
    return max([1.0, *(float((a - b).abs().max()) for b, a in _in_float64(before, after))])


def _real(values: torch.Tensor) -> torch.Tensor:
    """Numbers with their imaginary parts beside them, if they have such."""
    return torch.view_as_real(values.resolve_conj()) if values.is_complex() else values


def allowed(largest: float, own: float, dtype: torch.dtype) -> float:
    """How far from its judge an output may be.

    Args:
        largest: The largest value in it.
        own: How far the original's is.
        dtype: The model's.
    """
    return max(_ROUNDINGS * torch.finfo(dtype).eps * largest, _WORSE * own)


def _in_float64(*outputs: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """The same elements of outputs of one shape, so many at a time that their copies take little memory.

    They are compared where the first is. Others may be elsewhere, if memory was short when they were kept.
    """
    device = outputs[0].device
    parts = (output.reshape(-1).split(_AT_A_TIME) for output in outputs)
    for part in zip(*parts, strict=True):
        yield [p.to(device).double() for p in part]


def _larger(least: float, values: torch.Tensor, known: torch.Tensor) -> float:
    """The largest magnitude where it is known, if it is above another one."""
    picked = values[known].abs()
    return max(least, float(picked.max())) if picked.numel() else least
