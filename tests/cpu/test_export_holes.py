"""A block that cannot be captured costs only itself."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

import tilegym_fx.live as door
from tilegym_fx.errors import ExportError
from tilegym_fx.export import ExportedGraph, build, export_module, export_phase

OPAQUE = torch.ops.tilegym_fx_export.opaque.default
SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 50, "max_position_embeddings": 32,
}  # fmt: skip


class Sorted(nn.Module):
    """Experts in a loop over how many tokens each got: nothing that has a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        counts = (x[..., 0] > 0).long().bincount(minlength=3).tolist()
        parts = [expert(part) for expert, part in zip(self.experts, x.split(counts), strict=True)]
        return torch.cat(parts)


class Twice(Sorted):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        result = super().forward(x)
        return torch.stack([result, result])


class Block(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.norm, self.inner, self.up = nn.LayerNorm(8), inner, nn.Linear(8, 64)
        self.down = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.inner(self.norm(x)).reshape(-1, *x.shape)[0]
        return x + self.down(nn.functional.gelu(self.up(x)))


def network(inner: type[nn.Module] = Sorted) -> nn.Module:
    return nn.Sequential(Block(inner()), Block(inner())).eval()


def operations(graph: ExportedGraph) -> list[str]:
    return [str(n.target) for n in graph.graph_module.graph.nodes if n.op == "call_function"]


class TestOneBlock:
    @pytest.mark.parametrize("device", ["cpu", "meta"])
    def test_what_stands_around_it_is_captured(self, device: str) -> None:
        graph = export_module(network().to(device), (torch.randn(5, 8, device=device),))
        assert operations(graph).count("aten.gelu.default") == 2
        assert operations(graph).count("aten.layer_norm.default") == 2
        assert operations(graph).count("tilegym_fx_export.opaque.default") == 2

    def test_the_reason_is_kept(self) -> None:
        holes = export_module(network(), (torch.randn(5, 8),)).holes
        assert list(holes) == ["Sorted"]
        assert "data-dependent" in holes["Sorted"]

    def test_a_block_that_can_be_captured_is(self) -> None:
        graph = export_module(nn.Sequential(Block(nn.Linear(8, 8))).eval(), (torch.randn(5, 8),))
        assert graph.holes == {}
        assert OPAQUE not in {node.target for node in graph.graph_module.graph.nodes}

    def test_its_result_has_the_shape_that_a_run_gives(self) -> None:
        graph = export_module(network(Twice), (torch.randn(5, 8),))
        made = next(n for n in graph.graph_module.graph.nodes if n.target is OPAQUE)
        assert made.meta["val"].shape == (2, 5, 8)

    def test_it_reads_its_parameters(self) -> None:
        graph = export_module(network(), (torch.randn(5, 8),))
        made = next(n for n in graph.graph_module.graph.nodes if n.target is OPAQUE)
        read = {graph.parameters.get(source.name) for source in made.all_input_nodes}
        assert {"0.inner.experts.0.weight", "0.inner.experts.2.bias"} <= read

    def test_the_module_is_as_it_was(self) -> None:
        module = network()
        before = [dict(vars(part)) for part in module.modules()]
        export_module(module, (torch.randn(5, 8),))
        assert [vars(part) for part in module.modules()] == before

    def test_torch_prints_no_graph(self, capsys: pytest.CaptureFixture[str]) -> None:
        export_module(network(), (torch.randn(5, 8),))
        assert "def forward" not in capsys.readouterr().err


class TestNothingLeft:
    def test_a_module_that_fails_itself_is_one_clear_error(self) -> None:
        with pytest.raises(ExportError, match="Sorted cannot be exported: GuardOnDataDependent"):
            export_module(Sorted(), (torch.randn(5, 8),))

    def test_a_block_that_is_nearly_everything_is_no_hole(self) -> None:
        with pytest.raises(ExportError, match="data-dependent"):
            export_module(nn.Sequential(nn.LayerNorm(8), Sorted()), (torch.randn(5, 8),))


class Picky(LlamaMLP):
    """An MLP that looks at its values."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if float(x.sum()) < 1e9 else x


def picky_model(device: str = "cpu") -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES)
    model = LlamaForCausalLM(config).eval() if device == "cpu" else build(config, torch.float32)
    for layer in model.model.layers:
        layer.mlp = Picky(config).to(device)
    return model


class TestModels:
    @pytest.mark.parametrize("phase", ["prefill", "decode"])
    def test_both_phases_of_a_model_without_weights(self, phase: str) -> None:
        graph = export_phase(picky_model("meta"), phase, 1, 8)  # type: ignore[arg-type]
        assert list(graph.holes) == ["Picky"]
        assert operations(graph).count("aten.scaled_dot_product_attention.default") == 2

    def test_kernelize_takes_the_rest(self) -> None:
        model = picky_model()
        tokens = torch.arange(12).view(1, 12)
        with torch.no_grad():
            before = model(tokens).logits
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            door.kernelize(model, strict=True)
        counts = door.report(model).counts()
        with torch.no_grad():
            torch.testing.assert_close(model(tokens).logits, before, rtol=0, atol=1e-5)
        assert counts["rotary_embedding"] == 2
        assert not {"silu_mul", "gated_linear_silu"} & counts.keys()
        door.restore(model)
