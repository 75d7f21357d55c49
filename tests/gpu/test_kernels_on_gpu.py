"""Every Solution on a real GPU against float64, on ordinary and on adversarial inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from inputs import DTYPES, INVENTORY, ROWS, SIZES, WEIGHTS, make_inputs, worst

from tilegym_fx import ops

pytestmark = pytest.mark.gpu

#: Sizes of real models (576 SmolLM2, 2880 gpt-oss, 4544 falcon) and one that no tile divides.
WIDTHS = ({"H": 576, "I": 1536, "K": 576, "M": 192}, {"H": 2880, "I": 2880, "K": 2880, "M": 517},
          {"H": 4544, "I": 4544, "K": 130, "M": 50257}, {"H": 8192, "I": 14336, "K": 4096, "M": 1024})  # fmt: skip
#: Mamba2: heads, columns and states of real models, positions of a step, of one block and of several.
STATES = (
    {"Hs": 6, "Gs": 2, "Ps": 5, "Ns": 12, "L": 9},
    {"Hs": 24, "Gs": 1, "Ps": 64, "Ns": 128, "L": 1},
    {"Hs": 24, "Gs": 1, "Ps": 64, "Ns": 128, "L": 64},
    {"Hs": 16, "Gs": 8, "Ps": 64, "Ns": 256, "L": 150},
)
#: The gated delta rule: each key head has one, two or three value heads.
DELTA = ({"Hk": 2, "Hv": 6}, {"Hk": 8, "Hv": 8, "D": 80, "Dv": 96}, {"Hk": 4, "Hv": 8, "D": 128, "Dv": 128})
#: Multi-head latent attention: small heads, and those of two real models; a step, several tokens and a prompt.
LATENTS = ({"Hq": 7, "D": 20, "R": 6, "L": 40, "V": 12}, {"Hq": 16, "D": 128, "R": 64, "L": 512, "V": 128},
           {"Hq": 128, "D": 128, "R": 64, "L": 512, "V": 128})  # fmt: skip
EXPERT_WIDTHS = ({"H": 576, "I": 192, "K": 4}, {"H": 2880, "I": 64, "K": 4})
#: One of each kind of tiling.
ROW_COUNTS = (1, 3, 16, 24, 60, 130)
HEADS = (
    {"D": 64, "Hq": 9, "Hk": 3},
    {"D": 80, "Hq": 8, "Hk": 8},
    {"D": 96},
    {"D": 128, "Hq": 8, "Hk": 1},
    {"D": 256},
)
LENGTHS = (
    {"S": 1, "T": 1, "L": 2},
    {"S": 1, "T": 13, "L": 14},
    {"S": 1, "T": 700, "L": 701},
    {"S": 4, "T": 40, "L": 44},
    {"S": 77, "T": 77, "L": 154},
    {"S": 260, "T": 260, "L": 520},
)


def cases(name: str, dtype: torch.dtype) -> list[dict[str, int]]:
    """Every size in bfloat16; in the other dtypes the first and last of each kind (compiling takes the time)."""
    pick = slice(None) if dtype == torch.bfloat16 else slice(None, None, 3)
    definition = INVENTORY.definitions[name]
    axes = definition.axes
    if "Hs" in axes:
        return [{"B": 2, **states} for states in STATES]
    if "Hv" in axes:
        return [{"B": 2, **heads} for heads in DELTA]
    if "kv_weight" in definition.inputs:
        return [
            {"B": 2, **heads, "S": s, "T": t} for heads in LATENTS for s, t in ((1, 700), (1, 13), (3, 200), (40, 90))
        ]
    if "D" in axes:
        lengths = LENGTHS if "T" in axes else [{**x, "T": x["S"]} for x in LENGTHS]
        heads = [{**h, "R": h["D"] // 2} for h in HEADS]
        return [{"B": 2, **h, **length} for h in heads[pick] for length in lengths[pick]]
    if definition.op_type == "moe":  # the float64 evaluation holds the weights of every token's experts
        sizes = [{**width, "N": rows} for width in EXPERT_WIDTHS for rows in (1, 24, 130)]
        return [*sizes, {"H": 576, "I": 192, "K": 8, "N": 24, "E": 64}]
    return [{**width, "N": rows} for width in WIDTHS[pick] for rows in ROW_COUNTS[pick]]


def claims() -> list[Any]:
    """Every Definition with each dtype that its Solution claims."""
    names = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
    return [
        pytest.param(solution.definition, dtype, id=f"{solution.definition}-{name}")
        for solution in sorted(INVENTORY.solutions.values(), key=lambda s: s.definition)
        for name, dtype in names.items()
        if f"dtype:{name}" in (solution.tags or ())
    ]


@pytest.mark.parametrize(("name", "dtype"), claims())
def test_kernel_agrees_with_float64(name: str, dtype: torch.dtype) -> None:
    before = dict(ops.fallbacks())
    op = ops.overload(name)

    def run(**inputs: Any) -> Any:
        return op(*inputs.values())

    regimes = [(rows, w) for rows in ROWS for w in WEIGHTS if rows == "ordinary" or w == "as trained"]
    with torch.device("cuda"):  # the float64 evaluation too: on a CPU it would take most of the time
        for sizes in cases(name, dtype):
            for rows, weights in regimes:
                inputs = make_inputs(name, dtype, rows, weights, {k: v for k, v in sizes.items() if k in SIZES})
                ratio = worst(run, name, inputs, dtype)
                assert ratio <= 1, f"{sizes}, rows {rows}, weights {weights}: {ratio:.2f} times the rounding error"
    assert dict(ops.fallbacks()) == before, "a kernel was not used"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["gqa_attention_masked", "biased_attention_masked", "biased_attention_filled"])
def test_attention_under_a_float_mask_agrees_with_float64(name: str, dtype: torch.dtype) -> None:
    op = ops.overload(name)
    with torch.device("cuda"):
        for sizes in cases(name, dtype):
            sized = {k: v for k, v in sizes.items() if k in SIZES}
            inputs = make_inputs(name, dtype, "ordinary", "as trained", sized, float_mask=True)
            ratio = worst(lambda **given: op(*given.values()), name, inputs, dtype)
            assert ratio <= 1, f"{sizes}: {ratio:.2f} times the rounding error"


def test_a_replayed_graph_reads_its_inputs_anew() -> None:
    x = torch.randn(4, 4096, dtype=torch.bfloat16, device="cuda")
    weight = torch.ones(4096, dtype=torch.bfloat16, device="cuda")
    ops.rms_norm(x, weight, 1e-6)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.rms_norm(x, weight, 1e-6)
    for _ in range(2):
        x.copy_(torch.randn_like(x))
        out.zero_()
        graph.replay()
        torch.testing.assert_close(out, ops.rms_norm(x, weight, 1e-6), rtol=0, atol=0)


def test_kernels_run_on_the_stream_that_is_current() -> None:
    side = torch.cuda.Stream()
    x = torch.randn(64, 4096, dtype=torch.bfloat16, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        x.fill_(2.0)
        out = ops.silu_mul(x, x)
    side.synchronize()
    torch.testing.assert_close(out, torch.nn.functional.silu(torch.full_like(x, 2.0)) * 2.0)
