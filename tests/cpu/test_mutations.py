"""Every reference with one thing changed: whatever the pass still takes over computes what the changed code does.

A change is another operation, operands exchanged, another number, flag or dimension, or another value of the same
shape in the place of an operand. Then the same for references unchanged, with a write in place or another reader
put in anywhere.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from pass_checks import FP32, INVENTORY, capture, find_in
from torch.fx import GraphModule, Node
from torch.utils import _pytree

from tilegym_fx.kernel_check import random_inputs
from tilegym_fx.rewrite import rewrite

aten = torch.ops.aten
Change = Callable[[Node], None]
PER_DEFINITION = 5
#: Operation -> one that is easily taken for it.
ALIKE: dict[Any, Any] = {
    aten.silu.default: aten.sigmoid.default,
    aten.gelu.default: aten.silu.default,
    aten.rsqrt.default: aten.reciprocal.default,
    aten.mul.Tensor: aten.add.Tensor,
    aten.add.Tensor: aten.sub.Tensor,
    aten.sub.Tensor: aten.add.Tensor,
    aten.neg.default: aten.abs.default,
    aten.cos.default: aten.sin.default,
    aten.mean.dim: aten.sum.dim_IntList,
    aten.softmax.int: aten.log_softmax.int,
}
#: In float32, which shows every difference; what cannot be traced in it is left out.
NAMES = [name for name, d in INVENTORY.definitions.items() if d.op_type not in ("moe", "grouped_linear")]


def numbers(value: Any) -> Iterator[Any]:
    """Other values for a literal."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value + 1, value - 1)
    elif isinstance(value, float):
        yield value * 1.5
    elif isinstance(value, list) and len(value) > 1:
        yield value[::-1]


def changes(node: Node) -> Iterator[Change]:
    """What can be changed at one call."""
    if node.target in ALIKE:
        yield lambda n: setattr(n, "target", ALIKE[n.target])
    for i, argument in enumerate(node.args):
        if not isinstance(argument, Node):
            yield from (_argument(i, other) for other in numbers(argument))
        elif isinstance(argument.meta.get("val"), torch.Tensor):
            yield from (_operand(i, other.name) for other in _others(node, argument))
    for key, value in node.kwargs.items():
        yield from (_keyword(key, other) for other in numbers(value))
    if len(node.args) > 1 and _are_alike(*node.args[:2]):
        yield lambda n: setattr(n, "args", (n.args[1], n.args[0], *n.args[2:]))


def _are_alike(one: Any, other: Any) -> bool:
    """Only such may be exchanged: some operations read past the end of a tensor that is too small."""
    return isinstance(one, Node) and isinstance(other, Node) and one.meta["val"].shape == other.meta["val"].shape


def _others(node: Node, operand: Node) -> Iterator[Node]:
    for earlier in node.graph.nodes:
        if earlier is node:
            return
        value = earlier.meta.get("val")
        if earlier is not operand and isinstance(value, torch.Tensor) and value.shape == operand.meta["val"].shape:
            yield earlier


def _argument(place: int, value: Any) -> Change:
    return lambda n: n.update_arg(place, value)


def _operand(place: int, name: str) -> Change:
    return lambda n: n.update_arg(place, next(other for other in n.graph.nodes if other.name == name))


def _keyword(key: str, value: Any) -> Change:
    return lambda n: n.update_kwarg(key, value)


def changed(original: GraphModule, position: int, change: Change) -> GraphModule:
    module = copy.deepcopy(original)
    change(list(module.graph.nodes)[position])
    module.recompile()
    return module


def runs(code: Callable[..., Any], tensors: list[torch.Tensor]) -> tuple[GraphModule, list[Any]] | None:
    """The code captured; its results, and the inputs as it leaves them; None where it makes no sense."""
    try:
        given = [t.clone() for t in tensors]
        return capture(code, tensors), [*_pytree.tree_leaves(code(*given)), *given]
    except (RuntimeError, IndexError, TypeError, ValueError):
        return None


def captured(name: str) -> tuple[GraphModule, list[torch.Tensor]]:
    """A reference at random inputs, and its tensor inputs."""
    definition, reference = INVENTORY.definitions[name], INVENTORY.reference(name)
    inputs = random_inputs(definition, dtype=FP32)
    tensors = [value for value in inputs.values() if isinstance(value, torch.Tensor)]

    def code(*values: torch.Tensor) -> Any:
        given = iter(values)
        return reference(**{k: next(given) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()})

    return capture(code, tensors), tensors


def assert_pass_keeps_numbers(code: Callable[..., Any], tensors: list[torch.Tensor]) -> None:
    """Results, and inputs that are written in place, are those of the code; nothing is said of what cannot run."""
    ran = runs(code, tensors)
    if ran is None:
        return
    module, wanted = ran
    outcome = find_in(module)
    rewrite(module.graph, outcome.plan)
    module.recompile()
    given = [t.clone() for t in tensors]
    found = [*_pytree.tree_leaves(module(*given)), *given]
    taken = [p.match.definition for p in outcome.chosen]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4, equal_nan=True, msg=lambda m: f"{taken}: {m}")


@pytest.mark.parametrize("name", NAMES)
def test_one_thing_changed(name: str) -> None:
    original, tensors = captured(name)
    every = [(i, c) for i, n in enumerate(original.graph.nodes) if n.op == "call_function" for c in changes(n)]
    for position, change in random.Random(name).sample(every, min(PER_DEFINITION, len(every))):
        assert_pass_keeps_numbers(changed(original, position, change), tensors)


@pytest.mark.parametrize("name", NAMES)
def test_a_write_or_a_reader_put_in(name: str) -> None:
    original, tensors = captured(name)
    chance = random.Random(name)
    for put_in in (_doubled, _cleared, _read_too):
        module = copy.deepcopy(original)
        nodes = [node for node in module.graph.nodes if node.op != "output"]
        values = [n for n in nodes if isinstance(n.meta.get("val"), torch.Tensor)]
        floating = [n for n in values if n.meta["val"].is_floating_point()]
        value = chance.choice(floating or values)  # a changed index could point anywhere
        with module.graph.inserting_after(chance.choice(nodes[nodes.index(value) :])):
            put_in(module, value)
        module.recompile()
        assert_pass_keeps_numbers(module, tensors)


def _doubled(module: GraphModule, value: Node) -> None:
    module.graph.call_function(aten.mul_.Tensor, (value, 2))


def _cleared(module: GraphModule, value: Node) -> None:
    """Some of it, through a view."""
    view = module.graph.call_function(aten.slice.Tensor, (value, -1, 0, 3))
    with module.graph.inserting_after(view):
        module.graph.call_function(aten.zero_.default, (view,))


def _read_too(module: GraphModule, value: Node) -> None:
    reader = module.graph.call_function(aten.tanh.default, (value,))
    output = next(iter(reversed(module.graph.nodes)))
    results = output.args[0]
    output.args = ((*(results if isinstance(results, list | tuple) else (results,)), reader),)
