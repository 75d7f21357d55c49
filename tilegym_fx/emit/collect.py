"""Gathers replacements by module and method, and checks that every run of a method agrees with its new
text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from ..authored.modules import is_still, reach
from ..authored.source import FunctionSource
from ..layers import Copies
from ..provenance import Call, Provenance
from .outcome import Refusal
from .outputs import Replacement
from .owner import Owner
from .render import Edit, Renderer, edit_of, merge
from .values import view


@dataclass
class Placed:
    """A replacement with the edit that it became."""

    made: Replacement
    edit: Edit
    path: str


@dataclass
class Method:
    """One method of one module with its edits."""

    owner: Owner
    source: FunctionSource
    globals: dict[str, Any]
    placed: list[Placed] = field(default_factory=list)

    @property
    def edits(self) -> list[Edit]:
        found: list[Edit] = []
        for placed in self.placed:
            if all(placed.edit is not edit for edit in found):
                found.append(placed.edit)
        return sorted(found, key=place_of)


def place_of(edit: Edit) -> tuple[int, int]:
    """Where an edit stands in its file."""
    return edit.anchor.lineno, edit.anchor.col_offset


@dataclass(frozen=True)
class Alike:
    """Modules of one class whose method is rewritten in the same way under the same conditions.

    Attributes:
        module: One of them.
        path: Its path.
        others: The others.
        name: The method.
    """

    module: nn.Module
    path: str
    others: tuple[nn.Module, ...]
    name: str


class Collection:
    """Every method that is rewritten.

    Args:
        model: The exported module.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.paths = {id(module): path for path, module in model.named_modules()}
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self.methods: dict[tuple[int, str], Method] = {}
        self._texts: dict[Any, str] = {}

    @property
    def placed(self) -> Iterator[Placed]:
        for method in self.methods.values():
            yield from method.placed

    def add(self, made: Replacement) -> None:
        """Takes a replacement in.

        Raises:
            Refusal: If it cannot stand beside those that are there.
        """
        owner = made.owner
        path = self.paths.get(id(owner.module))
        if path is None:
            raise Refusal(f"{owner.cls.__name__} is no module of the model")
        key = (id(owner.module), owner.name)
        method = self.methods.get(key)
        if method is None:
            method = Method(owner, made.view.source, made.view.call.globals)
        if method.source.code is not made.view.source.code:
            raise Refusal(f"{owner.cls.__name__}.{owner.name} ran from two sources")
        edits = method.edits
        new = edit_of(made)
        merge(edits, new)
        edit = next(e for e in edits if e.anchor is new.anchor and e.removed == new.removed)
        try:
            self._text(method, sorted(edits, key=place_of))
        except Refusal:
            if edit is not new:
                edit.arms.remove(new.arms[0])
            raise
        method.placed.append(Placed(made, edit, path))
        self.methods[key] = method

    def text_of(self, method: Method) -> str:
        """The new text of a method.

        Raises:
            Refusal: If it would be no Python.
        """
        return self._text(method, method.edits)

    def _text(self, method: Method, edits: list[Edit]) -> str:
        key = (method.source.code, *(_edit_key(edit) for edit in edits))
        if key not in self._texts:
            self._texts[key] = Renderer(method.source, edits).render()
        return self._texts[key]

    def drop_unwritable(self) -> list[tuple[Placed, str]]:
        """Takes out the methods whose text, with what is left of it by now, would be no Python. Gives those, with
        reasons."""
        dropped: list[tuple[Placed, str]] = []
        for key, method in list(self.methods.items()):
            try:
                self.text_of(method)
            except Refusal as refusal:
                dropped += [(placed, str(refusal)) for placed in method.placed]
                del self.methods[key]
        return dropped

    def conditional(self) -> list[Alike]:
        """The methods with a condition, grouped by what is written into them and what it depends on."""
        groups: dict[Any, list[nn.Module]] = {}
        for (_, name), method in self.methods.items():
            if any(edit.guarded for edit in method.edits):
                groups.setdefault((method.owner.cls, name, _text_key(method)), []).append(method.owner.module)
        return [
            Alike(modules[0], self.paths[id(modules[0])], tuple(modules[1:]), key[1]) for key, modules in groups.items()
        ]

    def add_alike(self, alike: Alike, made: Replacement, provenance: Provenance) -> bool:
        """Takes a further branch of a method in, for every module of a group; False if it is none of that.

        Raises:
            Refusal: If it cannot stand beside what is there.
        """
        owner = made.owner
        if owner.module is not alike.module or owner.name != alike.name or not made.facts.guards:
            return False
        self.add(made)
        if self.settle(provenance):
            raise Refusal("the same method runs more than once and only some runs match")
        for module in alike.others:
            if _holds(made, module):
                self.add(replace(made, owner=replace(owner, module=module)))
        return True

    def spread(self, copies: Copies) -> None:
        """Writes what was found in a layer into those that it stands for.

        Raises:
            Refusal: If what depends on one is not so in another.
        """
        for method in list(self.methods.values()):
            path = self.paths[id(method.owner.module)]
            for copy in copies.of(path):
                self._copy(method, path, copy)

    def _copy(self, method: Method, path: str, copy: str) -> None:
        module = self._modules[copy]
        for placed in list(method.placed):
            made = placed.made
            if not _holds(made, module):
                raise Refusal(f"{path} and {copy} are alike, but what {path} depends on is not so in {copy}")
            self.add(replace(made, owner=replace(made.owner, module=module)))

    def settle(self, provenance: Provenance) -> list[tuple[Placed, str]]:
        """Takes out what not every run of its statement in this capture agrees with. Gives those, with
        reasons."""
        runs: dict[tuple[int, Any], list[Call]] = {}
        for call in provenance.calls:
            if call.module is not None:
                runs.setdefault((id(call.module), call.code), []).append(call)
        dropped: list[tuple[Placed, str]] = []
        for key, method in list(self.methods.items()):
            calls = runs.get((key[0], method.source.code), [])
            for edit in method.edits if len(calls) > 1 else ():
                mine = [p for p in method.placed if p.edit is edit]
                covered = {p.made.view.call.index for p in mine if p.made.view.provenance is provenance}
                missed = [c for c in calls if c.index not in covered and _ran(provenance, c, edit)]
                if covered and missed:
                    dropped += [(p, "the same method runs more than once and only some runs match") for p in mine]
                    method.placed = [p for p in method.placed if p.edit is not edit]
            if not method.placed:
                del self.methods[key]
        return dropped


def _text_key(method: Method) -> Any:
    """What tells the new text of a method, and the conditions for its use, from another's."""
    edits = tuple(_edit_key(edit) for edit in method.edits)
    facts = [placed.made.facts for placed in method.placed]
    return edits, repr([[f.constants, f.modules, f.dtypes] for f in facts])


def _edit_key(edit: Edit) -> Any:
    return edit.anchor, edit.removed, edit.idle, tuple(edit.arms)


def _holds(made: Replacement, module: nn.Module) -> bool:
    """Whether what one module was found to be is true of another."""
    facts = made.facts
    return (
        all(is_still(module, path, value) for path, value in facts.constants.items())
        and all(type(reach(module, path)) is cls for path, cls in facts.modules.items())
        and all(str(getattr(reach(module, p), "dtype", None)) == dtype for p, dtype in facts.dtypes.items())
    )


def _ran(provenance: Provenance, call: Call, edit: Edit) -> bool:
    at = view(provenance, call)
    return at is not None and at.ran(edit.last)
