"""One file -> one model object, or every fault of that file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from tilegym_fx.errors import Fault, InventoryError
from tilegym_fx.schema import InconsistentError, Problem

_Model = TypeVar("_Model", bound=BaseModel)


def shown(path: Path) -> str:
    """A path as messages show it: relative to the working folder where it lies below it."""
    absolute = Path(os.path.abspath(path))
    here = Path.cwd()
    return str(absolute.relative_to(here)) if absolute.is_relative_to(here) else str(absolute)


def faults_of(path: Path, problems: Iterable[Problem]) -> list[Fault]:
    """The problems of one file, with its name on them."""
    return [Fault(shown(path), problem.field, problem.problem, problem.fix) for problem in problems]


def read(path: Path, model: type[_Model], *, ignore_unknown: bool = False) -> _Model:
    """Reads one Definition or Solution.

    Args:
        path: The JSON file.
        model: What it should hold.
        ignore_unknown: Leave keys out that the model does not have, as FlashInfer-Bench's own models do.

    Raises:
        InventoryError: With every fault of the file.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):  # to open a pipe would be to wait for ever
        raise _error(path, "", "is no regular file", "remove it, or give it another ending than .json")
    try:
        text = path.read_bytes().decode("utf-8")
        data = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except OSError as error:
        raise _error(path, "", f"cannot be read ({error.strerror})", "check that it is a readable file") from error
    except UnicodeDecodeError as error:
        raise _error(path, "", f"is not UTF-8 (byte {error.start})", "save it as UTF-8") from error
    except json.JSONDecodeError as error:
        raise _error(
            path, f"line {error.lineno}, column {error.colno}", f"is no JSON ({error.msg})", "correct it"
        ) from error
    except RecursionError as error:
        raise _error(
            path, "", "is nested too deeply", "a Definition or Solution is at most five levels deep"
        ) from error
    except InconsistentError as error:
        raise InventoryError.of(faults_of(path, error.problems)) from error
    return _validate(path, model, data, ignore_unknown)


def _validate(path: Path, model: type[_Model], data: Any, ignore_unknown: bool) -> _Model:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        unknown = [item["loc"] for item in error.errors() if item["type"] == "extra_forbidden"]
        if not (ignore_unknown and unknown):
            raise InventoryError.of(_faults(path, error)) from error
    for location in unknown:
        _remove(data, location)
    return _validate(path, model, data, ignore_unknown=False)


def _faults(path: Path, error: ValidationError) -> list[Fault]:
    problems: list[Problem] = []
    for item in error.errors():
        cause = item.get("ctx", {}).get("error")
        if isinstance(cause, InconsistentError):
            problems += cause.problems
        else:
            problems.append(Problem(_field(item["loc"]), *_explain(item["type"], item["msg"], item["input"])))
    return faults_of(path, problems)


def _explain(kind: str, message: str, value: Any) -> tuple[str, str]:
    if kind == "missing":
        return "is missing", "add it"
    if kind == "extra_forbidden":
        return "is no key of the schema", "remove it or correct its spelling"
    if kind == "union_tag_not_found":
        return "has no `type`", 'add "type": "var" or "type": "const"'
    return f"{_clip(repr(value))} is not valid ({message[:1].lower()}{message[1:]})", "correct the value"


def _field(location: tuple[int | str, ...]) -> str:
    """Dotted, without the union and key marks that pydantic puts in between."""
    return ".".join(str(part) for part in location if part not in ("[key]", "const", "var"))


def _remove(data: Any, location: tuple[int | str, ...]) -> None:
    for part in location[:-1]:
        if isinstance(data, dict) and part not in data:
            continue  # the tag of a union: a step in the schema, not in the data
        data = data[part]
    del data[location[-1]]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise InconsistentError([Problem(name, "is a key twice in one object", "remove one of them") for name in twice])
    return result


def _no_constant(name: str) -> Any:
    raise InconsistentError([Problem("", f"holds {name}, which is no JSON number", "write a number")])


def _error(path: Path, field: str, problem: str, fix: str) -> InventoryError:
    return InventoryError.of(faults_of(path, [Problem(field, problem, fix)]))


def _clip(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
