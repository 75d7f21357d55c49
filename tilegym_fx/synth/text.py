"""A kernel's file: what it is, the helpers that it needs, the kernel, and the function that launches it."""

from __future__ import annotations

import ast
from dataclasses import dataclass

import torch

from tilegym_fx.schema import Definition, reference_run

from .guards import guards_of
from .host import HostWriter
from .kernel import KernelWriter
from .plan import Plan, plan_of
from .words import HELPER_CONSTANTS, HELPERS

_REDUCING = """\
Tiles. A block owns ROWS rows. Rows of up to MAX_HELD numbers stay in registers, as chunks of CHUNK columns,
so that memory is read once and written once; longer rows are read again for every pass."""
_POINTWISE = """\
Tiles. A block takes TILE numbers: CHUNK columns of ROWS rows. Tiles that lie inside their arrays are loaded
without bounds checks."""

_GET = '''\
def get(array, place, shape, whole):
    """A tile of an array; what lies outside of it reads as zero, gathered: a checked load waits for the one before."""
    if whole:
        return ct.load(array, place, shape=shape, check_bounds=False, allow_tma=False)
{indices}
    if array.dtype == ct.bool_:
        return ct.gather(array, ({names}), padding_value=False)
    return ct.gather(array, ({names}))
'''
_PUT = '''\
def put(array, place, tile, shape, whole):
    """Writes a tile in the array's dtype; what lies outside of the array is dropped."""
    tile = ct.broadcast_to(ct.astype(tile, array.dtype), shape)
    if whole:
        ct.store(array, place, tile, check_bounds=False, allow_tma=False)
    else:
        ct.store(array, place, tile, allow_tma=False)
'''
_WIDE = """\
def wide(tile):
    return ct.astype(tile, ct.float32)
"""
_INSIDE = '''\
def inside(tile, k, shape, width, even, neutral):
    """Chunk k of rows, with a neutral number beyond their end."""
    if even:
        return tile
    chunk = shape[-1]
    columns = k * chunk + ct.arange(chunk, dtype=ct.int32)
    return ct.where(ct.reshape(columns, LANES) < width, tile, neutral)
'''
_PICK_POINTWISE = '''\
@lru_cache(maxsize=4096)
def pick_tiles(inner: int, width: int) -> tuple[int, int, bool]:
    """Rows and columns of a tile, and whether the rows fill their tiles."""
    chunk = TILE if width >= TILE else max(16, 1 << (width - 1).bit_length())
    if LEAST_CHUNK <= width & -width < chunk:  # then no tile is ragged
        chunk = width & -width
    rows = 1
    while rows * chunk < TILE and 2 * rows <= inner:
        rows *= 2
    return rows, chunk, inner % rows == 0
'''
_PICK_REDUCING = '''\
@lru_cache(maxsize=4096)
def pick_tiles(inner: int, rows: int, width: int, arrays: int) -> tuple[int, int, int, bool, bool, bool]:
    """ROWS, CHUNK, CHUNKS, HELD, FIT and EVEN of a block; several short rows share one if there are many."""
    chunk = CHUNK if width >= CHUNK else max(16, 1 << (width - 1).bit_length())
    per_block = 1
    while per_block * chunk < 2 * CHUNK and 2 * per_block <= inner and rows >= 2 * per_block * FILL_BLOCKS:
        per_block *= 2
    chunks = -(-width // chunk)
    held = chunks * chunk * per_block * arrays <= MAX_HELD
    return per_block, chunk, chunks if held else 0, held, inner % per_block == 0, width % chunk == 0
'''
_AS_ROWS = '''\
def as_rows(x: torch.Tensor) -> tuple[int, int]:
    """Rows and columns: one long row, as long as 32 bits can index it."""
    count = x.numel()
    return (1, count) if count < 2**31 else (count // x.shape[-1], x.shape[-1])
'''


@dataclass(frozen=True)
class Written:
    """A kernel that was written.

    Attributes:
        kernel: Text of its file.
        how: How it works, in a sentence.
        guards: Functions for ``patterns/<name>.py``: where it must not be used.
        dtypes: What the inputs that are declared with 16 bits may be.
    """

    kernel: str
    how: str
    guards: str
    dtypes: tuple[str, ...]


def write_kernel(definition: Definition, name: str) -> Written:
    """A kernel file for a Definition.

    Args:
        definition: What to compute.
        name: Of the entry point; the kernel is called ``<name>_kernel``.

    Raises:
        SynthesisError: No kernel can be written for it by itself.
    """
    plan = plan_of(definition)
    kernel = KernelWriter(plan, name).write()
    writer = HostWriter(plan, kernel, definition, name)
    host = writer.write()
    body = "\n\n\n".join([*kernel.functions, kernel.body, host])
    parts = [*_helpers(plan, body, kernel.helpers), body]
    text = "\n\n\n".join(part.rstrip("\n") for part in parts)
    how = (
        "Written from the reference: rows stay in registers and are read once."
        if plan.reductions
        else "Written from the reference: one pass, every tile read and written once."
    )
    return Written(
        f"{_head(definition, name, plan, text)}\n\n{text}\n",
        how,
        guards_of(definition, rank_free=writer.is_rank_free()),
        _dtypes_of(definition, plan),
    )


def _dtypes_of(definition: Definition, plan: Plan) -> tuple[str, ...]:
    declared = {s.dtype for s in definition.inputs.values() if s.shape is not None and "float" in s.dtype}
    if not declared & {"bfloat16", "float16"}:
        return tuple(sorted(declared)) or ("float32",)
    halves = [n for n in plan.graph.nodes if n in plan.arrays and n.meta["val"].dtype == torch.bfloat16]
    every = all(n in plan.follows for n in halves)
    return ("float32", "float16", "bfloat16") if every else tuple(sorted({"float32", *declared}))


def _head(definition: Definition, name: str, plan: Plan, text: str) -> str:
    run = reference_run(ast.parse(definition.reference))
    lines = ast.unparse(ast.Module(run.body, [])).splitlines()
    shown = "\n".join(f"    {line}" for line in lines)
    tiles = _REDUCING if plan.reductions else _POINTWISE
    docstring = (
        f'"""{name} in cuTile, written from its Definition:\n\n{shown}\n\n'
        f'Every value is rounded where the reference rounds it.\n\n{tiles}\n"""'
    )
    imports = ["from functools import lru_cache", "from math import inf as INFINITY"]
    imports = [line for line in imports if "INFINITY" in text or "INFINITY" not in line]
    constants = [
        "Int = ct.Constant[int]",
        "Flag = ct.Constant[bool]",
        "",
        *(_constants_of(plan)),
    ]
    modules = "import cuda.tile as ct\nimport torch\n\nfrom tilegym_fx.launch import launch"
    head = f"{docstring}\n\nfrom __future__ import annotations\n\n" + "\n".join(imports)
    return f"{head}\n\n{modules}\n\n" + "\n".join(constants)


def _constants_of(plan: Plan) -> list[str]:
    if not plan.reductions:
        return [
            "#: Numbers of one block: two 16-byte loads for each of 128 threads, in a 2-byte dtype.",
            "TILE = 2048",
            "#: Columns below which a tile's rows are too short to be read at full speed.",
            "LEAST_CHUNK = 256",
        ]
    return [
        "#: Columns of a chunk: one 16-byte load for each of 128 threads, in a 2-byte dtype.",
        "CHUNK = 1024",
        "#: Numbers that a block holds in registers.",
        "MAX_HELD = 16384",
        "#: Blocks that fill a large GPU twice over.",
        "FILL_BLOCKS = 264",
    ]


def _get(rank: int) -> str:
    """The text of ``get`` for arrays of so many dimensions."""
    names = ("outer", "middle", "inner")[-(rank - 1) :] if rank > 2 else ("rows",)
    lines = []
    for dim, name in enumerate((*names, "columns")):
        sizes = ", ".join(f"shape[{dim}]" if other == dim else "1" for other in range(rank))
        numbers = f"place[{dim}] * shape[{dim}] + ct.arange(shape[{dim}], dtype=ct.int32)"
        lines.append(f"    {name} = ct.reshape({numbers}, ({sizes}))")
    return _GET.format(indices="\n".join(lines), names=", ".join((*names, "columns")))


def _helpers(plan: Plan, body: str, named: set[str]) -> list[str]:
    helpers = [HELPER_CONSTANTS[n] for n in HELPERS if n in named and n in HELPER_CONSTANTS]
    helpers += [HELPERS[n] for n in HELPERS if n in named]
    helpers += [_WIDE] if "wide(" in body else []
    helpers += [_get(len(plan.space.groups or ((),)) + 1), _PUT]
    lanes = ", ".join([*("1" for _ in plan.space.groups or ((),)), "chunk"])
    inside = _INSIDE.replace("LANES", f"({lanes})")
    helpers += [inside, _PICK_REDUCING] if plan.reductions else [_PICK_POINTWISE]
    helpers += [_AS_ROWS] if "as_rows(" in body else []
    return helpers
