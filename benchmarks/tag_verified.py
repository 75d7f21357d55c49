"""Tag as verified the Definitions whose kernels agreed with float64 on a GPU in every dtype that they claim.

    pytest -m gpu -v tests/gpu/test_kernels_on_gpu.py | tee log
    python benchmarks/tag_verified.py log

A Definition with a failure in any dtype loses the tag, one that the log does not speak of keeps what it has.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from pathlib import Path

from tilegym_fx import inventory

_TEST = r"test_kernel_agrees_with_float64\[(\w+)-(float32|float16|bfloat16)\]"
_HOW = r"(PASSED|FAILED|ERROR)"
#: A line of one process, and one of a worker of xdist.
_RESULT = re.compile(rf"^\S*{_TEST} {_HOW}", re.MULTILINE)
_OF_WORKER = re.compile(rf"^\[gw\d+\] \[ *\d+%\] {_HOW} \S*{_TEST}", re.MULTILINE)
_STATUS = re.compile(r"status:(un)?verified")


def results(log: str) -> dict[str, dict[str, bool]]:
    """Definition -> dtype -> whether it passed."""
    found: dict[str, dict[str, bool]] = defaultdict(dict)
    moved = [(name, dtype, how) for how, name, dtype in _OF_WORKER.findall(log)]
    for name, dtype, how in [*_RESULT.findall(log), *moved]:
        found[name][dtype] = how == "PASSED"
    return found


def main(log: Path) -> None:
    """Rewrite the Definitions' files."""
    ours = inventory.load()
    for name, passed in sorted(results(log.read_text(encoding="utf-8")).items()):
        definition = ours.definition(name)
        claimed = {dtype for solution in ours.solutions_for(name) for dtype in solution.dtypes}
        if all(passed.values()) and passed.keys() < claimed:
            print(f"{name}: not tried in {', '.join(sorted(claimed - passed.keys()))}")
            continue
        tag = "status:verified" if all(passed.values()) else "status:unverified"
        file = ours.file_of(definition)
        text = file.read_text(encoding="utf-8")
        if (new := _STATUS.sub(tag, text)) != text:
            file.write_text(new, encoding="utf-8")
            print(f"{name}: {tag}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
