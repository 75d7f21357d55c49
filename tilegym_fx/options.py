"""What a command line asks for beyond its defaults, to refuse what would do nothing."""

from __future__ import annotations

import argparse
from collections.abc import Iterable


def given(args: argparse.Namespace, usual: argparse.ArgumentParser) -> set[str]:
    """The names of the arguments that are not what the parser takes by default."""
    return {name for name, value in vars(args).items() if value != usual.get_default(name)}


def flags(names: Iterable[str]) -> str:
    """Arguments as a user writes them; a model is no flag."""
    return ", ".join("MODEL" if name == "model" else f"--{name.replace('_', '-')}" for name in sorted(names))
