"""What a worker is asked to do, as plain data that travels to another process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .cases import Case, Variant, get_variant, parse_cases


@dataclass(frozen=True)
class Job:
    """One variant of one model.

    Attributes:
        model: Whatever ``resolve_model`` takes.
        variant: Name of the variant.
        cases: The cases in order, as they are written.
        folder: Where workers leave reference logits and logs for each other.
        device: ``cuda`` or ``cpu``.
        dtype: Of the parameters.
        layers: Number of layers, if not the model's own.
        tiny: Shrink the model and spare the compilers, so that a CPU does it in seconds.
        repeats: How often a call is timed (a generation less often).
        judge: Keep a float32 copy of the model to judge by, where it fits; the first worker does.
        timed: False where only reference logits are wanted.
        graphed: Time a prompt as a decode step is timed, inside a CUDA graph: the GPU's time without the host.
        trust_remote_code: Whether code that comes with the configuration may run.
        trace: Where to leave traces; the variant and the case go into the name.
        inventory: Further inventory roots, besides those of ``TILEGYM_FX_INVENTORY``.
    """

    model: str
    variant: str
    cases: tuple[str, ...]
    folder: str
    device: str = "cuda"
    dtype: str = "bfloat16"
    layers: int | None = None
    tiny: bool = False
    repeats: int = 40
    judge: bool = True
    timed: bool = True
    graphed: bool = False
    trust_remote_code: bool = False
    trace: str | None = None
    inventory: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Job:
        """The inverse of :meth:`as_json`."""
        lists = {name: tuple(fields[name]) for name in ("cases", "inventory") if name in fields}
        return cls(**{**fields, **lists})

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def parsed_variant(self) -> Variant:
        return get_variant(self.variant)

    def parsed_cases(self) -> tuple[Case, ...]:
        return parse_cases(self.cases)

    def trace_file(self, case: Case) -> Path | None:
        """``trace.eager.decode-1x2048.json`` for ``trace.json``."""
        if self.trace is None:
            return None
        file = Path(self.trace)
        label = f"{self.variant}.{str(case).replace(':', '-').replace('@', 'at')}"
        return file.with_name(f"{file.stem}.{label}{file.suffix or '.json'}")
