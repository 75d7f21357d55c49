"""A call that stores what it computes in an object which the rewritten function holds, as a cache's update does.

    key, value = cache.update(key, value, self.layer_idx)

The maths lies in a method of an object that is no module, and the object must have the results afterwards. In place of
the call stand the assignments that its code made, with kernels in them, under the condition that the objects are of
these classes and go this way:

    cache.layers[self.layer_idx].keys = tilegym_fx.ops.cache_append(cache.layers[self.layer_idx].keys, key)
    cache.layers[self.layer_idx].values = tilegym_fx.ops.cache_append(cache.layers[self.layer_idx].values, value)
    key, value = cache.layers[self.layer_idx].keys, cache.layers[self.layer_idx].values
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import fx

from ..provenance import Call, NodeRef
from .conditions import unparse, wrapped
from .flow import target_names
from .guards import Inspector
from .outcome import Refusal
from .outputs import Outputs, Replacement
from .scope import Scope
from .source import walk


@dataclass(frozen=True)
class Store:
    """One assignment to an attribute of an object, in terms of the rewritten function.

    Attributes:
        target: What is assigned to.
        number: The number of the node whose value it gets.
        texts: Graph node that this value is made of -> the expression that gives it.
    """

    target: str
    number: int
    texts: dict[fx.Node, str] = field(default_factory=dict)


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
        numbers = self.at.numbers_in(call)
        if len(results) != len(names) or {r.id for r in results} != numbers:
            raise Refusal(f"`{unparse(call)}` in {self.at.where()} computes more than it gives")
        reader = _Reader(self.at, set(), (), numbers)
        reader.expression(call, ())
        targets = {store.number: store.target for store in reader.stores}
        if len(reader.stores) != len(results) or set(targets) != numbers:
            raise Refusal(f"`{unparse(call)}` in {self.at.where()} does not store what it gives")
        lines = [self._line(store, reader.stores[:i]) for i, store in enumerate(reader.stores)]
        lines.append(f"{', '.join(names)} = {', '.join(targets[r.id] for r in results)}")
        made = Replacement(self.region.match, self.at, self.owner, self.last, call, [], [], facts=reader.facts)
        made.lines = tuple(lines)
        made.part = next(i for i, store in enumerate(reader.stores) if store.number in self.region.numbers)
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

    def _line(self, store: Store, before: Sequence[Store]) -> str:
        """One assignment, computed by the Definition as the Match's own is."""
        (number,) = self.region.numbers
        own, other = (self.at.provenance.resolve(NodeRef(n)) for n in (number, store.number))
        if own is None or other is None or _kind(own) != _kind(other):
            raise Refusal(
                f"`{store.target}` in {self.at.where()} is computed in another way than what stands beside it"
            )
        parts = [self.names.canonical(node) for node in own.all_input_nodes]
        arguments = []
        for bound in self.region.match.inputs.values():
            if not isinstance(bound, fx.Node) or parts.count(bound) != 1:
                raise Refusal(f"`{store.target}` in {self.at.where()} is made of something else")
            text = store.texts.get(other.all_input_nodes[parts.index(bound)])
            if text is None or any(text == earlier.target for earlier in before):
                raise Refusal(f"what `{store.target}` in {self.at.where()} is made of has no expression there")
            arguments.append(text)
        return f"{store.target} = tilegym_fx.ops.{self.region.match.definition}({', '.join(arguments)})"


class _Reader(Inspector):
    """Goes through the methods of objects too, and notes what they store."""

    follows_objects = True

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.stores: list[Store] = []

    def _inside(self, child: Call, expr: ast.Call, scope: Scope) -> None:
        if child.receiver is not None:
            self._of_class(child.receiver, expr, scope)
        super()._inside(child, expr, scope)

    def _of_class(self, cls: type, expr: ast.Call, scope: Scope) -> None:
        """Another class may have another method."""
        base = self._lift(expr.func.value, scope) if isinstance(expr.func, ast.Attribute) else None
        if base is None or "." in cls.__qualname__:
            raise Refusal(f"the object of `{unparse(expr.func)}` in {scope.at.where()} cannot be compared")
        self.facts.imports[cls.__name__] = cls.__module__
        self._guard(f"type({unparse(base)}) is {cls.__name__}")

    def _assign(self, statement: ast.Assign | ast.AnnAssign, scope: Scope) -> None:
        target = statement.targets[0] if isinstance(statement, ast.Assign) else None
        if not isinstance(target, ast.Attribute) or scope.at.call.receiver is None or statement.value is None:
            super()._assign(statement, scope)
            return
        lifted = self._lift(target, scope)
        made = scope.at.value(statement.value)
        if lifted is None or len(statement.targets) != 1 or not isinstance(made, NodeRef):  # type: ignore[union-attr]
            raise Refusal(f"an assignment to `{unparse(target)}` in {scope.at.where()} would be dropped")
        self._expression(statement.value, scope, set())
        self.stores.append(Store(unparse(lifted), made.id, self._texts(statement.value, scope)))

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
