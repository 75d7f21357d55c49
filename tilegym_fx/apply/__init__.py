"""Binding an emitted module to one model instance, and taking it off again.

An emitted module holds subclasses of the model's own classes. `apply` makes chosen modules instances of those
(`module.__class__ = ...`), as torch's FSDP and parametrizations do; no class, module or registry is touched.
Nothing is stored on the module, so state dicts, deep copies and hooks see no difference. What is put on or
exchanged later inside a replaced call gives that call back to its author's code (`watch`).
"""

from tilegym_fx.apply.bind import applied, apply, emitted_files, is_applied, restore
from tilegym_fx.apply.classes import Patched, original_class
from tilegym_fx.apply.files import load, save
from tilegym_fx.apply.table import Patch
from tilegym_fx.apply.watch import GivenBack, check, given_back

__all__ = [
    "GivenBack", "Patch", "Patched", "applied", "apply", "check", "emitted_files", "given_back", "is_applied",
    "load", "original_class", "restore", "save",
]  # fmt: skip
