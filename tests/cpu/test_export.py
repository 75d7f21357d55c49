"""Capture: phases of generation, live modules, masks, caches, regions, sites, and the errors."""

from __future__ import annotations

import copy
import io
import linecache
import logging
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    DynamicCache,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    OPTConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
    RobertaConfig,
    masking_utils,
)

from tilegym_fx.errors import ExportError, UnknownModelError
from tilegym_fx.export import ExportedGraph, build, export_module, export_phase, longest, positions, site_of
from tilegym_fx.results import Site

aten = torch.ops.aten
SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 50,
}  # fmt: skip
LLAMA = LlamaConfig(**SIZES)
TINY = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 50}
TORCH_LOG = logging.getLogger("torch._subclasses.fake_tensor")


@pytest.fixture(scope="module")
def prefill() -> ExportedGraph:
    return export_phase(build(LLAMA), "prefill", 2, 8)


@pytest.fixture(scope="module")
def decode() -> ExportedGraph:
    return export_phase(build(LLAMA), "decode", 2, 8)


@pytest.fixture(scope="module")
def live() -> nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(LLAMA, dtype=torch.float32).eval()


def calls(graph: ExportedGraph, target: Any = None) -> list[Node]:
    nodes = [node for node in graph.graph_module.graph.nodes if node.op == "call_function"]
    return [node for node in nodes if target is None or node.target is target]


def operations(graph: ExportedGraph) -> Counter[str]:
    return Counter(str(node.target) for node in calls(graph) if "_assert" not in str(node.target))


def attentions(graph: ExportedGraph) -> list[dict[str, Any]]:
    """Each attention's arguments by name."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    defaults = {"attn_mask": None, "is_causal": False}
    found = calls(graph, aten.scaled_dot_product_attention.default)
    return [defaults | dict(zip(names, node.args, strict=False)) | node.kwargs for node in found]


def run(graph: ExportedGraph, *inputs: Any) -> Any:
    """Run a captured graph on its module's weights; inputs in the order of its placeholders."""
    model, remaining = graph.model, iter(inputs)
    state = dict(model.named_parameters(remove_duplicate=False))
    state |= dict(model.named_buffers(remove_duplicate=False))
    placeholders = graph.graph_module.graph.find_nodes(op="placeholder")
    values = [
        state[graph.parameters[node.name]] if node.name in graph.parameters else next(remaining)
        for node in placeholders
        if not node.name.startswith("c_")
    ]
    constants = [torch.empty(0) for node in placeholders if node.name.startswith("c_")]
    at = len(graph.parameters)
    return graph.graph_module(*values[:at], *constants, *values[at:])


class TestBuild:
    def test_a_model_has_shapes_and_no_memory(self) -> None:
        model = build(LLAMA, torch.float16)
        assert {p.device.type for p in model.parameters()} == {"meta"}
        assert {p.dtype for p in model.parameters()} == {torch.float16}
        assert not model.training

    def test_buffers_keep_the_dtype_that_the_author_chose(self) -> None:
        assert build(LLAMA).get_buffer("model.rotary_emb.inv_freq").dtype is torch.float32

    def test_a_configuration_without_a_causal_class_is_one_clear_error(self) -> None:
        with pytest.raises(UnknownModelError, match="model can be built"):
            build(PreTrainedConfig())


class TestPrefill:
    def test_attention_is_causal_without_a_mask_as_when_the_model_runs(self, prefill: ExportedGraph) -> None:
        found = attentions(prefill)
        assert [(a["attn_mask"], a["is_causal"]) for a in found] == [(None, True)] * 2

    def test_only_the_last_logits_are_computed(self, prefill: ExportedGraph) -> None:
        logits = prefill.graph_module.graph.output_node().args[0][0]
        assert logits.meta["val"].shape == (2, 1, LLAMA.vocab_size)

    def test_it_returns_the_cache_that_it_filled(self, prefill: ExportedGraph) -> None:
        _, *cache = prefill.graph_module.graph.output_node().args[0]
        assert [tuple(part.meta["val"].shape) for part in cache] == [(2, 2, 8, 8)] * 4

    def test_nothing_is_left_of_the_empty_cache(self, prefill: ExportedGraph) -> None:
        assert all(len(node.args[0]) == 2 for node in calls(prefill, aten.cat.default))
        assert not any(node.target._schema.is_mutable for node in calls(prefill))

    def test_operations_are_whole(self, prefill: ExportedGraph) -> None:
        ops = operations(prefill)
        assert (ops["aten.linear.default"], ops["aten.silu.default"]) == (15, 2)

    def test_weights_are_placeholders_with_their_names_and_dtypes(self, prefill: ExportedGraph) -> None:
        weights = {n.name: n for n in prefill.graph_module.graph.find_nodes(op="placeholder")}
        for placeholder, name in prefill.parameters.items():
            tensor = dict(prefill.model.state_dict(keep_vars=True)).get(name)
            tensor = prefill.model.get_buffer(name) if tensor is None else tensor
            value = weights[placeholder].meta["val"]
            assert (value.shape, value.dtype) == (tensor.shape, tensor.dtype)

    def test_stages_add_up(self, prefill: ExportedGraph, decode: ExportedGraph) -> None:
        for graph in (prefill, decode):
            assert sum(graph.stages.values()) == pytest.approx(graph.seconds)
            assert set(graph.stages) == {"inputs", "trace", "flatten"}


class TestDecode:
    def test_one_token_attends_to_the_cache_and_itself(self, decode: ExportedGraph) -> None:
        for attention in attentions(decode):
            assert attention["query"].meta["val"].shape == (2, 4, 1, 8)
            assert attention["key"].meta["val"].shape == (2, 2, 9, 8)
            assert (attention["attn_mask"], attention["is_causal"]) == (None, False)

    def test_the_phase_is_recorded(self, prefill: ExportedGraph, decode: ExportedGraph) -> None:
        assert (prefill.phase, decode.phase) == ("prefill", "decode")

    def test_a_sliding_layer_sees_its_window_alone(self) -> None:
        config = Gemma3TextConfig(
            **SIZES, head_dim=8, sliding_window=4, layer_types=["sliding_attention", "full_attention"]
        )
        graph = export_phase(build(config), "decode", 1, 16)
        assert [a["key"].meta["val"].shape[-2] for a in attentions(graph)] == [4, 17]

    def test_a_recurrent_model_has_its_own_kind_of_cache(self) -> None:
        config = MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=50, state_size=4)
        graph = export_phase(build(config), "decode", 1, 16)
        assert graph.graph_module.graph.output_node().args[0][0].meta["val"].shape == (1, 1, 50)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_experts_are_grouped_products(self, dtype: torch.dtype) -> None:
        config = Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8)
        ops = operations(export_phase(build(config, dtype), "decode", 1, 8))
        assert sum(count for name, count in ops.items() if "grouped_mm" in name) == 4
        assert not any("nonzero" in name for name in ops)

    def test_a_model_without_a_cache_is_one_clear_error(self) -> None:
        class Bag(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embed = nn.Embedding(5, 4, device="meta")

            def forward(self, input_ids: Tensor, use_cache: bool) -> Tensor:
                return self.embed(input_ids)

        with pytest.raises(ExportError, match=r"Bag takes no cache\. Scan its prefill phase alone"):
            export_phase(Bag(), "decode", 1, 3)


@pytest.mark.parametrize(("batch", "seq"), [(0, 8), (1, 0), (1, -3)])
def test_sizes_that_leave_nothing_are_refused(batch: int, seq: int) -> None:
    with pytest.raises(ExportError, match="leave nothing to export"):
        export_phase(build(LLAMA), "prefill", batch, seq)


def test_more_tokens_than_learned_positions_are_refused() -> None:
    model = build(GPT2Config(n_positions=8, n_embd=32, n_layer=1, n_head=2, vocab_size=50))
    export_phase(model, "decode", 1, 7)
    with pytest.raises(ExportError, match=r"8 positions, and decode with seq 8 needs 9\. Give a seq of at most 7"):
        export_phase(model, "decode", 1, 8)


@pytest.mark.parametrize(
    ("config", "most"),
    [
        (BertConfig(max_position_embeddings=24, **TINY), 24),
        (RobertaConfig(max_position_embeddings=24, pad_token_id=1, **TINY), 22),
        (OPTConfig(max_position_embeddings=24, ffn_dim=64, word_embed_proj_dim=32, **TINY), 24),
        (LlamaConfig(max_position_embeddings=24, **TINY), None),
        (LlamaConfig(max_position_embeddings=TINY["vocab_size"], **TINY), None),
    ],
    ids=["table", "table that begins behind the padding", "table with spare rows", "rotary", "words alone"],
)
def test_a_table_of_positions_is_noticed_and_rotary_ones_go_on(config: Any, most: int | None) -> None:
    model = build(config)
    assert positions(model) == most
    assert longest(model, "decode") == (most and most - 1)


class LogsOfItself(nn.Module):
    """Logs as torch does while it is traced, then fails."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        TORCH_LOG.error("a traceback")
        TORCH_LOG.warning("a warning")
        raise ValueError("it fails")


def test_errors_that_torch_logs_in_a_capture_are_kept_off_the_terminal_and_nothing_else_is() -> None:
    handler = logging.StreamHandler(io.StringIO())
    TORCH_LOG.addHandler(handler)
    try:
        with pytest.raises(ExportError, match="it fails"):
            export_module(LogsOfItself(), (torch.ones(2),))
        TORCH_LOG.error("an error of another time")
    finally:
        TORCH_LOG.removeHandler(handler)
    assert handler.stream.getvalue().split("\n") == ["a warning", "an error of another time", ""]


class TestLiveModel:
    @pytest.mark.parametrize("phase", ["prefill", "decode"])
    def test_it_gives_the_graph_that_its_meta_twin_gives(self, live: nn.Module, phase: Any) -> None:
        twin = operations(export_phase(build(LLAMA, torch.float32), phase, 2, 8))
        found = operations(export_phase(live, phase, 2, 8))
        for ops in (twin, found):  # the layout of attention's result depends on the device
            ops.pop("aten.contiguous.default", None)
        assert found == twin

    def test_it_is_untouched(self, live: nn.Module) -> None:
        weights = {name: (id(p), p.data_ptr(), p._version) for name, p in live.named_parameters()}
        attributes = {name: set(vars(module)) for name, module in live.named_modules()}
        export_phase(live, "decode", 1, 8)
        assert {name: (id(p), p.data_ptr(), p._version) for name, p in live.named_parameters()} == weights
        assert {name: set(vars(module)) for name, module in live.named_modules()} == attributes

    def test_the_prefill_graph_computes_the_model(self, live: nn.Module) -> None:
        tokens = torch.randint(0, 50, (2, 8))
        graph = export_phase(live, "prefill", 2, 8)
        with torch.no_grad():
            expected = live(input_ids=tokens).logits[:, -1:]
        torch.testing.assert_close(run(graph, True, 1, tokens)[0], expected)

    def test_the_decode_graph_computes_the_model(self, live: nn.Module) -> None:
        tokens = torch.randint(0, 50, (2, 9))
        cache = DynamicCache(config=LLAMA)
        with torch.no_grad():
            expected = live(input_ids=tokens).logits[:, -1:]
            live(tokens[:, :8], use_cache=True, **{cache_argument(live): cache})
        graph = export_module(live, (), {"input_ids": tokens[:, 8:], cache_argument(live): cache}, phase="decode")
        assert cache.get_seq_length() == 8
        torch.testing.assert_close(run(graph, tokens[:, 8:], *tree_leaves(cache))[0], expected)

    def test_a_mask_given_as_input_is_used(self, live: nn.Module) -> None:
        ones = torch.ones(2, 8, dtype=torch.long)
        graph = export_module(live, (), {"input_ids": ones, "attention_mask": ones})
        assert all(isinstance(a["attn_mask"], Node) for a in attentions(graph))

    def test_masks_are_skipped_without_a_cache_too(self, live: nn.Module) -> None:
        graph = export_module(live, (torch.ones(2, 8, dtype=torch.long),), {"use_cache": False})
        assert [a["attn_mask"] for a in attentions(graph)] == [None, None]

    def test_symbolic_sizes_keep_the_mask(self, live: nn.Module) -> None:
        axes = {"input_ids": {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}, "use_cache": None}
        inputs = {"input_ids": torch.ones(2, 8, dtype=torch.long), "use_cache": False}
        graph = export_module(live, (), inputs, dynamic_shapes=axes)
        assert all(isinstance(a["attn_mask"], Node) for a in attentions(graph))
        assert any(isinstance(n.meta["val"], torch.SymInt) for n in calls(graph) if "val" in n.meta)

    @pytest.mark.parametrize("tokens", [torch.ones(2, 8, dtype=torch.long), "not a tensor"])
    def test_transformers_is_as_before(self, live: nn.Module, tokens: Any) -> None:
        before = dict(vars(masking_utils))
        try:
            export_module(live, (), {"input_ids": tokens})
        except ExportError:
            assert tokens == "not a tensor"
        assert vars(masking_utils) == before


def cache_argument(model: nn.Module) -> str:
    from tilegym_fx.export.caches import cache_name

    name = cache_name(model)
    assert name is not None
    return name


class Plain(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


class TestOwnModules:
    def test_positional_and_keyword_inputs(self) -> None:
        module = Plain(lambda self, x, scale: self.linear(x) * scale)
        graph = export_module(module, (torch.randn(2, 8),), {"scale": torch.randn(8)})
        assert operations(graph) == {"aten.linear.default": 1, "aten.mul.Tensor": 1}
        assert dict(graph.parameters) == {"p_linear_weight": "linear.weight", "p_linear_bias": "linear.bias"}

    def test_they_need_no_transformers(self) -> None:
        code = (
            "import sys, torch; from tilegym_fx.export import export_module;"
            "export_module(torch.nn.Linear(2, 2), (torch.randn(1, 2),));"
            "assert 'transformers' not in sys.modules"
        )
        subprocess.run([sys.executable, "-c", code], check=True)

    def test_what_forward_leaves_on_the_module_is_taken_back(self) -> None:
        class Counting(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.seen: Tensor | None = None
                self.count = 0
                self.register_buffer("total", torch.zeros(8))

            def forward(self, x: Tensor) -> Tensor:
                self.seen = x * 2 if self.seen is None else self.seen
                self.count += 1
                self.total = self.total + 1
                self.extra = x
                return x + self.seen + self.total

        module = Counting()
        total = module.total
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            export_module(module, (torch.randn(2, 8),))
        assert (module.seen, module.count, module.total is total) == (None, 0, True)
        assert not hasattr(module, "extra")

    def test_train_mode_stays(self) -> None:
        module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).train()
        graph = export_module(module, (torch.randn(2, 4),))
        assert module.training
        assert calls(graph, aten.dropout.default)[0].args[2] is True

    def test_the_error_of_a_module_names_its_line(self) -> None:
        class Choosy(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x if x.sum() > 0 else -x

        with pytest.raises(ExportError, match=r"Choosy cannot be exported: .+ \(at .+test_export\.py:\d+\)") as caught:
            export_module(Choosy(), (torch.randn(3),))
        assert "\n" not in str(caught.value)


class TestRegions:
    def test_grad_mode_regions_become_plain_nodes(self) -> None:
        def body(self: Plain, x: Tensor) -> tuple[Tensor, Tensor]:
            with torch.enable_grad():
                y = self.linear(x).relu()
                with torch.no_grad():
                    z = y * torch.tensor([2.0])
            return y + z, z

        module, x = Plain(body), torch.randn(2, 8)
        graph = export_module(module, (x,))
        assert {"aten.relu.default", "aten.mul.Tensor", "aten.add.Tensor"} <= set(operations(graph))
        assert not any("wrap_with" in name for name in operations(graph))
        graph.graph_module.graph.lint()
        for name, sub in graph.graph_module.named_children():
            assert not isinstance(sub, torch.fx.GraphModule), name

    def test_inlined_regions_compute_the_same(self) -> None:
        def body(self: Plain, x: Tensor) -> Tensor:
            with torch.enable_grad():
                y = self.linear(x).relu()
            return y + 1

        module, x = Plain(body), torch.randn(2, 8)
        torch.testing.assert_close(run(export_module(module, (x,)), x)[0], module(x))

    def test_a_region_without_autocast_is_inlined_within_one_that_has_it(self) -> None:
        def body(self: Plain, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                y = self.linear(x)
            return y * 2

        with torch.autocast("cpu", torch.bfloat16):
            graph = export_module(Plain(body), (torch.randn(2, 8),))
        assert operations(graph)["aten.linear.default"] == 1

    def test_a_region_under_autocast_stays_whole(self) -> None:
        def body(self: Plain, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.linear(x)

        module, x = Plain(body), torch.randn(2, 8)
        graph = export_module(module, (x,))
        assert any("autocast" in name for name in operations(graph))
        torch.testing.assert_close(run(graph, x)[0], module(x))


class TestSites:
    def test_the_innermost_module_and_line(self, prefill: ExportedGraph) -> None:
        site = site_of(calls(prefill, aten.rsqrt.default)[1])
        assert (site.module_path, site.module_class) == (
            "model.layers.0.post_attention_layernorm",
            "LlamaRMSNorm",
        )
        assert site.innermost is not None
        assert site.innermost.file.endswith("modeling_llama.py")
        assert "rsqrt" in linecache.getline(site.innermost.file, site.innermost.line)
        assert site.frames[0].function == "forward"

    def test_frames_are_model_code_alone(self, prefill: ExportedGraph) -> None:
        files = {frame.file for node in calls(prefill) for frame in site_of(node).frames}
        assert all("/torch/" not in file and "/transformers/utils/" not in file for file in files)
        assert any(file.endswith("modeling_llama.py") for file in files)

    def test_one_site_is_one_object(self, prefill: ExportedGraph) -> None:
        first, second = (site_of(calls(prefill, aten.silu.default)[0]) for _ in range(2))
        assert first is second

    def test_a_weight_has_no_site(self, prefill: ExportedGraph) -> None:
        assert site_of(prefill.graph_module.graph.find_nodes(op="placeholder")[0]) == Site()

    @pytest.mark.parametrize(
        ("recorded", "path"),
        [
            ("", ""),
            ("model.layers.0", "model.layers.0"),
            ("L['self'].model.layers[3].mlp", "model.layers.3.mlp"),
            ("L['self']._modules['model']._modules['layers'][1]", "model.layers.1"),
            ("norm@2", "norm"),
        ],
    )
    def test_paths_are_those_of_named_modules(self, recorded: str, path: str) -> None:
        node = torch.fx.Graph().placeholder("x")
        node.meta["nn_module_stack"] = {"k": (recorded, nn.Linear)}
        assert site_of(node) == Site(path, "Linear")

    def test_a_compiled_graph_has_them_too(self) -> None:
        sites: list[Site] = []

        def backend(graph_module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
            sites.extend(site_of(node) for node in graph_module.graph.nodes if node.op == "call_function")
            return graph_module.forward

        module = nn.ModuleDict({"inner": nn.Sequential(nn.Linear(4, 4))})
        module.forward = lambda x: module["inner"](x)  # type: ignore[method-assign]
        torch.compile(copy.copy(module["inner"]), backend=backend)(torch.randn(1, 4))
        assert [(site.module_path, site.module_class) for site in sites] == [("0", "Linear")]


def test_a_number_that_is_made_a_tensor_on_meta_is_known_in_the_graph() -> None:
    class Filled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            least = torch.tensor(-3.5, dtype=x.dtype, device=x.device)
            return torch.where(x > 0, x, least) * torch.tensor([1.0, 2.0], device=x.device)

    make = torch.tensor
    graph = export_module(Filled(), (torch.empty(3, 2, device="meta"),)).graph_module.graph
    fills = [node.args[1] for node in graph.nodes if node.target is aten.full.default]
    assert fills == [-3.5]
    assert torch.tensor is make
