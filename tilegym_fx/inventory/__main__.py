"""``python -m tilegym_fx.inventory check|list|export``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tilegym_fx.errors import TilegymFxError, did_you_mean
from tilegym_fx.inventory import Inventory, load, shipped_root
from tilegym_fx.schema import Definition


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        status: int = options.command(options)
    except TilegymFxError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return status


def _check(options: argparse.Namespace) -> int:
    from tilegym_fx.inventory.check import check

    roots = [*options.roots, *options.root] or [shipped_root()]
    result = check(roots, execute=options.execute)
    for fault in result.faults:
        print(fault)
    for note in result.notes:
        print(f"note: {note}")
    found = f"{result.definitions} Definitions and {result.solutions} Solutions in {', '.join(map(str, roots))}"
    if result.faults:
        print(f"error: {len(result.faults)} fault(s) among {found}", file=sys.stderr)
        return 1
    print(f"ok: {found}{'' if options.execute else ', nothing executed'}")
    return 0


def _list(options: argparse.Namespace) -> int:
    inventory = load(*options.root)
    chosen = [
        definition
        for _, definition in sorted(inventory.definitions.items())
        if options.op_type in (None, definition.op_type) and set(options.tag) <= set(definition.tags)
    ]
    if options.json:
        print(json.dumps([_as_json(inventory, definition) for definition in chosen], indent=2))
    else:
        _print_blocks(inventory, chosen)
        for line in () if chosen else _strangers(options, inventory):
            print(line, file=sys.stderr)
    return 0


def _strangers(options: argparse.Namespace, inventory: Inventory) -> Iterator[str]:
    """What was asked for that no Definition has, and what looks like it."""
    families = {definition.op_type for definition in inventory.definitions.values()}
    tags = {tag for definition in inventory.definitions.values() for tag in definition.tags}
    if options.op_type is not None and options.op_type not in families:
        yield f"no Definition has the op_type {options.op_type!r}{did_you_mean(options.op_type, families)}"
    for tag in options.tag:
        if tag not in tags:
            yield f"no Definition has the tag {tag!r}{did_you_mean(tag, tags)}"


def _export(options: argparse.Namespace) -> int:
    from tilegym_fx.inventory.flashinfer import export_flashinfer, inexpressible

    inventory = load(shipped_root(), *options.root, shipped=False)
    written = export_flashinfer(inventory, options.flashinfer)
    print(f"ok: {len(written)} files written to {options.flashinfer}")
    left_out = [name for name, definition in inventory.definitions.items() if inexpressible(definition)]
    if left_out:
        print(f"left out, for FlashInfer-Bench has no complex numbers: {', '.join(sorted(left_out))}")
    return 0


def _as_json(inventory: Inventory, definition: Definition) -> dict[str, object]:
    return {
        **definition.model_dump(mode="json"),
        "file": str(inventory.file_of(definition)),
        "solutions": [
            {**solution.model_dump(mode="json"), "file": str(inventory.file_of(solution))}
            for solution in inventory.solutions_for(definition.name)
        ],
    }


def _print_blocks(inventory: Inventory, definitions: Sequence[Definition]) -> None:
    """For each Definition a line that can be searched for its name, and below it what it takes, gives and is for."""
    from rich.padding import Padding
    from rich.text import Text

    from tilegym_fx import folding

    out = folding.console()
    name_width = max((len(definition.name) for definition in definitions), default=0)
    type_width = max((len(definition.op_type) for definition in definitions), default=0)
    for definition in definitions:
        status = ", ".join(definition.tag_values("status"))
        line = f"{definition.name:<{name_width}}  {definition.op_type:<{type_width}}  {status}"
        out.print(Text(line.rstrip(), style="bold"), soft_wrap=True)
        for detail in _details(inventory, definition):
            folding.show(Padding(folding.Folding(detail), (0, 0, 0, 4)), out)
    out.print(f"{len(definitions)} Definitions", highlight=False)


def _details(inventory: Inventory, definition: Definition) -> Iterator[str]:
    yield f"({', '.join(definition.inputs)}) -> {', '.join(definition.outputs)}"
    solutions = inventory.solutions_for(definition.name)
    runs = "; ".join(f"{s.name} on {', '.join(s.spec.target_hardware)}" for s in solutions)
    yield f"Solution: {runs}" if solutions else "no Solution"
    if models := definition.tag_values("model"):
        yield f"models: {_shortened(models)}"


def _shortened(names: Sequence[str]) -> str:
    more = f" +{len(names) - 3}" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tilegym_fx.inventory",
        description="Reads inventories. They are code: name only roots that you trust.",
    )
    commands = parser.add_subparsers(required=True, metavar="check|list|export")
    check = commands.add_parser("check", help="list every fault; exit 1 if there is one")
    check.add_argument("roots", nargs="*", type=Path, metavar="ROOT", help="roots to check (default: the shipped one)")
    check.add_argument("--root", action="append", default=[], type=Path, metavar="DIR", help="the same as ROOT")
    check.add_argument("--no-exec", dest="execute", action="store_false", help="only parse, run nothing")
    check.set_defaults(command=_check)
    listing = commands.add_parser("list", help="show Definitions and their Solutions")
    listing.add_argument("--json", action="store_true", help="print whole records")
    listing.add_argument("--op-type", metavar="T", help="only this op_type")
    listing.add_argument("--tag", action="append", default=[], metavar="TAG", help="only with this tag (model:llama)")
    _add_root(listing)
    listing.set_defaults(command=_list)
    export = commands.add_parser("export", help="write the inventory in another form")
    export.add_argument("--flashinfer", type=Path, required=True, metavar="DIR", help="as a FlashInfer-Trace data set")
    _add_root(export)
    export.set_defaults(command=_export)
    return parser


def _add_root(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--root",
        action="append",
        default=[],
        type=Path,
        help="an extra root beside the shipped one (repeatable)",
    )


if __name__ == "__main__":
    sys.exit(main())
