"""One exception tree. Every class carries a fixed advice, so a message always ends with what to do next.

A front door catches :class:`TilegymFxError` and prints ``error: <message>`` on one line; all else is a bug.
"""

from __future__ import annotations

import difflib
import errno
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypeVar

E = TypeVar("E", bound="TilegymFxError")

#: How to get what kernels need, the interpreter included, where tilegym_fx comes from a wheel, and in a clone.
CUTILE_BESIDE_WHEEL = 'pip install "cuda-tile[tileiras]"'
INSTALL_CUTILE = f'Install cuTile: `{CUTILE_BESIDE_WHEEL}`, or `pip install -e ".[cuda]"` in a clone'


class TilegymFxError(Exception):
    """Base of everything that tilegym_fx raises on purpose.

    Args:
        what: What happened and where.
        advice: What to do next; the class has a fixed one for when the caller knows nothing better.

    The message is two sentences; a full stop at the end of either is not doubled. An error that is raised because of
    another is made with :meth:`because`, so that the advice is the one that was nearest to the fault.
    """

    advice: ClassVar[str] = "See docs/ for the rules"

    def __init__(self, what: str, *, advice: str | None = None) -> None:
        self.what = _clause(what)
        self.next_step = _clause(advice or self.advice)
        super().__init__(f"{self.what}. {self.next_step}.")

    @classmethod
    def because(cls: type[E], what: str, *causes: BaseException) -> E:
        """The error for what came of others: what they say after ``what``, and their advice instead of our own.

        Args:
            what: What could not be done.
            causes: Why, at least one. What others than ours say is kept in one line; the class advises.
        """
        said = [cause.what if isinstance(cause, TilegymFxError) else str(cause) for cause in causes]
        advice = [cause.next_step for cause in causes if isinstance(cause, TilegymFxError)]
        why = "; ".join(dict.fromkeys(map(_clause, said)))
        return cls(f"{what}: {why}", advice=". ".join(dict.fromkeys(advice)) or None)


def _clause(text: str) -> str:
    """One line without the full stop at its end; the three dots of something cut stay."""
    line = " ".join(text.split())
    return line if line.endswith("...") else line.rstrip(".")


def did_you_mean(name: str, known: Iterable[str], meant: Mapping[str, str] | None = None) -> str:
    """What is known that looks like a name that is not, to be put behind an advice; empty where nothing does.

    Args:
        name: What was asked for. Its case does not count.
        known: Every spelling that would have been understood.
        meant: Spelling -> the name to show for it, where that is another one.
    """
    shown = {spelling.lower(): (meant or {}).get(spelling, spelling) for spelling in known}
    near = difflib.get_close_matches(name.lower(), shown, n=3, cutoff=0.6)
    names = list(dict.fromkeys(f"`{shown[spelling]}`" for spelling in near))
    return f"; did you mean {' or '.join(filter(None, (', '.join(names[:-1]), names[-1])))}" if names else ""


class UsageError(TilegymFxError):
    """A call or command line that makes no sense."""

    advice = "Run the command with --help to see what it takes"


@contextmanager
def writing(place: Path | str) -> Iterator[None]:
    """While something is written to a place that the user named: what the system refuses becomes one clear line.

    Raises:
        UsageError: The system refuses.
    """
    try:
        yield
    except OSError as error:
        problem = f"{str(place)!r} cannot be written: {error.strerror or error}"
        raise UsageError(problem, advice="Name another place") from error


def make_folder(folder: Path) -> None:
    """Makes a folder that the user named, before the work whose results it is to hold.

    Raises:
        UsageError: There can be no such folder, or nothing may be written in it.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


class SettingsError(TilegymFxError):
    """A TILEGYM_FX_* environment variable holds a value that it cannot take."""

    advice = "Unset the variable or give it one of the values that the message names"


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong in an inventory.

    Attributes:
        file: Path of the file, relative to its root where it lies below one.
        field: Dotted field (``spec.entry_point``), or empty for the file as a whole.
        problem: What is wrong.
        fix: What to do about it.
    """

    file: str
    field: str
    problem: str
    fix: str

    def __str__(self) -> str:
        where = f"{self.file}: {self.field}" if self.field else self.file
        return f"{where}: {self.problem}; {self.fix}"


class InventoryError(TilegymFxError):
    """The inventory has faults; ``faults`` holds them all, the message the first."""

    advice = "`python -m tilegym_fx.inventory check` with the same roots lists every fault"

    def __init__(self, what: str, *, faults: Iterable[Fault] = (), advice: str | None = None) -> None:
        self.faults = tuple(faults)
        super().__init__(what, advice=advice)

    @classmethod
    def of(cls, faults: Iterable[Fault]) -> InventoryError:
        """The error for these faults, of which there is at least one."""
        listed = tuple(faults)
        more = f" (and {len(listed) - 1} more)" if len(listed) > 1 else ""
        return cls(f"the inventory has {len(listed)} fault(s): {listed[0]}{more}", faults=listed)


class UnknownNameError(InventoryError):
    """A Definition or Solution that no loaded inventory has."""

    advice = "`python -m tilegym_fx.inventory list` shows the names that exist"


class UnknownModelError(TilegymFxError):
    """The model id, folder or type cannot be resolved to a class and a configuration."""

    advice = "Give a hub id, a local folder with a config.json, or a transformers model type such as `llama`"


class ExportError(TilegymFxError):
    """The model, or a part of it, cannot be captured as a graph."""

    advice = "Leave that part out, or report the model class with the versions of torch and transformers"


class PatternError(TilegymFxError):
    """A reference, spelling or guard cannot be made into a Pattern."""

    advice = "Write it as plain PyTorch with the parameters of the Definition's inputs, in their order"


class MatchError(TilegymFxError):
    """Matching was asked for something impossible: an unknown name in only=/skip=, or strict and no match."""

    advice = "`python -m tilegym_fx.scan MODEL` shows what matches and why the rest does not"


class RewriteError(TilegymFxError):
    """A planned replacement cannot be put into the graph or the source."""

    advice = "Leave the named Definition out with skip=, and report it with the scan of the model"


class KernelError(TilegymFxError):
    """A kernel cannot be loaded, compiled, launched or interpreted."""

    advice = "`python -m tilegym_fx.doctor` says what kernels need on this machine"


class ApplyError(TilegymFxError):
    """An emitted module cannot be bound to this model instance."""

    advice = "Emit it again with the installed version of transformers"


class VerifyError(TilegymFxError):
    """The rewritten model does not compute what the original does."""

    advice = "Leave the named Definition out with skip=; the model has been put back as it was"


class InternalError(TilegymFxError):
    """A check of tilegym_fx on itself failed (a pass broke its own postcondition)."""

    advice = "This is a bug: report it with the model's class and the versions of torch and transformers"
