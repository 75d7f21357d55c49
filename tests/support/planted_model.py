"""A tiny model with three uncovered regions: one that a library solves, one that needs an adapter, one new."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tilegym_fx.inventory import load

#: Written to a file of its own, as users write theirs: ``FILE.py::make``.
MODEL = '''\
"""Three modules, none of which the shipped inventory covers."""

import torch
from torch import nn


class Squash(nn.Module):
    """In the library."""

    def forward(self, x):
        return torch.exp(-torch.abs(x)) * torch.tanh(x)


class ChannelGate(nn.Module):
    """A gate with one row for all tokens: silu_mul, but for a broadcast."""

    def __init__(self, width):
        super().__init__()
        self.row = nn.Parameter(torch.linspace(-1, 1, width).view(1, 1, width))

    def forward(self, x):
        return nn.functional.silu(x) * self.row


class Standardize(nn.Module):
    """Rows over their largest magnitude, bent; in nobody's inventory."""

    def forward(self, x):
        wide = x.float()
        top = wide.abs().amax(-1, keepdim=True)
        return (torch.sin(wide / (top + 0.5)) * 3.0).to(x.dtype)


class Planted(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.squash, self.gate, self.standardize = Squash(), ChannelGate(width), Standardize()

    def forward(self, x):
        return self.standardize(self.gate(self.squash(x)))


def make():
    torch.manual_seed(0)
    return Planted(48).bfloat16(), (torch.randn(3, 37, 48).bfloat16(),)


class Wrong(nn.Module):
    def forward(self, x):
        return torch.tanh(x) * 1.5 + 0.25


class Slow(nn.Module):
    def forward(self, x):
        return torch.sigmoid(x) * x * x * 0.5


class Crash(nn.Module):
    def forward(self, x):
        return torch.cos(x) - 0.75


class Failing(nn.Module):
    """A hook writes a kernel for each of these that does what the name says."""

    def __init__(self):
        super().__init__()
        self.wrong, self.slow, self.crash = Wrong(), Slow(), Crash()

    def forward(self, x):
        return self.crash(self.slow(self.wrong(x)))


def failing():
    return Failing(), (torch.randn(3, 37, 48).bfloat16(),)


def mixed():
    """One whose kernel is right, and a smaller one whose kernel is not."""
    return Mixed(), (torch.randn(3, 37, 48).bfloat16(), torch.randn(3, 11, 48).bfloat16())


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.squash, self.wrong = Squash(), Wrong()

    def forward(self, x, y):
        return self.squash(x), self.wrong(y)


def one():
    return Crash(), (torch.randn(3, 37, 48).bfloat16(),)
'''

#: A hook: takes what was synthesised and spoils it as the Definition's name says.
HOOK = """\
import json, sys, time
from pathlib import Path

folder = Path(sys.argv[1])
name = json.loads((folder / "definition.json").read_text())["name"]
kernel = (folder / "attempt.py").read_text()
if name.startswith("wrong"):
    kernel = kernel.replace("* 1.5", "* 1.25")
elif name.startswith("slow"):
    kernel = kernel.replace("        launch(", "        for _ in range(40):\\n            launch(")
elif name.startswith("crash"):
    kernel = kernel + "\\n\\nimport os\\n\\nos.abort()\\n"
if sys.argv[0].endswith("hang.py"):
    time.sleep(3600)
(folder / "kernel.py").write_text(kernel)
"""

_LIBRARY_KERNEL = '''\
"""squash in cuTile, one tile of a long row for each block."""

import cuda.tile as ct
import torch

from tilegym_fx.launch import launch

TILE = 1024


@ct.kernel
def squash_kernel(x, out, WIDTH: ct.Constant[int]):
    columns = ct.bid(0) * WIDTH + ct.arange(WIDTH, dtype=ct.int32)
    tile = ct.gather(x, columns)
    falling = ct.astype(ct.exp(-ct.abs(ct.astype(tile, ct.float32))), x.dtype)
    bent = ct.astype(ct.tanh(ct.astype(tile, ct.float32)), x.dtype)
    product = ct.astype(falling, ct.float32) * ct.astype(bent, ct.float32)
    ct.scatter(out, columns, ct.astype(product, out.dtype))


def squash(x: torch.Tensor) -> torch.Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        launch(squash_kernel, (-(-x.numel() // TILE),), (x.view(-1), out.view(-1), TILE))
    return out
'''


def write_model(folder: Path) -> Path:
    """The model's file."""
    file = folder / "planted.py"
    file.write_text(MODEL, encoding="utf-8")
    return file


def write_hook(folder: Path, name: str = "hook.py") -> str:
    """A hook command; called ``hang.py`` it never comes back."""
    file = folder / name
    file.write_text(HOOK, encoding="utf-8")
    return f"{sys.executable} {file}"


def write_root(root: Path) -> Path:
    """An inventory of one shipped Definition, in a git repository with nothing to commit."""
    shipped = load()
    definition, solution = shipped.definitions["silu_mul"], shipped.solutions["silu_mul"]
    home = shipped.root_of("silu_mul").path
    for file in (
        shipped.file_of(definition),
        shipped.file_of(solution),
        *(home / source.path for source in solution.sources),
        home / "patterns" / "silu_mul.py",
    ):
        target = root / file.relative_to(home)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.read_bytes())
    for arguments in (
        ["init", "-q"],
        ["add", "."],
        ["-c", "user.name=t", "-c", "user.email=t@localhost", "commit", "-qm", "start"],
    ):
        subprocess.run(["git", *arguments], cwd=root, check=True)
    return root


def write_library(root: Path) -> Path:
    """An inventory with one Definition that the model's first region is."""
    rows = {"shape": ["N", "H"], "dtype": "bfloat16"}
    definition: dict[str, Any] = {
        "name": "squash",
        "description": "A bump: exp(-|x|) tanh(x).",
        "op_type": "activation",
        "tags": ["status:unverified", "dtype:bfloat16"],
        "axes": {"N": {"type": "var"}, "H": {"type": "var"}},
        "inputs": {"x": rows},
        "outputs": {"output": rows},
        "reference": "import torch\n\n\ndef run(x):\n    return torch.exp(-torch.abs(x)) * torch.tanh(x)\n",
    }
    solution = {
        "name": "squash",
        "definition": "squash",
        "description": "One tile a block.",
        "author": "somebody else",
        "spec": {
            "language": "cuda-tile",
            "target_hardware": ["SM80", "SM90", "SM100", "SM120"],
            "entry_point": "kernels/squash.py::squash",
            "dependencies": ["cuda-tile"],
        },
        "sources": [{"path": "kernels/squash.py"}],
        "tags": ["dtype:bfloat16", "dtype:float16", "dtype:float32"],
    }
    for name, text in (
        ("definitions/squash.json", json.dumps(definition)),
        ("solutions/squash.json", json.dumps(solution)),
        ("kernels/squash.py", _LIBRARY_KERNEL),
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return root
