"""Rules for Solutions beyond the schema: each yields a Problem for all that is wrong and runs nothing."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from tilegym_fx.inventory.definition_rules import place_problems
from tilegym_fx.inventory.tags import tag_problems
from tilegym_fx.schema import UNPARSABLE, Definition, Problem, Solution

if TYPE_CHECKING:
    from tilegym_fx.inventory.collect import Entry

#: What the tile compiler makes code for (`tileiras --help`).
HARDWARE = (
    "SM80", "SM86", "SM87", "SM88", "SM89", "SM90", "SM100", "SM103", "SM107", "SM110", "SM120", "SM121",
)  # fmt: skip


def solution_file(entry: Entry[Solution], _: Definition | None) -> Iterator[Problem]:
    yield from place_problems(entry, "solutions")
    if not entry.record.description:
        yield Problem("description", "is missing", "say in one sentence how it is done")


def cuda_tile(entry: Entry[Solution], _: Definition | None) -> Iterator[Problem]:
    spec = entry.record.spec
    if spec.language != "cuda-tile":
        yield Problem("spec.language", f"is {spec.language!r}", "ours are written in cuda-tile")
    for hardware in spec.target_hardware:
        if hardware not in HARDWARE:
            known = f"name one of {', '.join(HARDWARE)}"
            yield Problem("spec.target_hardware", f"{hardware!r} is no architecture that kernels run on", known)
    if spec.destination_passing_style:
        yield Problem("spec.destination_passing_style", "is true", "return the outputs and set it to false")


def in_kernels(entry: Entry[Solution], _: Definition | None) -> Iterator[Problem]:
    if not re.fullmatch(r"kernels/\w+\.py", entry.record.entry_file):
        yield Problem(
            "spec.entry_point",
            f"its file is {entry.record.entry_file!r}",
            "write kernels/<file>.py::<function>",
        )
    for index, source in enumerate(entry.record.sources):
        if source.content is not None:
            yield Problem(
                f"sources.{index}.content", "is embedded", "keep the code in kernels/ and give its path alone"
            )


def sources_exist(entry: Entry[Solution], _: Definition | None) -> Iterator[Problem]:
    for index, source in enumerate(entry.record.sources):
        if source.content is None and entry.root.find(entry.file, source.path) is None:
            yield Problem(
                f"sources.{index}.path", f"{source.path!r} does not exist", "correct the path or add the file"
            )


def sources_complete(entry: Entry[Solution], _: Definition | None) -> Iterator[Problem]:
    """Every file that the kernel imports from beside its own is listed, and no other: these alone go along with it."""
    listed = {source.path for source in entry.record.sources}
    needed = files_needed(entry.record.entry_file, lambda path: _text_of(entry, path))
    for path in sorted(needed - listed):
        yield Problem("sources", f"{path} is imported and not listed", f'add {{"path": "{path}"}}')
    for path in sorted(listed - needed):
        yield Problem("sources", f"{path} is listed and imported by none of the others", "remove it")


def sources_embedded(entry: Entry[Solution], _: Definition | None) -> Iterator[Problem]:
    for index, source in enumerate(entry.record.sources):
        if not source.content:
            yield Problem(f"sources.{index}.content", "is missing", "embed the text of the file")


def entry_point_exists(entry: Entry[Solution], _: Definition | None) -> Iterator[Problem]:
    solution = entry.record
    if not solution.entry_file.endswith(".py"):
        return
    text = _text_of(entry, solution.entry_file)
    if text is None:
        return
    try:
        names = _global_names(ast.parse(text))
    except UNPARSABLE as error:
        yield Problem("spec.entry_point", f"{solution.entry_file} is no valid Python ({error})", "correct the code")
        return
    if solution.entry_function not in names:
        yield Problem(
            "spec.entry_point",
            f"{solution.entry_file} has no function {solution.entry_function!r}",
            "correct the name or add the function",
        )


def entry_point_signature(entry: Entry[Solution], definition: Definition | None) -> Iterator[Problem]:
    text = _text_of(entry, entry.record.entry_file)
    try:
        tree = ast.parse(text or "")
    except UNPARSABLE:
        return
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    function = functions.get(entry.record.entry_function)
    if function is None or definition is None:
        return
    found = [arg.arg for arg in (*function.args.posonlyargs, *function.args.args)]
    if found != list(definition.inputs):
        yield Problem(
            "spec.entry_point",
            f"its parameters are ({', '.join(found)})",
            f"take the Definition's inputs in order: ({', '.join(definition.inputs)})",
        )


def solution_tags(entry: Entry[Solution], _: Definition | None) -> Iterator[Problem]:
    yield from tag_problems(entry.record.tags, ("dtype", "status"), frozenset())


def _text_of(entry: Entry[Solution], path: str) -> str | None:
    for source in entry.record.sources:
        if source.path == path and source.content is not None:
            return source.content
    file = entry.root.find(entry.file, path)
    return file.read_text(encoding="utf-8", errors="replace") if file else None


def files_needed(path: str, text_of: Callable[[str], str | None]) -> set[str]:
    """A kernel's file and all that it imports from beside it, in turn; ``text_of`` a path is None where it is not."""
    needed, waiting = set[str](), [path]
    while waiting:
        path = waiting.pop()
        if path not in needed:
            needed.add(path)
            waiting += _imported(path, text_of(path) or "")
    return needed


def _imported(path: str, text: str) -> list[str]:
    """The files beside ``path`` that it imports from; none where it is no Python, which another rule tells."""
    try:
        tree = ast.parse(text)
    except UNPARSABLE:
        return []
    found = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level == 1]
    names = [name for node in found for name in ([node.module] if node.module else [a.name for a in node.names])]
    return [str(PurePosixPath(path).with_name(f"{name.split('.')[0]}.py")) for name in names]


_NO_FUNCTIONS = (ast.Constant, ast.JoinedStr, ast.List, ast.Tuple, ast.Set, ast.Dict)


def _global_names(tree: ast.Module) -> set[str]:
    """Globals that may be functions: not those that are plainly set to a value."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif not isinstance(getattr(node, "value", None), _NO_FUNCTIONS):
            names |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return names
