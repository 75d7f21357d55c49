"""Turns one Match into a replacement of statements of one function, or says why it cannot be.

The lowest function is tried first. In it the Match's nodes lie in one or more statements of one block. The
last of them holds the anchor, the expression whose value is the Match's output; the others go. Arguments
of the new call are the author's own expressions that held the inputs in the code that goes.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import torch

from ..provenance import NODE_KEY, Call, Provenance
from ..results import Match
from .conditions import wrapped
from .flow import always_binds, needed_after, reads
from .ground import right_side
from .guards import Inspector
from .inputs import Piece
from .outcome import FinalRefusal, Refusal
from .outputs import Outputs, Replacement
from .owner import Owner, owner_of
from .regions import Names, Region, outside_users, region_of, without_last_turn, writes_in_place
from .stored import Stored
from .values import View, view

_ADDS = {torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor}


def place(match: Match, names: Names, provenance: Provenance) -> Replacement:
    """The replacement for a Match.

    Raises:
        Refusal: If it cannot be written in source form, with the reason.
    """
    try:
        return _place(region_of(match, names), names, provenance)
    except FinalRefusal:
        raise
    except Refusal as refusal:
        turn = without_last_turn(match)
        if turn is None:
            raise
        try:
            return _place(region_of(match, names, *turn), names, provenance)
        except Refusal:
            raise refusal from None


def _place(region: Region, names: Names, provenance: Provenance) -> Replacement:
    unowned: list[str] = []
    refusals: list[str] = []
    for call in _common_calls(region, provenance):
        at = view(provenance, call)
        owner = _owner(at, unowned) if at is not None else None
        if at is None or owner is None:
            continue
        try:
            return _in_function(region, at, owner, names)
        except FinalRefusal:
            raise
        except Refusal as refusal:
            refusals.append(str(refusal))
    telling = [why for why in unowned if not why.endswith(_NO_METHOD) and " belongs to torch" not in why]
    raise Refusal((refusals or telling or unowned or ["no function of model code contains the whole region"])[0])


def _in_function(region: Region, at: View, owner: Owner, names: Names) -> Replacement:
    try:
        return Placer(region, at, owner, names).replacement()
    except FinalRefusal:
        raise
    except Refusal:
        if all(at.provenance._origins[number].call.receiver is None for number in region.numbers):
            raise
        return Stored(region, at, owner, names).replacement()


_NO_METHOD = "is no method of a module"


def _owner(at: View, unowned: list[str]) -> Owner | None:
    try:
        return owner_of(at)
    except Refusal as refusal:
        unowned.append(str(refusal))
        return None


def _common_calls(region: Region, provenance: Provenance) -> Iterator[Call]:
    """The calls that every node of the region was made in, innermost first."""
    chains: list[list[Call]] = []
    for number in region.numbers:
        origin = provenance._origins.get(number)
        if origin is None:
            return
        chains.append(list(origin.call.ancestors()))
    common = set.intersection(*({call.index for call in chain} for chain in chains))
    yield from (call for call in chains[0] if call.index in common)


class Placer(Outputs):
    """Plans the replacement of one region in one function. See `Ground` for the attributes."""

    def replacement(self) -> Replacement:
        """The replacement.

        Raises:
            Refusal: If there is none in this function.
        """
        if writes_in_place(self.region.numbers, self.at.provenance) is not None:
            raise FinalRefusal("the region changes a tensor in place")
        self._check_removable()
        refusals: list[Refusal] = []
        for anchor in self._anchors():
            found = self._try_anchor(anchor)
            if isinstance(found, Replacement):
                return found
            refusals.append(found)
        raise refusals[0] if refusals else Refusal("the region has no expression of its own")

    def _try_anchor(self, anchor: ast.expr) -> Replacement | Refusal:
        try:
            return self._with_anchor(anchor)
        except FinalRefusal:
            raise
        except Refusal as refusal:
            return refusal

    def _anchors(self) -> Iterator[ast.expr]:
        """The smallest expression of the last statement with its region nodes, then what encloses it."""
        exprs = [
            expr
            for number in sorted(self.region.numbers)
            if (expr := self.at.expression_of(number)) is not None and self.source.statement(expr) is self.last
        ]
        chains = [[expr, *self.source.ancestors(expr)] for expr in exprs]
        for above in chains[0]:
            if isinstance(above, ast.stmt):
                return
            if isinstance(above, ast.expr) and all(above in chain for chain in chains):
                yield above

    def _with_anchor(self, anchor: ast.expr) -> Replacement:
        self._check_context(anchor)
        operands = self._operands(anchor)
        kept = {operand.expr for operand in operands}
        outputs, before, after = self._outputs_of(anchor)
        unasked = self._unasked
        self._check_numbers(anchor, kept)
        literals = list(self.region.literals.values())
        inspector = Inspector(self.at, self.written, literals, self.region.numbers)
        for statement in self.removed:
            inspector.expression(right_side(statement), kept)
        inspector.expression(anchor, kept)
        facts = inspector.facts
        if unasked is not None:
            inspector.note(unasked)
        for name in self._optional(operands):
            inspector.present(name)
        arguments = self._arguments(operands, facts)
        made = Replacement(
            self.region.match,
            self.at,
            self.owner,
            self.last,
            anchor,
            self.removed,
            arguments,
            self.region.suffix,
            before,
            after,
            facts=facts,
            partial=unasked is not None,
        )
        self._bind_outputs(made, outputs, kept)
        added = self._added_mask(arguments)
        if added is not None and (facts.guards or self._is_guardable(made)):
            inspector.note(added)
        elif added is not None:
            made.arguments = self._with_mask_cast(arguments)
        if facts.guards:
            self._check_guarded(made)
        else:
            made.idle = self._idle(made, kept)
        return made

    def _added_mask(self, arguments: list[Piece]) -> str | None:
        """The condition that a mask which the author adds is such: the kernel takes a boolean one as who attends."""
        pieces = dict(zip(self.region.match.inputs, arguments, strict=True))
        mask, query, node = pieces.get("mask"), pieces.get("q"), self.region.inputs.get("mask")
        if node is None or not isinstance(mask, ast.expr) or not node.meta["val"].is_floating_point():
            return None
        if not any(
            user.target in _ADDS and user.meta.get(NODE_KEY) in self.region.numbers
            for origin in self.names.origins(node)
            for user in origin.users
        ):
            return None
        if isinstance(query, ast.Name) and node.meta["val"].dtype == self.region.inputs["q"].meta["val"].dtype:
            return f"{wrapped(mask)}.dtype == {query.id}.dtype"
        return f"{wrapped(mask)}.is_floating_point()"

    def _with_mask_cast(self, arguments: list[Piece]) -> list[Piece]:
        """The arguments where no condition can be written: what is added to the scores is made such before, as ones
        of a boolean mask are. Of the sample's own kind a mask stays itself."""
        names = list(self.region.match.inputs)
        mask, query = (arguments[names.index(name)] for name in ("mask", "q"))
        same = self.region.inputs["mask"].meta["val"].dtype == self.region.inputs["q"].meta["val"].dtype
        if not (same and isinstance(query, ast.Name) and isinstance(mask, ast.expr)):
            raise Refusal(f"the mask in {self.at.where()} may be a boolean one, and no condition can be written there")
        cast = f"{wrapped(mask)}.to({query.id}.dtype)"
        return [cast if name == "mask" else piece for name, piece in zip(names, arguments, strict=True)]

    def _is_guardable(self, made: Replacement) -> bool:
        try:
            self._check_guarded(made)
        except Refusal:
            return False
        return True

    def _check_context(self, anchor: ast.expr) -> None:
        """The anchor must run whenever its statement does: no part of a choice, target or delayed code."""
        child: ast.AST = anchor
        for above in self.source.ancestors(anchor):
            if isinstance(above, ast.stmt):
                if isinstance(above, (ast.AugAssign, ast.Delete)) or child in getattr(above, "targets", ()):
                    raise Refusal(f"line {above.lineno} of {self.at.where()} changes a value in place")
                return
            if isinstance(above, (ast.FormattedValue, ast.NamedExpr)) and self.removed:
                raise Refusal(f"the region ends inside {ast.unparse(above)!r}")
            child = above

    def _check_numbers(self, anchor: ast.expr, kept: set[ast.expr]) -> None:
        """What goes must compute nothing that stays."""
        gone: set[int] = set()
        for statement in self.removed:
            gone |= self.at.numbers_in(statement)
        gone |= self.at.numbers_in(anchor)
        for expr in kept:
            gone -= self.at.numbers_in(expr)
        missing = self.region.numbers - gone
        if missing:
            raise Refusal(f"an input of the region is computed by part of it in {self.at.where()}")
        changed = writes_in_place(gone, self.at.provenance)
        if changed is not None:
            raise FinalRefusal(f"{self.at.where()} also changes a tensor in place ({changed.name})")
        for node in outside_users(gone, self.at.provenance):
            # An input given on under another name (a cast that does nothing) is the same tensor, so it
            # stays as it is.
            if self.names.canonical(node) not in (*self.region.outputs, *self.region.inputs.values()):
                origin = self.at.provenance.site(node).innermost
                raise Refusal(f"{node.name}, computed at {origin}, is also needed elsewhere")
        self.gone = gone

    def _check_guarded(self, made: Replacement) -> None:
        block = self.block
        first = block.index(made.removed[0]) if made.removed else block.index(self.last)
        if len(made.removed) != block.index(self.last) - first:
            raise Refusal(f"the region in {self.at.where()} depends on a condition and has other statements in between")
        if not isinstance(self.last, (ast.Assign, ast.AnnAssign, ast.Return, ast.Expr)):
            raise Refusal(f"the region in {self.at.where()} depends on a condition inside a larger statement")

    def _idle(self, made: Replacement, kept: set[ast.expr]) -> list[ast.stmt]:
        """Plain assignments before the region that nobody reads once it is gone."""
        gone: set[ast.AST] = {*self.removed}
        dropped = {name for s in self.removed for name in reads(s)} | reads(made.anchor)
        now = {name for a in made.arguments if isinstance(a, ast.expr) for name in reads(a)}
        rest = reads(self.last, [made.anchor]) | now
        idle: list[ast.stmt] = []
        start = self.block.index(self.removed[0]) if self.removed else self.block.index(self.last)
        for statement in reversed(self.block[: self.block.index(self.last)]):
            if statement in self.removed or not self.at.ran(statement):
                continue
            names = always_binds(statement)
            if not names or not names <= dropped or names & rest or not self._is_plain(statement):
                continue
            if any(self._read_on(statement, name, gone, made.anchor) for name in names):
                continue
            if self.block.index(statement) >= start and statement in self.between:
                continue
            idle.append(statement)
            gone.add(statement)
            dropped |= reads(statement)
        return idle[::-1]

    def _read_on(self, statement: ast.stmt, name: str, gone: set[ast.AST], anchor: ast.expr) -> bool:
        return needed_after(self.source, statement, name, {*gone, anchor})

    def _is_plain(self, statement: ast.stmt) -> bool:
        """Whether a statement only looks: no call, and no graph node that others read."""
        value = right_side(statement)
        allowed = (
            ast.Name, ast.Attribute, ast.Constant, ast.Subscript, ast.Slice, ast.Tuple, ast.UnaryOp,
            ast.BinOp, ast.expr_context, ast.operator, ast.unaryop,
        )  # fmt: skip
        if not all(isinstance(part, allowed) for part in ast.walk(value)):
            return False
        numbers = self.at.numbers_in(statement)
        return not outside_users(numbers, self.at.provenance, but=self.gone)
