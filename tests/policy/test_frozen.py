"""What users write down: public names and command-line flags. A change shows as a diff of a golden file."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

from repository import PACKAGE, python_files, tree

Golden = Callable[[str, str], None]


def is_command(path: Path) -> bool:
    """Whether users run this file with ``python -m``; deeper files with a main block are workers of ours."""
    if path.parent != PACKAGE:
        return path.name == "__main__.py"
    return any(
        isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'" for node in tree(path).body
    )


def arguments(path: Path) -> Iterator[str]:
    """Names of the options, positionals and subcommands that a file declares."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr not in ("add_argument", "add_parser"):
                continue
            yield from (str(a.value) for a in node.args if isinstance(a, ast.Constant))


def command_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__main__")


def files_of_command(path: Path) -> list[Path]:
    """A command's own file or, where it is a package, all files of that package."""
    return sorted(path.parent.rglob("*.py")) if path.parent != PACKAGE else [path]


def test_public_names(golden: Golden) -> None:
    import tilegym_fx

    assert sorted(set(tilegym_fx.__all__)) == sorted(tilegym_fx.__all__)
    golden("public_names.txt", "\n".join(sorted(tilegym_fx.__all__)) + "\n")


def test_every_public_name_is_there_and_documented() -> None:
    import tilegym_fx

    undocumented = [n for n in tilegym_fx.__all__ if not n.startswith("__") and not getattr(tilegym_fx, n).__doc__]
    assert undocumented == []


def test_command_line_flags(golden: Golden) -> None:
    commands = [path for path in python_files("tilegym_fx") if is_command(path)]
    lines = []
    for path in commands:
        declared = {argument for file in files_of_command(path) for argument in arguments(file)}
        lines.append(f"{command_name(path)}: {' '.join(sorted(declared))}")
    golden("command_line.txt", "\n".join(lines) + "\n")
