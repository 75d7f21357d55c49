"""Definitions and Solutions as model objects: strict, frozen, and never at odds with themselves."""

from __future__ import annotations

from typing import Any

import pytest
from inventory_roots import definition, solution
from pydantic import ValidationError

from tilegym_fx.schema import AxisConst, Definition, InconsistentError, Solution


def problems_of(error: ValidationError) -> list[tuple[str, str]]:
    """(field, problem) of every contradiction that a validation error carries."""
    causes = [item.get("ctx", {}).get("error") for item in error.errors()]
    return [(p.field, p.problem) for c in causes if isinstance(c, InconsistentError) for p in c.problems]


def test_a_valid_definition_keeps_the_order_of_its_inputs() -> None:
    record = Definition.model_validate(definition())
    assert list(record.inputs) == ["x", "scale"]
    assert record.inputs["scale"].is_scalar
    assert not record.inputs["x"].is_scalar
    assert record.tag_values("model") == ("tiny",)


def test_records_are_frozen() -> None:
    record = Definition.model_validate(definition())
    with pytest.raises(ValidationError, match="frozen"):
        record.name = "other"


@pytest.mark.parametrize(
    ("model", "data", "where"),
    [
        (Definition, definition(colour="red"), ("colour",)),
        (Definition, definition(axes={"N": {"type": "var", "value": 3}}), ("axes", "N", "var", "value")),
        (
            Definition,
            definition(axes={"N": {"type": "const", "value": "3"}}),
            ("axes", "N", "const", "value"),
        ),
        (Definition, definition(axes={"N": {"type": "const", "value": -1}}), ("axes", "N", "const", "value")),
        (Definition, definition(outputs={}), ("outputs",)),
        (Definition, definition(name="../evil"), ("name",)),
        (Definition, definition(inputs={"x": {"shape": ["N"], "dtype": "bf16"}}), ("inputs", "x", "dtype")),
        (Definition, definition(inputs={"x": {"dtype": "int8"}}), ("inputs", "x", "shape")),
        (Solution, solution(sources=[]), ("sources",)),
        (Solution, solution(spec={**solution()["spec"], "target_hardware": []}), ("spec", "target_hardware")),
        (Solution, solution(sources=[{"path": "a.py", "text": ""}]), ("sources", 0, "text")),
    ],
)
def test_what_the_schema_does_not_have_is_refused(
    model: type[Definition | Solution], data: dict[str, Any], where: tuple[str, ...]
) -> None:
    with pytest.raises(ValidationError) as caught:
        model.model_validate(data)
    assert [item["loc"] for item in caught.value.errors()] == [where]


def test_every_contradiction_of_a_definition_is_found_at_once() -> None:
    data = definition(
        inputs={"x": {"shape": ["N", "Q"], "dtype": "bfloat16"}, "y": {"shape": None, "dtype": "bool"}},
        outputs={"x": {"shape": ["R"], "dtype": "bfloat16"}},
        constraints=["N ==", "N > 1"],
        reference="def run(x, scale):\n    return x\n",
    )
    with pytest.raises(ValidationError) as caught:
        Definition.model_validate(data)
    fields = [field for field, _ in problems_of(caught.value)]
    assert fields == [
        "inputs.x.shape",
        "outputs.x.shape",
        "outputs.x",
        "constraints.0",
        "inputs.y",
        "reference",
    ]


@pytest.mark.parametrize(
    ("reference", "problem"),
    [
        ("def run(:\n", "is no valid Python"),
        ("\0", "is no valid Python"),
        ("(" * 1000, "is no valid Python"),
        ("def walk(x, scale): ...\n", "has no global function `run`"),
        ("class A:\n    def run(x, scale): ...\n", "has no global function `run`"),
        ("def run(*x, scale): ...\n", "takes *args"),
        ("def run(x, scale, bias): ...\n", "needs 'bias'"),
    ],
)
def test_a_reference_needs_a_run_with_the_inputs(reference: str, problem: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Definition.model_validate(definition(reference=reference))
    assert any(problem in text for _, text in problems_of(caught.value))


def test_extra_parameters_with_defaults_are_allowed_and_inputs_can_be_put_in_order() -> None:
    data = definition(reference="def run(scale, x, bias=None):\n    return x\n")
    assert list(Definition.model_validate(data).in_run_order().inputs) == ["scale", "x"]


def test_a_constant_axis_keeps_its_size() -> None:
    record = Definition.model_validate(definition(axes={"N": {"type": "const", "value": 0}, "D": {"type": "var"}}))
    assert record.axes["N"] == AxisConst(type="const", value=0)


@pytest.mark.parametrize("path", ["/x.py", "../x.py", "a/../x.py", "./x.py", "a//x.py", "C:/x.py", "a\\x.py"])
def test_a_source_path_is_plain_and_relative(path: str) -> None:
    spec = {**solution()["spec"], "entry_point": f"{path}::run"}
    with pytest.raises(ValidationError) as caught:
        Solution.model_validate(solution(spec=spec, sources=[{"path": path}]))
    assert [field for field, _ in problems_of(caught.value)] == ["sources.0.path"]


@pytest.mark.parametrize("entry", ["kernels/a.py", "kernels/a.py::", "::run", "a.py::b::c", "a.py::not a name"])
def test_an_entry_point_is_file_and_function(entry: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Solution.model_validate(solution(spec={**solution()["spec"], "entry_point": entry}))
    assert [field for field, _ in problems_of(caught.value)] == ["spec.entry_point"]


def test_the_entry_file_is_one_of_the_sources_and_none_is_listed_twice() -> None:
    with pytest.raises(ValidationError) as caught:
        Solution.model_validate(solution(sources=[{"path": "kernels/b.py"}, {"path": "kernels/b.py"}]))
    assert [field for field, _ in problems_of(caught.value)] == ["sources.1.path", "spec.entry_point"]


def test_tilegyms_form_of_sources_is_read() -> None:
    record = Solution.model_validate(solution(sources={"path": ["kernels/scaled.py"]}))
    assert [source.path for source in record.sources] == ["kernels/scaled.py"]
    assert (record.entry_file, record.entry_function) == ("kernels/scaled.py", "scaled")
    assert record.dtypes == ("bfloat16",)
