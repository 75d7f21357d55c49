"""The cache of best configurations: what a kernel's launch wrapper asks before it falls back on its own rule.

    config = tuning.best("linear", (16, 4096, 14336), "bfloat16", "sm_90")   # {"features": 64, ...} or None

There is one table for each architecture: ``tuned/<arch>.json`` as shipped, under what was measured on this
machine, which lies in the cache folder (``TILEGYM_FX_CACHE``) under the same name. Both are read when first
asked for.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from tilegym_fx import settings
from tilegym_fx.errors import TilegymFxError

Config = dict[str, Any]
#: What decides which configuration is best, as the kernel's wrapper puts it: sizes, mostly rounded.
ShapeClass = tuple[Any, ...]
Key = tuple[str, ShapeClass, Any]
#: The architecture of tensors that are on no GPU.
NO_GPU = "none"


class TuningError(TilegymFxError):
    """A file of tuned configurations cannot be read."""

    advice = "Delete it, or write it anew with `python -m tilegym_fx.tune MODEL`"


@dataclass(frozen=True)
class Entry:
    """The outcome of tuning one kernel for one shape class and dtype.

    Attributes:
        kernel: As the wrapper names it.
        shape_class: As the wrapper gives it.
        dtype: ``bfloat16`` for example.
        config: The fastest configuration; None where the wrapper's own choice is not beaten.
        microseconds: Of that configuration.
        default_microseconds: Of the wrapper's own choice.
        disabled: Configurations that do not compile, crash or compute something else, and why.
    """

    kernel: str
    shape_class: ShapeClass
    dtype: str
    config: Config | None
    microseconds: float
    default_microseconds: float
    disabled: tuple[tuple[Config, str], ...] = field(default=())


def best(kernel: str, shape_class: ShapeClass, dtype: Any, arch: str) -> Config | None:
    """The tuned configuration, or None where there is none. Costs one look-up in a dict.

    Args:
        kernel: A name that the wrapper chooses.
        shape_class: A tuple that it makes of the sizes.
        dtype: A ``torch.dtype``, or its name.
        arch: ``sm_90`` for example; :func:`arch_of` tells that of a device.
    """
    table = _tables.get(arch)
    if table is None:
        table = _tables[arch] = _load(arch)
    return table.get((kernel, shape_class, dtype))


@functools.cache
def arch_of(device: torch.device) -> str:
    """``sm_90`` for a device of that compute capability; NO_GPU for one that is no GPU."""
    if device.type != "cuda":
        return NO_GPU
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def size_class(size: int) -> int:
    """The size rounded up to a power of two: for axes that vary from call to call, such as rows."""
    return 1 << max(size - 1, 0).bit_length()


_tables: dict[str, Mapping[Key, Config]] = {}


def forget() -> None:
    """Read the files again when next asked."""
    _tables.clear()


def _load(arch: str) -> dict[Key, Config]:
    table: dict[Key, Config] = {}
    for entry in (*entries(shipped_file(arch)), *entries(user_file(arch))):
        for dtype in (entry.dtype, getattr(torch, entry.dtype)):
            key = (entry.kernel, entry.shape_class, dtype)
            if entry.config is None:
                table.pop(key, None)
            else:
                table[key] = entry.config
    return table


def shipped_file(arch: str) -> Path:
    """The file in the package; it need not exist."""
    return Path(str(resources.files("tilegym_fx").joinpath("tuned", f"{arch}.json")))


def user_file(arch: str) -> Path:
    """The file of this machine; it need not exist."""
    return settings.cache_folder() / "tuned" / f"{arch}.json"


def entries(file: Path) -> tuple[Entry, ...]:
    """What a file holds; nothing if there is none.

    Raises:
        TuningError: It is not as :func:`save` writes it.
    """
    if not file.is_file():
        return ()
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
        return tuple(_entry(fields) for fields in stored["entries"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TuningError(f"{file} holds no tuned configurations: {type(error).__name__}: {error}") from error


def _entry(fields: dict[str, Any]) -> Entry:
    if not isinstance(getattr(torch, fields["dtype"]), torch.dtype):
        raise ValueError(f"{fields['dtype']} is no dtype")
    disabled = tuple((config, why) for config, why in fields.pop("disabled", ()))
    return Entry(**{**fields, "shape_class": tuple(fields["shape_class"]), "disabled": disabled})


def save(file: Path, arch: str, about: Mapping[str, Any], new: Iterable[Entry]) -> None:
    """Add entries to a file, over older ones of the same kernel, shape class and dtype.

    Args:
        file: Made if it does not exist.
        arch: Of the entries.
        about: Device, driver, versions: on what it was measured.
        new: The entries.
    """
    merged = {(e.kernel, e.shape_class, e.dtype): e for e in (*entries(file), *new)}
    ordered = sorted(merged.values(), key=lambda e: (e.kernel, e.dtype, str(e.shape_class)))
    lines = ",\n".join(f"  {json.dumps(asdict(entry))}" for entry in ordered)
    head = json.dumps({"arch": arch, **about})[:-1]
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_suffix(".tmp")
    draft.write_text(f'{head}, "entries": [\n{lines}\n]}}\n', encoding="utf-8")
    draft.replace(file)


class _Recorder(dict[Key, Config]):
    """A table that notes what it is asked for, and may answer one question by force."""

    def __init__(self, forced: Mapping[Key, Config]) -> None:
        super().__init__(forced)
        self.asked: dict[Key, None] = {}

    def get(self, key: Key, default: Any = None) -> Any:
        self.asked[key] = None
        return super().get(key, default)


@contextmanager
def recording(arch: str, forced: Mapping[Key, Config] | None = None) -> Iterator[dict[Key, None]]:
    """While the body runs, nothing is tuned for ``arch`` but what is forced; yields the keys asked for.

    A wrapper that keeps what it chose has to be made to forget that first.
    """
    before = _tables.get(arch)
    recorder = _Recorder(forced or {})
    _tables[arch] = recorder
    try:
        yield recorder.asked
    finally:
        if before is None:
            del _tables[arch]
        else:
            _tables[arch] = before
