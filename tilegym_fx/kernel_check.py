"""Is a Solution's kernel right? Interpreted beside the reference, compiled for every target, found in code.

Every function gives a list of sentences that say what is wrong, empty where nothing is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tilegym_fx.closeness import error_ratio
from tilegym_fx.errors import INSTALL_CUTILE, KernelError, PatternError, TilegymFxError, UsageError, did_you_mean
from tilegym_fx.inventory import load, shipped_root
from tilegym_fx.inventory.sizes import CannotTryError, sizes_of
from tilegym_fx.inventory.trial import sample_inputs
from tilegym_fx.match import Matcher
from tilegym_fx.pattern import patterns_of, trace
from tilegym_fx.results import Site

if TYPE_CHECKING:
    from tilegym_fx.inventory import Inventory
    from tilegym_fx.schema import Definition

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: Factors on the small sizes: one tile, and several of which the last is ragged.
_FACTORS = (1, 37)
_MAX_ELEMENTS = 1 << 19
#: What code under test may raise: a kernel's own mistakes are findings, not crashes.
_CODE_ERRORS = (
    ArithmeticError, AssertionError, AttributeError, LookupError, NameError, RuntimeError, TypeError,
    ValueError, TilegymFxError,
)  # fmt: skip


def inventory_with(root: Path) -> Inventory:
    """The shipped inventory, and that of ``root`` where it is another one."""
    return load() if root.resolve() == shipped_root().resolve() else load(root)


def random_inputs(
    definition: Definition,
    sizes: Mapping[str, int] | None = None,
    *,
    dtype: torch.dtype | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Inputs of a Definition by name: floats are normal numbers, masks random with the first entry true.

    Raises:
        CannotTryError: No inputs can be made up.
        UsageError: A size is given for what the Definition does not have.
    """
    _require_known(definition, sizes or {})
    inputs = sample_inputs(definition, sizes, dtype=dtype, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            inputs[name] = torch.randn(value.shape, generator=generator).to(value.dtype)
        elif isinstance(value, torch.Tensor) and value.dtype == torch.bool and value.dim():
            inputs[name] = torch.rand(value.shape, generator=generator) < 0.6
            inputs[name][..., 0] = True
    return inputs


def _require_known(definition: Definition, sizes: Mapping[str, int]) -> None:
    """A size that nothing takes would be left out without a word, and another size be tried in its place."""
    scalars = [name for name, spec in definition.inputs.items() if spec.is_scalar]
    known = [*definition.axes, *scalars]
    for name in sizes:
        if name not in known:
            near = did_you_mean(name, known)
            raise UsageError(
                f"a size is given for {name!r}, and {definition.name} has no such axis",
                advice=f"Its axes are {', '.join(definition.axes)}{near}",
            )


def sizes_to_try(definition: Definition) -> Iterator[dict[str, int]]:
    """Small odd sizes, sizes that are alike, and sizes of several tiles, as the constraints allow.

    Raises:
        CannotTryError: No sizes can be made up.
    """
    seen: list[dict[str, int]] = []
    for factor in _FACTORS:
        for equal in (False, True):
            sizes = _scaled(definition, sizes_of(definition, equal=equal), factor)
            if sizes not in seen and (factor == 1 or _elements(definition, sizes) <= _MAX_ELEMENTS):
                seen.append(sizes)
                yield sizes


def _scaled(definition: Definition, sizes: Mapping[str, int], factor: int) -> dict[str, int]:
    """Variable axes times a factor: constraints of sums, multiples and divisibility go on to hold."""
    free = {name for name, axis in definition.axes.items() if axis.type == "var"}
    return {name: size * factor if name in free else size for name, size in sizes.items()}


def _elements(definition: Definition, sizes: Mapping[str, int]) -> int:
    specs = (*definition.inputs.values(), *definition.outputs.values())
    return sum(math.prod(sizes[a] for a in spec.shape or ()) for spec in specs)


def disagreements(
    inventory: Inventory, solution: str, *, dtypes: Sequence[torch.dtype] = DTYPES, device: str = "cpu"
) -> list[str]:
    """Where a Solution's kernel and its Definition's reference differ; on a CPU the kernel is interpreted.

    Args:
        inventory: That has both.
        solution: Name of the Solution.
        dtypes: Taken in turn for the inputs that are declared bfloat16.
        device: Where the kernel runs.
    """
    definition = inventory.definitions[inventory.solutions[solution].definition]
    reference = inventory.reference(definition.name)
    try:
        kernel = inventory.entry_point(solution)
        cases = [(sizes, dtype) for sizes in sizes_to_try(definition) for dtype in _distinct(definition, dtypes)]
    except (TilegymFxError, CannotTryError) as error:
        return [str(error)]
    problems, tried = [], 0
    for seed, (sizes, dtype) in enumerate(cases):
        inputs = random_inputs(definition, sizes, dtype=dtype, seed=seed)
        if not _is_defined(reference, inputs):
            continue
        tried += 1
        found = difference(reference, kernel, inputs, device=device)
        problems += [f"at {_words(sizes)} in {str(dtype).removeprefix('torch.')}: {p}" for p in found]
    return problems if tried else ["its reference runs at none of the sizes that were tried"]


def _is_defined(reference: Callable[..., Any], inputs: Mapping[str, Any]) -> bool:
    """Whether the reference runs at these sizes: constraints do not say everything."""
    try:
        with torch.no_grad():
            reference(**inputs)
    except _CODE_ERRORS:
        return False
    return True


def _distinct(definition: Definition, dtypes: Sequence[torch.dtype]) -> Sequence[torch.dtype]:
    return (
        dtypes if any(s.dtype == "bfloat16" and s.shape is not None for s in definition.inputs.values()) else dtypes[:1]
    )


def _words(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items())


def difference(
    reference: Callable[..., Any],
    kernel: Callable[..., Any],
    inputs: Mapping[str, Any],
    *,
    device: str = "cpu",
) -> list[str]:
    """What is other than the reference's in a kernel's results: number, shape, dtype, values."""
    moved = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    before = _copies(moved)
    try:
        with torch.no_grad():
            wanted, got = _as_tuple(reference(**inputs)), _as_tuple(kernel(**moved))
    except _CODE_ERRORS as error:
        return [f"{type(error).__name__}: {' '.join(str(error).split())}"]
    if len(got) != len(wanted):
        return [f"gives {len(got)} values where the reference gives {len(wanted)}"]
    own = _own_errors(reference, inputs, wanted)
    problems = [f"output {i}: {p}" for i, one in enumerate(zip(wanted, got, own, strict=True)) for p in _unequal(*one)]
    return _written(before, moved) + problems


def writes(inventory: Inventory, solution: str) -> list[str]:
    """To which of its inputs a Solution's kernel writes, interpreted; an op promises that it only reads them.

    Args:
        inventory: That has the Solution.
        solution: Its name.

    Returns:
        Nothing too where the kernel raises: why is the business of :func:`disagreements`.
    """
    definition = inventory.definitions[inventory.solutions[solution].definition]
    try:
        inputs = random_inputs(definition)
        before = _copies(inputs)
        with torch.no_grad():
            inventory.entry_point(solution)(**inputs)
    except (*_CODE_ERRORS, CannotTryError):
        return []
    return _written(before, inputs)


def _copies(inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in inputs.items() if isinstance(v, torch.Tensor)}


def _written(before: Mapping[str, torch.Tensor], after: Mapping[str, Any]) -> list[str]:
    return [f"it writes to its input {k!r}" for k, v in before.items() if not torch.equal(v, after[k])]


def _as_tuple(result: Any) -> tuple[torch.Tensor, ...]:
    return tuple(result) if isinstance(result, tuple | list) else (result,)


def _own_errors(
    reference: Callable[..., Any], inputs: Mapping[str, Any], wanted: Sequence[torch.Tensor]
) -> list[float]:
    """How far float32 results are from the reference in float64: sums that nearly cancel are worth little."""
    floats = {k: v for k, v in inputs.items() if isinstance(v, torch.Tensor) and v.is_floating_point()}
    if not floats or any(v.dtype != torch.float32 for v in floats.values()):
        return [0.0] * len(wanted)
    try:
        with torch.no_grad():
            exact = _as_tuple(reference(**{**inputs, **{k: v.double() for k, v in floats.items()}}))
    except _CODE_ERRORS:  # it names a dtype that does not go with float64
        return [0.0] * len(wanted)
    return [_largest(e.double() - w.double()) for e, w in zip(exact, wanted, strict=True)]


def _largest(error: torch.Tensor) -> float:
    return float(error.nan_to_num(0, 0, 0).abs().max()) if error.numel() else 0.0


def _unequal(wanted: torch.Tensor, got: torch.Tensor, own: float) -> Iterator[str]:
    if got.shape != wanted.shape:
        yield f"has shape {list(got.shape)}, not {list(wanted.shape)}"
    elif got.dtype != wanted.dtype:
        yield f"is {got.dtype}, not {wanted.dtype}"
    elif (ratio := error_ratio(wanted, got, own)) > 1:
        yield f"is off by {ratio:.3g} times what rounding explains"
    elif not got.is_contiguous():
        yield "is not contiguous"


def compile_faults(
    inventory: Inventory,
    solution: str,
    archs: Sequence[str] | None = None,
    *,
    sizes: Mapping[str, int] | None = None,
    isolated: bool = False,
    timeout: float | None = 120,
) -> list[str]:
    """For which architectures a Solution's kernel does not compile, and why.

    Args:
        inventory: That has the Solution.
        solution: Its name.
        archs: ``sm_90`` and so on; all that kernels are tested for by default.
        sizes: Axis -> size of the inputs that it is compiled for; made up where absent.
        isolated: In child processes, for kernels that may hang the compiler.
        timeout: Seconds for each.

    Raises:
        KernelError: cuda-tile is not installed.
    """
    try:
        from tilegym_fx.compile import ARCHITECTURES, compile_kernel
        from tilegym_fx.recording import recorded
    except ImportError as error:
        raise KernelError(f"no kernel can be compiled here: {error}", advice=INSTALL_CUTILE) from error

    definition = inventory.definitions[inventory.solutions[solution].definition]
    try:
        known = {**_scaled(definition, sizes_of(definition), 64), **(sizes or {})}
        inputs = sample_inputs(definition)
        meta = {k: _on_meta(definition, k, v, known) for k, v in inputs.items()}
        with recorded() as launches:
            inventory.entry_point(solution)(**meta)
    except (*_CODE_ERRORS, CannotTryError) as error:
        return [f"{type(error).__name__}: {' '.join(str(error).split())}"]
    if not launches:
        return ["it launches no kernel"]

    def fault(arch: str) -> str | None:
        try:
            for one in launches:
                compile_kernel(one.kernel, one.args, arch, isolated=isolated, timeout=timeout)
        except TilegymFxError as error:
            return f"{arch}: {error}"
        return None

    return [found for arch in archs or ARCHITECTURES if (found := fault(arch)) is not None]


def _on_meta(definition: Definition, name: str, value: Any, sizes: Mapping[str, int]) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    shape = [sizes[axis] for axis in definition.inputs[name].shape or ()]
    return torch.empty(shape, dtype=value.dtype, device="meta")


def finds(inventory: Inventory, name: str, code: Callable[..., Any] | None = None) -> bool:
    """Whether the pass finds a Definition in some code.

    Args:
        inventory: That has the Definition.
        name: The Definition.
        code: Takes the Definition's inputs; its own reference by default.

    Raises:
        PatternError: The reference or the code cannot be traced.
    """
    definition = inventory.definitions[name]
    matcher = Matcher(inventory.definitions, patterns_of(inventory, name))
    inputs = sample_inputs(definition)
    try:
        graph, _, _ = trace(code or inventory.reference(name), _fakes(inputs))
    except (RuntimeError, TypeError, ValueError) as error:
        raise PatternError(f"the code to look for {name} in cannot be traced: {error}") from error
    matches, _ = matcher.match(graph, lambda node: Site())
    return any(match.definition == name for match in matches)


def _fakes(inputs: Mapping[str, Any]) -> dict[str, Any]:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return {k: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
