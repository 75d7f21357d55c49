"""``python -m tilegym_fx.bench MODEL``: how fast the whole model runs, with and without our kernels."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tilegym_fx.errors import TilegymFxError, UsageError, did_you_mean, make_folder, writing
from tilegym_fx.model_source import DTYPE_HELP, DTYPES
from tilegym_fx.options import flags, given

from . import patches
from .cases import DEFAULT_CASES, DEFAULT_VARIANTS, PEERS, SMALL, VARIANTS, get_variant, parse_cases
from .job import Job
from .models import find_source
from .picture import draw
from .record import append_record, machine
from .report import print_report, summary_lines
from .results import Result, as_json, from_json, latest
from .run import Limits, run, run_here

EXIT_OK, EXIT_ERROR = 0, 1
#: The options that say what becomes of results.
_WITH_FROM = {"read", "json", "svg", "record"}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    variants = "; ".join(f"{v.name}: {v.about}" for v in VARIANTS.values() if not v.is_peer)
    p = argparse.ArgumentParser("python -m tilegym_fx.bench", description=__doc__, epilog=f"Variants: {variants}.")
    p.add_argument("model", metavar="MODEL", nargs="?", help="anything that scan takes; weights are random, "
                   "or those of a local folder that has some")  # fmt: skip
    p.add_argument("--phases", nargs="+", metavar="PHASE", default=list(DEFAULT_CASES),
                   help=f"what to time (default: {' '.join(DEFAULT_CASES)})")  # fmt: skip
    p.add_argument("--variants", metavar="A,B", default=",".join(DEFAULT_VARIANTS),
                   help="ways to run it, in order (default: %(default)s)")  # fmt: skip
    p.add_argument(
        "--peers", metavar="A,B", default="", help=f"of {','.join(PEERS)}: their own patches, where installed"
    )
    p.add_argument("--layers", type=int, metavar="N", help="the first N layers only, for a quick look")
    p.add_argument("--dtype", choices=DTYPES, help=DTYPE_HELP)
    p.add_argument("--repeats", type=int, default=40, help="timed steps of a decode (prompts: a quarter of it)")
    p.add_argument("--no-judge", action="store_true", help="no float32 run beside: compare with the original alone")
    p.add_argument("--limit", type=float, default=300, metavar="S", help="seconds that a variant may take for a phase")
    p.add_argument("--at-once", type=int, default=1, metavar="N", help="variants that build and compile side by side")
    p.add_argument("--here", action="store_true", help="all in this process: no time limit, no peers")
    p.add_argument("--out", type=Path, metavar="FILE", help="append every result as it comes, as JSON lines")
    p.add_argument("--from", dest="read", type=Path, nargs="+", metavar="FILE", help="read such files, time nothing")
    p.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    p.add_argument("--trace", metavar="FILE", help="keep the profiler's traces; variant and phase go into the name")
    p.add_argument("--svg", type=Path, metavar="FILE", help="draw the time by kernel, before and after")
    p.add_argument("--record", type=Path, nargs="?", const=Path("benchmarks"), metavar="DIR",
                   help="append a dated record (default folder: benchmarks)")  # fmt: skip
    p.add_argument("--dry-run", action="store_true", help="a tiny model of the same type on the CPU, "
                   f"with at most {SMALL[0]} sequences of {SMALL[1]} tokens")  # fmt: skip
    p.add_argument("--trust-remote-code", action="store_true", help="allow code that comes with the configuration")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    args = parser().parse_args(argv)
    try:
        _refuse_idle_options(args)
        return _bench(args)
    except TilegymFxError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_ERROR


def _refuse_idle_options(args: argparse.Namespace) -> None:
    """With results that are read nothing is run, so that an option of a run would do nothing."""
    if args.read and (idle := given(args, parser()) - _WITH_FROM):
        raise UsageError(f"--from reads results and runs nothing, so that {flags(idle)} would do nothing",
                         advice="Leave out --from, or that")  # fmt: skip


def _bench(args: argparse.Namespace) -> int:
    for file in filter(None, (args.out, args.svg, args.record and args.record / "record.md")):
        make_folder(file.parent)
    header, results = _read(args.read) if args.read else _measure(args)
    results = latest(results)
    if args.json:
        summary = summary_lines(results)
        print(json.dumps({**header, "results": [as_json(r) for r in results], "summary": summary}, indent=1))
    else:
        print_report(header, results)
    if args.svg:
        with writing(args.svg):
            args.svg.write_text(draw(results), encoding="utf-8")
    if args.record:
        print(f"recorded in {append_record(args.record, header, results)}", file=sys.stderr)
    return EXIT_OK if any(result.error is None for result in results) else EXIT_ERROR


def _measure(args: argparse.Namespace) -> tuple[dict[str, Any], list[Result]]:
    if not args.model:
        raise UsageError("no MODEL to time", advice="Give one, or --from with the results of earlier runs")
    jobs_wanted = [get_variant(name).name for name in (*args.variants.split(","), *_peers(args)) if name]
    if not args.dry_run and not _has_gpu():
        raise UsageError("there is no CUDA device to time on", advice="Run it on a GPU machine, or with --dry-run")
    with tempfile.TemporaryDirectory(prefix="tilegym_fx_bench_") as folder:
        jobs = make_jobs(args, jobs_wanted, folder)
        source = find_source(jobs[0])  # a name that means nothing is told before anything starts
        if args.dry_run and jobs[0].cases != tuple(map(str, parse_cases(args.phases))):
            print(f"a dry run: phases are cut to {' '.join(jobs[0].cases)}", file=sys.stderr)
        dtype = str(source.dtype_for(args.dtype)).removeprefix("torch.")
        jobs = [replace(job, dtype=dtype) for job in jobs]
        asked = {name: vars(args)[name] for name in ("model", "layers", "dry_run")}
        header: dict[str, Any] = {"kind": "header", **asked, "dtype": dtype, **machine()}
        messages: list[dict[str, Any]] = []

        def sink(message: dict[str, Any]) -> None:
            messages.append(message)
            _append(args.out, [message])
            if message["kind"] == "result":
                outcome = message["error"] or f"{message['wall_ms']:.3f} ms"
                print(f"{message['case']} {message['variant']}: {outcome}", file=sys.stderr, flush=True)

        _append(args.out, [header])
        if args.here:
            run_here(jobs, sink)
        else:
            run(jobs, sink, Limits(args.limit, max(1, args.at_once)))
    return _assembled([header, *messages])


def make_jobs(args: argparse.Namespace, variants: Sequence[str], folder: str) -> list[Job]:
    """A job for each variant; the original first, if only to be compared with."""
    wanted = parse_cases(args.phases)
    cases = tuple(dict.fromkeys(str(case.small() if args.dry_run else case) for case in wanted))
    common = Job(
        args.model, "eager", cases, folder, device="cpu" if args.dry_run else "cuda", layers=args.layers,
        tiny=args.dry_run, repeats=args.repeats, judge=not args.no_judge,
        timed="eager" in variants, trust_remote_code=args.trust_remote_code, trace=args.trace,
    )  # fmt: skip
    others = [replace(common, variant=name, timed=True) for name in dict.fromkeys(variants) if name != "eager"]
    return [common, *others]


def _peers(args: argparse.Namespace) -> list[str]:
    """The peers that are asked for and installed."""
    chosen = []
    for peer in filter(None, args.peers.split(",")):
        if peer not in PEERS:
            raise UsageError(
                f"{peer!r} is no peer", advice=f"Give some of {', '.join(PEERS)}{did_you_mean(peer, PEERS)}"
            )
        if args.here:
            raise UsageError("a peer patches its whole process", advice="Leave out --here or --peers")
        if patches.is_installed(peer):
            chosen.append(peer)
        else:
            print(f"{peer} is not installed, so it is left out", file=sys.stderr)
    return chosen


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _append(file: Path | None, messages: Iterable[dict[str, Any]]) -> None:
    if file is not None:
        with writing(file), file.open("a", encoding="utf-8") as lines:
            lines.writelines(json.dumps(message) + "\n" for message in messages)


def _read(files: Iterable[Path]) -> tuple[dict[str, Any], list[Result]]:
    return _assembled(message for file in files for message in _messages(file))


def _messages(file: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line]
    except (OSError, ValueError) as error:
        raise UsageError(f"{file} is no file of results: {error}", advice="Give files that --out wrote") from None


def _assembled(messages: Iterable[dict[str, Any]]) -> tuple[dict[str, Any], list[Result]]:
    """The header, with what the first worker said about the model, and the results."""
    header: dict[str, Any] = {}
    results = []
    for message in messages:
        if message["kind"] == "header":
            header = {**message, "about": header.get("about", {})}
        elif message["kind"] == "about":
            header["about"] = {**message, **_known(header.get("about", {}))}
        else:
            results.append(from_json(message))
    return header, results


def _known(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


if __name__ == "__main__":
    sys.exit(main())
