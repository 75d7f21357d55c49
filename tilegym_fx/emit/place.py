"""Turns one Match into a replacement of statements of one function, or says why it cannot be.

The lowest function is tried first. In it the Match's nodes lie in one or more statements of one block. The last of
them holds the anchor, the expression whose value is the Match's output; the others go. Arguments of the new call are
the author's own expressions that held the inputs in the code that goes.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from ..provenance import Call, NodeRef, Provenance
from ..results import Match
from .flow import always_binds, binds, captured, needed_after, reads, target_names
from .guards import Facts, Inspector, Refusal
from .owner import Owner, owner_of
from .regions import Names, Region, outside_users, region_of, writes_in_place
from .values import View, called_from, view

_LOOPS = (ast.For, ast.AsyncFor, ast.While, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda)

#: A piece of text, or an expression of the function that keeps its own text.
Piece = str | ast.expr


@dataclass(frozen=True)
class Operand:
    """An expression of the code that goes, whose value is an input of the Match."""

    expr: ast.expr
    statement: ast.stmt
    node: fx.Node


@dataclass
class Replacement:
    """What is written for one Match in one function.

    Attributes:
        match: The Match.
        view: The call that was looked at; another call of the same module must give the same text.
        owner: The method that is rewritten.
        last: The statement that holds the anchor.
        anchor: The expression whose value is the Match's output.
        removed: Statements before `last` that go, in order.
        idle: Statements that only fed the ones that go, in order.
        arguments: The arguments of the new call.
        before, after: Text around the call inside the anchor's place.
        targets: With several outputs: the names that `last` binds now.
        aliases: Names bound to another name after `last`.
        facts: What the code that goes depends on.
    """

    match: Match
    view: View
    owner: Owner
    last: ast.stmt
    anchor: ast.expr
    removed: list[ast.stmt]
    arguments: list[Piece]
    before: str = ""
    after: str = ""
    targets: list[str] | None = None
    aliases: list[tuple[str, str]] = field(default_factory=list)
    idle: list[ast.stmt] = field(default_factory=list)
    facts: Facts = field(default_factory=Facts)

    @property
    def statements(self) -> list[ast.stmt]:
        """Every statement that goes or changes, in order."""
        return [*self.idle, *self.removed, self.last]


def place(match: Match, names: Names, provenance: Provenance) -> Replacement:
    """The replacement for a Match.

    Raises:
        Refusal: If it cannot be written in source form, with the reason.
    """
    region = region_of(match, names)
    refusals: list[str] = []
    for call in _common_calls(region, provenance):
        at = view(provenance, call)
        if at is None:
            continue
        try:
            return Placer(region, at, owner_of(at), names).replacement()
        except Refusal as refusal:
            refusals.append(str(refusal))
            if not _may_be_written_above(refusal):
                break
    raise Refusal(_main(refusals))


class FinalRefusal(Refusal):
    """A refusal that no enclosing function can mend."""


def _may_be_written_above(refusal: Refusal) -> bool:
    return not isinstance(refusal, FinalRefusal)


def _main(refusals: list[str]) -> str:
    if not refusals:
        return "no function of model code contains the whole region"
    telling = [r for r in refusals if not r.endswith("is no method of a module") and " belongs to torch" not in r]
    return (telling or refusals)[0]


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


class Placer:
    """Plans the replacement of one region in one function."""

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

    # -- statements -------------------------------------------------------------------------------------------

    def _statements(self) -> tuple[ast.stmt, list[ast.stmt]]:
        found: dict[ast.stmt, None] = {}
        for number in sorted(self.region.numbers):
            expr = self.at.expression_of(number)
            statement = self.source.statement(expr) if expr is not None else None
            if statement is None or expr is None:
                raise Refusal(f"the expression of a node in {self.at.where()} cannot be told")
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
        """Statements that stay, between the first that goes and the last. Plain copies of an output go too."""
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
            raise Refusal(
                f"line {statement.lineno} of {self.at.where()} reads `{sorted(needed)[0]}` in the middle of the region"
            )
        changed = writes_in_place(self.at.numbers_in(statement), self.at.provenance)
        if changed is not None:
            raise Refusal(f"line {statement.lineno} of {self.at.where()} changes a tensor in the middle of the region")
        if (binds(statement) & self.written) - always_binds(statement):
            raise Refusal(f"line {statement.lineno} of {self.at.where()} may bind what the region binds")

    # -- the replacement --------------------------------------------------------------------------------------

    def replacement(self) -> Replacement:
        """The replacement.

        Raises:
            Refusal: If there is none in this function.
        """
        if writes_in_place(self.region.numbers, self.at.provenance) is not None:
            raise FinalRefusal("the region changes a tensor in place")
        self._check_removable()
        refusal = Refusal("the region has no expression of its own")
        for anchor in self._anchors():
            try:
                return self._with_anchor(anchor)
            except FinalRefusal:
                raise
            except Refusal as found:
                refusal = refusal if refusal.args[0] != "the region has no expression of its own" else found
        raise refusal

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

    def _anchors(self) -> Iterator[ast.expr]:
        """The smallest expression of the last statement with all of its region nodes, then what encloses it."""
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
        self._check_numbers(anchor, kept)
        inspector = Inspector(self.at, self.written, list(self.region.literals.values()))
        for statement in self.removed:
            inspector.expression(_right_side(statement), kept)
        inspector.expression(anchor, kept)
        facts = inspector.facts
        for name in self._optional(operands):
            inspector.present(name)
        arguments = self._arguments(operands, facts)
        made = Replacement(
            self.region.match, self.at, self.owner, self.last, anchor, self.removed, arguments, before, after, facts=facts
        )
        self._bind_outputs(made, outputs, kept)
        if facts.guards:
            self._check_guarded(made)
        else:
            made.idle = self._idle(made, kept)
        return made

    def _optional(self, operands: list[Operand]) -> list[str]:
        """Inputs that are None unless a caller gives them; a called function may do without, the kernel cannot."""
        spec = self.source.node.args
        named = dict(zip([a.arg for a in (*spec.posonlyargs, *spec.args)][::-1], spec.defaults[::-1], strict=False))
        named |= {a.arg: d for a, d in zip(spec.kwonlyargs, spec.kw_defaults, strict=True) if d is not None}
        optional = {name for name, d in named.items() if isinstance(d, ast.Constant) and d.value is None}
        found = [o.expr.id for o in operands if isinstance(o.expr, ast.Name) and o.expr.id in optional]
        crossed = any(self.at.provenance._origins[n].call is not self.at.call for n in self.region.numbers)
        return list(dict.fromkeys(found)) if crossed else []

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

    def _outputs_of(self, anchor: ast.expr) -> tuple[list[fx.Node], str, str]:
        """The outputs that the anchor's value holds, and the text that goes around the call for the rest of it."""
        value = self.at.value(anchor)
        single = self._output(value)
        if single is not None:
            return [single], "", ""
        if not isinstance(value, tuple):
            raise Refusal(f"the value of `{_short(anchor)}` in {self.at.where()} is not what the kernel computes")
        outputs = [self._output(item) for item in value]
        if None not in outputs:
            if tuple(outputs) != self.region.outputs:
                raise Refusal(f"`{_short(anchor)}` in {self.at.where()} gives the outputs in another order")
            return list(self.region.outputs), "", ""
        if len(self.region.outputs) != 1 or sum(o is not None for o in outputs) != 1:
            raise Refusal(f"`{_short(anchor)}` in {self.at.where()} gives more than the kernel computes")
        rest = [item for item, output in zip(value, outputs, strict=True) if output is None]
        if any(item is not None and not isinstance(item, (bool, int, float, str)) for item in rest):
            raise Refusal(f"`{_short(anchor)}` in {self.at.where()} gives more than the kernel computes")
        at = next(i for i, output in enumerate(outputs) if output is not None)
        before = "".join(f"{item!r}, " for item in value[:at])
        after = "".join(f", {item!r}" for item in value[at + 1 :])
        parent = self.source.parent(anchor)
        bare = isinstance(parent, (ast.Assign, ast.Return))
        return [o for o in outputs if o is not None], before if bare else "(" + before, after if bare else after + ")"

    def _output(self, value: Any) -> fx.Node | None:
        node = self.names.of_value(value)
        if node is None or node not in self.region.outputs or not self.names.same_shape(value, node):
            return None
        return node

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
            # An input given on under another name (a cast that does nothing) is the same tensor, so it stays as it is.
            if self.names.canonical(node) not in (*self.region.outputs, *self.region.inputs.values()):
                origin = self.at.provenance.site(node).innermost
                raise Refusal(f"{node.name}, computed at {origin}, is also needed elsewhere")
        self.gone = gone

    # -- inputs -----------------------------------------------------------------------------------------------

    def _operands(self, anchor: ast.expr) -> list[Operand]:
        found: list[Operand] = []
        for statement in self.removed:
            found += self._find_operands(_right_side(statement), statement, None)
        return found + self._find_operands(anchor, self.last, anchor)

    def _find_operands(self, expr: ast.AST, statement: ast.stmt, root: ast.expr | None) -> list[Operand]:
        if isinstance(expr, (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
            return []
        if isinstance(expr, ast.expr) and expr is not root and not (self.at.numbers_in(expr) & self.region.numbers):
            value = self.at.value(expr)
            node = self.names.of_value(value)
            if node is not None and node in self.region.inputs.values() and self.names.same_shape(value, node):
                return [Operand(expr, statement, node)]
        found: list[Operand] = []
        for child in ast.iter_child_nodes(expr):
            found += self._find_operands(child, statement, root)
        return found

    def _arguments(self, operands: list[Operand], facts: Facts) -> list[Piece]:
        used: list[ast.expr] = []
        arguments: list[Piece] = []
        for name, bound in self.region.match.inputs.items():
            if isinstance(bound, fx.Node):
                piece = self._tensor(name, self.region.inputs[name], operands)
                if isinstance(piece, ast.expr):
                    used.append(piece)
                piece = self._turned(name, piece)
            else:
                piece = self._scalar(name, bound, facts)
            arguments.append(piece)
        working = [expr for expr in used if self.at.numbers_in(expr)]
        if len({id(expr) for expr in working}) != len(working):
            raise Refusal("an input that is computed in place would be computed twice")
        for operand in operands:
            if self.at.numbers_in(operand.expr) and operand.expr not in used:
                raise Refusal(f"`{_short(operand.expr)}` is computed twice in {self.at.where()}")
        return arguments

    def _turned(self, name: str, piece: Piece) -> Piece:
        suffix = self.region.turned.get(name)
        if suffix is None:
            return piece
        text = piece if isinstance(piece, str) else ast.unparse(piece)
        if isinstance(piece, ast.expr) and not isinstance(piece, (ast.Name, ast.Attribute, ast.Subscript)):
            raise Refusal(f"`{name}` would have to be transposed in {self.at.where()}")
        return text + suffix

    def _tensor(self, name: str, node: fx.Node, operands: list[Operand]) -> Piece:
        candidates = [operand for operand in operands if operand.node is node]
        texts = dict.fromkeys(ast.unparse(operand.expr) for operand in candidates)
        if not texts:
            held = self._held(node)
            if held is None:
                raise Refusal(f"`{name}` has no expression in {self.at.where()}")
            return held
        movable = [o for o in candidates if self._same_at_anchor(o)]
        if not movable:
            raise Refusal(f"`{next(iter(texts))}` in {self.at.where()} has another value where the region ends")
        chosen = movable[0]
        others = {ast.unparse(o.expr): o for o in candidates}
        if len(others) > 1:
            chosen = next((o for o in movable if ast.unparse(o.expr) == name), chosen)
            for operand in others.values():
                if not self._aliases(chosen, operand):
                    raise Refusal(
                        f"`{ast.unparse(chosen.expr)}` and `{ast.unparse(operand.expr)}` in {self.at.where()} happen to "
                        "be one value"
                    )
        return chosen.expr

    def _same_at_anchor(self, operand: Operand) -> bool:
        """Whether an expression of a statement that goes still has its value where the anchor stands."""
        if operand.statement is self.last:
            return not self._rebound(operand, reads(operand.expr))
        names = reads(operand.expr)
        if self.at.numbers_in(operand.expr) and any(self.at.numbers_in(s) for s in self._kept_after(operand)):
            return not any(writes_in_place(self.at.numbers_in(s), self.at.provenance) for s in self._kept_after(operand))
        return not self._rebound(operand, names)

    def _kept_after(self, operand: Operand) -> list[ast.stmt]:
        start = self.block.index(operand.statement)
        return [s for s in self.between if self.block.index(s) > start]

    def _rebound(self, operand: Operand, names: set[str]) -> bool:
        """Whether a name was bound by a statement that goes, before this, or by one that stays, after this."""
        at = self.block.index(operand.statement)
        for statement in self.removed:
            if self.block.index(statement) < at and binds(statement) & names:
                later = [s for s in self.between if self.block.index(statement) < self.block.index(s) < at]
                for name in binds(statement) & names:
                    if not any(name in always_binds(s) for s in later):
                        return True
        return any(binds(s) & names for s in self._kept_after(operand))

    def _aliases(self, chosen: Operand, other: Operand) -> bool:
        """Whether two expressions are one value on every path: the same text, or one a plain copy of the other."""
        left, right = chosen.expr, other.expr
        if ast.dump(left) == ast.dump(right):
            return True
        if not isinstance(left, ast.Name) or not isinstance(right, ast.Name):
            return False
        return self._copied(left.id, right.id, other) or self._copied(right.id, left.id, other)

    def _copied(self, target: str, value: str, operand: Operand) -> bool:
        """Whether `target = value` runs before the region and neither name is bound after it."""
        first = self.removed[0] if self.removed else self.last
        found = False
        for statement in self.block[: self.block.index(first)]:
            is_copy = isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Name)
            if is_copy and statement.value.id == value and always_binds(statement) == {target}:  # type: ignore[attr-defined]
                found = True
            elif binds(statement) & {target, value}:
                found = False
        return found

    def _held(self, node: fx.Node) -> str | None:
        """A parameter or buffer as an attribute path from the function's `self`."""
        path = self.at.provenance.held.get(self._placeholder(node))
        if path is None:
            return None
        tensor_owner, _, attribute = path.rpartition(".")
        tensor = getattr(self.at.provenance.module.get_submodule(tensor_owner), attribute)
        found: list[str] = []
        for inner, module in self.owner.module.named_modules(remove_duplicate=False):
            for name, held in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
                if held is tensor:
                    found.append(".".join(part for part in (inner, name) if part))
        ran = self._ran_in()
        found.sort(key=lambda p: (p.rpartition(".")[0] not in ran, p.count("."), p))
        return _attribute_text(self.source.node.args.args[0].arg, found[0]) if found else None

    def _placeholder(self, node: fx.Node) -> str:
        origins = self.names.origins(node)
        return origins[0].name if origins else node.name

    def _ran_in(self) -> set[str]:
        """Paths, below this function's module, of the modules that the region ran in."""
        prefix = next(iter(self.at.provenance.module_paths(self.owner.module)), "")
        found: set[str] = set()
        for number in self.region.numbers:
            for call in self.at.provenance._origins[number].call.ancestors():
                if call is self.at.call:
                    break
                if call.module is not None:
                    paths = self.at.provenance.module_paths(call.module)
                    found |= {p.removeprefix(prefix).lstrip(".") for p in paths if p.startswith(prefix)}
        return found or {""}

    def _scalar(self, name: str, value: Any, facts: Facts) -> str:
        if isinstance(value, (bool, type(None))):
            return repr(value)
        found = [text for text, held in facts.floats.items() if type(held) is type(value) and held == value]
        if len(found) > 1:
            found = [text for text in found if name in text.rpartition(".")[2]] or found
        if len(found) != 1:
            return repr(value)
        root = self.source.node.args.args[0].arg
        facts.constants.pop(found[0].removeprefix(root + "."), None)
        return found[0]

    # -- outputs ----------------------------------------------------------------------------------------------

    def _bind_outputs(self, made: Replacement, anchored: list[fx.Node], kept: set[ast.expr]) -> None:
        """Finds the names that must hold outputs once the statements that bound them are gone."""
        wanted = self._wanted(made, kept)
        outputs = self.region.outputs
        if not wanted and len(outputs) == len(anchored):
            return
        holder = self.last if isinstance(self.last, (ast.Assign, ast.AnnAssign)) else None
        names = self._target_of(holder, made.anchor) if holder is not None else None
        if names is None or len(anchored) != 1 or made.before or made.after:
            raise Refusal(f"line {self.last.lineno} of {self.at.where()} gives the kernel's results no names of their own")
        holding: dict[fx.Node, list[str]] = {anchored[0]: names}
        for name, node in wanted.items():
            if name not in names:
                holding.setdefault(node, []).append(name)
        spare = self._spare_name()
        made.targets = [holding[o][0] if o in holding else spare for o in outputs]
        made.aliases = [(name, held[0]) for held in holding.values() for name in held[1:]]

    def _target_of(self, statement: ast.Assign | ast.AnnAssign | None, anchor: ast.expr) -> list[str] | None:
        if isinstance(statement, ast.Assign) and statement.value is anchor:
            names = [target.id for target in statement.targets if isinstance(target, ast.Name)]
            return names if len(names) == len(statement.targets) else None
        return None

    def _spare_name(self) -> str:
        used = reads(self.source.node) | captured(self.source.node)
        return next(name for name in ("_", "_unused", "_unused_output") if name not in used)

    def _wanted(self, made: Replacement, kept: set[ast.expr]) -> dict[str, fx.Node]:
        """Names bound by statements that go and still needed, with the outputs that they hold."""
        gone: set[ast.AST] = {*self.removed, made.anchor}
        here = reads(self.last, [made.anchor])
        wanted: dict[str, fx.Node] = {}
        after = self.at.before(self.last)
        for name in sorted(self.written):
            writer = next(s for s in reversed(self.removed) if name in binds(s))
            later = [s for s in self.between if s.lineno > writer.lineno]
            if any(name in always_binds(s) for s in later):
                continue
            in_last = name in here
            lives_on = name not in always_binds(self.last) and needed_after(self.source, self.last, name, gone)
            if not in_last and not lives_on:
                continue
            node = self._output(after.get(name))
            if node is None or in_last:
                raise Refusal(f"`{name}`, bound by the region at line {writer.lineno}, is read afterwards")
            wanted[name] = node
        return wanted

    # -- what else goes ---------------------------------------------------------------------------------------

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
        value = _right_side(statement)
        allowed = (
            ast.Name, ast.Attribute, ast.Constant, ast.Subscript, ast.Slice, ast.Tuple, ast.UnaryOp, ast.BinOp,
            ast.expr_context, ast.operator, ast.unaryop,
        )  # fmt: skip
        if not all(isinstance(part, allowed) for part in ast.walk(value)):
            return False
        numbers = self.at.numbers_in(statement)
        return not outside_users(numbers, self.at.provenance, but=self.gone)


def _right_side(statement: ast.stmt) -> ast.expr:
    value = getattr(statement, "value", None)
    if not isinstance(value, ast.expr):
        raise Refusal(f"line {statement.lineno} is no plain assignment")
    return value


def _short(expr: ast.expr) -> str:
    text = ast.unparse(expr)
    return text if len(text) <= 60 else text[:57] + "..."


def _attribute_text(root: str, path: str) -> str:
    text = root
    for part in path.split("."):
        text += f"[{part}]" if part.isdigit() else f".{part}"
    return text


def explain(found: Refusal, describe: Callable[[], str]) -> str:
    """The refusal with what it is about."""
    return f"{describe()}: {found}"


__all__ = ["NodeRef", "Operand", "Piece", "Placer", "Replacement", "called_from", "place"]
