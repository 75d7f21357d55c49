"""Is everything there? The tree, the GPU, the versions; asked before anything is tried."""

from __future__ import annotations

import symtable
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from tilegym_fx.bench.models import cut_layers
from tilegym_fx.cost import get_device
from tilegym_fx.errors import InventoryError, UnknownModelError, UsageError, make_folder
from tilegym_fx.inventory import load
from tilegym_fx.model_source import resolve_model
from tilegym_fx.survey import versions

from .experiment import fresh
from .options import Options
from .repository import Repository
from .subject import is_file


def require_sense(options: Options) -> None:
    """Numbers and names that can be right, and go together.

    Raises:
        UsageError: They cannot.
    """
    for name, number in (("--max-experiments", options.most), ("--give-up-after", options.patience)):
        if number < 0:
            raise UsageError(f"{name} {number} is negative", advice="Give 0 for the baseline alone, or more")
    get_device(options.device)
    if not is_file(options.model):
        return
    if not options.dry_run:
        raise UsageError(
            f"{options.model} cannot be measured: the benchmark takes language models of transformers",
            advice="Estimate it with --dry-run",
        )
    for name, value in (("dtype", options.dtype), ("layers", options.layers)):
        if value is not None:
            raise UsageError(f"{options.model} has the {name} that its function gives it", advice=f"Leave out --{name}")


def require_model(model: str, layers: int | None) -> None:
    """A model that exists, with as many layers; a file is read and not run: that is left to a child.

    Raises:
        UnknownModelError: There is no such model, file or function.
        UsageError: It has fewer layers.
    """
    if is_file(model):
        _require_function(model)
        return
    config = resolve_model(model).config
    if layers is None:
        return
    if not hasattr(config, "num_hidden_layers"):
        raise UsageError(f"{model} does not say how many layers it has", advice="Leave out --layers")
    cut_layers(config, layers)


def _require_function(model: str) -> None:
    path, _, function = model.partition("::")
    file = Path(path)
    if not file.is_file():
        raise UnknownModelError(f"{path} does not exist", advice="Give FILE.py::function")
    try:
        text = file.read_text(encoding="utf-8")
        symbols = symtable.symtable(text, path, "exec").get_symbols()
    except (OSError, SyntaxError, ValueError) as error:
        raise UnknownModelError(f"{path} cannot be read as Python: {error}", advice="Correct the file") from error
    bound = {s.get_name() for s in symbols if s.is_assigned() or s.is_imported()}
    if function not in bound and "import *" not in text:
        raise UnknownModelError(f"{path} has no function {function!r}", advice="It returns a module and its inputs")


def require_inventories(root: Path, libraries: Sequence[Path], *, alone: bool) -> None:
    """Inventories that can be read: that of the root with the shipped one, and each library.

    Raises:
        InventoryError: One cannot.
    """
    try:
        fresh(root, alone=alone)
    except InventoryError as error:
        if alone or not _is_sound(root):
            raise
        advice = f"That of {root} is sound by itself: --alone leaves the shipped inventory out"
        raise InventoryError(error.what, faults=error.faults, advice=advice) from error
    for library in libraries:
        try:
            load(library, shipped=False)
        except InventoryError as error:
            raise InventoryError.because(f"--library {library}", error) from error


def _is_sound(root: Path) -> bool:
    with suppress(InventoryError):
        load(root, shipped=False)
        return True
    return False


def require_writable(folder: Path) -> None:
    """A folder that can be made and written in; as what follows may yet be refused, none is left behind.

    Raises:
        UsageError: There can be none.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        make_folder(folder)
    finally:
        for path in missing:
            with suppress(OSError):
                path.rmdir()


def environment(*, dry_run: bool, device: str, layers: int | None = None, dtype: str | None = None) -> dict[str, str]:
    """What a run's figures depend on.

    Raises:
        UsageError: Figures are to be measured and there is no GPU.
    """
    found = {"versions": ", ".join(f"{name} {version}" for name, version in versions().items())}
    found |= {"layers": f"the first {layers}"} if layers is not None else {}
    found |= {"dtype": dtype} if dtype is not None else {}
    if dry_run:
        return {"figures": f"estimated for {device}, no GPU was used", **found}
    if not torch.cuda.is_available():
        raise UsageError("there is no CUDA device to measure on", advice="Run it on a GPU machine, or with --dry-run")
    properties = torch.cuda.get_device_properties(0)
    uuid = getattr(properties, "uuid", "unknown")
    figures = f"measured on {properties.name}, throughput inside CUDA graphs"
    return {"figures": figures, "GPU UUID": str(uuid), **found}


def require_clean(repository: Repository, results: Path) -> None:
    """Nothing in the work tree but what is committed.

    Raises:
        UsageError: Something is; or the results folder is not ignored by git, so that it would be.
    """
    changes = [path for path in repository.changes() if not _is_below(repository.root / path, results)]
    if changes:
        more = f" (and {len(changes) - 1} more)" if len(changes) > 1 else ""
        raise UsageError(
            f"{repository.root} is not clean: {changes[0]}{more}",
            advice="Commit or put aside your changes: experiments are reset with `git reset --hard`",
        )


def _is_below(path: Path, folder: Path) -> bool:
    return path.resolve().is_relative_to(folder.resolve())
