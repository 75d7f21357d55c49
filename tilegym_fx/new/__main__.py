"""``python -m tilegym_fx.new NAME --op-type T``: the files of a new kernel, and the state of its steps."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from tilegym_fx.errors import TilegymFxError, UsageError, did_you_mean
from tilegym_fx.inventory import shipped_root

from . import scaffold
from .steps import look

_OP_TYPE_HELP = """family: rmsnorm, activation, gemm and so on, best one that `python -m tilegym_fx.inventory list`
shows; any other word begins a new family, and the output says so"""
EXIT_OK, EXIT_ERROR, EXIT_FAULT = 0, 1, 1


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser("python -m tilegym_fx.new", description=__doc__)
    p.add_argument("name", nargs="?", metavar="NAME", help="of the Definition, the op and every file")
    p.add_argument("--op-type", metavar="T", help=_OP_TYPE_HELP)
    start = p.add_mutually_exclusive_group()
    start.add_argument("--like", metavar="DEFINITION", help="start from this Definition and its kernel")
    start.add_argument(
        "--from-draft", type=Path, metavar="FILE", help="start from a draft that `scan --draft` has written"
    )
    p.add_argument("--root", type=Path, help="inventory to write to (default: this repository)")
    p.add_argument("--status", metavar="NAME", help="only print the state of the six steps")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    args = parser().parse_args(argv)
    try:
        return _new(args)
    except TilegymFxError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_ERROR


def _new(args: argparse.Namespace) -> int:
    root = (args.root or scaffold.default_root()).resolve()
    if args.status:
        if not any(path.exists() for path in scaffold.files_of(args.status, root).values()):
            near = did_you_mean(args.status, (file.stem for file in (root / "definitions").glob("*.json")))
            advice = f"Create them: new NAME --op-type T{near}"
            raise UsageError(f"{root} has no file of {args.status!r}", advice=advice)
        return _print_steps(args.status, root)
    if not args.name or not args.op_type:
        raise UsageError("a new kernel needs NAME and --op-type")
    scaffold.require_new(args.name, root)
    families = {definition.op_type for definition in scaffold.inventory_of(root).definitions.values()}
    parts = _parts(args, root)
    written = scaffold.write(args.name, parts, root)
    for path in written.new:
        print(f"wrote {path.relative_to(root)}")
    for path in written.changed:
        print(f"changed {path.relative_to(root)}: the float64 evaluation of {args.name} is at its end", flush=True)
    status = _print_steps(args.name, root)
    if args.op_type not in families:
        print(_new_family(args.op_type, families))
    print(_ways_on(args.name, written, root))
    return status


def _parts(args: argparse.Namespace, root: Path) -> scaffold.Parts:
    if args.like:
        return scaffold.from_definition(args.name, args.op_type, args.like, scaffold.inventory_of(root))
    if args.from_draft:
        from tilegym_fx.synth import write_kernel

        return scaffold.from_draft(args.name, args.op_type, args.from_draft, write_kernel)
    return scaffold.from_nothing(args.name, args.op_type)


def _new_family(op_type: str, families: Collection[str]) -> str:
    """That an op type is no Definition's yet: it may be meant so, or be misspelt."""
    near = did_you_mean(op_type, families)
    return f"note: {op_type!r} is a new op type{near}; there are {', '.join(sorted(families))}"


def _ways_on(name: str, written: scaffold.Written, root: Path) -> str:
    """What to do with new files, and how to be rid of them."""
    where = "" if root == shipped_root() else f" --root {shlex.quote(str(root))}"
    new = " ".join(shlex.quote(path.relative_to(root).as_posix()) for path in written.new)
    lines = [
        "next: make the reference and its spellings yours, then the kernel, then its test and benchmark, until",
        f"      `python -m tilegym_fx.new --status {name}{where}` says ok everywhere (docs/kernel_loop.md)",
        f"undo: cd {shlex.quote(str(root))} && rm {new}",
    ]
    for path in written.changed:
        shown = path.relative_to(root).as_posix()
        lines.append(f"      and take {name} out of {shown} (git checkout {shown}, if nothing else has changed there)")
    return "\n".join(lines)


def _print_steps(name: str, root: Path) -> int:
    print(f"{name} in {root}")
    faults = 0
    for number, step in enumerate(look(name, root), 1):
        faults += step.state == "FAULT"
        print(f"  {number} {step.title:<15} {step.state:<8} {step.text}", flush=True)
    return EXIT_FAULT if faults else EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
