"""How near one tensor is to another that it should equal: errors in units of what rounding explains."""

from __future__ import annotations

import math

import torch

#: Roundings of the output's dtype by which a result may be off, relative to the value and to its row.
_ROUNDINGS = {torch.float32: 64.0}
_USUAL_ROUNDINGS = 2.0
#: Times the reference's own error that a result may be off besides. One of 16 bits is mostly its own last rounding.
_WORSE = {torch.float32: 8.0}
_USUAL_WORSE = 2.0


def tolerance(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """By how much each of some float64 values may be off as results in a dtype."""
    row = values.nan_to_num(0, 0, 0).square().mean(-1, keepdim=True).sqrt() if values.dim() else values.abs()
    return _ROUNDINGS.get(dtype, _USUAL_ROUNDINGS) * torch.finfo(dtype).eps * (values.abs() + row)


def error_ratio(
    wanted: torch.Tensor, got: torch.Tensor, own: float | torch.Tensor = 0.0, dtype: torch.dtype | None = None
) -> float:
    """The largest error in units of what is allowed at that element; 1 and less is right.

    Args:
        wanted: The reference's result.
        got: The kernel's.
        own: The reference's own error, of all or of each row.
        dtype: Whose roundings are allowed; that of ``wanted`` by default, which may be a wider one than the kernel's.
    """
    got = got.to(wanted.device)
    if not wanted.is_floating_point():
        return 0.0 if torch.equal(wanted, got) else math.inf
    if not wanted.numel():
        return 0.0
    dtype = dtype or wanted.dtype
    info = torch.finfo(dtype)
    wide, error = wanted.double(), (got.double() - wanted.double()).abs()
    if not torch.equal(wide.isnan(), got.isnan()):
        return math.inf
    near_limit = wide.abs() > 0.99 * info.max
    error[(wide == got.double()) | wide.isnan() | near_limit] = 0
    allowed = tolerance(wide, dtype) + _WORSE.get(dtype, _USUAL_WORSE) * own
    return float((error / (allowed + info.smallest_normal)).max())
