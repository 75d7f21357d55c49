"""Run commands side by side, one on each GPU, within a time limit, and pack whatever they wrote into one file.

    python benchmarks/on_gpus.py benchmarks/h200_models.txt --limit 500 --out results

Each line of the file is `name: command`; empty lines and lines with # are left out. `{out}` in a command is the folder
for its files. A GPU takes the next command when its last one has ended, so put the longest first. When the limit comes,
what still runs gets Ctrl-C, and the results so far are packed all the same. Commands on different GPUs share the host:
figures of eager code, which waits for the CPU, are those of a busy machine. A GPU named twice (`--gpus 0,0,1,1`) takes
two commands: right for runs of `tilegym_fx.bench`, which prepare together and time alone, and for nothing else.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

#: Seconds between Ctrl-C and the end of a command that does not heed it.
GRACE = 10


@dataclass(frozen=True)
class Ended:
    """How a command ended: its status, or None where the time had run out before it began."""

    name: str
    status: int | None
    seconds: float


def commands(file: Path, out: Path) -> dict[str, list[str]]:
    """Name -> words of the command."""
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip() and line[0] != "#"]
    pairs = (line.partition(":") for line in lines)
    return {name.strip(): shlex.split(command.replace("{out}", str(out))) for name, _, command in pairs}


def run(name: str, words: list[str], gpus: Queue[str], out: Path, deadline: float) -> Ended:
    """Wait for a free GPU and run one command on it."""
    gpu, started = gpus.get(), time.monotonic()
    try:
        if started >= deadline:
            return Ended(name, None, 0.0)
        with (out / f"{name}.log").open("w", encoding="utf-8") as log:
            environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu, "PYTHONUNBUFFERED": "1"}
            process = subprocess.Popen(
                words, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
            return Ended(name, _wait(process, deadline), time.monotonic() - started)
    finally:
        gpus.put(gpu)


def _wait(process: subprocess.Popen[bytes], deadline: float) -> int:
    for seconds, sign in ((deadline - time.monotonic(), signal.SIGINT), (GRACE, signal.SIGKILL)):
        try:
            return process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, sign)
    return process.wait()


def pack(out: Path) -> Path:
    """All files of the folder in one archive beside it."""
    archive = out.with_suffix(".tar.gz")
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(out, out.name)
    return archive


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("file", type=Path)
    p.add_argument("--gpus", default="0,1,2,3", help="CUDA device numbers (default: 0,1,2,3)")
    p.add_argument("--limit", type=float, default=500, help="seconds for all of them")
    p.add_argument("--out", type=Path, default=Path("results"))
    args = p.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    deadline, gpus, numbers = time.monotonic() + args.limit, Queue[str](), args.gpus.split(",")
    for number in numbers:
        gpus.put(number)
    failed = 0
    with ThreadPoolExecutor(len(numbers)) as pool:
        jobs = [
            pool.submit(run, name, words, gpus, args.out, deadline)
            for name, words in commands(args.file, args.out).items()
        ]
        for job in jobs:
            ended = job.result()
            how = "not begun" if ended.status is None else f"status {ended.status}"
            print(f"{ended.name}: {how}, {ended.seconds:.0f} s", flush=True)
            failed += ended.status != 0
    print(pack(args.out))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
