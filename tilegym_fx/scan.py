"""``python -m tilegym_fx.scan MODEL``: what would match, without weights and without a GPU."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text
from torch import nn

from . import breadth
from .apply import save
from .cost import get_device
from .draft import write_drafts
from .errors import MatchError, TilegymFxError, UsageError, make_folder, writing
from .folder_form import emitted_path, make_emitted_folder, modeling_file, refuse_foreign, write_folder
from .inventory import Inventory, load
from .model_source import DTYPE_HELP, DTYPES
from .options import flags, given
from .plan import Policy
from .planner import plan_source_form
from .render import print_explanation, print_survey
from .survey import PHASES, Survey, as_json, survey, versions

_WHAT_TO_GIVE = (
    "Give one: a hub id such as `meta-llama/Llama-3.1-8B`, a folder with a config.json, or a model type such as"
    " `llama`; or --all for every model type"
)
#: Options of --all alone, and those that it shares with the scan of one model.
_WITH_ALL, _WITH_BOTH = {"out", "jobs", "limit", "floor"}, {"all", "model", "json", "inventory"}
EXIT_OK, EXIT_ERROR, EXIT_NO_MATCH = 0, 1, 2


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser("python -m tilegym_fx.scan", description=__doc__)
    p.add_argument(
        "model",
        metavar="MODEL",
        nargs="*",
        help="hub id (config only), folder, model type, or id of the shipped table; with --all, model types",
    )
    p.add_argument("--phase", choices=PHASES, action="append", help="only this phase (default: both)")
    p.add_argument("--device", default="h200", help="device whose time is estimated (default: h200)")
    p.add_argument("--batch", type=int, default=1)
    p.add_argument(
        "--seq",
        type=int,
        help="prompt length, and cache length in decode (default: 2048, or what the model has positions for)",
    )
    p.add_argument("--dtype", choices=DTYPES, help=DTYPE_HELP)
    p.add_argument(
        "--inventory",
        type=Path,
        action="append",
        default=[],
        metavar="ROOT",
        help="a further inventory root; it is code, name only what you trust",
    )
    p.add_argument("--only", action="append", metavar="DEFINITION", help="use these Definitions only")
    p.add_argument("--skip", action="append", default=[], metavar="DEFINITION", help="leave these out")
    p.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    p.add_argument(
        "--forms",
        action="store_true",
        help="tell of each match whether it can be written in source form, in graph form alone, or both; takes longer",
    )
    p.add_argument(
        "--explain",
        metavar="PLACE",
        help="every match and miss of one Definition, or in one class, module path, file or file:line",
    )
    p.add_argument("--draft", type=Path, metavar="DIR", help="write a draft Definition for each uncovered region")
    p.add_argument("--emit", type=Path, metavar="DIR", help="write modeling_<model type>.py, the patch in source form")
    p.add_argument(
        "--layout",
        choices=("file", "tilegym"),
        help="with --emit: the file alone (default), or a folder with its Definitions, Solutions and kernels",
    )
    p.add_argument("--strict", action="store_true", help="exit 2 when nothing matched")
    p.add_argument("--trust-remote-code", action="store_true", help="allow code that comes with the configuration")
    every = p.add_argument_group("every causal language model of transformers")
    every.add_argument(
        "--all", action="store_true", help="try all model types, or those named, in processes of their own"
    )
    every.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="rows, JSON, CSV and page; a stopped run goes on there (default: coverage)",
    )
    every.add_argument("--jobs", type=int, metavar="N", help="processes at once (default: 2)")
    every.add_argument("--limit", type=float, metavar="SECONDS", help="for each model type (default: 240)")
    every.add_argument("--floor", type=Path, metavar="JSON", help="exit 2 when a count is below that coverage.json")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    args = parser().parse_args(argv)
    console = Console(stderr=True)
    try:
        _refuse_idle_options(args)
        return _scan_all(args) if args.all else _scan(args, console)
    except TilegymFxError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_ERROR


def _refuse_idle_options(args: argparse.Namespace) -> None:
    """An option that would do nothing is not what the user meant."""
    asked = given(args, parser())
    if args.all and (idle := asked - _WITH_ALL - _WITH_BOTH):
        raise UsageError(f"{flags(idle)} cannot be had for all model types at once", advice="Leave out --all, or that")
    if not args.all and (idle := asked & _WITH_ALL):
        raise UsageError(f"{flags(idle)} belongs to --all", advice="Leave it out, or give --all")
    if args.layout and not args.emit:
        raise UsageError("--layout tells how --emit writes", advice="Give --emit DIR too")


def _scan_all(args: argparse.Namespace) -> int:
    rows = breadth.run_all(
        args.out or Path("coverage"),
        args.model,
        jobs=2 if args.jobs is None else args.jobs,
        limit=240.0 if args.limit is None else args.limit,
        roots=args.inventory,
    )
    print(breadth.as_json(rows, versions()) if args.json else breadth.as_text(rows))
    lost = breadth.dropped(rows, args.floor) if args.floor else []
    for line in lost:
        print(f"dropped: {line}", file=sys.stderr)
    return EXIT_NO_MATCH if lost else EXIT_OK


def _scan(args: argparse.Namespace, console: Console) -> int:
    if len(args.model) != 1:
        problem = f"{len(args.model)} models are named" if args.model else "no MODEL is named"
        raise UsageError(problem, advice=_WHAT_TO_GIVE)
    inventory = load(*args.inventory)
    policy = Policy(get_device(args.device), args.only, args.skip)
    if args.draft:
        make_folder(args.draft)
    if args.emit:
        make_emitted_folder(args.emit)
    with console.status("starting") as status:
        found = survey(
            args.model[0],
            inventory,
            policy,
            batch=args.batch,
            seq=args.seq,
            dtype=args.dtype,
            phases=args.phase or PHASES,
            trust_remote_code=args.trust_remote_code,
            forms=args.forms,
            progress=lambda doing: status.update(Text(doing)),
        )
    if args.emit:
        refuse_foreign(_emitted_file(args, _built(found)))
    if args.json:
        print(json.dumps(as_json(found), indent=1))
    elif args.explain:
        print_explanation(found, args.explain, inventory.definitions)
    else:
        print_survey(found)
    if args.draft:
        written = write_drafts(found, args.draft)
        print(f"{len(written)} draft Definitions in {args.draft}", file=sys.stderr)
    if args.emit:
        print(_emit(args, found, inventory, policy), file=sys.stderr)
    return EXIT_NO_MATCH if args.strict and not found.sites else EXIT_OK


def _built(found: Survey) -> nn.Module:
    return next(phase.graph.model for phase in found.phases if phase.graph is not None)


def _emitted_file(args: argparse.Namespace, model: nn.Module) -> Path:
    return modeling_file(args.emit, model) if args.layout == "tilegym" else emitted_path(args.emit, model)


def _emit(args: argparse.Namespace, found: Survey, inventory: Inventory, policy: Policy) -> str:
    model = _built(found)
    made, report = plan_source_form(
        model, only=policy.only, skip=policy.skip, inventory=inventory, device=policy.device
    )
    if not made.text:
        raise MatchError(f"nothing of {args.model} can be written in source form: {'; '.join(report.misses()[:1])}")
    with writing(args.emit):
        if args.layout == "tilegym":
            path = write_folder(made, model, inventory, args.emit)
        else:
            path = _emitted_file(args, model)
            save(made.text, path)
    written, planned = report.in_both_forms, sum(len(form.ours) for form in report.graph_form.values())
    places = f"{written} of {planned} places; the others need graph form (--forms tells which)"
    if written == planned:
        places = f"all {planned} places"
    return f"wrote {path}: {places}\nto apply it: import {path.stem}; {path.stem}.apply(model)"


if __name__ == "__main__":
    sys.exit(main())
