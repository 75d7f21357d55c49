"""The imports of an emitted module, and the global names of the functions in it."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from .collect import Method
from .flow import binds, reads


class Imports:
    """The imports of an emitted module; one name never means two things."""

    def __init__(self) -> None:
        self._lines: dict[str, tuple[str, str]] = {}
        self._plain: set[str] = {"sys", "tilegym_fx.apply", "tilegym_fx.ops"}
        self._taken: dict[str, tuple[str, str]] = {"sys": ("sys", ""), "tilegym_fx": ("tilegym_fx", "")}

    def name(self, wanted: str, module: str, attribute: str) -> str:
        """The name under which a module (empty attribute) or an object of it is imported."""
        source = (module, attribute)
        count, name = 1, wanted
        while name in self._taken and self._taken[name] != source:
            count += 1
            name = f"{wanted}_{count}"
        if name not in self._taken:
            self._taken[name] = source
            if attribute == "" and name == module:
                self._plain.add(module)
            else:
                self._lines[name] = source
        return name

    def text(self) -> str:
        """The import block, sorted."""
        groups: dict[str, list[str]] = {}
        for name, (module, attribute) in self._lines.items():
            owner, item = (module, attribute) if attribute else (module.rpartition(".")[0], module.rpartition(".")[2])
            if not owner:
                self._plain.add(f"{module} as {name}")
                continue
            groups.setdefault(owner, []).append(item if item == name else f"{item} as {name}")
        lines = [f"import {module}" for module in sorted(self._plain)]
        for owner in sorted(groups):
            flat = f"from {owner} import {', '.join(sorted(groups[owner]))}"
            if len(flat) > 119:
                flat = f"from {owner} import (\n" + "".join(f"    {i},\n" for i in sorted(groups[owner])) + ")"
            lines.append(flat)
        return "\n".join(lines)


def import_globals(method: Method, text: str, extra: Mapping[str, str], imports: Imports) -> str:
    """Imports every global that a method's text reads; renames those whose name is taken."""
    tree = ast.parse(textwrap.dedent(text)).body[0]
    assert isinstance(tree, ast.FunctionDef)
    local = {a.arg for a in ast.walk(tree.args) if isinstance(a, ast.arg)} | {n for s in tree.body for n in binds(s)}
    renames: dict[str, str] = {}
    for name in sorted(reads(tree) - local - {"tilegym_fx"}):
        source = _origin(name, method.globals, extra)
        if source is not None:
            new = imports.name(name, *source)
            if new != name:
                renames[name] = new
    return _renamed(text, tree, renames) if renames else text


def _origin(name: str, names: Mapping[str, Any], extra: Mapping[str, str]) -> tuple[str, str] | None:
    if name in names:
        held = names[name]
        if isinstance(held, ModuleType):
            return held.__name__, ""
        return str(names["__name__"]), name
    if name in extra:
        return extra[name], name
    return None


def _renamed(text: str, tree: ast.FunctionDef, renames: Mapping[str, str]) -> str:
    """The text with global names exchanged, by position; a dedented tree has the same order of names."""
    indent = indent_of(text)
    lines = text.split("\n")
    names = [n for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id in renames]
    for node in sorted(names, key=lambda n: (n.lineno, n.col_offset), reverse=True):
        raw = lines[node.lineno - 1].encode()
        at = node.col_offset + indent
        raw = raw[:at] + renames[node.id].encode() + raw[at + len(node.id.encode()) :]
        lines[node.lineno - 1] = raw.decode()
    return "\n".join(lines)


def indent_of(text: str) -> int:
    return len(text) - len(text.lstrip(" "))
