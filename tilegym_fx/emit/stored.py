"""A call that stores what it computes in an object which the rewritten function holds, as a cache's update does.

    key, value = cache.update(key, value, self.layer_idx)

The maths lies in a method of an object that is no module, and the object must have the results afterwards. In place of
the call stand the kernels and the assignments that its code made, under the condition that the objects are of these
classes and go this way:

    key, value = (
        tilegym_fx.ops.cache_append(cache.layers[self.layer_idx].keys, key),
        tilegym_fx.ops.cache_append(cache.layers[self.layer_idx].values, value),
    )
    cache.layers[self.layer_idx].keys = key
    cache.layers[self.layer_idx].values = value
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

from torch import fx

from ..authored.source import walk
from ..provenance import Call, NodeRef
from .conditions import PLAIN, unparse, wrapped
from .flow import reads, target_names
from .guards import Inspector
from .outcome import Refusal
from .outputs import Outputs, Replacement
from .scope import Scope


@dataclass(frozen=True)
class Effect:
    """One change of an object, in terms of the rewritten function.

    Attributes:
        left: What is assigned to, with the sign of the assignment: `cache.keys =`.
        right: What it gets; where that is made of a result, what stands after the result's name.
        number: The number of that result's node; None where there is none.
        first: Whether it comes before anything is computed.
    """

    left: str
    right: str
    number: int | None
    first: bool


class Stored(Outputs):
    """Plans the replacement of a call that stores its results. See `Ground` for the attributes."""

    def replacement(self) -> Replacement:
        """The replacement; every Match of the call gives the same.

        Raises:
            Refusal: If there is none in this function.
        """
        call, names = self._assigned_call()
        results = self.at.value(call)
        if not isinstance(results, tuple) or not all(isinstance(r, NodeRef) for r in results):
            raise Refusal(f"`{unparse(call)}` in {self.at.where()} gives more than tensors")
        reader = _Reader(self.at, set(), (), self.at.numbers_in(call))
        reader.expression(call, ())
        named = {r.id: name for r, name in zip(results, names, strict=False)}
        if len(results) != len(names) or list(named) != list(dict.fromkeys(reader.computed)) or not reader.effects:
            raise Refusal(f"`{unparse(call)}` in {self.at.where()} does not keep what it gives, or in another order")
        if reader.followed != self.at.numbers_in(call):
            raise Refusal(f"`{unparse(call)}` in {self.at.where()} computes more than it keeps and gives")
        made = Replacement(self.region.match, self.at, self.owner, self.last, call, [], [], facts=reader.facts)
        calls = [self._call(number, texts) for number, texts in reader.computed.items()]
        made.lines = (
            *(f"{e.left} {e.right}" for e in reader.effects if e.first),
            f"{', '.join(names)} = {', '.join(calls)}",
            *(self._after(e, named) for e in reader.effects if not e.first),
        )
        made.part = next(i for i, number in enumerate(reader.computed) if number in self.region.numbers)
        return made

    def _assigned_call(self) -> tuple[ast.Call, list[str]]:
        """The call, and the names that the statement binds to its results."""
        statement = self.last
        if len(self.region.numbers) != 1 or self.removed or not isinstance(statement, ast.Assign):
            raise Refusal("the region is no single call")
        names = target_names(statement.targets[0]) if len(statement.targets) == 1 else None
        if not isinstance(statement.value, ast.Call) or not isinstance(statement.targets[0], ast.Tuple) or not names:
            raise Refusal("the region is no single call")
        return statement.value, names

    def _call(self, number: int, texts: dict[fx.Node, str]) -> str:
        """One result, computed by the Definition as the Match's own is."""
        (mine,) = self.region.numbers
        own, other = (self.at.provenance.resolve(NodeRef(n)) for n in (mine, number))
        if own is None or other is None or _kind(own) != _kind(other):
            raise Refusal(f"a result in {self.at.where()} is computed in another way than what stands beside it")
        parts = [self.names.canonical(node) for node in own.all_input_nodes]
        arguments = []
        for bound in self.region.match.inputs.values():
            if not isinstance(bound, fx.Node) or parts.count(bound) != 1:
                raise Refusal(f"a result in {self.at.where()} is made of something else")
            text = texts.get(other.all_input_nodes[parts.index(bound)])
            if text is None:
                raise Refusal(f"what a result in {self.at.where()} is made of has no expression there")
            arguments.append(text)
        return f"tilegym_fx.ops.{self.region.match.definition}({', '.join(arguments)})"

    def _after(self, effect: Effect, named: dict[int, str]) -> str:
        """A change that comes after the results have their names."""
        right = effect.right if effect.number is None else f"_{effect.right}"
        if reads(ast.parse(right)) & set(named.values()):
            raise Refusal(f"what `{effect.left}` gets in {self.at.where()} has another name by then")
        return f"{effect.left} {effect.right if effect.number is None else named[effect.number] + effect.right}"


class _Reader(Inspector):
    """Goes through the methods of objects too, and notes what they compute and change.

    Attributes:
        computed: Number of a result's node -> graph node that it is made of -> the expression that gives it.
        effects: What is changed, in order.
        followed: The numbers of all nodes that the new text accounts for.
    """

    follows_objects = True

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.computed: dict[int, dict[fx.Node, str]] = {}
        self.effects: list[Effect] = []
        self.followed: set[int] = set()

    def _guard(self, text: str) -> None:
        changed = [e.left.partition(" ")[0] for e in self.effects]
        if any(target in text for target in changed):
            raise Refusal(f"`{text}` is asked after it has been changed")
        super()._guard(text)

    def _item(self, expr: ast.Subscript, scope: Scope) -> bool:
        """An item that is an object is reached by the same expression in the new text, and asked for its class there.

        So its number is no constant: else each layer, having its own, would be rewritten in its own way.
        """
        if super()._item(expr, scope):
            return True
        known = (scope.at.value(expr), scope.at.value(expr.value))
        if self._lift(expr, scope) is None or any(isinstance(v, (NodeRef, *PLAIN)) for v in known):
            return False
        self._expression(expr.value, scope, set())
        return True

    def _inside(self, child: Call, expr: ast.Call, scope: Scope) -> None:
        if child.receiver is not None:
            self._of_class(child.receiver, expr, scope)
        super()._inside(child, expr, scope)

    def _of_class(self, cls: type, expr: ast.Call, scope: Scope) -> None:
        """Another class may have another method, and so may an object of its own."""
        base = self._lift(expr.func.value, scope) if isinstance(expr.func, ast.Attribute) else None
        if base is None or "." in cls.__qualname__:
            raise Refusal(f"the object of `{unparse(expr.func)}` in {scope.at.where()} cannot be compared")
        self.facts.imports[cls.__name__] = cls.__module__
        self._guard(f"type({unparse(base)}) is {cls.__name__}")
        assert isinstance(expr.func, ast.Attribute)
        self._guard(f"'{expr.func.attr}' not in vars({unparse(base)})")

    def _statement(self, statement: ast.stmt, scope: Scope) -> bool:
        target = statement.target if isinstance(statement, ast.AugAssign) else None
        if not isinstance(target, ast.Attribute) or scope.at.call.receiver is None:
            return super()._statement(statement, scope)
        assert isinstance(statement, ast.AugAssign)
        left, right = self._lift(target, scope), self._lift(statement.value, scope)
        if left is None or right is None or scope.at.numbers_in(statement):
            raise Refusal(f"`{unparse(target)}` is changed in {scope.at.where()} by what only that function knows")
        sign = ast.unparse(ast.AugAssign(ast.Name("_"), statement.op, ast.Name("_"))).split()[1]
        self._change(f"{unparse(left)} {sign}", unparse(right), None)
        return False

    def _assign(self, statement: ast.Assign | ast.AnnAssign, scope: Scope) -> None:
        if scope.at.call.receiver is None or not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
            super()._assign(statement, scope)
            return
        target, value = statement.targets[0], statement.value
        if isinstance(value, ast.Call) and not any(m.child for m in scope.at.made_at(value)):
            self._compute(value, scope)
        if not isinstance(target, ast.Attribute):
            super()._assign(statement, scope)
            return
        lifted = self._lift(target, scope)
        number, rest = self._result(value, scope)
        if lifted is None:
            raise Refusal(f"an assignment to `{unparse(target)}` in {scope.at.where()} would be dropped")
        self._change(f"{unparse(lifted)} =", rest, number)

    def _change(self, left: str, right: str, number: int | None) -> None:
        self.effects.append(Effect(left, right, number, not self.computed))

    def _compute(self, value: ast.Call, scope: Scope) -> None:
        made = scope.at.value(value)
        if isinstance(made, NodeRef) and scope.at.numbers_in(value) == {made.id}:
            self._expression(value, scope, set())
            self.computed[made.id] = self._texts(value, scope)
            self.followed.add(made.id)

    def _result(self, value: ast.expr, scope: Scope) -> tuple[int, str]:
        """The result that a stored value is, or is an index into, and the text of the index."""
        base = value.value if isinstance(value, ast.Subscript) else value
        made = scope.at.value(base)
        if not isinstance(made, NodeRef) or made.id not in self.computed:
            raise Refusal(f"`{unparse(value)}` in {scope.at.where()} is kept and is no result")
        if not isinstance(value, ast.Subscript):
            return made.id, ""
        index = self._lift(value.slice, scope)
        if index is None or scope.at.numbers_in(value.slice):
            raise Refusal(f"`{unparse(value)}` in {scope.at.where()} depends on what only that function knows")
        self.followed |= scope.at.numbers_in(value)
        return made.id, unparse(ast.Subscript(ast.Name("_"), index))[1:]

    def _texts(self, value: ast.expr, scope: Scope) -> dict[fx.Node, str]:
        found: dict[fx.Node, str] = {}
        for part in walk(value):
            ref = self._operand(part, scope)
            node = scope.at.provenance.resolve(ref) if ref is not None else None
            lifted = self._lift(part, scope) if node is not None else None  # type: ignore[arg-type]
            if node is not None and lifted is not None:
                found.setdefault(node, wrapped(lifted))
        return found

    def _operand(self, part: ast.AST, scope: Scope) -> NodeRef | None:
        """The graph value that a name, or an attribute of the object itself, has in this code."""
        if isinstance(part, ast.Name):
            value = scope.at.value(part)
            return value if isinstance(value, NodeRef) else None
        if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == "self":
            return scope.at.call.attributes.get(part.attr)
        return None


def _kind(node: fx.Node) -> object:
    """What two nodes have in common that do the same to tensors of one rank and dtype."""
    values = [n.meta["val"] for n in (*node.all_input_nodes, node)]
    plain = [a for a in node.args if not isinstance(a, (fx.Node, list, tuple))]
    return node.target, plain, dict(node.kwargs), [(v.dim(), v.dtype) for v in values]
