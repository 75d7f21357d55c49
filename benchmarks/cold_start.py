"""How long a user waits for the first token: a new process, with empty caches of compilers and with full ones.

    python benchmarks/cold_start.py meta-llama/Llama-3.1-8B --json results.json
    python benchmarks/cold_start.py meta-llama/Llama-3.1-8B --dry-run      # a tiny model of the type, on the CPU

Counted from the imports on: `import` of torch, transformers and tilegym_fx, `kernelize` with its verification, `first`
token of a prompt, and `generate` of 32 more with a static cache (`--compile` has transformers compile that step with
tilegym_fx's backend). Building the model is left out: it is the same with and without us. `cold` has an empty folder
for all caches, `warm` the one that `cold` filled, and `emitted` applies the file that `cold` emitted and verified in
place of `kernelize`.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

#: What each tool calls its folder; all are put below one.
CACHES = ("CUDA_TILE_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TILEGYM_FX_CACHE", "XDG_CACHE_HOME")
PROMPT, NEW = 2048, 32
STEPS = ("import", "kernelize", "first", "generate")
STARTS = ("cold", "warm", "emitted")
EMITTED = "modeling.py"


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--compile", action="store_true", help="compile the decode step with the backend")
    parser.add_argument("--dry-run", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--json", type=Path, help="write the seconds to this file")
    parser.add_argument(
        "--limit", type=float, default=240, metavar="S", help="seconds for one start (default: %(default)s)"
    )
    parser.add_argument("--inside", choices=STARTS, help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


@contextmanager
def _counted(name: str, seconds: dict[str, float]) -> Iterator[None]:
    started = time.perf_counter()
    yield
    seconds[name] = round(time.perf_counter() - started, 2)
    print(f"{name}: {seconds[name]} s", file=sys.stderr, flush=True)


def inside(args: argparse.Namespace) -> dict[str, float]:
    """The seconds of one start, in this process."""
    seconds: dict[str, float] = {}
    faulthandler.dump_traceback_later(args.limit, exit=True, file=sys.__stderr__)
    with _counted("import", seconds):
        import torch

        import tilegym_fx
        from tilegym_fx.apply import load
        from tilegym_fx.bench.job import Job
        from tilegym_fx.bench.models import make_model, random_tokens
    device = "cpu" if args.dry_run else "cuda"
    model = make_model(Job(args.model, "eager+fx", (), "", device=device, tiny=args.dry_run))
    tokens = random_tokens(model, 1, 16 if args.dry_run else PROMPT)
    with _counted("kernelize", seconds):
        if args.inside == "emitted":
            load(args.file).apply(model)
        else:
            tilegym_fx.kernelize(model, emit=args.file if args.inside == "cold" else None)
    with _counted("first", seconds), torch.inference_mode():
        model(tokens, logits_to_keep=1).logits.argmax(-1).item()
    with _counted("generate", seconds):
        _generate(model, tokens, compiled=args.compile)
    faulthandler.cancel_dump_traceback_later()
    return seconds


def _generate(model: Any, tokens: Any, *, compiled: bool) -> None:
    import torch
    from transformers import CompileConfig

    more = {"compile_config": CompileConfig(backend="tilegym_fx", mode=None)} if compiled else {"disable_compile": True}
    model.generate(tokens, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, cache_implementation="static",
                   attention_mask=torch.ones_like(tokens), **more)  # fmt: skip


def start(kind: str, arguments: list[str], caches: Path) -> dict[str, float]:
    """The seconds of one start in a process of its own, whose caches and emitted file are below a folder.

    Raises:
        SystemExit: It failed or took too long; where it was then, it has said itself.
    """
    folders = {name: str(caches / name.lower()) for name in CACHES}
    command = [sys.executable, __file__, *arguments, "--inside", kind, "--file", str(caches / EMITTED)]
    done = subprocess.run(command, env={**os.environ, **folders}, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit("error: a start failed, see above")
    seconds: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return seconds


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    args = parsed(arguments)
    if args.inside:
        print(json.dumps(inside(args)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        found = {kind: start(kind, arguments, Path(folder)) for kind in STARTS}
    print(f"{'':8}" + "".join(f"{step:>11}" for step in (*STEPS, "to token 1")))
    for name, seconds in found.items():
        token = sum(seconds[step] for step in STEPS[:3])
        print(f"{name:8}" + "".join(f"{value:9.1f} s" for value in (*(seconds[step] for step in STEPS), token)))
    if args.json:
        args.json.write_text(json.dumps({"model": args.model, "compiled": args.compile, **found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
