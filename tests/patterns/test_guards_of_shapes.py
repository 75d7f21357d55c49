"""Kernels that do not broadcast are not given what the reference would broadcast."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pass_checks import FP32, INVENTORY

from tilegym_fx.kernel_check import random_inputs

#: Definition, input and the dimension that is cut to one place.
CUT = (
    ("causal_conv1d", "x", 1),
    ("causal_conv1d_bias_silu", "bias", 0),
    ("causal_conv1d_step", "window", 1),
    ("experts_combine", "top_k_weights", 0),
    ("experts_rows", "top_k_index", 0),
    ("gated_delta_step", "beta", 2),
    ("gated_delta_step", "decay", 0),
    ("gated_delta_step", "state", 2),
    ("gated_delta_step", "v", 3),
    ("linear_qkv_bias", "k_bias", 0),
    ("mamba2_readout", "C", 2),
    ("mamba2_scan", "B", 1),
    ("mamba2_scan", "C", 3),
    ("mamba2_scan", "dt", 2),
    ("mamba2_step", "A_log", 0),
    ("mamba2_step", "B", 2),
    ("mamba2_step", "dt_bias", 0),
    ("rms_norm_linear_qkv_bias", "q_bias", 0),
)


def refusals(name: str, inputs: dict[str, Any]) -> list[str]:
    """What the guards of the reference say."""
    return [said for guard in INVENTORY.guards(name, "reference") if (said := guard(**inputs))]


@pytest.mark.parametrize(("name", "cut", "dimension"), CUT)
def test_an_input_that_would_be_broadcast_is_refused(name: str, cut: str, dimension: int) -> None:
    inputs = random_inputs(INVENTORY.definitions[name], dtype=FP32)
    tensor = inputs[cut]
    assert isinstance(tensor, torch.Tensor)
    assert tensor.shape[dimension] > 1
    refused = refusals(name, {**inputs, cut: tensor.narrow(dimension, 0, 1)})
    assert set(refused) - set(refusals(name, inputs))
