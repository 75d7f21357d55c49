"""Modules put together at random from the code around kernels, as text with a file of its own."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from types import ModuleType

import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from torch import nn

WIDTH = 8

HEAD = f"""
import torch
from torch import nn
from torch.nn import functional as F

WIDTH = {WIDTH}


class Norm(nn.Module):
    def __init__(self, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.eps = eps

    def forward(self, x):
        dtype = x.dtype
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * x.to(dtype)


def gated(gate, up, twice=False):
    if twice:
        up = up * 2
    return F.silu(gate) * up


def added(x, residual, norm):
    total = x + residual
    return norm(total), total


class Case(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = Norm(1e-6)
        self.other = Norm(1e-2)
        self.layer_norm = nn.LayerNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)
        self.down = nn.Linear(WIDTH, WIDTH)
        self.act = nn.SiLU()
        self.kept = None

"""

#: Right sides, over names that hold tensors.
VALUES = (
    "{a} + {b}", "{b} + {a}", "{a} * {b}", "self.norm({a})", "self.other({a})", "self.norm({a} + {b})",
    "self.layer_norm({a})", "self.layer_norm({a} + {b})", "self.gate({a})", "self.down({a})", "self.down({a}) + {b}",
    "F.silu({a}) * {b}", "self.act(self.gate({a})) * self.up({b})", "self.act(self.gate({a})) * self.up({a})",
    "F.gelu({a}) * {b}", "F.gelu(self.gate({a}), approximate='tanh') * self.up({a})", "gated({a}, {b})",
    "gated({a}, {b}, flag)", "gated(self.gate({a}), self.up({a}), twice=flag)", "added({a}, {b}, self.norm)[0]",
    "added({a}, {b}, self.other)[1]", "{a}.to(torch.float32)", "{a}.clone()", "{a}[:, :1] + {b}", "{a} / 2",
    "{a} * torch.rsqrt({a}.pow(2).mean(-1, keepdim=True) + 1e-6) * self.norm.weight",
    "(self.norm({a}) if flag else {b})", "{a}", "{a}.view(-1, WIDTH).view({a}.shape)",
    "{a}.transpose(0, 1).transpose(0, 1)",
)  # fmt: skip
#: Statements; `{{t}}` and `{{u}}` are bound already.
STATEMENTS = (
    "{t} += {b}", "{t} = {t} * 0.5", "{t}.add_({b})", "{t}, {u} = {u}, {t}", "{t}[:, 0] = 0.25", "self.kept = {a}",
    "{t}, {u} = added({a}, {b}, self.norm)", "{t} = {u} = self.norm({a})", "self.kept = self.norm({a})",
    "for _ in range(2):\n    {t} = self.norm({t} + {b})", "with torch.no_grad():\n    {t} = self.norm({a} + {b})",
    "if flag:\n    {t} = {v}", "if flag:\n    {t} = {a}\nelse:\n    {t} = {v}", "if flag:\n    return {v}",
    "if not flag:\n    {t} = {v}", "if ({t} := {v}).dim() == 3:\n    {u} = {t} + {b}",
    "{t} = [{v}, {a}]\n{t} = {t}[0]", "view = {t}[0]\n{u} = {v}\nview.mul_(2)",
)  # fmt: skip


@st.composite
def sources(draw: DrawFn) -> str:
    """The text of a module with a class `Case`, of two tensors and a flag."""
    names = ["x", "r"]
    lines: list[str] = []
    for _ in range(draw(st.integers(2, 7))):
        picked = {key: draw(st.sampled_from(names)) for key in "abtu"}
        value = draw(st.sampled_from(VALUES)).format(**picked)
        if draw(st.integers(0, 2)):
            fresh = draw(st.sampled_from(["x", "r", "y", "z", "h"]))
            lines.append(f"{fresh} = {value}")
            names = list(dict.fromkeys([*names, fresh]))
        else:
            lines += draw(st.sampled_from(STATEMENTS)).format(**picked, v=value).split("\n")
    results = draw(st.lists(st.sampled_from(names), min_size=1, max_size=3))
    body = "\n".join(f"        {line}" for line in [*lines, f"return {', '.join(results)}"])
    return f"{HEAD}    def forward(self, x, r, flag=False):\n{body}\n"


_count = itertools.count()


def module_of(text: str, folder: Path) -> nn.Module:
    """The module of a text, importable by name and with its source in a file."""
    name = f"random_case_{next(_count)}"
    file = folder / f"{name}.py"
    file.write_text(text, encoding="utf-8")
    module = ModuleType(name)
    module.__file__ = str(file)
    sys.modules[name] = module
    exec(compile(text, str(file), "exec"), module.__dict__)
    torch.manual_seed(0)
    return module.Case().eval()
