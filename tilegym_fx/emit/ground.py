"""The statements of a function that a region touches, and those in between."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

from torch import fx

from .flow import always_binds, binds, reads, target_names
from .outcome import Refusal
from .owner import Owner
from .regions import Names, Region, writes_in_place
from .values import View

_LOOPS = (
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.ListComp,
    ast.SetComp,
    ast.DictComp,
    ast.GeneratorExp,
    ast.Lambda,
)


class Ground:
    """One region in one function.

    Attributes:
        last: The last statement with nodes of the region; it holds the anchor.
        removed: The ones before it, with the plain copies of outputs between them.
        between: The other statements between; they stay.
        written: Names that the removed statements bind.
    """

    def __init__(self, region: Region, at: View, owner: Owner, names: Names) -> None:
        self.region = region
        self.at = at
        self.owner = owner
        self.names = names
        self.source = at.source
        self.last, self.removed = self._statements()
        self.block = self.source.block(self.last)
        self.written = {name for s in self.removed for name in binds(s)}
        self.between = self._between()

    def _statements(self) -> tuple[ast.stmt, list[ast.stmt]]:
        found: dict[ast.stmt, None] = {}
        for number in sorted(self.region.numbers):
            expr = self.at.expression_of(number)
            statement = self.source.statement(expr) if expr is not None else None
            if statement is None or expr is None:
                why = "" if hasattr(self.source.code, "co_positions") else " before Python 3.11"
                raise Refusal(f"the expression of a node in {self.at.where()} cannot be told{why}")
            for above in (expr, *self.source.ancestors(expr)):
                if isinstance(above, _LOOPS):
                    raise Refusal(f"the region stands in a loop of {self.at.where()}, line {above.lineno}")
            found[statement] = None
        statements = sorted(found, key=lambda s: s.lineno)
        blocks = {id(self.source.block(s)) for s in statements}
        if len(blocks) > 1:
            raise Refusal(f"the region is spread over several blocks of {self.at.where()}")
        if any(hasattr(s, "body") for s in statements):
            raise Refusal(f"the region stands in the header of a block of {self.at.where()}")
        return statements[-1], statements[:-1]

    def _between(self) -> list[ast.stmt]:
        """Statements that stay, between the first that goes and the last. Plain copies of an output go
        too."""
        if not self.removed:
            return []
        kept: list[ast.stmt] = []
        gone: set[str] = set()
        for statement in self.block[self.block.index(self.removed[0]) : self.block.index(self.last)]:
            if statement in self.removed:
                gone |= binds(statement)
                continue
            if self._copies_output(statement, gone):
                self.removed = sorted([*self.removed, statement], key=lambda s: s.lineno)
                gone |= binds(statement)
                self.written |= binds(statement)
                continue
            self._check_kept(statement, gone)
            gone -= always_binds(statement)
            kept.append(statement)
        return kept

    def _copies_output(self, statement: ast.stmt, gone: set[str]) -> bool:
        if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Name):
            return False
        if statement.value.id not in gone or any(target_names(t) is None for t in statement.targets):
            return False
        return self.names.of_value(self.at.value(statement.value)) in self.region.outputs

    def _check_kept(self, statement: ast.stmt, gone: set[str]) -> None:
        needed = reads(statement) & gone
        if needed:
            name = sorted(needed)[0]
            raise Refusal(f"line {statement.lineno} of {self.at.where()} reads `{name}` inside the region")
        changed = writes_in_place(self.at.numbers_in(statement), self.at.provenance)
        if changed is not None:
            raise Refusal(f"line {statement.lineno} of {self.at.where()} changes a tensor in the middle of the region")
        if (binds(statement) & self.written) - always_binds(statement):
            raise Refusal(f"line {statement.lineno} of {self.at.where()} may bind what the region binds")

    def _check_removable(self) -> None:
        for statement in self.removed:
            if isinstance(statement, ast.AnnAssign):
                targets: Sequence[ast.expr] = [statement.target]
            elif isinstance(statement, ast.Assign):
                targets = statement.targets
            else:
                raise Refusal(f"line {statement.lineno} of {self.at.where()} is no plain assignment")
            if any(target_names(target) is None for target in targets):
                raise Refusal(f"line {statement.lineno} of {self.at.where()} assigns to more than names")

    def _output(self, value: Any) -> fx.Node | None:
        node = self.names.of_value(value)
        if node is None or node not in self.region.outputs or not self.names.same_shape(value, node):
            return None
        return node


def right_side(statement: ast.stmt) -> ast.expr:
    value = getattr(statement, "value", None)
    if not isinstance(value, ast.expr):
        raise Refusal(f"line {statement.lineno} is no plain assignment")
    return value


def short(expr: ast.expr) -> str:
    text = ast.unparse(expr)
    return text if len(text) <= 60 else text[:57] + "..."
