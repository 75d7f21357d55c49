"""Timing shared by the benchmark scripts: the very functions that `tilegym_fx.bench` uses."""

from __future__ import annotations

from tilegym_fx.bench.timing import Timing, argument_sets, copy_rate, host_time, median_time

__all__ = ["Timing", "argument_sets", "copy_rate", "host_time", "median_time"]
