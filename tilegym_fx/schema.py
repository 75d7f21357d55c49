"""The on-disk contract: FlashInfer-Bench Definitions and Solutions as strict, frozen pydantic models.

A model object is always consistent in itself (axes exist, ``run`` is there, names do not clash). What needs
other files, or is a house rule of one kind of inventory, lives in ``tilegym_fx.inventory``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, StrictInt, model_validator

DTypeName = Literal[
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float4_e2m1",
    "int64", "int32", "int16", "int8", "uint8", "bool", "complex64",
]  # fmt: skip

Text = Annotated[str, Field(min_length=1)]
Identifier = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
#: A Definition's or Solution's name: it becomes a file name and, for our own Definitions, an op name.
Name = Annotated[str, Field(pattern=r"^[^\s./\\][^/\\\x00-\x1f]*$")]


#: What `ast.parse` raises for text that is no Python.
UNPARSABLE = (SyntaxError, ValueError, RecursionError, MemoryError)


class Problem(NamedTuple):
    """One inconsistency: the dotted field, what is wrong, what to do."""

    field: str
    problem: str
    fix: str


class InconsistentError(ValueError):
    """A model object contradicts itself; ``problems`` has every contradiction."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(f"{p.field}: {p.problem}" for p in problems))


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class AxisConst(_Model):
    """A dimension with one fixed size."""

    type: Literal["const"]
    """Says that this is a constant axis."""
    value: Annotated[StrictInt, Field(ge=0)]
    """The size."""
    description: str | None = None
    """What the dimension is, for people."""


class AxisVar(_Model):
    """A dimension whose size is known only when the kernel is called."""

    type: Literal["var"]
    """Says that this is a variable axis."""
    description: str | None = None
    """What the dimension is, for people."""


Axis = Annotated[AxisConst | AxisVar, Field(discriminator="type")]


class TensorSpec(_Model):
    """One input or output."""

    shape: tuple[Identifier, ...] | None
    """Axis names from the outermost in; ``null`` for a Python scalar, ``[]`` for a 0-d tensor."""
    dtype: DTypeName
    """Element type; for a scalar it says float, int or bool."""
    description: str | None = None
    """What the value is, for people."""
    inplace_output: StrictBool = False
    """The reference writes to this input (TileGym's inventories only; ours never write to inputs)."""

    @property
    def is_scalar(self) -> bool:
        """Whether the value is a Python number and not a tensor."""
        return self.shape is None


class Definition(_Model):
    """What a kernel computes: its interface, and a reference in plain PyTorch."""

    name: Name
    """Unique among all loaded Definitions."""
    op_type: Name
    """Family for grouping, such as ``rmsnorm`` or ``gemm``."""
    description: str | None = None
    """What is computed, in a sentence."""
    tags: tuple[Text, ...] = ()
    """``model:``, ``stage:``, ``status:``, ``dtype:`` with a value, or the flag ``fused``."""
    axes: dict[Identifier, Axis]
    """Every dimension that a shape names."""
    inputs: dict[Identifier, TensorSpec]
    """Parameters of ``run`` by name; their order is the order of the parameters."""
    outputs: Annotated[dict[Identifier, TensorSpec], Field(min_length=1)]
    """Results of ``run`` by name; their order is the order of the results."""
    constraints: tuple[Text, ...] = ()
    """Python expressions over axes and inputs that hold for every valid call."""
    reference: Text
    """Python source with a global function ``run``; begins with ``# Source:`` lines."""

    @model_validator(mode="after")
    def _is_consistent(self) -> Definition:
        problems = list(_definition_problems(self))
        if problems:
            raise InconsistentError(problems)
        return self

    def tag_values(self, namespace: str) -> tuple[str, ...]:
        """Values of the tags in a namespace: ``tag_values("model")`` of ``model:llama`` is ``("llama",)``."""
        return _tag_values(self.tags, namespace)

    def run_parameters(self) -> tuple[ast.arg, ...]:
        """The positional parameters of the reference's ``run``, in order."""
        args = reference_run(ast.parse(self.reference)).args
        return (*args.posonlyargs, *args.args)

    def in_run_order(self) -> Definition:
        """A copy with ``inputs`` in the order of ``run``'s parameters; some inventories sort their keys."""
        order = [arg.arg for arg in self.run_parameters() if arg.arg in self.inputs]
        rest = [name for name in self.inputs if name not in order]
        return self.model_copy(update={"inputs": {name: self.inputs[name] for name in (*order, *rest)}})


class BuildSpec(_Model):
    """How to get from a Solution's sources to a callable."""

    language: Text
    """``cuda-tile`` for ours; FlashInfer-Bench data sets use python, triton, cuda, cpp, tilelang."""
    target_hardware: Annotated[tuple[Text, ...], Field(min_length=1)]
    """Where it runs: ``SM90`` and so on."""
    entry_point: Text
    """``{file}::{function}``; the file is one of the sources."""
    dependencies: tuple[Text, ...] = ()
    """Packages that the sources import."""
    destination_passing_style: StrictBool | None = None
    """Whether outputs are passed in as the last arguments; ours return them, absent or false."""
    binding: Text | None = None
    """How compiled languages are bound to Python (FlashInfer-Bench data sets only)."""


class Source(_Model):
    """One file of a Solution."""

    path: Text
    """Relative to the inventory root, without ``..``."""
    content: str | None = None
    """The text of the file where the inventory embeds it, else absent."""


def _as_source_list(value: Any) -> Any:
    """TileGym writes ``{"path": ["a.py"]}`` for what everyone else writes as ``[{"path": "a.py"}]``."""
    if isinstance(value, dict) and set(value) == {"path"} and isinstance(value["path"], list):
        return [{"path": path} for path in value["path"]]
    return value


class Solution(_Model):
    """Who implements a Definition, and where."""

    name: Name
    """Unique among all loaded Solutions."""
    definition: Name
    """Name of the Definition that this implements."""
    description: str | None = None
    """How it does it, in a sentence."""
    author: Text
    """Person or team."""
    spec: BuildSpec
    """Language, hardware and entry point."""
    sources: Annotated[tuple[Source, ...], BeforeValidator(_as_source_list), Field(min_length=1)]
    """Every file that belongs to it."""
    tags: tuple[Text, ...] = ()
    """``dtype:bfloat16`` and so on: the dtypes that it is verified for."""

    @model_validator(mode="after")
    def _is_consistent(self) -> Solution:
        problems = list(_solution_problems(self))
        if problems:
            raise InconsistentError(problems)
        return self

    @property
    def entry_file(self) -> str:
        """The file part of the entry point."""
        return self.spec.entry_point.split("::")[0]

    @property
    def entry_function(self) -> str:
        """The function part of the entry point."""
        return self.spec.entry_point.split("::")[1]

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes that it is verified for, from its ``dtype:`` tags."""
        return _tag_values(self.tags, "dtype")


def reference_run(module: ast.Module) -> ast.FunctionDef:
    """The global ``run`` of a parsed reference.

    Raises:
        LookupError: There is none.
    """
    for node in module.body:
        if isinstance(node, ast.FunctionDef) and node.name == "run":
            return node
    raise LookupError("the reference has no global function `run`")


def _tag_values(tags: tuple[str, ...], namespace: str) -> tuple[str, ...]:
    prefix = f"{namespace}:"
    return tuple(tag[len(prefix) :] for tag in tags if tag.startswith(prefix))


def _definition_problems(definition: Definition) -> Iterator[Problem]:
    for group, specs in (("inputs", definition.inputs), ("outputs", definition.outputs)):
        for name, spec in specs.items():
            for axis in dict.fromkeys(spec.shape or ()):
                if axis not in definition.axes:
                    yield Problem(
                        f"{group}.{name}.shape",
                        f"names the axis {axis!r}, which `axes` does not have",
                        "add it to `axes` or correct the spelling",
                    )
    for name in definition.outputs:
        if name in definition.inputs:
            yield Problem(f"outputs.{name}", "is the name of an input too", "give the output another name")
    for index, constraint in enumerate(definition.constraints):
        if not _is_expression(constraint):
            yield Problem(f"constraints.{index}", f"{constraint!r} is no Python expression", "correct it")
    try:
        run = reference_run(ast.parse(definition.reference))
    except UNPARSABLE as error:
        yield Problem("reference", f"is no valid Python ({_first_line(error)})", "correct the code")
    except LookupError:
        yield Problem("reference", "has no global function `run`", "define `run(...)` at the top level")
    else:
        yield from _interface_problems(run.args, definition)


def _interface_problems(args: ast.arguments, definition: Definition) -> Iterator[Problem]:
    positional = [arg.arg for arg in (*args.posonlyargs, *args.args)]
    required = positional[: len(positional) - len(args.defaults)]
    if args.vararg or args.kwarg or args.kwonlyargs or args.posonlyargs:
        yield Problem(
            "reference",
            "`run` takes *args, **kwargs, keyword-only or positional-only parameters",
            "give it one plain parameter for each input",
        )
    for name in definition.inputs:
        if name not in positional:
            yield Problem(f"inputs.{name}", "is no parameter of `run`", "add the parameter or remove the input")
    for name in required:
        if name not in definition.inputs:
            yield Problem("reference", f"`run` needs {name!r}, which is no input", "add it to `inputs`")


def _solution_problems(solution: Solution) -> Iterator[Problem]:
    file, separator, function = solution.spec.entry_point.partition("::")
    if not (file and separator and function.isidentifier()):
        yield Problem("spec.entry_point", f"is {solution.spec.entry_point!r}", "write it as `<file>::<function>`")
        return
    paths = [source.path for source in solution.sources]
    for index, path in enumerate(paths):
        parts = path.replace("\\", "/").split("/")
        if not {"", ".", ".."}.isdisjoint(parts) or ":" in parts[0] or "\\" in path:
            yield Problem(
                f"sources.{index}.path",
                f"{path!r} is not a plain relative path",
                "write it relative to the inventory root, with / and without ..",
            )
        if path in paths[:index]:
            yield Problem(f"sources.{index}.path", f"{path!r} is listed twice", "remove one of the two")
    if file not in paths:
        yield Problem("spec.entry_point", f"its file {file!r} is not among `sources`", "add the file to `sources`")


def _is_expression(text: str) -> bool:
    try:
        ast.parse(text, mode="eval")
    except UNPARSABLE:
        return False
    return True


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
