"""The arguments of the new call: the author's own expressions for the inputs of the Match."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any

from torch import fx

from ..authored.source import children
from .conditions import literal
from .flow import always_binds, binds, reads
from .ground import Ground, right_side, short
from .outcome import Facts, Refusal
from .regions import writes_in_place

#: A piece of text, or an expression of the function that keeps its own text.
Piece = str | ast.expr


@dataclass(frozen=True)
class Operand:
    """An expression of the code that goes, whose value is an input of the Match."""

    expr: ast.expr
    statement: ast.stmt
    node: fx.Node


class Inputs(Ground):
    """Finds the arguments. See `Ground` for the attributes."""

    def _operands(self, anchor: ast.expr) -> list[Operand]:
        found: list[Operand] = []
        for statement in self.removed:
            found += self._find_operands(right_side(statement), statement, None)
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
        for child in children(expr):
            found += self._find_operands(child, statement, root)
        return found

    def _optional(self, operands: list[Operand]) -> list[str]:
        """Inputs that are None unless a caller gives them; a called function may do without, the kernel
        cannot."""
        spec = self.source.node.args
        named = dict(zip([a.arg for a in (*spec.posonlyargs, *spec.args)][::-1], spec.defaults[::-1], strict=False))
        named |= {a.arg: d for a, d in zip(spec.kwonlyargs, spec.kw_defaults, strict=True) if d is not None}
        optional = {name for name, d in named.items() if isinstance(d, ast.Constant) and d.value is None}
        found = [o.expr.id for o in operands if isinstance(o.expr, ast.Name) and o.expr.id in optional]
        crossed = any(self.at.provenance._origins[n].call is not self.at.call for n in self.region.numbers)
        return list(dict.fromkeys(found)) if crossed else []

    def _arguments(self, operands: list[Operand], facts: Facts) -> list[Piece]:
        used: list[ast.expr] = []
        arguments: list[Piece] = []
        for name, bound in self.region.match.inputs.items():
            if isinstance(bound, fx.Node):
                node = self.region.inputs[name]
                piece = self._tensor(name, node, operands)
                self._note_dtype(node, facts)
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
                raise Refusal(f"`{short(operand.expr)}` is computed twice in {self.at.where()}")
        return arguments

    def _note_dtype(self, node: fx.Node, facts: Facts) -> None:
        held = self._held(node)
        if held is not None:
            path = held.removeprefix(self.source.node.args.args[0].arg + ".")
            facts.dtypes[_dotted(path)] = str(node.meta["val"].dtype)

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
                    both = f"`{short(chosen.expr)}` and `{short(operand.expr)}`"
                    raise Refusal(f"{both} in {self.at.where()} happen to be one value")
        return chosen.expr

    def _same_at_anchor(self, operand: Operand) -> bool:
        """Whether an expression of a statement that goes still has its value where the anchor stands."""
        if operand.statement is self.last:
            return not self._rebound(operand, reads(operand.expr))
        if self._rebound(operand, reads(operand.expr)):
            return False
        if not self.at.numbers_in(operand.expr):
            return True
        return not any(writes_in_place(self.at.numbers_in(s), self.at.provenance) for s in self._kept_after(operand))

    def _kept_after(self, operand: Operand) -> list[ast.stmt]:
        start = self.block.index(operand.statement)
        return [s for s in self.between if self.block.index(s) > start]

    def _rebound(self, operand: Operand, names: set[str] | frozenset[str]) -> bool:
        """Whether a name was bound by a statement that goes, before this, or by one that stays, after
        this."""
        at = self.block.index(operand.statement)
        for statement in self.removed:
            if self.block.index(statement) < at and binds(statement) & names:
                later = [s for s in self.between if self.block.index(statement) < self.block.index(s) < at]
                for name in binds(statement) & names:
                    if not any(name in always_binds(s) for s in later):
                        return True
        return any(binds(s) & names for s in self._kept_after(operand))

    def _aliases(self, chosen: Operand, other: Operand) -> bool:
        """Whether two expressions are one value on every path: the same text, or one a plain copy of the
        other."""
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
            return literal(value)
        root = self.source.node.args.args[0].arg
        facts.constants.pop(_dotted(found[0].removeprefix(root + ".")), None)
        return found[0]


def _dotted(text: str) -> str:
    """`norms[1].weight` as a path: `norms.1.weight`; `cfg["eps"]` as `cfg.eps`."""
    return text.replace("[", ".").replace("]", "").replace('"', "").replace("'", "")


def _attribute_text(root: str, path: str) -> str:
    text = root
    for part in path.split("."):
        text += f"[{part}]" if part.isdigit() else f".{part}"
    return text
