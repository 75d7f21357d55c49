"""What the user asks of the loop, and where the results of that go."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from . import ledger as book


@dataclass(frozen=True)
class Options:
    """What the user asks for.

    Attributes:
        model: The model.
        root: Where kernels are kept; in a git repository.
        results: Where results and drafts go.
        limit: Seconds for each experiment.
        most: Experiments at most, the baseline not counted.
        patience: Experiments in vain, one after another, before giving up.
        libraries: Other inventories in which to look for candidates.
        device: Whose roofline is used without a GPU.
        dry_run: Estimate instead of measuring.
        hook: Command that writes kernels.
        alone: Leave the shipped inventory out.
        layers: The first layers of the model only.
        init: Make the root a git repository where it is in none.
        dtype: Of the model's weights; None for its checkpoint's.
    """

    model: str
    root: Path
    results: Path
    limit: float = 900.0
    most: int = 20
    patience: int = 5
    libraries: tuple[Path, ...] = ()
    device: str = "h200"
    dry_run: bool = False
    hook: str = ""
    alone: bool = False
    layers: int | None = None
    init: bool = False
    dtype: str | None = None

    def folder(self, number: int) -> Path:
        """Where the drafts and the log of an experiment go."""
        return self.results.resolve() / book.slug(self.model) / f"{number:03}"
