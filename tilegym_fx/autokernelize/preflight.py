"""Is everything there? The tree, the GPU, the versions; asked before anything is tried."""

from __future__ import annotations

from pathlib import Path

import torch

from tilegym_fx.errors import UsageError
from tilegym_fx.survey import versions

from .repository import Repository


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
        raise UsageError(
            f"{repository.root} is not clean: {changes[0]} (and {len(changes) - 1} more)",
            advice="Commit or put aside your changes: experiments are reset with `git reset --hard`",
        )


def _is_below(path: Path, folder: Path) -> bool:
    return path.resolve().is_relative_to(folder.resolve())
