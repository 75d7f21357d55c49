"""The names and expressions that must hold the outputs of a Match once its statements are gone."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from ..authored.modules import is_looked_at
from ..authored.source import walk
from ..provenance import NodeRef
from ..results import Match
from .flow import always_binds, binds, captured, needed_after, reads, target_names
from .ground import short
from .inputs import Inputs, Piece
from .outcome import Facts, Refusal
from .owner import Owner
from .values import View


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
        suffix: Text right after the call.
        before, after: Text around the call inside the anchor's place.
        targets: With several outputs: the names that `last` binds now.
        aliases: Names bound to another name after `last`.
        facts: What the code that goes depends on.
        partial: Whether a part of what the method returns is left out, under a condition.
        lines: The statements that stand in the place of `last`, where a call alone would not do.
        part: Which of the kernels' calls in those is this Match's.
    """

    match: Match
    view: View
    owner: Owner
    last: ast.stmt
    anchor: ast.expr
    removed: list[ast.stmt]
    arguments: list[Piece]
    suffix: str = ""
    before: str = ""
    after: str = ""
    targets: list[str] | None = None
    aliases: list[tuple[str, str]] = field(default_factory=list)
    idle: list[ast.stmt] = field(default_factory=list)
    facts: Facts = field(default_factory=Facts)
    partial: bool = False
    lines: tuple[str, ...] = ()
    part: int = 0

    @property
    def statements(self) -> list[ast.stmt]:
        """Every statement that goes or changes, in order."""
        return [*self.idle, *self.removed, self.last]


class Outputs(Inputs):
    """Finds where the results go. See `Ground` for the attributes."""

    def _outputs_of(self, anchor: ast.expr) -> tuple[list[fx.Node], str, str]:
        """The outputs that the anchor's value holds, and the text that goes around the call for the rest
        of it."""
        value = self.at.value(anchor)
        self._unasked: str | None = None
        single = self._output(value)
        if single is not None:
            return [single], "", ""
        if not isinstance(value, tuple):
            raise Refusal(f"the value of `{short(anchor)}` in {self.at.where()} is not what the kernel computes")
        outputs = [self._output(item) for item in value]
        if None not in outputs:
            if tuple(outputs) != self.region.outputs:
                raise Refusal(f"`{short(anchor)}` in {self.at.where()} gives the outputs in another order")
            return list(self.region.outputs), "", ""
        if len(self.region.outputs) != 1 or sum(o is not None for o in outputs) != 1:
            raise Refusal(f"`{short(anchor)}` in {self.at.where()} gives more than the kernel computes")
        rest = [item for item, output in zip(value, outputs, strict=True) if output is None]
        self._unasked = self._weights_unasked(anchor, value, rest)
        if self._unasked is not None:
            rest, value = (
                [None],
                tuple(None if output is None else item for item, output in zip(value, outputs, strict=True)),
            )
        if any(item is not None and not isinstance(item, (bool, int, float, str)) for item in rest):
            raise Refusal(f"`{short(anchor)}` in {self.at.where()} gives more than the kernel computes")
        at = next(i for i, output in enumerate(outputs) if output is not None)
        before = "".join(f"{item!r}, " for item in value[:at])
        after = "".join(f", {item!r}" for item in value[at + 1 :])
        parent = self.source.parent(anchor)
        bare = isinstance(parent, (ast.Assign, ast.Return))
        return (
            [o for o in outputs if o is not None],
            before if bare else "(" + before,
            after if bare else after + ")",
        )

    def _weights_unasked(self, anchor: ast.expr, value: tuple[Any, ...], rest: list[Any]) -> str | None:
        """The condition under which nobody sees the attention weights that stand beside an attention's output.

        The function only hands them on, and transformers looks at them only when they were asked for.
        """
        if "attention" not in self.region.match.definition or len(rest) != 1 or len(value) != 2:
            return None
        if not isinstance(rest[0], NodeRef) or rest[0].id not in self.region.numbers:
            return None
        parent = self.source.parent(anchor)
        names = target_names(parent.targets[0]) if isinstance(parent, ast.Assign) and len(parent.targets) == 1 else None
        if names is None or len(names) != 2 or not self._only_returned(names[value.index(rest[0])]):
            return None
        spec = self.source.node.args
        if any(a.arg == "output_attentions" for a in (*spec.args, *spec.kwonlyargs)):
            return "not output_attentions"
        if spec.kwarg is None or not hasattr(self.owner.module, "config") or is_looked_at(self.owner.module):
            return None
        by_config = 'getattr(self.config, "output_attentions", False)'
        return f'not {spec.kwarg.arg}.get("output_attentions", {by_config})'

    def _only_returned(self, name: str) -> bool:
        read = [
            n
            for n in walk(self.source.node)
            if isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Load)
        ]
        return all(
            isinstance(self.source.parent(n), ast.Return)
            or (isinstance(up := self.source.parent(n), ast.Tuple) and isinstance(self.source.parent(up), ast.Return))
            for n in read
        )

    def _bind_outputs(self, made: Replacement, anchored: list[fx.Node], kept: set[ast.expr]) -> None:
        """Finds the names that must hold outputs once the statements that bound them are gone."""
        wanted = self._wanted(made, kept)
        outputs = self.region.outputs
        if not wanted and len(outputs) == len(anchored):
            return
        holder = self.last if isinstance(self.last, (ast.Assign, ast.AnnAssign)) else None
        names = self._target_of(holder, made.anchor) if holder is not None else None
        if names is None or len(anchored) != 1 or made.before or made.after:
            raise Refusal(f"line {self.last.lineno} of {self.at.where()} gives the results no names of their own")
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
