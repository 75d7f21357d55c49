"""What of a model can be written in source form: its calls captured one after the other, each matched and planned.

The calls are those that ``generate()`` makes, or the user's own. Of a deep model a capture sees the first layers, which
stand for the others (`layers`); where that does not work out, all of them.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from .choices import chooses
from .cost import Device, device_of
from .emit import Alike, Emitter, Refusal, why_not
from .errors import ExportError, UsageError
from .export import phase_inputs, run_without_memory, site_of
from .inventory import Inventory, load
from .layer_runs import unlike, watching
from .layers import Copies
from .live_model import BATCH, Call, is_language_model, model_device, sample_length, split_inputs
from .live_report import Report
from .pipeline import Outcome, find
from .plan import Policy
from .provenance import Provenance, record
from .results import EmitResult, Phase

_PHASES: tuple[Phase, ...] = ("prefill", "decode")


def plan_source_form(model: nn.Module, *, inputs: Any = None, only: Collection[str] | None = None,
                     skip: Collection[str] = (), inventory: Inventory | None = None,
                     device: Device | None = None, whole: str = "") -> tuple[EmitResult, Report]:  # fmt: skip
    """Capture, match and write: the emitted text and the report of what is in it, with nothing applied.

    Args:
        model: A causal language model of transformers, or any module together with ``inputs``.
        inputs: What the module is called with.
        only: Use these Definitions only.
        skip: Leave these Definitions out.
        inventory: Whose Definitions; by default the shipped one.
        device: For estimates; by default that of the model.
        whole: Why the first layers shall not stand for all; empty where they may.

    Raises:
        ExportError: If the model cannot be captured in any phase.
        MatchError: If an option names no Definition.
    """
    started = time.perf_counter()
    _require_weights(model)
    policy = Policy(device or device_of(model_device(model)), only, skip)
    planner = Planner(model, inventory or load(), policy, whole=whole)
    planner.capture_calls(inputs)
    made = planner.emitter.result()
    problems = {name: str(error) for name, error in planner.failures.items()}
    found = Report.of(
        model,
        made,
        planner.outcomes,
        problems,
        time.perf_counter() - started,
        planner.copies,
        planner.whole,
        planner.chooses,
    )
    return made, found


def _require_weights(model: nn.Module) -> None:
    """Weights that accelerate brings in for each call are not there when a method reads them by itself."""
    for path, module in model.named_modules():
        hook: Any = getattr(module, "_hf_hook", None)
        if any(getattr(part, "offload", False) for part in getattr(hook, "hooks", (hook,))):
            where = f"{path or '<root>'} ({type(module).__name__})"
            raise ExportError(
                f"{where} has hooks that bring in its weights for each call",
                advice="Load the model with all its weights in memory",
            )


@dataclass
class Planner:
    """Captures the calls of a model one after the other, and plans each in source form.

    Attributes:
        model: The model.
        inventory: Whose Definitions to look for.
        policy: Device, ``only`` and ``skip``.
        whole: Why every layer is captured, and none stands for others; empty where it is not so.
        copies: Which layers stand for which others.
        outcomes: Call (``prefill``, ``decode``, or ``call`` with the user's inputs) -> what was found in it.
        failures: Call -> why it could not be captured.
        chooses: Whether a captured call chooses by scores, or has parts that nobody could look into.
    """

    model: nn.Module
    inventory: Inventory
    policy: Policy
    whole: str = ""
    copies: Copies = field(init=False)
    outcomes: dict[str, Outcome] = field(init=False)
    failures: dict[str, ExportError] = field(init=False)
    chooses: bool = False

    def __post_init__(self) -> None:
        self._start()

    def _start(self) -> None:
        self.emitter = Emitter(self.model)
        self.copies, self.outcomes, self.failures = Copies(self.model), {}, {}

    def capture_calls(self, inputs: Any) -> None:
        """The user's own call, or those that ``generate()`` makes.

        Raises:
            ExportError: If none can be captured.
        """
        if inputs is None and not is_language_model(self.model):
            raise UsageError(f"{type(self.model).__name__} is no causal language model of transformers",
                             advice="Pass inputs=, a sample of what it is called with")  # fmt: skip
        if not self.whole and (copies := Copies.in_model(self.model)):
            self.whole = self._unlike(copies, inputs) or self._capture_first(copies, inputs)
            if not self.whole:
                return
            self._start()
        self._capture_each(inputs)
        if not self.outcomes:
            raise ExportError.because(f"{type(self.model).__name__} cannot be captured", *self.failures.values())
        if inputs is None:
            self._capture_padded()

    def _unlike(self, copies: Copies, inputs: Any) -> str:
        """Why the first layers cannot stand for all, by what each does in a run of the model; empty where they can."""
        try:
            with copies.left_out(), watching(copies) as first:
                self._run(inputs)
            with watching(copies) as whole:
                self._run(inputs)
        except ExportError as error:
            return error.what
        return unlike(copies, first, whole)

    def _run(self, inputs: Any) -> None:
        """Runs the model with nothing computed. A cached step has its prompt run before it, so it tells of both."""
        args, kwargs = split_inputs(inputs) if inputs is not None else ((), self._inputs("decode"))
        run_without_memory(self.model, args, kwargs)

    def _inputs(self, phase: Phase, *, padded: bool = False) -> dict[str, Any]:
        return phase_inputs(self.model, phase, BATCH, sample_length(self.model), padded=padded)

    def _capture_first(self, copies: Copies, inputs: Any) -> str:
        """Captures with the first layers, which then stand for all. Gives why they cannot, or nothing."""
        self.copies = copies
        with copies.left_out():
            self._capture_each(inputs)
            if why := next(filter(None, (_side_by_side(o, copies) for o in self.outcomes.values())), ""):
                return why
            if not self.failures:
                try:
                    self.emitter.spread(copies)
                except Refusal as refusal:
                    return str(refusal)
                if inputs is None:
                    self._capture_padded()
        return "; ".join(error.what for error in self.failures.values())

    def _capture_each(self, inputs: Any) -> None:
        for name, (args, kwargs) in self._calls(inputs):
            if (found := self._capture(self.model, name, args, kwargs)) is not None:
                self.outcomes[name] = found[0]
                self.emitter.add(found[0].chosen, found[1])

    def _calls(self, inputs: Any) -> Iterator[tuple[str, Call]]:
        if inputs is not None:
            yield "call", split_inputs(inputs)
            return
        for phase in _PHASES:
            try:
                yield phase, ((), self._inputs(phase))
            except ExportError as error:
                self.failures[phase] = error

    def _capture(
        self, module: nn.Module, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Outcome, Provenance] | None:
        try:
            exported, provenance = record(module, args, kwargs)
        except ExportError as error:
            self.failures[name] = error
            return None
        policy = Policy(self.policy.device, self.policy.only, self.policy.skip, lambda m: why_not(m, provenance))
        self.chooses |= bool(exported.holes) or chooses(exported.graph_module.graph)
        # The record speaks of the exported graph, so the pass works on a copy.
        return find(exported.copy(), self.inventory, policy, site_of), provenance

    def _capture_padded(self) -> None:
        """What a batch with padding does where the code above chose by condition: one module of each kind alone."""
        groups = self.emitter.conditional()
        for phase in _PHASES if groups else ():
            name = f"padded {phase}"
            try:
                calls = _calls_inside(self.model, self._inputs(phase, padded=True), groups)
            except ExportError as error:
                self.failures[name] = error
                continue
            for group in groups:
                call = calls.get(group.module)
                found = self._capture(group.module, name, *call) if call is not None else None
                if found is not None:
                    self.emitter.add_alike(group, found[0].chosen, found[1])


def _side_by_side(outcome: Outcome, copies: Copies) -> str:
    """A place that takes from several layers what does not depend on one another: how many such places there are does
    not follow from the first layers. Empty where there is none."""
    for planned in (*outcome.chosen, *(outcome.anywhere or ())):
        layers = {node: copies.layer(site_of(node).module_path) for node in planned.match.nodes}
        found = sorted(set(layers.values()) - {""})
        joined = any(layers[a] != layers[node] for node in layers for a in node.all_input_nodes if a in layers)
        if len(found) > 1 and not joined:
            return f"{planned.match.definition} takes operations of {found[0]} and {found[1]} side by side"
    return ""


def _calls_inside(model: nn.Module, kwargs: dict[str, Any], groups: Sequence[Alike]) -> dict[nn.Module, Call]:
    """What one module of each group is called with in a call of the model. Nothing is computed.

    Raises:
        ExportError: If the model does not run so.
    """
    calls: dict[nn.Module, Call] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.setdefault(module, tree_map_only(torch.Tensor, torch.clone, (args, kwargs)))
        if len(calls) == len(groups):
            raise _SeenAll

    handles = [group.module.register_forward_pre_hook(note, with_kwargs=True) for group in groups]
    try:
        run_without_memory(model, (), kwargs)
    except _SeenAll:
        pass
    finally:
        for handle in handles:
            handle.remove()
    return calls


class _SeenAll(Exception):
    """Ends a run in which every module has been called that was waited for."""
