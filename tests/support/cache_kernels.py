"""Kernels that update a cache, held to their references bit by bit."""

from __future__ import annotations

import sys

import torch
from inputs import INVENTORY, make_inputs


def assert_moves_every_bit(name: str, sizes: dict[str, int], dtype: torch.dtype, device: str) -> None:
    """Both forms give the reference's bits; one leaves its inputs alone, and the other writes the cache and no more."""
    kernels = sys.modules[INVENTORY.entry_point(name).__module__]
    made = make_inputs(name, dtype, "ordinary", "as trained", sizes)
    inputs = {key: tensor.to(device) for key, tensor in made.items()}
    expected = INVENTORY.reference(name)(**inputs)
    before = {key: tensor.clone() for key, tensor in inputs.items()}
    assert all(map(torch.equal, getattr(kernels, name)(**inputs), expected))
    assert all(torch.equal(inputs[key], before[key]) for key in inputs)
    assert getattr(kernels, f"{name}_")(**inputs) is None
    assert all(map(torch.equal, (inputs["keys"], inputs["values"]), expected))
    assert all(torch.equal(inputs[key], before[key]) for key in inputs.keys() - {"keys", "values"})
