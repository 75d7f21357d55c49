"""The kernel of a plan: what each block loads, reduces and stores."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch.fx import Node

from .expressions import Lines, Segment
from .plan import Plan
from .words import REDUCTIONS

_GROUP_NAMES = {1: ("row",), 2: ("outer", "inner"), 3: ("outer", "middle", "inner")}
#: Reduction -> its start, how a tile joins the lanes, how lanes become one number, what changes nothing.
_REDUCE = {
    "sum": (
        "ct.zeros(shape, ct.float32)",
        "{acc} + {tile}",
        "ct.sum({acc}, axis={axis}, keepdims=True)",
        "0.0",
    ),
    "mean": (
        "ct.zeros(shape, ct.float32)",
        "{acc} + {tile}",
        "ct.sum({acc}, axis={axis}, keepdims=True) * inverse",
        "0.0",
    ),
    "max": (
        "ct.full(shape, -INFINITY, ct.float32)",
        "ct.maximum({acc}, {tile})",
        "ct.max({acc}, axis={axis}, keepdims=True)",
        "-INFINITY",
    ),
    "min": (
        "ct.full(shape, INFINITY, ct.float32)",
        "ct.minimum({acc}, {tile})",
        "ct.min({acc}, axis={axis}, keepdims=True)",
        "INFINITY",
    ),
}
_CALLED = {"sum": "total", "mean": "mean", "max": "top", "min": "least"}


@dataclass
class Piece:
    """An array that the kernel is given: all of a value's columns, or one segment of them.

    Attributes:
        name: In the kernel.
        node: The value.
        segment: Which columns; None for all.
    """

    name: str
    node: Node
    segment: Segment


@dataclass
class Function:
    """A function inside the kernel's file: its name, what it takes, its lines."""

    name: str
    lines: Lines
    results: list[str]
    note: str

    def text(self) -> str:
        """The function's source."""
        takes = [*self.lines.loads.values(), *self.lines.reductions.values(), *self.lines.scalars]
        takes += ["dtype"] if self.lines.takes_dtype else []
        body = [f'    """{self.note}"""', *(f"    {line}" for line in self.lines.lines)]
        return "\n".join([f"def {self.name}({', '.join(takes)}):", *body, f"    return {', '.join(self.results)}"])


@dataclass
class KernelText:
    """A kernel as text, and what its launch has to pass.

    Attributes:
        functions: What is computed, between loads and stores.
        body: The kernel itself.
        loads: The arrays that it reads.
        stores: The arrays that it writes.
        scalars: Numbers of the Definition that it takes.
        has_mean: Whether it takes the inverse of the rows' width.
        helpers: Names of helpers that it uses.
    """

    functions: list[str]
    body: str
    loads: list[Piece]
    stores: list[Piece]
    scalars: list[str]
    has_mean: bool
    helpers: set[str] = field(default_factory=set)


class KernelWriter:
    """Writes the kernel of a plan."""

    def __init__(self, plan: Plan, name: str) -> None:
        self._plan, self._name = plan, name
        self._groups = max(1, len(plan.space.groups))
        self._places = _GROUP_NAMES[self._groups]
        self._pieces: dict[tuple[Node, Segment], Piece] = {}
        self._reduced = {r: self._reduction_name(r) for r in plan.reductions}
        self._functions: list[Function] = []

    def write(self) -> KernelText:
        """The text of the kernel and of the functions that it calls."""
        before = {r: self._before(r) for r in self._plan.reductions}
        stores = [
            Piece(_piece_name(name, s, self._plan.segments(node)), node, s)
            for name, node in self._plan.outputs.items()
            for s in self._plan.segments(node)
        ]
        rows = [s for s in stores if self._kind(s.node) == "row"] if self._plan.reductions else stores
        after = self._after(rows, "finished", "The results.")
        per_row = self._after([s for s in stores if s not in rows], "per_row", "One number a row.")
        used = [f for f in self._functions if f is not None]
        scalars = list(dict.fromkeys(s for f in used for s in f.lines.scalars))
        has_mean = any(REDUCTIONS[r.target] == "mean" for r in self._plan.reductions)
        loads = self._arrays()
        body = (
            self._with_reductions(before, after, per_row, stores, scalars, has_mean)
            if self._plan.reductions
            else self._pointwise(after, stores, scalars)
        )
        helpers = {h for f in used for h in f.lines.helpers}
        return KernelText([f.text() for f in used], body, loads, stores, scalars, has_mean, helpers)

    def _kind(self, node: Node) -> str:
        return self._plan.space.kinds[node]

    def _reduction_name(self, node: Node) -> str:
        kind = REDUCTIONS[node.target]
        same = [r for r in self._plan.reductions if REDUCTIONS[r.target] == kind]
        return f"{_CALLED[kind]}_{same.index(node) + 1}"

    def _lines(self) -> Lines:
        return Lines(self._plan, self._load_name, self._reduced.__getitem__)

    def _load_name(self, node: Node, segment: Segment) -> str:
        key = node, segment
        if key not in self._pieces:
            base = self._plan.arrays[node].split(".")[0]
            others = {p.node for p in self._arrays() if re.split("_part_|_left|_right", p.name)[0] == base}
            base = f"{base}_view" if others - {node} else base
            self._pieces[key] = Piece(_piece_name(base, segment, self._plan.segments(node)), node, segment)
        return self._pieces[key].name

    def _before(self, reduction: Node) -> Function:
        """What is reduced: all segments of the operand, put together lane by lane."""
        lines, source = self._lines(), reduction.all_input_nodes[0]
        add = _REDUCE[REDUCTIONS[reduction.target]][1]
        values = []
        for segment in self._plan.segments(source):
            name = lines.value(source, segment)
            values.append(name if str(source.meta["val"].dtype) == "torch.float32" else f"wide({name})")
        result = values[0]
        for value in values[1:]:
            result = add.format(acc=result, tile=value)
        kind = REDUCTIONS[reduction.target]
        note = f"What the {kind} of every row is taken of."
        return self._add(Function(f"before_{self._reduced[reduction]}", lines, [result], note))

    def _after(self, stores: Sequence[Piece], name: str, note: str) -> Function | None:
        if not stores:
            return None
        lines = self._lines()
        return self._add(Function(name, lines, [lines.value(s.node, s.segment) for s in stores], note))

    def _add(self, function: Function) -> Function:
        self._functions.append(function)
        return function

    def _arrays(self) -> list[Piece]:
        """What is loaded; segments of one array side by side."""
        order = list(dict.fromkeys(piece.node for piece in self._pieces.values()))
        return sorted(self._pieces.values(), key=lambda piece: order.index(piece.node))

    def _place(self, node: Node, column: str) -> tuple[str, str, bool]:
        """Index and shape of an array's tile, and whether its rows are the block's."""
        space, names, sizes = self._plan.space, [], []
        for i, name in enumerate(self._places):
            there = bool(space.groups) and space.has_group(node, space.groups[i])
            names.append(name if there else "0")
            sizes.append("ROWS" if there and i == self._groups - 1 else "1")
        is_row = self._kind(node) == "row"
        index = ", ".join([*names, column if is_row else "0"])
        shape = ", ".join([*sizes, "CHUNK" if is_row else "1"])
        return f"({index})", f"({shape})", sizes[-1] == "ROWS"

    def _get(self, piece: Piece, column: str, even: str) -> str:
        index, shape, has_rows = self._place(piece.node, column)
        conditions = (["FIT"] if has_rows else []) + ([even] if self._kind(piece.node) == "row" else [])
        return f"get({piece.name}, {index}, {shape}, {_all(conditions)})"

    def _call(self, function: Function, tile_of: dict[str, str]) -> str:
        lines = function.lines
        given = [tile_of[n] for n in lines.loads.values()]
        given += [*lines.reductions.values(), *lines.scalars]
        given += [f"{self._half()}.dtype"] if lines.takes_dtype else []
        return f"{function.name}({', '.join(given)})"

    def _half(self) -> str:
        """An array whose dtype the 16-bit values follow."""
        return next(p.name for p in self._arrays() if p.node in self._plan.follows)

    def _puts(self, stores: Sequence[Piece], call: str, even: str, indent: str, column: str) -> Iterator[str]:
        names = [f"{s.name}_tile" for s in stores]
        yield f"{indent}{', '.join(names)} = {call}"
        for store, name in zip(stores, names, strict=True):
            index, shape, has_rows = self._place(store.node, column)
            conditions = (["FIT"] if has_rows else []) + ([even] if self._kind(store.node) == "row" else [])
            yield f"{indent}put({store.name}, {index}, {name}, {shape}, {_all(conditions)})"

    def _blocks(self, out: str) -> Iterator[str]:
        """Lines that tell which rows a block has."""
        if self._groups == 1:
            yield f"    {self._places[0]} = block"
            return
        yield f"    blocks = ct.cdiv({out}.shape[{self._groups - 1}], ROWS)"
        if self._groups == 2:
            yield "    outer, inner = block // blocks, block % blocks"
            return
        yield f"    planes = blocks * {out}.shape[1]"
        yield "    outer, rest = block // planes, block % planes"
        yield "    middle, inner = rest // blocks, rest % blocks"

    def _signature(self, stores: Sequence[Piece], numbers: Sequence[str], constants: str) -> list[str]:
        arrays = [p.name for p in (*self._arrays(), *stores)]
        return [
            "@ct.kernel",
            f"def {self._name}_kernel(",
            f"    {', '.join([*arrays, *numbers])},",
            f"    {constants},",
            "):  # fmt: skip",
        ]

    def _pointwise(self, function: Function | None, stores: Sequence[Piece], scalars: Sequence[str]) -> str:
        assert function is not None
        arrays = [p.name for p in (*self._arrays(), *stores)]
        out = self._full(stores)
        places = ", ".join((*self._places, "k"))
        passed = ", ".join([*arrays, *scalars, *self._places, "k", "ROWS", "CHUNK", "FIT"])
        tile_of = {p.name: self._get(p, "k", "even") for p in self._arrays()}
        lines = [
            f"def one_tile({passed}, even):",
            f'    """The block\'s tile at {places}."""',
            *(f"    {name}_tile = {text}" for name, text in tile_of.items()),
            *self._puts(stores, self._call(function, {n: f"{n}_tile" for n in tile_of}), "even", "    ", "k"),
            "",
            "",
            *self._signature(stores, scalars, "ROWS: Int, CHUNK: Int, FIT: Flag"),
            f"    chunks = ct.cdiv({out}.shape[{self._groups}], CHUNK)",
            "    block, k = ct.bid(0) // chunks, ct.bid(0) % chunks",
            *self._blocks(out),
            f"    if (k + 1) * CHUNK <= {out}.shape[{self._groups}]:",
            f"        one_tile({passed}, True)",
            "    else:",
            f"        one_tile({passed}, False)",
        ]
        return "\n".join(lines)

    def _full(self, stores: Sequence[Piece]) -> str:
        """An output with all the columns that are walked; all outputs have all the rows."""
        return next((s.name for s in stores if self._kind(s.node) == "row"), stores[0].name)

    def _with_reductions(
        self,
        before: dict[Node, Function],
        after: Function | None,
        per_row: Function | None,
        stores: Sequence[Piece],
        scalars: Sequence[str],
        has_mean: bool,
    ) -> str:
        rows = [p for p in self._arrays() if self._kind(p.node) == "row"]
        ones = [p for p in self._arrays() if self._kind(p.node) != "row"]
        shape = ", ".join([*("1" for _ in range(self._groups - 1)), "ROWS", "CHUNK"])
        numbers = [*scalars, *(["inverse"] if has_mean else [])]
        constants = "ROWS: Int, CHUNK: Int, CHUNKS: Int, HELD: Flag, FIT: Flag, EVEN: Flag"
        row_stores = [s for s in stores if self._kind(s.node) == "row"]
        one_stores = [s for s in stores if self._kind(s.node) != "row"]
        lines = [
            *self._signature(stores, numbers, constants),
            "    block = ct.bid(0)",
            *self._blocks(stores[0].name),
            f"    shape, width = ({shape}), {rows[0].name}.shape[{self._groups}]",
            *(f"    {p.name}_one = {self._get(p, '0', 'True')}" for p in ones),
            "    if HELD:",
            *self._held(before, after, rows, ones, row_stores),
            "    else:",
            *self._walked(before, after, rows, ones, row_stores),
        ]
        if per_row is not None:
            tile_of = {p.name: f"{p.name}_one" for p in ones}
            lines += self._puts(one_stores, self._call(per_row, tile_of), "True", "    ", "0")
        return "\n".join(lines)

    def _held(
        self,
        before: dict[Node, Function],
        after: Function | None,
        rows: Sequence[Piece],
        ones: Sequence[Piece],
        stores: Sequence[Piece],
    ) -> Iterator[str]:
        even = "EVEN or k + 1 < CHUNKS"
        for piece in rows:
            yield f"        {piece.name}_row = ()"
        yield "        for k in ct.static_iter(range(CHUNKS)):"
        for piece in rows:
            yield f"            {piece.name}_row += ({self._get(piece, 'k', f'({even})')},)"
        tile_of = {p.name: f"{p.name}_row[k]" for p in rows} | {p.name: f"{p.name}_one" for p in ones}
        for reduction, function in before.items():
            yield from self._reduce(reduction, self._call(function, tile_of), "ct.static_iter(range(CHUNKS))", even)
        if after is not None:
            yield "        for k in ct.static_iter(range(CHUNKS)):"
            yield from self._puts(stores, self._call(after, tile_of), f"({even})", " " * 12, "k")

    def _walked(
        self,
        before: dict[Node, Function],
        after: Function | None,
        rows: Sequence[Piece],
        ones: Sequence[Piece],
        stores: Sequence[Piece],
    ) -> Iterator[str]:
        def tiles(function: Function) -> dict[str, str]:
            used = set(function.lines.loads.values())
            got = {p.name: self._get(p, "k", "EVEN") for p in rows if p.name in used}
            return got | {p.name: f"{p.name}_one" for p in ones}

        loop = "range(ct.cdiv(width, CHUNK))"
        for reduction, function in before.items():
            yield from self._reduce(reduction, self._call(function, tiles(function)), loop, "EVEN")
        if after is not None:
            yield f"        for k in {loop}:"
            yield from self._puts(stores, self._call(after, tiles(after)), "EVEN", " " * 12, "k")

    def _reduce(self, reduction: Node, tile: str, loop: str, even: str) -> Iterator[str]:
        start, add, end, neutral = _REDUCE[REDUCTIONS[reduction.target]]
        name = self._reduced[reduction]
        yield f"        {name} = {start}"
        yield f"        for k in {loop}:"
        yield f"            tile = inside({tile}, k, shape, width, {even}, {neutral})"
        yield f"            {name} = {add.format(acc=name, tile='tile')}"
        yield f"        {name} = {end.format(acc=name, axis=self._groups)}"


def _piece_name(base: str, segment: Segment, segments: Sequence[Segment]) -> str:
    if segment is None:
        return base
    if len(segments) == 2 and segment in segments:
        return f"{base}_{('left', 'right')[segments.index(segment)]}"
    return f"{base}_part_{segments.index(segment)}"


def _all(conditions: Sequence[str]) -> str:
    return " and ".join(conditions) or "True"
