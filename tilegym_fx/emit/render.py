"""The text of a rewritten function: the author's bytes, with the planned places replaced.

Everything that is not replaced keeps its bytes. A replaced place may hold expressions of the author's own,
and those may hold further replacements, so text is rendered from the inside out.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from ..authored.source import FunctionSource
from .conditions import unparse
from .inputs import Piece
from .outcome import Refusal
from .outputs import Replacement

#: Width at which an emitted call is broken into one argument per line: transformers' own.
WIDTH = 119


@dataclass(frozen=True)
class Arm:
    """One way to run a place, under conditions that all must hold.

    Attributes:
        guards: The conditions; none for a place that always holds.
        call: Name of the Definition.
        arguments: The arguments of the call.
        suffix: Text right after the call.
        before, after: Text around both.
        targets, aliases, lines: As in `Replacement`.
    """

    guards: tuple[str, ...]
    call: str
    arguments: tuple[Piece, ...]
    suffix: str
    before: str
    after: str
    targets: tuple[str, ...] | None
    aliases: tuple[tuple[str, str], ...]
    lines: tuple[str, ...] = ()


@dataclass
class Edit:
    """What happens to one place of a function: the statements that go and the anchor that is replaced."""

    last: ast.stmt
    anchor: ast.expr
    removed: tuple[ast.stmt, ...]
    idle: tuple[ast.stmt, ...]
    arms: list[Arm] = field(default_factory=list)

    @property
    def guarded(self) -> bool:
        return bool(self.arms[0].guards)


def edit_of(made: Replacement) -> Edit:
    """The edit that a replacement asks for."""
    targets = tuple(made.targets) if made.targets is not None else None
    arm = Arm(
        tuple(made.facts.guards), made.match.definition, tuple(made.arguments), made.suffix,
        made.before, made.after, targets, tuple(made.aliases), made.lines,
    )  # fmt: skip
    return Edit(made.last, made.anchor, tuple(made.removed), tuple(made.idle), [arm])


def merge(edits: list[Edit], new: Edit) -> None:
    """Adds an edit to those of one function.

    Raises:
        Refusal: If it overlaps with one that is there in a way that cannot be combined.
    """
    for edit in edits:
        if edit.anchor is new.anchor and edit.removed == new.removed:
            _add_arm(edit, new)
            return
        if _overlap(edit, new) or _overlap(new, edit):
            raise Refusal("the region overlaps with another that is rewritten in the same function")
        if edit.last is new.last and (edit.guarded or new.guarded) and _clash(edit, new):
            raise Refusal("the region shares its statement with another that depends on a condition")
    edits.append(new)


def _overlap(edit: Edit, other: Edit) -> bool:
    """Whether an edit drops what another needs: nesting inside an expression that is kept is no overlap."""
    if set(edit.removed) & set(other.removed) or set(edit.idle) & {*other.removed, other.last}:
        return True
    return other.last in edit.removed and not _inside(other.anchor, edit)


def _clash(edit: Edit, new: Edit) -> bool:
    """Whether two edits of one statement cannot nest: one must lie inside an argument of the other."""
    return not (_inside(edit.anchor, new) or _inside(new.anchor, edit))


def _inside(anchor: ast.expr, edit: Edit) -> bool:
    return any(
        anchor is part for arm in edit.arms for a in arm.arguments if isinstance(a, ast.expr) for part in ast.walk(a)
    )


def _add_arm(edit: Edit, new: Edit) -> None:
    arm = new.arms[0]
    if arm in edit.arms:
        return
    if not arm.guards or not edit.guarded:
        raise Refusal("two captures of the model ask for different calls at this place")
    edit.arms.append(arm)


class Renderer:
    """Renders one function.

    Args:
        source: The function.
        edits: Its edits; no two overlap except by nesting.
        renames: Global name -> the name that it has in the emitted file.
    """

    def __init__(self, source: FunctionSource, edits: Iterable[Edit]) -> None:
        self.source = source
        self.edits = list(edits)
        self._text = source.file.text
        self._gone = {s for edit in self.edits if not edit.guarded for s in (*edit.removed, *edit.idle)}

    def render(self) -> str:
        """The function's text, from its first decorator on, indented as in its file.

        Raises:
            Refusal: If that would be no Python.
        """
        text = self._render()
        try:
            ast.parse(f"if True:\n{text}" if text[:1].isspace() else text)
        except SyntaxError as error:
            line = (error.text or "").strip()
            raise Refusal(f"{self.source.node.name} would hold `{line}`, which is no Python: {error.msg}") from error
        return text

    def _render(self) -> str:
        start, end = self.source.whole()
        places: list[tuple[int, int, str]] = []
        for edit in self.edits:
            places += self._places(edit)
        text = self._fill(start, end, self._outermost(places))
        return text.rstrip() + "\n"

    def _outermost(self, places: Sequence[tuple[int, int, str]]) -> list[tuple[int, int, str]]:
        found: list[tuple[int, int, str]] = []
        for place in sorted(set(places), key=lambda p: (p[0], -p[1])):
            if not found or place[0] >= found[-1][1]:
                found.append(place)
        return found

    def _fill(self, start: int, end: int, places: Sequence[tuple[int, int, str]]) -> str:
        text, at = "", start
        for first, last, new in places:
            text += self._text[at:first].decode() + new
            at = last
        return text + self._text[at:end].decode()

    def _places(self, edit: Edit) -> list[tuple[int, int, str]]:
        places = [self._line_span(s) for s in (*edit.removed, *edit.idle)] if not edit.guarded else []
        if edit.guarded:
            first = edit.removed[0] if edit.removed else edit.last
            start, end = self.source.span(first)[0], self.source.span(edit.last)[1]
            places.append((start, end, self._guarded(edit)))
        elif edit.arms[0].targets is not None:
            start, end = self.source.span(edit.last)
            places.append((start, end, self._statement(edit, edit.arms[0], edit.last.col_offset)))
        else:
            start, end = self.source.span(edit.anchor)
            places.append((start, end, self._call(edit, edit.arms[0], self._column(edit.anchor))))
        return places

    def _line_span(self, statement: ast.stmt) -> tuple[int, int, str]:
        """A statement's whole lines, with the blank lines after it if blank lines come before it or
        nothing does."""
        file = self.source.file
        first, last = statement.lineno, statement.end_lineno or statement.lineno
        start, end = file.line_start(first), file.line_start(last + 1)
        if (beside := self._beside_others(statement, start, end)) is not None:
            return *beside, ""
        before = self._line(first - 1).strip()
        if before == "" or before.endswith((":", '"""', "'''")):
            while self._line(last + 1).strip() == "" and last + 1 <= self.source.last_line:
                last += 1
                end = file.line_start(last + 1)
        return start, end, ""

    def _beside_others(self, statement: ast.stmt, start: int, end: int) -> tuple[int, int] | None:
        """Where a statement stands that shares its lines with others, up to the next; None if it has them alone."""
        first, last = self.source.span(statement)
        before, after = self._text[start:first].strip(), self._text[last:end].lstrip()
        follows = after[1:].strip() if after.startswith(b";") else b""
        if follows and not follows.startswith(b"#"):
            return first, end - len(after[1:].lstrip())
        return (first, last) if before else None

    def _line(self, number: int) -> str:
        return self._text[self.source.file.line_start(number) : self.source.file.line_start(number + 1)].decode()

    def _column(self, expr: ast.expr) -> int:
        """The column at which an expression's line begins: where a broken call's last bracket goes."""
        line = self._line(expr.lineno)
        return len(line) - len(line.lstrip())

    def expression(self, expr: ast.expr, without: Edit | None = None) -> str:
        """An expression of the author's, with the replacements inside it."""
        start, end = self.source.span(expr)
        places: list[tuple[int, int, str]] = []
        for edit in self.edits:
            if edit is without or edit.guarded or edit.arms[0].targets is not None:
                continue
            first, last = self.source.span(edit.anchor)
            if start <= first and last <= end:
                places += [(first, last, self._call(edit, edit.arms[0], self._column(edit.anchor)))]
        return self._fill(start, end, self._outermost(places))

    def _call(self, edit: Edit, arm: Arm, column: int, prefix: int | None = None) -> str:
        arguments = [
            argument if isinstance(argument, str) else self._argument(argument, edit) for argument in arm.arguments
        ]
        name = f"tilegym_fx.ops.{arm.call}"
        flat = f"{arm.before}{name}({', '.join(arguments)}){arm.suffix}{arm.after}"
        lead = edit.anchor.col_offset if prefix is None else prefix
        tail = self._tail(edit.anchor) if prefix is None else 0
        if "\n" not in flat and lead + len(flat) + tail <= WIDTH:
            return flat
        if (arm.before or arm.after) and not arm.before.startswith("("):
            return self._tuple(edit, arm, column)
        inner = " " * (column + 4)
        lines = "".join(f"{inner}{_reindent(argument, column + 4)},\n" for argument in arguments)
        return f"{arm.before}{name}(\n{lines}{' ' * column}){arm.suffix}{arm.after}"

    def _tuple(self, edit: Edit, arm: Arm, column: int) -> str:
        """The call and what stands beside it, one item per line in brackets."""
        inner = " " * (column + 4)
        alone = replace(arm, before="", after="")
        items = [*_items(arm.before), self._call(edit, alone, column + 4, column + 4), *_items(arm.after)]
        return "(\n" + "".join(f"{inner}{item},\n" for item in items) + " " * column + ")"

    def _tail(self, anchor: ast.expr) -> int:
        line = self._line(anchor.end_lineno or anchor.lineno)
        return len(line.rstrip()) - (anchor.end_col_offset or 0)

    def _argument(self, argument: ast.expr, edit: Edit) -> str:
        text = self.expression(argument, edit)
        return f"({text})" if isinstance(argument, (ast.NamedExpr, ast.GeneratorExp, ast.Starred)) else text

    def _statement(self, edit: Edit, arm: Arm, column: int) -> str:
        """The last statement as one assignment to all results."""
        assert arm.targets is not None
        left = ", ".join(arm.targets) + " = "
        text = left + self._call(edit, arm, column, column + len(left))
        for name, held in arm.aliases:
            text += f"\n{' ' * column}{name} = {held}"
        return text

    def _guarded(self, edit: Edit) -> str:
        """`if` the conditions hold, the new call; `else` the author's statements."""
        first = edit.removed[0] if edit.removed else edit.last
        column = first.col_offset
        pad = " " * column
        text = ""
        for i, arm in enumerate(edit.arms):
            text += f"{'if' if i == 0 else 'elif'} {_condition(arm.guards, column)}:\n"
            text += textwrap.indent(self._armed(edit, arm, column + 4), "    " + pad).rstrip() + f"\n{pad}"
        start, end = self.source.span(first)[0], self.source.span(edit.last)[1]
        original = self._fill(start, end, self._outermost(self._nested(edit, start, end)))
        if any(isinstance(n, ast.Constant) and isinstance(n.value, str) and n.lineno != n.end_lineno
               for s in (*edit.removed, edit.last) for n in ast.walk(s)):  # fmt: skip
            raise Refusal("the region depends on a condition and holds a string of several lines")
        return text + f"else:\n{pad}    " + original.replace("\n", "\n    ").replace("\n    \n", "\n\n")

    def _nested(self, edit: Edit, start: int, end: int) -> list[tuple[int, int, str]]:
        places: list[tuple[int, int, str]] = []
        for other in self.edits:
            first, last = self.source.span(other.anchor)
            if other is not edit and not other.guarded and start <= first and last <= end:
                places.append((first, last, self._call(other, other.arms[0], self._column(other.anchor))))
        return places

    def _armed(self, edit: Edit, arm: Arm, column: int) -> str:
        """The replaced statement of one arm, without indentation of its own."""
        if arm.lines:
            return "\n".join(_broken(line, column) for line in arm.lines)
        if arm.targets is not None:
            return textwrap.dedent(" " * column + self._statement(edit, arm, column))
        start, end = self.source.span(edit.last)
        first, last = self.source.span(edit.anchor)
        head = self._text[start:first].decode()
        lead = column + len(head.rpartition("\n")[2])
        call = self._call(edit, arm, column, lead)
        return textwrap.dedent(" " * column + head + call + self._text[last:end].decode())


def _broken(line: str, column: int) -> str:
    """An assignment with the items of what is right of it on lines of their own, if it is too long for one."""
    if column + len(line) <= WIDTH:
        return line
    left, _, right = line.partition(" = ")
    return f"{left} = {_opened(ast.parse(right, mode='eval').body, column)}"


def _opened(value: ast.expr, column: int) -> str:
    """A tuple or call with one item per line, an index with a line of its own."""
    if isinstance(value, ast.Subscript):
        index = unparse(ast.Subscript(ast.Name("_"), value.slice))[2:-1]
        return f"{unparse(value.value)}[\n    {index}\n]"
    if not isinstance(value, (ast.Tuple, ast.Call)):
        return unparse(value)
    head, items = ("", value.elts) if isinstance(value, ast.Tuple) else (unparse(value.func), value.args)
    inner = ""
    for item in items:
        text = unparse(item)
        fits = column + 4 + len(text) < WIDTH
        inner += textwrap.indent(text if fits else _opened(item, column + 4), "    ") + ",\n"
    return f"{head}(\n{inner})"


def _items(text: str) -> list[str]:
    return [item for item in text.split(", ") if item]


def _condition(guards: Sequence[str], column: int) -> str:
    flat = " and ".join(guards)
    if column + len(flat) + 6 <= WIDTH:
        return flat
    pad = " " * (column + 4)
    return "(\n" + "".join(f"{pad}{'and ' if i else ''}{g}\n" for i, g in enumerate(guards)) + " " * column + ")"


def _reindent(text: str, column: int) -> str:
    """A text of several lines moved so that its last line, a closing bracket, stands at a column."""
    lines = text.split("\n")
    if len(lines) == 1:
        return text
    shift = column - (len(lines[-1]) - len(lines[-1].lstrip()))
    moved = [
        line if not line.strip() else " " * max(0, len(line) - len(line.lstrip()) + shift) + line.lstrip()
        for line in lines[1:]
    ]
    return "\n".join([lines[0], *moved])
