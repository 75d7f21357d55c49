"""The model types that stand for all others: each norm, rotary embedding, MLP, attention, router and recurrence."""

from __future__ import annotations

#: What a run of a minute or two can try; see `tests/models/test_breadth_sample.py`.
FEW = ("bart", "gemma3_text", "gpt2", "gptj", "llama", "olmo2", "phi3", "qwen3_moe")

#: What `nox -s drift` tries with each version of transformers.
SAMPLE = (
    *FEW, "apertus", "bamba", "bert", "bloom", "cohere2", "dbrx", "deepseek_v3", "falcon", "gemma2", "glm4_moe",
    "gpt_neox", "gpt_oss", "granite", "jamba", "lfm2", "llama4_text", "mamba2", "mixtral", "opt", "phi", "qwen2_moe",
    "qwen3_next",
)  # fmt: skip
