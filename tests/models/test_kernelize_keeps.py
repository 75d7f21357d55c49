"""What a kernelized model must still do: everything that its users and other libraries do with a model."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import adversarial_modules
import pytest
import torch
from small_models import small
from torch import nn

from tilegym_fx.apply import is_applied
from tilegym_fx.errors import MatchError
from tilegym_fx.live import kernelize, kernelized, report, restore
from tilegym_fx.ops import backends

LLAMA, GEMMA = "meta-llama/Llama-3.2-1B", "google/gemma-3-4b-it (text)"
IDS = torch.randint(3, 120, (2, 10), generator=torch.Generator().manual_seed(1))
MASK = torch.ones_like(IDS)
MASK[0, :4] = 0

Pair = tuple[nn.Module, nn.Module]


def pair_of(name: str, **changes: Any) -> Pair:
    """A model, and a copy of it with kernels."""
    original = small(name, **changes)
    return original, kernelize(copy.deepcopy(original), strict=True, verify=False)


@pytest.fixture(scope="module")
def pairs() -> dict[str, Pair]:
    """Models that no test changes; the second has sliding windows of 8 tokens."""
    return {"llama": pair_of(LLAMA), "gemma3_text": pair_of(GEMMA)}


@pytest.fixture
def one() -> Iterator[nn.Module]:
    """A model of one layer, not kernelized yet."""
    torch._dynamo.reset()
    yield small(LLAMA, num_hidden_layers=1)
    torch._dynamo.reset()


def logits(model: nn.Module, **kwargs: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, **kwargs).logits


def assert_near(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


DECODING = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 20, "temperature": 1.3},
    "beam": {"do_sample": False, "num_beams": 3},
}


class TestGenerate:
    @pytest.mark.parametrize("cache", ["dynamic", "static"])
    @pytest.mark.parametrize("decoding", DECODING)
    @pytest.mark.parametrize("family", ["llama", "gemma3_text"])
    def test_a_left_padded_batch_gives_the_same_tokens(
        self, pairs: dict[str, Pair], family: str, decoding: str, cache: str
    ) -> None:
        said = []
        for model in pairs[family]:
            torch.manual_seed(5)
            settings = {"max_new_tokens": 12, "min_new_tokens": 12, "cache_implementation": cache, **DECODING[decoding]}
            said.append(model.generate(IDS, attention_mask=MASK, **settings))
        assert said[0].shape == (2, 22)
        assert torch.equal(*said)

    def test_the_original_says_something_else_without_its_mask(self, pairs: dict[str, Pair]) -> None:
        """So that the test above would notice a mask that is ignored."""
        model = pairs["llama"][1]
        assert not torch.equal(
            *(
                model.generate(IDS, attention_mask=m, max_new_tokens=8, do_sample=False)
                for m in (MASK, torch.ones_like(MASK))
            )
        )


class TestOutputs:
    @pytest.mark.parametrize("family", ["llama", "gemma3_text"])
    def test_hidden_states(self, pairs: dict[str, Pair], family: str) -> None:
        with torch.no_grad():
            want, got = (m(IDS, output_hidden_states=True).hidden_states for m in pairs[family])
        assert len(got) == len(want) == 1 + pairs[family][0].config.num_hidden_layers
        for one, two in zip(got, want, strict=True):
            assert_near(one, two)

    @pytest.mark.parametrize("kept", [1, 3, torch.tensor([2, 5])])
    def test_logits_to_keep(self, pairs: dict[str, Pair], kept: Any) -> None:
        want, got = (logits(m, logits_to_keep=kept) for m in pairs["llama"])
        assert got.shape[1] == (kept if isinstance(kept, int) else 2)
        assert_near(got, want)

    def test_attention_weights_fall_back_where_they_are_asked_for(self) -> None:
        original, model = pair_of(LLAMA, num_hidden_layers=1, attn_implementation="eager")
        assert any("attention" in name for name in report(model).counts())
        conditions = {g for w in report(model).written if "attention" in w.match.definition for g in w.guards}
        assert any("output_attentions" in condition for condition in conditions)
        with torch.no_grad():
            want, got = (m(IDS, attention_mask=MASK, output_attentions=True).attentions for m in (original, model))
        assert len(got) == 1
        assert_near(got[0], want[0])


class TestOthersCode:
    def test_hooks_from_before_run_and_so_do_those_from_after(self, one: nn.Module) -> None:
        seen: list[str] = []

        def hook(name: str) -> Callable[..., None]:
            return lambda *args: seen.append(name)

        layer = one.model.layers[0]
        handles = [
            layer.register_forward_hook(hook("layer")),
            layer.mlp.register_forward_pre_hook(hook("mlp")),
            layer.self_attn.q_proj.register_forward_hook(hook("q_proj")),
        ]
        want = logits(one)
        before, seen[:] = list(seen), []
        kernelize(one, strict=True)
        seen.clear()
        assert_near(logits(one), want)
        assert sorted(seen) == sorted(before) == ["layer", "mlp", "q_proj"]
        with pytest.warns(UserWarning, match="runs its author's code again"):
            layer.mlp.down_proj.register_forward_hook(hook("down_proj"))
        layer.input_layernorm.register_forward_hook(hook("norm"))
        assert_near(logits(one), want)
        assert {"down_proj", "norm"} <= set(seen)
        assert report(one).given_back
        for handle in handles:
            handle.remove()

    def test_a_module_of_the_users_own(self) -> None:
        model = adversarial_modules.Broadcast().eval()
        inputs = torch.randn(2, 3, 16), torch.randn(2, 3, 16)
        want = model(*inputs)
        kernelize(model, inputs=inputs, strict=True)
        assert report(model).counts() == {"add_rms_norm": 1}
        assert all(torch.equal(a, b) for a, b in zip(model(*inputs), want, strict=True))

    def test_other_instances_and_the_library_are_untouched(self, one: nn.Module) -> None:
        from transformers.models.llama import modeling_llama

        other, held = small(LLAMA, num_hidden_layers=1), dict(vars(modeling_llama))
        functions = {k: dict(vars(v)) for k, v in held.items() if isinstance(v, type)}
        types = [type(m) for m in other.modules()]
        kernelize(one, strict=True)
        assert [type(m) for m in other.modules()] == types
        assert dict(vars(modeling_llama)) == held
        assert {k: dict(vars(v)) for k, v in held.items() if isinstance(v, type)} == functions

    def test_compiling_it_afterwards_breaks_no_graph(self, one: nn.Module) -> None:
        before = torch._dynamo.explain(one)(IDS)
        want = logits(one)
        kernelize(one, strict=True)
        torch._dynamo.reset()
        after = torch._dynamo.explain(one)(IDS)
        assert after.graph_break_count == before.graph_break_count == 0
        assert after.graph_count == before.graph_count
        torch._dynamo.reset()
        assert_near(logits(torch.compile(one, backend="eager", fullgraph=True)), want)
        ops = {
            str(node.target) for graph in after.graphs for node in graph.graph.nodes if "tilegym" in str(node.target)
        }
        assert len(ops) > 3


class TestSaved:
    def test_state_dict_and_save_pretrained(self, one: nn.Module, tmp_path: Path) -> None:
        want, keys = logits(one), list(one.state_dict())
        kernelize(one, strict=True)
        assert list(one.state_dict()) == keys
        one.save_pretrained(tmp_path)
        again = type(one).from_pretrained(tmp_path).eval()
        assert not is_applied(again)
        assert_near(logits(again), want)
        assert "tilegym" not in (tmp_path / "config.json").read_text()
        one.load_state_dict(again.state_dict())
        assert is_applied(one)
        assert_near(logits(one), want)

    def test_deep_copy_runs_kernels_on_its_own_weights(self, one: nn.Module) -> None:
        kernelize(one, strict=True)
        twin = copy.deepcopy(one)
        assert is_applied(twin)
        with torch.no_grad():
            twin.model.layers[0].mlp.down_proj.weight.zero_()
        assert not torch.equal(logits(twin), logits(one))
        restore(twin)
        assert is_applied(one)

    def test_a_pickle_is_the_authors_model(self, one: nn.Module) -> None:
        want = logits(kernelize(one, strict=True))
        again = pickle.loads(pickle.dumps(one))
        assert not is_applied(again)
        assert_near(logits(again), want)
        buffer = io.BytesIO()
        torch.save(one, buffer)
        buffer.seek(0)
        assert not is_applied(torch.load(buffer, weights_only=False))


class TestTraining:
    @pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
    def test_losses_are_the_same(self, one: nn.Module, checkpointing: bool) -> None:
        original, model = copy.deepcopy(one), kernelize(one, strict=True, verify=False)
        losses = []
        for each in (original, model):
            each.train()
            if checkpointing:
                each.gradient_checkpointing_enable()
            optimizer = torch.optim.SGD(each.parameters(), lr=0.05)
            losses.append([_step(each, optimizer) for _ in range(4)])
        assert losses[0][0] > losses[0][-1], "it learns"
        assert losses[1] == pytest.approx(losses[0], rel=1e-5)
        assert is_applied(model)
        assert_near(logits(model.eval()), logits(original.eval()))

    def test_train_and_eval_are_kept(self, one: nn.Module) -> None:
        one.train()
        one.model.layers[0].mlp.eval()
        modes = [m.training for m in one.modules()]
        kernelize(one, strict=True)
        assert [m.training for m in one.modules()] == modes


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    loss = model(input_ids=IDS, labels=IDS).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


class TestTheDoor:
    def test_twice_is_once(self, one: nn.Module) -> None:
        text = report(kernelize(one, strict=True)).text
        classes = [type(m) for m in one.modules()]
        assert report(kernelize(one, strict=True)).text == text
        assert [type(m) for m in one.modules()] == classes
        restore(restore(one))
        assert not is_applied(one)

    def test_a_block_undoes_itself_even_when_it_fails(self, one: nn.Module) -> None:
        def fail() -> None:
            with kernelized(one):
                assert is_applied(one)
                raise KeyError

        with pytest.raises(KeyError):
            fail()
        assert not is_applied(one)

    def test_a_module_that_nothing_is_known_of_is_returned_with_a_warning(self) -> None:
        model = nn.Sequential(nn.Conv1d(4, 4, 3), nn.Sigmoid())
        x = torch.ones(1, 4, 8)
        with pytest.warns(UserWarning, match=r"Sequential is unchanged: nothing in it can be replaced"):
            assert kernelize(model, inputs=x) is model
        with pytest.raises(MatchError, match="nothing in it can be replaced"):
            kernelize(model, inputs=x, strict=True)

    def test_a_module_that_cannot_be_captured_is_returned_with_a_warning(self) -> None:
        class Refuses(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                raise RuntimeError("not today")

        with pytest.warns(UserWarning, match="not today"):
            kernelize(Refuses(), inputs=torch.ones(2))

    def test_a_cpu_is_told_once_that_references_run(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(backends, "_told_of_references", False)
        model, x = adversarial_modules.Broadcast().eval(), torch.ones(2, 3, 16)
        with pytest.warns(UserWarning, match="no CUDA device here"):
            kernelize(model, inputs=(x, x))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            kernelize(model, inputs=(x, x))
