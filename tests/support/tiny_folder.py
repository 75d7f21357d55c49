"""A folder with the configuration of a tiny model, as a user who names a folder has one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 200,
}


def write(folder: Path, **changes: Any) -> str:
    (folder / "config.json").write_text(json.dumps({**LLAMA, **changes}), encoding="utf-8")
    return str(folder)
