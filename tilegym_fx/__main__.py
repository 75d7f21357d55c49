"""``python -m tilegym_fx``: the names of the commands."""

from __future__ import annotations

import sys

COMMANDS = {
    "scan": "what would match in a model, without weights and without a GPU",
    "bench": "a model's throughput, and the share of its GPU time that is ours",
    "tune": "measure the best configuration of each kernel for a model's shapes",
    "doctor": "is this machine set up right, and what to do",
    "inventory": "list, check and export Definitions and Solutions",
    "new": "a Definition, a Solution and a kernel to begin with",
    "autokernelize": "try kernels for what a model leaves uncovered",
}


def main() -> int:
    """Print them; a command is none of its own."""
    width = max(map(len, COMMANDS))
    print("Each is a command: python -m tilegym_fx.scan MODEL, and --help for each.")
    print("\n".join(f"  {name:{width}}  {what}" for name, what in COMMANDS.items()))
    return 0 if len(sys.argv) == 1 or sys.argv[1] in ("-h", "--help") else 2


if __name__ == "__main__":
    sys.exit(main())
