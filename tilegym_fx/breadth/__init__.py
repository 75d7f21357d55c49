"""Every causal language model of transformers, tried one by one: what `scan --all` runs and shows."""

from .record import Row
from .run import dropped, run_all
from .table import as_json, as_text, summary

__all__ = ["Row", "as_json", "as_text", "dropped", "run_all", "summary"]
