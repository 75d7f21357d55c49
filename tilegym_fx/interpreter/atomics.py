"""Atomic updates, element after element. Blocks run one after another, so each sees all earlier updates."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import cuda.tile as ct
import torch

from tilegym_fx.interpreter.errors import TileTypeError
from tilegym_fx.interpreter.memory import Array, expanded, places_of, stored
from tilegym_fx.interpreter.tile import Tile

_WHOLE = frozenset({ct.int32, ct.int64})
_WIDE = _WHOLE | {ct.float32, ct.float64}

#: Name -> (new value from old value and update, the array dtypes that it takes).
UPDATES: dict[str, tuple[Callable[[Any, Any], Any], frozenset[ct.DType]]] = {
    "atomic_add": (operator.add, _WIDE | {ct.float16, ct.bfloat16}),
    "atomic_and": (operator.and_, _WHOLE),
    "atomic_max": (max, _WHOLE),
    "atomic_min": (min, _WHOLE),
    "atomic_or": (operator.or_, _WHOLE),
    "atomic_xchg": (lambda old, new: new, _WIDE),
    "atomic_xor": (operator.xor, _WHOLE),
}


def read_modify_write(name: str) -> Callable[..., Tile]:
    """``ct.<name>``: updates the places and returns what was there before."""
    update, supported = UPDATES[name]

    def apply(
        array: Array, indices: Any, value: Any, /, *,
        check_bounds: bool = True, memory_order: Any = None, memory_scope: Any = None,
    ) -> Tile:  # fmt: skip
        places, active = places_of(array, indices, None, check_bounds, name)
        if array.dtype not in supported:
            raise TileTypeError(f"{name} on an array of {array.dtype.name}")
        new = expanded(stored(value, array, "the update"), active.shape, f"{name}: the update").reshape(-1)
        old = torch.zeros_like(new)
        for i, place in _active(places, active):
            old[i] = array.tensor[place]
            array.tensor[place] = update(old[i], new[i])
        return Tile(old.reshape(active.shape), array.dtype)

    return apply


def compare_and_swap(
    array: Array, indices: Any, expected: Any, desired: Any, /, *,
    check_bounds: bool = True, memory_order: Any = None, memory_scope: Any = None,
) -> Tile:  # fmt: skip
    """``ct.atomic_cas``; out of bounds it returns the expected value."""
    places, active = places_of(array, indices, None, check_bounds, "atomic_cas")
    if array.dtype not in _WIDE:
        raise TileTypeError(f"atomic_cas on an array of {array.dtype.name}")
    old = expanded(stored(expected, array, "the expected value"), active.shape, "expected").reshape(-1).clone()
    new = expanded(stored(desired, array, "the desired value"), active.shape, "desired").reshape(-1)
    for i, place in _active(places, active):
        before = array.tensor[place].clone()
        if before == old[i]:
            array.tensor[place] = new[i]
        old[i] = before
    return Tile(old.reshape(active.shape), array.dtype)


def _active(places: tuple[torch.Tensor, ...], active: torch.Tensor) -> list[tuple[int, tuple[int, ...]]]:
    """Each place that is touched, with its position in the flattened tile."""
    columns = [place.reshape(-1).tolist() for place in places]
    return [(i, tuple(c[i] for c in columns)) for i, on in enumerate(active.reshape(-1).tolist()) if on]
