"""Tiny inventories in the three folder forms, written to a folder of the test."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

SOURCE = "# Source: https://github.com/org/repo/blob/v1.2.3/src/model.py#L10-L20\n"
KERNEL = "def scaled(x, scale):\n    return x * scale\n"

DEFINITION: dict[str, Any] = {
    "name": "scaled",
    "op_type": "activation",
    "description": "Multiplies by a number.",
    "tags": ["model:tiny", "stage:decode", "status:verified", "dtype:bfloat16"],
    "axes": {"N": {"type": "var"}, "D": {"type": "var", "description": "Width."}},
    "inputs": {
        "x": {"shape": ["N", "D"], "dtype": "bfloat16"},
        "scale": {"shape": None, "dtype": "float32"},
    },
    "outputs": {"output": {"shape": ["N", "D"], "dtype": "bfloat16"}},
    "constraints": [],
    "reference": SOURCE + "import torch\n\n\ndef run(x, scale):\n    return x * scale\n",
}
SOLUTION: dict[str, Any] = {
    "name": "scaled",
    "definition": "scaled",
    "description": "One program per tile.",
    "author": "somebody",
    "spec": {
        "language": "cuda-tile",
        "target_hardware": ["SM90", "SM100"],
        "entry_point": "kernels/scaled.py::scaled",
        "dependencies": ["cuda-tile"],
    },
    "sources": [{"path": "kernels/scaled.py"}],
    "tags": ["dtype:bfloat16"],
}


def definition(name: str = "scaled", **changes: Any) -> dict[str, Any]:
    """A Definition of a valid inventory, with some keys changed."""
    return {**copy.deepcopy(DEFINITION), "name": name, **changes}


def solution(name: str = "scaled", **changes: Any) -> dict[str, Any]:
    """A Solution of a valid inventory, with some keys changed."""
    return {**copy.deepcopy(SOLUTION), "name": name, **changes}


def with_reference(name: str, body: str, **changes: Any) -> dict[str, Any]:
    """A Definition whose ``run(x, scale)`` has this body."""
    return definition(name, reference=f"{SOURCE}import torch\n\n\ndef run(x, scale):\n    {body}\n", **changes)


def write_json(path: Path, data: Any) -> Path:
    """Writes a file, and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(data if isinstance(data, str) else json.dumps(data), encoding="utf-8")
    return path


def write_repository(root: Path, *definitions: dict[str, Any]) -> Path:
    """An inventory of the repository form: one Definition with its Solution, and the Definitions given."""
    write_json(root / "definitions" / "scaled.json", definition())
    write_json(root / "solutions" / "scaled.json", solution())
    write_json(root / "kernels" / "scaled.py", KERNEL)
    for record in definitions:
        write_json(root / "definitions" / f"{record['name']}.json", record)
    return root


def write_flashinfer_trace(root: Path) -> Path:
    """A FlashInfer-Trace data set: embedded code, several languages, no sources, keys of later versions."""
    norm = {
        "name": "norm_h8",
        "op_type": "rmsnorm",
        "tags": ["stage:decode", "tp:4", "fi_api:some.api", "status:reference"],
        "axes": {"batch_size": {"type": "var"}, "hidden_size": {"type": "const", "value": 8}},
        "inputs": {
            "hidden_states": {"shape": ["batch_size", "hidden_size"], "dtype": "bfloat16"},
            "weight": {"shape": ["hidden_size"], "dtype": "bfloat16", "optional": True},
        },
        "outputs": {"output": {"shape": ["batch_size", "hidden_size"], "dtype": "bfloat16"}},
        "reference": "import torch\n\n@torch.no_grad()\ndef run(hidden_states, weight):\n"
        "    assert hidden_states.shape[1] == 8\n    return hidden_states * weight\n",
    }
    paged = {
        "name": "paged_ps2",
        "op_type": "gqa_paged",
        "axes": {"batch": {"type": "var"}, "ptr": {"type": "var"}, "pages": {"type": "var"}},
        "constraints": ["ptr == batch + 1", "pages == indptr[-1].item()"],
        "inputs": {
            "indptr": {"shape": ["ptr"], "dtype": "int32"},
            "cache": {"shape": ["pages"], "dtype": "float16"},
            "scale": {"shape": None, "dtype": "float32"},
        },
        "outputs": {"output": {"shape": ["batch"], "dtype": "float32"}},
        "reference": "def run(indptr, cache, scale):\n    raise RuntimeError('offsets')\n",
    }
    for record in (norm, paged):
        write_json(root / "definitions" / record["op_type"] / f"{record['name']}.json", record)
    for language, file, text in (
        ("triton", "main.py", "import helper\n\n\ndef run(hidden_states, weight, output):\n    pass\n"),
        ("cuda", "kernel.cu", "extern void run();"),
    ):
        name = f"norm_h8_{language}"
        record = {
            "name": name,
            "definition": "norm_h8",
            "author": "agent",
            "spec": {
                "language": language,
                "target_hardware": ["NVIDIA_H100", "cuda"],
                "entry_point": f"{file}::run",
                "dependencies": [],
                "destination_passing_style": True,
                "binding": "torch" if language == "cuda" else None,
            },
            "sources": [{"path": file, "content": text}],
        }
        write_json(root / "solutions" / "agent" / "rmsnorm" / "norm_h8" / f"{name}.json", record)
    return root
