"""Writing the files of a new kernel, from nothing, from another Definition, or from a draft."""

from __future__ import annotations

import ast
import importlib.util
import json
import keyword
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tilegym_fx import ops, settings
from tilegym_fx.errors import InventoryError, KernelError, UsageError
from tilegym_fx.inventory import Inventory, load, shipped_root
from tilegym_fx.inventory.collect import Collection, collect
from tilegym_fx.inventory.solution_rules import files_needed
from tilegym_fx.kernel_source import cut_out
from tilegym_fx.schema import Definition

from . import templates

_NAME = re.compile(r"[a-z][a-z0-9_]*")
#: Sizes of variable axes in a benchmark; the outermost grows from there.
_BENCH_SIZE = 64
_FACTORS = (1, 4, 16)

#: Draft -> its kernel; raises KernelError where none can be written by itself.
Writer = Callable[[Definition, str], Any]


@dataclass(frozen=True)
class Parts:
    """What the files of a new kernel are made of.

    Attributes:
        definition: The record to be written.
        kernel: Text of the kernel's file, or None where somebody has to write it.
        how: How the kernel works, for the Solution.
        dtypes: What it is written for.
        near_miss: Whether the soft cap's near miss applies.
        guards: Functions for its patterns file.
        beside: Path -> text of every file that the kernel imports from beside it.
        exact: Python lines that evaluate it in float64 for this repository's own tests.
    """

    definition: dict[str, Any]
    kernel: str | None
    how: str
    dtypes: tuple[str, ...] = templates.DTYPES
    near_miss: bool = False
    exact: str = ""
    guards: str = ""
    beside: Mapping[str, str] = field(default_factory=dict)


def files_of(name: str, root: Path) -> dict[str, Path]:
    """What a file is -> where it is, in the order of the steps."""
    return {
        "definition": root / "definitions" / f"{name}.json",
        "patterns": root / "patterns" / f"{name}.py",
        "kernel": root / "kernels" / f"{name}.py",
        "solution": root / "solutions" / f"{name}.json",
        "test": root / "tests" / "patterns" / f"test_{name}.py",
        "benchmark": root / "benchmarks" / f"bench_{name}.py",
    }


def exact_file(root: Path) -> Path:
    """Where this repository's tests evaluate every Definition in float64."""
    return root / "tests" / "support" / "exact.py"


def default_root() -> Path:
    """The repository that this package runs from.

    Raises:
        UsageError: It runs from an installed wheel, which is no place for new files.
    """
    root = shipped_root()
    if root.name == "_data":
        raise UsageError("tilegym_fx is installed as a wheel", advice="Name a folder for the new files with --root")
    return root


def inventory_of(root: Path) -> Inventory:
    """The shipped inventory, and that of ``root`` where it has one."""
    if root.resolve() == shipped_root().resolve() or not (root / "definitions").is_dir():
        return load()
    return load(root)


def collected(root: Path) -> Collection:
    """What :func:`inventory_of` reads, with what is wrong beside it instead of an error."""
    own = [root] if (root / "definitions").is_dir() or (root / "solutions").is_dir() else []
    return collect([shipped_root(), *settings.inventory_roots(), *own])


def from_nothing(name: str, op_type: str) -> Parts:
    """A soft cap, to be replaced."""
    return Parts(
        templates.definition(name, op_type),
        templates.kernel(name),
        "One long row; tiles of 2048 elements.",
        near_miss=True,
        exact=f'''

@exact("{name}")
def _{name}(r: Rounding, name: str, x: Any, cap: float) -> Any:
    value = (x / cap).tanh() * cap
    return ((value, (3 * r.relative + 16 * ROUNDED32) * value.abs() + r.step * (1 + 2 * abs(cap))),)
''',
    )


def from_definition(name: str, op_type: str, like: str, inventory: Inventory) -> Parts:
    """A copy of another Definition and of its kernel, the kernel cut out of its file.

    Raises:
        UnknownNameError: There is no such Definition.
        UsageError: It has no Solution whose source can be read.
    """
    definition = inventory.definition(like)
    solutions = inventory.solutions_for(like)
    if not solutions:
        raise UsageError(f"{like!r} has no Solution to start from", advice="Leave --like out, or name another")
    first = solutions[0]
    texts = inventory.source_texts(first.name)
    docstring = f"{name} in cuTile, started from {like}."
    record = definition.model_dump(mode="json", exclude_defaults=True)
    record = {**record, "name": name, "op_type": op_type}
    record["tags"] = [
        "status:draft",
        *(t for t in definition.tags if not t.startswith(("status:", "model:"))),
    ]
    record["description"] = f"Started from {like}: {definition.description or ''}".strip()
    for spec in (*record["inputs"].values(), *record["outputs"].values()):
        spec.setdefault("shape", None)
    kernel = cut_out(texts[first.entry_file], first.entry_function, name, docstring)
    return Parts(
        record,
        kernel,
        first.description or f"Started from {like}.",
        first.dtypes or templates.DTYPES,
        exact=f'\n\nEXACT["{name}"] = lambda r, name, **inputs: EXACT["{like}"](r, "{like}", **inputs)\n',
        beside=files_beside(kernel, first.entry_file, texts),
    )


def files_beside(kernel: str, file: str, texts: Mapping[str, str]) -> dict[str, str]:
    """Path -> text of what a kernel imports from beside it.

    Args:
        kernel: Its text, made of that of ``file``.
        file: Path of the file that it comes from.
        texts: Path -> text of that file and of those that it needs.
    """
    needed = files_needed(file, {**texts, file: kernel}.get)
    return {path: texts[path] for path in sorted(needed - {file})}


def from_draft(name: str, op_type: str, file: Path, writer: Writer) -> Parts:
    """A draft Definition, and the kernel that can be written from it.

    Raises:
        UsageError: The file is no Definition.
    """
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        definition = Definition.model_validate({**record, "name": name, "op_type": op_type})
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(
            f"{str(file)!r} is no draft Definition: {str(error).splitlines()[0]}",
            advice="`python -m tilegym_fx.scan MODEL --draft DIR` writes drafts",
        ) from error
    record = {**record, "name": name, "op_type": op_type}
    dtypes = tuple(dict.fromkeys(s.dtype for s in definition.inputs.values() if "float" in s.dtype))
    try:
        written = writer(definition, name)
    except KernelError:
        return Parts(record, None, "Not written yet.", dtypes)
    return Parts(record, written.kernel, written.how, written.dtypes, guards=written.guards)


class Written(NamedTuple):
    """What writing a new kernel did to a root.

    Attributes:
        new: Files that were not there.
        changed: Files that were, and have more lines now.
    """

    new: tuple[Path, ...]
    changed: tuple[Path, ...]


def require_new(name: str, root: Path) -> None:
    """Refuse a name under which no kernel can be added to a root, before anything is made of it.

    Raises:
        UsageError: It is no good, or taken, in the root or in the shipped inventory.
    """
    _require_name(name)
    _require_no_file(name, root)
    inventory = inventory_of(root)
    if name in inventory.definitions or name in inventory.solutions:
        kind = "Definition" if name in inventory.definitions else "Solution"
        raise UsageError(f"there is a {kind} {name!r} already", advice="Take another name, and start with --like")


def _require_name(name: str, kernel: str = "") -> None:
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} is no name for an op", advice="Use a-z, 0-9 and _, a letter first")
    if keyword.iskeyword(name):
        raise UsageError(f"{name!r} is no name for an op: Python has that word", advice="Take another name")
    for shown, home in (("tilegym_fx.ops", ops), ("torch.ops.tilegym_fx", torch.ops.tilegym_fx)):
        if name in vars(home) and name not in ops.names():
            raise UsageError(f"{shown}.{name} is something else than an op", advice="Take another name")
    if _global_names(kernel).count(name) > 1:
        raise UsageError(f"{name!r} is something else in the kernel's file", advice="Take another name")


def _global_names(kernel: str) -> list[str]:
    """What a file defines or imports, as often as it does; nothing of one that is no Python."""
    try:
        statements = ast.parse(kernel).body
    except SyntaxError:
        return []
    names = [s.name for s in statements if isinstance(s, ast.FunctionDef)]
    imported = [a for s in statements if isinstance(s, ast.Import | ast.ImportFrom) for a in s.names]
    return names + [alias.asname or alias.name.split(".")[0] for alias in imported]


def _require_no_file(name: str, root: Path) -> None:
    for path in files_of(name, root).values():
        if path.exists():
            raise UsageError(
                f"{path.relative_to(root)} exists",
                advice=f"Take another name, or see `python -m tilegym_fx.new --status {name}`",
            )


def write(name: str, parts: Parts, root: Path) -> Written:
    """Write every file of a new kernel.

    Raises:
        UsageError: The name is no good, or a file of it exists.
        InventoryError: The Definition is inconsistent.
    """
    _require_name(name, parts.kernel or "")
    _require_no_file(name, root)
    files = files_of(name, root)
    try:
        definition = Definition.model_validate(parts.definition)
    except ValueError as error:
        raise InventoryError(f"the Definition {name!r} is inconsistent: {error}") from error
    beside = {root / path: text for path, text in parts.beside.items() if not (root / path).exists()}
    for file, text in {**{files[k]: t for k, t in _texts(name, parts, definition).items()}, **beside}.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    changed = _add_exact(exact_file(root), parts.exact)
    laid_out([path for path in files.values() if path.suffix == ".py"])
    return Written((*files.values(), *beside), changed)


def laid_out(files: Sequence[Path]) -> None:
    """Give Python files this repository's layout, where ruff is installed: a name changes line lengths."""
    if importlib.util.find_spec("ruff") is not None:
        command = [sys.executable, "-m", "ruff", "format", "-q", "--no-cache", "--line-length", "120"]
        subprocess.run([*command, *map(str, files)], check=False)


def _texts(name: str, parts: Parts, definition: Definition) -> dict[str, str]:
    record = templates.solution(name, name, parts.how, parts.dtypes, parts.beside)
    before = (parts.definition.get("description") or name).rstrip(".").split("\n")[0]
    before = before[:1].lower() + before[1:90]
    return {
        "definition": json.dumps(parts.definition, indent=2) + "\n",
        "patterns": templates.patterns(name, before, parts.guards),
        "kernel": parts.kernel or unwritten(name, definition),
        "solution": json.dumps(record, indent=2) + "\n",
        "test": templates.test_file(name, near_miss=parts.near_miss),
        "benchmark": templates.benchmark(name, *_bench_sizes(definition)),
    }


def unwritten(name: str, definition: Definition) -> str:
    """A kernel file that says that its kernel is missing."""
    parameters = ", ".join(
        f"{key}: {'torch.Tensor' if spec.shape is not None else 'float'}" for key, spec in definition.inputs.items()
    )
    returns = "torch.Tensor" if len(definition.outputs) == 1 else "tuple[torch.Tensor, ...]"
    signature = f"def {name}({parameters}) -> {returns}:"
    if len(signature) > 110:
        inner = "".join(f"    {p},\n" for p in parameters.split(", "))
        signature = f"def {name}(\n{inner}) -> {returns}:"
    docstring = f'"""{name} in cuTile: the kernel is still to be written."""'
    body = f'    raise NotImplementedError("the kernel of {name} is not written")'
    return f"{docstring}\n\nfrom __future__ import annotations\n\nimport torch\n\n\n{signature}\n{body}\n"


def _bench_sizes(definition: Definition) -> tuple[dict[str, int], str, tuple[int, ...]]:
    """Sizes that satisfy the constraints, the axis that grows, and by which factors."""
    from tilegym_fx.inventory.sizes import sizes_of

    small = sizes_of(definition)
    free = [axis for axis, spec in definition.axes.items() if spec.type == "var"]
    sizes = {axis: size * _BENCH_SIZE if axis in free else size for axis, size in small.items()}
    constrained = {word for text in definition.constraints for word in re.findall(r"\w+", text)}
    growing = next((axis for axis in free if axis not in constrained), "")
    return sizes, growing, _FACTORS if growing else (1,)


def _add_exact(file: Path, text: str) -> tuple[Path, ...]:
    """This repository's tests want a float64 evaluation of every Definition; gives the file if it changed."""
    if not text or not file.is_file():
        return ()
    file.write_text(file.read_text(encoding="utf-8").rstrip("\n") + "\n" + text, encoding="utf-8")
    return (file,)
