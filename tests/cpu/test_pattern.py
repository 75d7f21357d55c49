"""References and spellings as Patterns: which literals mean what, what is refused, what is traced and when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pass_checks import INVENTORY

from tilegym_fx.errors import PatternError
from tilegym_fx.facts import operations_of
from tilegym_fx.pattern import OPEN, Captured, Form, FormPatterns, Pattern, forms_of, merged, patterns_of
from tilegym_fx.probes import Probe, probe_axes, probes
from tilegym_fx.schema import Definition

aten = torch.ops.aten
BF16, FP32 = torch.bfloat16, torch.float32


def definition(
    inputs: str = "x: N H", outputs: str = "y: N H", scalars: tuple[str, ...] = (), **more: Any
) -> Definition:
    """A Definition with bfloat16 tensors of these axes and float scalars."""

    def specs(text: str) -> dict[str, Any]:
        named = (item.split(":") for item in text.split(","))
        return {name.strip(): {"shape": shape.split(), "dtype": "bfloat16"} for name, shape in named}

    axes = {a for side in (inputs, outputs) for item in side.split(",") for a in item.split(":")[1].split()}
    parameters = {**specs(inputs), **{s: {"shape": None, "dtype": "float32"} for s in scalars}}
    return Definition.model_validate(
        {
            "name": "own",
            "op_type": "own",
            "axes": {name: {"type": "var"} for name in sorted(axes)},
            "inputs": parameters,
            "outputs": specs(outputs),
            "reference": f"def run({', '.join(parameters)}):\n    pass\n",
            **more,
        }
    )


def only_pattern(what: Definition, function: Callable[..., Any]) -> Pattern:
    """The first Pattern: that of 16-bit inputs."""
    return FormPatterns(what, Form("own", function)).patterns[0]


def literal(pattern: Pattern, operation: Any, place: str) -> Any:
    (node,) = (p for p in pattern.nodes.values() if p.facts.operation is operation)
    return dict(node.literals)[place]


class TestLiterals:
    def test_a_scalar_input_is_captured(self) -> None:
        pattern = only_pattern(definition(scalars=("eps",)), lambda x, eps: torch.rsqrt(x + eps))
        assert literal(pattern, aten.add.Tensor, "other") == Captured("eps")
        assert pattern.scalars == ("eps",)

    def test_a_constant_of_the_maths_is_kept(self) -> None:
        pattern = only_pattern(definition(), lambda x: torch.softmax(x, -1, dtype=FP32))
        assert literal(pattern, aten.softmax.int, "dim") == -1
        assert literal(pattern, aten.softmax.int, "dtype") == FP32

    def test_what_follows_from_a_size_is_open(self) -> None:
        pattern = only_pattern(definition(), lambda x: torch.tanh(x / x.shape[-1]))
        node = next(p for p in pattern.nodes.values() if p.facts.operation is not aten.tanh.default)
        assert OPEN in dict(node.literals).values()

    def test_half_a_size_is_open_and_the_beginning_is_not(self) -> None:
        pattern = only_pattern(definition(outputs="y: N G"), lambda x: torch.tanh(x[..., : x.shape[-1] // 2]))
        assert literal(pattern, aten.slice.Tensor, "start") == 0
        assert literal(pattern, aten.slice.Tensor, "end") is OPEN

    def test_the_dtype_of_an_input_is_open_and_another_is_not(self) -> None:
        pattern = only_pattern(definition(), lambda x: torch.tanh(x.float()).to(x.dtype))
        dtypes = [dict(p.literals)["dtype"] for p in pattern.nodes.values() if p.facts.operation is aten.to.dtype]
        assert dtypes == [FP32, OPEN]

    def test_a_flag_is_no_number(self) -> None:
        pattern = only_pattern(definition(outputs="y: N"), lambda x: torch.tanh(x.mean(-1, keepdim=True))[:, 0])
        assert literal(pattern, aten.mean.dim, "keepdim") is True


class TestPatterns:
    def test_casts_make_one_pattern_for_each_width(self) -> None:
        found = FormPatterns(definition(), Form("own", lambda x: torch.tanh(x.float()).to(x.dtype))).patterns
        assert [len(p.nodes) for p in found] == [3, 1]

    def test_without_casts_one_is_enough(self) -> None:
        assert len(FormPatterns(definition(), Form("own", torch.tanh)).patterns) == 1

    def test_forms_that_trace_alike_share_a_pattern(self) -> None:
        what = definition("x: N H, z: N H")
        forms = [
            FormPatterns(what, Form("reference", lambda x, z: F.silu(x) * z)),
            FormPatterns(what, Form("spelled", lambda x, z: torch.mul(F.silu(x), z))),
        ]
        (pattern,) = merged(forms)
        assert [form.name for form in pattern.forms] == ["reference", "spelled"]

    def test_forms_that_do_not_have_their_own(self) -> None:
        what = definition("x: N H, z: N H")
        forms = [
            FormPatterns(what, Form("reference", lambda x, z: F.silu(x) * z)),
            FormPatterns(what, Form("spelled", lambda x, z: x * torch.sigmoid(x.float()).to(x.dtype) * z)),
        ]
        assert len(merged(forms)) > 1

    def test_a_form_for_a_special_case_has_the_pattern_of_that_case(self) -> None:
        what = definition("q: H, k: G", "y: H", constraints=["H % G == 0"])

        def one_head_per_group(q: Any, k: Any) -> Any:
            return torch.tanh(q) + torch.stack((k,)).view(q.shape)  # as many in both

        assert len(FormPatterns(what, Form("own", one_head_per_group)).patterns) == 1

    def test_the_first_is_the_references(self) -> None:
        assert patterns_of(INVENTORY, "gqa_attention")[0].spelling == "reference"


class TestRefusals:
    def test_an_input_that_is_not_used(self) -> None:
        with pytest.raises(PatternError, match="own \\(own\\) does not use its input 'eps' as such"):
            only_pattern(definition(scalars=("eps",)), lambda x, eps: torch.tanh(x))

    def test_a_tensor_that_is_not_used(self) -> None:
        with pytest.raises(PatternError, match="does not use its input 'z'"):
            only_pattern(definition("x: N H, z: N H"), lambda x, z: torch.tanh(x))

    def test_a_function_that_runs_at_no_probe(self) -> None:
        forms = FormPatterns(definition("x: N H, z: H N"), Form("own", lambda x, z: x + z))
        with pytest.raises(PatternError, match=r"own \(own\) cannot be traced"):
            _ = forms.operations
        with pytest.raises(PatternError, match=r"own \(own\) cannot be traced"):
            _ = forms.patterns

    def test_a_constraint_that_is_not_understood(self) -> None:
        with pytest.raises(PatternError, match="has a form that is not understood"):
            probe_axes(definition(constraints=["N > H"]))


class TestProbes:
    def test_sizes_satisfy_the_constraints(self) -> None:
        axes = probe_axes(definition("x: A B C D", constraints=["A == 2 * B", "C % B == 0", "D == B * C"]))
        assert axes["A"] == 2 * axes["B"]
        assert axes["D"] == axes["B"] * axes["C"]
        assert axes["C"] % axes["B"] == 0 < axes["C"] // axes["B"] - 1

    def test_equal_sizes_are_one_group(self) -> None:
        axes = probe_axes(definition("x: A B", constraints=["A % B == 0"]), equal=True)
        assert axes["A"] == axes["B"]

    def test_there_are_more_where_there_is_more_to_tell_apart(self) -> None:
        assert [p.dtype for p in probes(definition())] == [BF16, FP32]
        assert sum(p.wide_weights for p in probes(definition("x: N H, w: H"))) == 1
        assert sum(p.equal for p in probes(definition("x: A B", constraints=["A % B == 0"]))) == 2

    def test_every_case_of_a_constraint_is_tried(self) -> None:
        what = INVENTORY.definitions["mamba2_scan"]
        cases = {p.case for p in probes(what) if p.dtype == BF16}
        n = Probe(BF16).inputs(what)["chunk_size"]
        lengths = [probe_axes(what, case=case)["L"] for case in sorted(cases)]
        assert [(length % n == 0, length > n, length == n) for length in lengths] == [
            (True, True, False), (False, True, False), (True, False, True), (False, False, False),
        ]  # fmt: skip
        assert not any(
            Probe(BF16).is_constant(number) for s in lengths for number in (-s % n or s, s // n if s > n else s)
        )

    def test_wide_weights_are_vectors_alone(self) -> None:
        inputs = Probe(BF16, wide_weights=True).inputs(definition("x: N H, w: H"))
        assert [t.dtype for t in inputs.values()] == [BF16, FP32]

    @pytest.mark.parametrize(
        ("name", "own", "other"), [("rotary_embedding", BF16, FP32), ("rotary_embedding_fp32", FP32, BF16)]
    )
    def test_tables_may_be_wider_or_narrower(self, name: str, own: torch.dtype, other: torch.dtype) -> None:
        kinds = [p.inputs(INVENTORY.definitions[name]) for p in probes(INVENTORY.definitions[name]) if not p.equal]
        found = [(inputs["q"].dtype, inputs["cos"].dtype, inputs["sin"].dtype) for inputs in kinds]
        assert found == [(BF16, own, own), (FP32, FP32, FP32), (BF16, other, other)]

    def test_only_cosines_and_sines_are_tables(self) -> None:
        assert all(p.tables is None for p in probes(definition("x: N H, other: N H")))

    @pytest.mark.parametrize("name", INVENTORY.definitions)
    def test_no_size_can_be_taken_for_a_constant(self, name: str) -> None:
        what = INVENTORY.definitions[name]
        probe = Probe(BF16)
        sizes = [s for axis, s in probe_axes(what).items() if what.axes[axis].type == "var"]
        assert len(set(sizes)) == len(sizes) or what.constraints
        assert not any(probe.is_constant(number) for s in sizes for number in (s, s // 2, s**-0.5))
        numbers = [v for v in probe.inputs(what).values() if not isinstance(v, torch.Tensor)]
        assert not any(probe.is_constant(number) or number in sizes for number in numbers)
        assert len(set(numbers)) == len(numbers)


class TestWhatIsTraced:
    def test_nothing_until_it_is_asked_for(self) -> None:
        calls = []
        form = Form("own", lambda x: calls.append(1) or torch.tanh(x))
        forms = FormPatterns(definition(), form)
        assert not calls
        assert forms.operations == {aten.tanh.default}
        assert len(calls) == 1
        assert forms.patterns
        assert len(calls) == 2  # the first trace is used again

    @pytest.mark.parametrize("name", INVENTORY.definitions)
    def test_one_probe_tells_the_operations_of_all(self, name: str) -> None:
        """Else a graph that has what one probe needs would not be searched."""
        for form in forms_of(INVENTORY, name):
            forms = FormPatterns(INVENTORY.definitions[name], form)
            assert {operations_of(pattern.graph) for pattern in forms.patterns} == {forms.operations}
