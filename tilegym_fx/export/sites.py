"""Where in the model's source a node of a graph comes from, read from what the capture left in its meta."""

from __future__ import annotations

import re
import sysconfig
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch.fx import Node

from tilegym_fx.results import Frame, Site

_FRAME = re.compile(r'^ *File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)', re.MULTILINE)
_PACKAGES = tuple({f"{sysconfig.get_path(key)}/" for key in ("purelib", "platlib")})
_STANDARD_LIBRARY = f"{sysconfig.get_path('stdlib')}/"
#: Folders whose frames only carry a call from one line of model code to the next.
_PLUMBING = (
    f"{Path(torch.__file__).parent}/",
    *(f"{folder}{part}/" for folder in _PACKAGES for part in ("transformers/utils", "accelerate")),
)
_CACHED = 1 << 15


def site_of(node: Node) -> Site:
    """The innermost module that a node was traced in, and the frames of model code that led there.

    Works on graphs of ``torch.export`` and of ``torch.compile``, normalised or not. A node with no record,
    such as a placeholder, has an empty Site. ``torch.export`` keeps the frames of ``forward`` methods alone.
    """
    stack = node.meta.get("nn_module_stack")
    path, class_name = _innermost(list(stack.values())[-1]) if stack else ("", "")
    return _site(path, class_name, node.meta.get("stack_trace") or "")


def _innermost(entry: tuple[str, Any]) -> tuple[str, str]:
    path, kind = entry[0], entry[1]
    name = kind if isinstance(kind, str) else kind.__qualname__
    return _dotted(path), name.rpartition(".")[2]


@lru_cache(maxsize=_CACHED)
def _dotted(path: str) -> str:
    """A path as ``named_modules`` has it: ``L['self'].layers[0]@1``, a second call, is ``layers.0``."""
    path = re.sub(r"\._modules\[['\"](\w+)['\"]\]", r".\1", path.partition("@")[0])
    path = re.sub(r"^L\[['\"]\w+['\"]\]", "", path)
    return re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", path).strip(".")


@lru_cache(maxsize=_CACHED)
def _site(path: str, class_name: str, stack_trace: str) -> Site:
    return Site(path, class_name, _frames(stack_trace))


@lru_cache(maxsize=_CACHED)
def _frames(stack_trace: str) -> tuple[Frame, ...]:
    found = (Frame(m["file"], int(m["line"]), m["function"]) for m in _FRAME.finditer(stack_trace))
    return tuple(frame for frame in found if _is_model_code(frame.file))


@lru_cache(maxsize=_CACHED)
def _is_model_code(file: str) -> bool:
    in_the_standard_library = file.startswith(_STANDARD_LIBRARY) and not file.startswith(_PACKAGES)
    return not (in_the_standard_library or file.startswith(("<", *_PLUMBING)))
