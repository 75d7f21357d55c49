"""Puts rewritten methods together into the text of one module: head, imports, classes, PATCHES, apply and
restore."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from torch import nn

from ..results import WRITTEN_BY
from .collect import Collection, Method
from .conditions import literal
from .flow import reads
from .imports import Imports, import_globals, indent_of

#: What the first line of every emitted text ends with.


@dataclass(frozen=True)
class Header:
    """What the head of an emitted text says.

    Attributes:
        model: The model's class or id.
        versions: Package -> version that the text was made with.
    """

    model: str
    versions: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module) -> Header:
        """The header for a live model, with the installed versions."""
        packages = ("torch", "transformers", "tilegym_fx")
        found = {package: version for package in packages if (version := _version(package)) is not None}
        return cls(type(model).__name__, found)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@dataclass
class Variant:
    """One emitted class: the methods of a group of modules that are rewritten alike."""

    cls: type
    name: str
    methods: list[tuple[Method, str]]
    constants: dict[str, Any]
    modules: dict[str, str]
    dtypes: dict[str, str]
    paths: list[str]
    imports: dict[str, str]


def write(collection: Collection, header: Header, solutions: Mapping[str, str | None]) -> str:
    """The text for what was collected; empty for nothing."""
    variants = _variants(collection)
    if not variants:
        return ""
    imports = Imports()
    bodies = [_class(variant, imports, header) for variant in variants]
    used = {p.made.match.definition for p in collection.placed}
    head = _head(header, variants, {name: solutions.get(name) for name in sorted(used)})
    text = "\n\n\n".join([f"{head}\n\n{imports.text()}", *bodies, _tables(collection, variants), _FUNCTIONS]) + "\n"
    compile(text, "<emitted>", "exec")
    return text


def _variants(collection: Collection) -> list[Variant]:
    by_module: dict[int, list[Method]] = {}
    for (module, _), method in collection.methods.items():
        by_module.setdefault(module, []).append(method)
    groups: dict[Any, Variant] = {}
    for module, methods in by_module.items():
        methods.sort(key=_place)
        texts = [(method, collection.text_of(method)) for method in methods]
        cls = methods[0].owner.cls
        constants, modules, dtypes, imports = _facts(methods)
        key = (cls, tuple(t for _, t in texts), repr(constants), repr(modules), repr(dtypes))
        if key not in groups:
            groups[key] = Variant(cls, cls.__name__, texts, constants, modules, dtypes, [], imports)
        groups[key].paths.append(collection.paths[module])
    variants = sorted(groups.values(), key=lambda v: _place(v.methods[0][0]))
    _name(variants)
    for variant in variants:
        others = [p for v in variants if v.cls is variant.cls and v is not variant for p in v.paths]
        left = [
            path for path, module in collection.model.named_modules()
            if type(module) is variant.cls and path not in variant.paths and path not in others
        ]  # fmt: skip
        variant.paths = _patterns(variant.paths, [*others, *left])
    return variants


def _place(method: Method) -> tuple[str, int]:
    return method.source.code.co_filename, method.source.first_line


def _facts(
    methods: Iterable[Method],
) -> tuple[dict[str, Any], dict[str, str], dict[str, str], dict[str, str]]:
    constants: dict[str, Any] = {}
    modules: dict[str, str] = {}
    dtypes: dict[str, str] = {}
    imports: dict[str, str] = {}
    for method in methods:
        for placed in method.placed:
            facts = placed.made.facts
            constants |= facts.constants
            modules |= {path: f"{cls.__module__}.{cls.__qualname__}" for path, cls in facts.modules.items()}
            dtypes |= facts.dtypes
            imports |= facts.imports
    return tuple(dict(sorted(d.items())) for d in (constants, modules, dtypes, imports))  # type: ignore[return-value]


def _name(variants: Sequence[Variant]) -> None:
    """Distinct class names, none of which a rewritten method reads as a global."""
    read = {name for v in variants for method, _ in v.methods for name in reads(method.source.node)}
    taken: set[str] = set()
    for variant in variants:
        name, count = variant.cls.__name__, 1
        base = f"{name}WithOps" if name in read else name
        name = base
        while name in taken:
            count += 1
            name = f"{base}{count}"
        taken.add(name)
        variant.name = name


def _patterns(paths: Sequence[str], others: Sequence[str]) -> list[str]:
    """Paths with `*` for the numbers, unless that would take in a module that is not among them."""
    patterns = dict.fromkeys(_starred(path) for path in paths)
    if {_starred(path) for path in others} & set(patterns):
        return sorted(paths, key=_natural)
    return list(patterns)


def _starred(path: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def _natural(path: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in path.split(".")]


def _class(variant: Variant, imports: Imports, header: Header) -> str:
    owner = imports.name(variant.cls.__module__.rpartition(".")[2], variant.cls.__module__, "")
    lines = [f"class {variant.name}(tilegym_fx.apply.Patched, {owner}.{variant.cls.__qualname__}):"]
    for i, (method, text) in enumerate(variant.methods):
        text = import_globals(method, text, variant.imports, imports)
        body = text if indent_of(text) == 4 else textwrap.indent(textwrap.dedent(text), "    ")
        if method.source.node.name != method.owner.name:
            body = f"{body.rstrip()}\n\n    {method.owner.name} = {method.source.node.name}"
        lines.append(("\n" if i else "") + f"    # {_link(method, header)}\n{body.rstrip()}")
    return "\n".join(lines)


def _link(method: Method, header: Header) -> str:
    module = method.owner.definer.__module__
    first, last = method.source.first_line, method.source.last_line
    version = header.versions.get("transformers", "")
    if module.startswith("transformers.") and re.fullmatch(r"\d+(\.\d+)*", version):
        path = module.replace(".", "/")
        return f"https://github.com/huggingface/transformers/blob/v{version}/src/{path}.py#L{first}-L{last}"
    return f"{module}.{method.owner.definer.__qualname__}.{method.owner.name}, lines {first}-{last}"


def _head(header: Header, variants: Sequence[Variant], solutions: Mapping[str, str | None]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in header.versions.items())
    lines = [
        f'"""{header.model} {WRITTEN_BY}',
        "",
        "Each class below is its author's, with the regions that a kernel can compute replaced by a call each.",
        "Apply it to a model of the same code with `apply(model)`; `restore(model)` puts the model back.",
        "",
    ]
    if versions:
        lines += [f"Made with: {versions}.", ""]
    lines += [
        "Definitions, and the Solution planned for each; a call runs one for its GPU, and on a CPU the reference:"
    ]
    width = max(len(name) for name in solutions)
    lines += [f"    {name:<{width}}  {solution or 'none'}" for name, solution in solutions.items()]
    lines += ["", "Functions replaced, with the sha256 of their text:"]
    seen: set[str] = set()
    for variant in variants:
        for method, _ in variant.methods:
            line = f"    {method.owner.definer.__qualname__}.{method.owner.name}  {method.source.digest}"
            if line not in seen:
                seen.add(line)
                lines.append(line)
    return "\n".join([*lines, '"""'])


def _tables(collection: Collection, variants: Sequence[Variant]) -> str:
    return "\n\n".join(table for table in (_dropped(collection), _patches(variants)) if table)


def _dropped(collection: Collection) -> str:
    """Functions whose code is gone, by module, with the sha256 of their text."""
    found: dict[str, dict[str, str]] = {}
    for placed in collection.placed:
        for (module, name), digest in placed.made.facts.dropped.items():
            found.setdefault(module, {})[name] = digest
    lines = []
    for module, functions in sorted(found.items()):
        items = [f"        {_quoted(name)}: {_quoted(digest)}," for name, digest in sorted(functions.items())]
        lines += [f"    {_quoted(module)}: {{", *items, "    },"]
    return "\n".join(["DROPPED = {", *lines, "}"]) if lines else ""


def _patches(variants: Sequence[Variant]) -> str:
    lines = ["PATCHES = ("]
    for variant in variants:
        lines.append("    tilegym_fx.apply.Patch(")
        lines.append(f"        {variant.name},")
        lines += _table("paths", [f"{_quoted(path)}" for path in variant.paths], "(", ")")
        lines += _table("sources", [f"{_quoted(m.owner.name)}: {_quoted(m.source.digest)}" for m, _ in variant.methods])
        lines += _table("constants", [f"{_quoted(k)}: {_literal(v)}" for k, v in variant.constants.items()])
        lines += _table("modules", [f"{_quoted(k)}: {_quoted(v)}" for k, v in variant.modules.items()])
        lines += _table("dtypes", [f"{_quoted(k)}: {_quoted(v)}" for k, v in variant.dtypes.items()])
        lines.append("    ),")
    return "\n".join([*lines, ")"])


def _table(name: str, items: Sequence[str], left: str = "{", right: str = "}") -> list[str]:
    if not items:
        return []
    comma = "," if left == "(" and len(items) == 1 else ""
    flat = f"        {name}={left}{', '.join(items)}{comma}{right},"
    if len(flat) <= 119:
        return [flat]
    return [f"        {name}={left}", *(f"            {item}," for item in items), f"        {right},"]


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _literal(value: Any) -> str:
    return _quoted(value) if isinstance(value, str) else literal(value)


_FUNCTIONS = '''def apply(model):
    """Makes this model, and no other, run the classes above. Gives the model back."""
    return tilegym_fx.apply.apply(sys.modules[__name__], model)


def restore(model):
    """Undoes `apply`."""
    return tilegym_fx.apply.restore(model)'''
