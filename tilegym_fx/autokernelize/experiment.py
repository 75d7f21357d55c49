"""One experiment in a child: ``python -m tilegym_fx.autokernelize.experiment`` answers a request, as JSON.

It may crash, hang or write nonsense into the root: the parent bounds its time, and puts the tree back.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from tilegym_fx.candidates import Candidate, candidate_for
from tilegym_fx.cost import Device, device_of, get_device
from tilegym_fx.emit import why_not
from tilegym_fx.errors import TilegymFxError
from tilegym_fx.export import site_of
from tilegym_fx.inventory import Inventory, load, shipped_root
from tilegym_fx.pipeline import find
from tilegym_fx.plan import Policy, verified
from tilegym_fx.schema import Definition
from tilegym_fx.synth import SynthesisError, write_kernel

from . import figures, judging, writing
from .choice import Choice, Found, choices, hindrance_in_source, searchable
from .measuring import Bench, kernels_of
from .subject import Call, Subject, capture

#: In an experiment's folder: which region it is about.
TURN_FILE = "region.json"


@dataclass(frozen=True)
class Request:
    """What a child has to do.

    Attributes:
        model: See :func:`tilegym_fx.autokernelize.subject.capture`.
        root: Where kernels are kept.
        folder: Where drafts and logs of this experiment go.
        libraries: Other inventories in which to look for candidates.
        tried: Regions that have had their turn, or were passed over.
        device: Whose roofline is used without a GPU.
        dry_run: Estimate instead of measuring.
        hook: Command that writes kernels; empty for none.
        limit: Seconds for a benchmark.
        baseline: Only look, write nothing.
        alone: Leave the shipped inventory out.
        layers: The first layers of the model only.
        dtype: Of the model's weights; None for its checkpoint's.
    """

    model: str
    root: str
    folder: str
    libraries: tuple[str, ...] = ()
    tried: tuple[str, ...] = ()
    device: str = "h200"
    dry_run: bool = False
    hook: str = ""
    limit: float = 300.0
    baseline: bool = False
    alone: bool = False
    layers: int | None = None
    dtype: str | None = None


@dataclass
class Reply:
    """What a child found.

    Attributes:
        status: ``baseline``, ``right``, ``wrong`` or ``nothing`` left to try.
        key: The region that had its turn.
        name: Of its Definition.
        kind: ``exact``, ``compatible`` or ``none``: what candidate there was.
        how: Where the kernel came from.
        where: The region's source line.
        seconds: The region's time.
        files: What was written, relative to the root.
        problems: What is wrong.
        figures: Coverage and throughput with the kernel in place.
        passed_over: Region -> why it cannot be tried.
        uncovered: Place and seconds of the slowest regions that are left.
    """

    status: str
    key: str = ""
    name: str = ""
    kind: str = ""
    how: str = ""
    where: str = ""
    seconds: float = 0.0
    files: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    passed_over: dict[str, str] = field(default_factory=dict)
    uncovered: list[tuple[str, float]] = field(default_factory=list)


class Experiment:
    """Carries out a request."""

    def __init__(self, request: Request) -> None:
        self._request, self._started = request, time.monotonic()
        self._root = Path(request.root).resolve()
        self._device = _device(request)
        self._policy = Policy(self._device)
        self._passed_over: dict[str, str] = {}

    def run(self) -> Reply:
        """The one reply."""
        request = self._request
        _say(f"capturing {request.model}")
        with_provenance = not request.dry_run
        subject = capture(request.model, layers=request.layers, dtype=request.dtype, with_provenance=with_provenance)
        inventory = fresh(self._root, alone=request.alone)
        found = self._find(subject, inventory)
        if request.baseline:
            return self._reply("baseline", subject, found, inventory)
        for choice in choices(subject, found, set(inventory.definitions)):
            if choice.key not in request.tried:
                reply = self._try(choice, subject, found, inventory)
                if reply is not None:
                    return reply
        return Reply("nothing", passed_over=self._passed_over)

    def _find(self, subject: Subject, inventory: Inventory, tested: str = "") -> list[Found]:
        _say("matching")
        return [self._found(call, inventory, self._policy_for(inventory, tested)) for call in subject.calls]

    def _found(self, call: Call, inventory: Inventory, policy: Policy) -> Found:
        """What the pass finds; where kernels are to run in the model's own code, only what can be written there."""
        provenance = call.provenance
        if provenance is not None:
            policy = replace(policy, refuse=lambda match: why_not(match, provenance))
        graph = call.copy()
        return Found(call, graph, find(graph, inventory, policy, site_of))

    def _policy_for(self, inventory: Inventory, tested: str = "") -> Policy:
        """In an estimate every kernel counts; where it is measured, those that are verified and the one under test."""
        names = frozenset(inventory.definitions) if self._request.dry_run else verified(inventory) | {tested}
        return replace(self._policy, only=names & inventory.definitions.keys())

    def _try(self, choice: Choice, subject: Subject, found: Sequence[Found], inventory: Inventory) -> Reply | None:
        """An experiment with one region, or None if there is nothing to try."""
        made = searchable(choice.drafts)
        if made is None:
            self._passed_over[choice.key] = f"{_where(choice)}: no Pattern can be traced from it"
            return None
        draft, record = made.definition, made.record
        shelves = [inventory, *(load(path, shipped=False) for path in self._request.libraries)]
        candidate, home = _best(draft, shelves)
        _say(f"{draft.name}: {candidate.kind}, {candidate.why}")
        is_own = candidate.kind == "exact" and home is inventory and bool(candidate.solution)
        if is_own and not self._can_promote(candidate, inventory):
            self._passed_over[choice.key] = f"{_where(choice)}: {candidate.why}, which the plan does not take"
            return None
        why = self._hindrance(choice, draft) if candidate.kind == "none" else ""
        if not is_own and (why := why or hindrance_in_source(made, found)):
            self._passed_over[choice.key] = f"{_where(choice)}: {why}"
            return None
        changes = [writing.promoted_file(candidate, inventory, self._root)] if is_own else []
        self._note_turn(choice, draft.name, changes)
        reply = Reply(
            "wrong",
            choice.key,
            draft.name,
            candidate.kind,
            where=_where(choice),
            seconds=choice.region.seconds,
        )
        try:
            files = self._write(draft, record, candidate, home, choice)
        except (TilegymFxError, SyntaxError) as error:
            reply.problems = [str(error)]
            return reply
        return self._judged(reply, files, subject)

    def _can_promote(self, candidate: Candidate, inventory: Inventory) -> bool:
        """Whether a Definition waits for its kernel to pass on a GPU, and is where its record can be changed."""
        is_unverified = candidate.definition not in verified(inventory)
        return not self._request.dry_run and is_unverified and self._has(candidate, inventory)

    def _has(self, candidate: Candidate, home: Inventory) -> bool:
        """Whether a candidate is in the root itself."""
        file = home.file_of(home.definitions[str(candidate.definition)])
        return file.resolve().is_relative_to(self._root)

    def _note_turn(self, choice: Choice, name: str, changes: Sequence[Path]) -> None:
        """Tell the parent whose turn it is, and which files of the root are changed, as nothing may be told later."""
        file = Path(self._request.folder) / TURN_FILE
        file.parent.mkdir(parents=True, exist_ok=True)
        changed = [path.relative_to(self._root).as_posix() for path in changes]
        turn = {"key": choice.key, "name": name, "where": _where(choice), "changes": changed}
        file.write_text(json.dumps(turn), encoding="utf-8")

    def _hindrance(self, choice: Choice, draft: Definition) -> str:
        """Why no kernel would come of it."""
        if self._request.hook:
            return ""
        if not choice.writable:
            return "it has operations that cannot be synthesised"
        try:
            write_kernel(draft, draft.name)
        except SynthesisError as error:
            return error.what
        return ""

    def _write(
        self, draft: Definition, record: Any, candidate: Candidate, home: Inventory, choice: Choice
    ) -> writing.Files:
        if candidate.kind == "exact":
            if not candidate.solution:
                return writing.solve_exact(candidate, home, self._root)
            return (writing.promote if self._has(candidate, home) else writing.copy_exact)(candidate, home, self._root)
        if candidate.kind == "compatible":
            return writing.adapt(draft, record, candidate, home, self._root)
        if self._request.hook:
            why = f"{_where(choice)}: {choice.region.seconds * 1e6:.1f} us in {choice.region.count} places"
            folder = Path(self._request.folder) / "hook"
            return writing.ask_hook(self._request.hook, draft, record, why, folder, self._root)
        return writing.synthesise(draft, record, self._root)

    def _judged(self, reply: Reply, files: writing.Files, subject: Subject) -> Reply:
        reply.name, reply.how = files.name, files.how
        reply.files = [path.relative_to(self._root).as_posix() for path in files.paths]
        writing.keep_drafts(files, self._root, Path(self._request.folder))
        _say("checking the inventory")
        reply.problems = judging.inventory_faults(self._root, files.name, is_public=subject.is_public)
        if reply.problems:
            return reply
        inventory = fresh(self._root, alone=self._request.alone)
        found = self._find(subject, inventory, files.name)
        reply.problems = _not_taken(found, files.name) or self._faults(files.name, subject, inventory)
        if reply.problems:
            return reply
        if not self._request.dry_run:
            writing.mark_verified(files)
        done = self._reply("right", subject, found, inventory, files.name)
        reply.status, reply.figures, reply.uncovered = done.status, done.figures, done.uncovered
        reply.passed_over = self._passed_over
        return reply

    def _faults(self, name: str, subject: Subject, inventory: Inventory) -> list[str]:
        """What is wrong with the kernels of a Definition, alone or in the model."""
        _say("interpreting and compiling the kernel")
        faults = judging.kernel_faults(inventory, name, on_gpu=not self._request.dry_run)
        for call in subject.calls if not faults else ():
            faults += judging.model_faults(subject.module, call, inventory, self._policy_for(inventory, name))
        return faults

    def _reply(
        self, status: str, subject: Subject, found: Sequence[Found], inventory: Inventory, tested: str = ""
    ) -> Reply:
        left = [(_where(c), c.region.seconds) for c in choices(subject, found, set())][:12]
        return Reply(
            status,
            figures=self._figures(subject, found, inventory, tested).as_json(),
            uncovered=left,
            passed_over=self._passed_over,
        )

    def _figures(self, subject: Subject, found: Sequence[Found], inventory: Inventory, tested: str) -> figures.Figures:
        request, folder = self._request, Path(self._request.folder)
        if request.dry_run:
            _say("estimating")
            return figures.estimated(subject, [f.outcome for f in found], inventory, self._device, tested)
        _say("measuring")
        reference = folder.parent / "reference"
        if request.baseline:  # an earlier run's may be another version's
            shutil.rmtree(reference, ignore_errors=True)
        bench = Bench(
            subject.name, request.layers, self._root, reference, request.limit, subject.positions, dtype=subject.dtype,
            until=self._started + request.limit,
        )  # fmt: skip
        return bench.figures(kernels_of(inventory, tested) if tested else ())


def _not_taken(found: Sequence[Found], name: str) -> list[str]:
    """Why the pass does not put a Definition into any call; empty if it does."""
    outcomes = [one.outcome for one in found]
    if any(planned.match.definition == name for outcome in outcomes for planned in outcome.chosen):
        return []
    why = [r.reason for outcome in outcomes for r in outcome.rejections if r.definition == name]
    return [f"the pass does not use it: {why[0] if why else 'it is not found in the model'}"]


def fresh(root: Path, *, alone: bool = False) -> Inventory:
    """The shipped inventory and that of ``root``, as they are on disk now; that of ``root`` if ``alone``."""
    if alone:
        return load(root, shipped=False)
    if root.resolve() == shipped_root().resolve() or not (root / "definitions").is_dir():
        return load(shipped_root(), shipped=False)
    return load(shipped_root(), root, shipped=False)


def _best(draft: Definition, shelves: Sequence[Inventory]) -> tuple[Candidate, Inventory]:
    """The best candidate of several inventories, an earlier one where they are alike."""
    found = [(candidate_for(draft, shelf), shelf) for shelf in shelves]
    rank = {"exact": 0, "compatible": 1, "none": 2}
    return min(found, key=lambda item: rank[item[0].kind])


def _where(choice: Choice) -> str:
    site = choice.region.site
    frame = site.innermost
    line = f" {Path(frame.file).name}:{frame.line}" if frame else ""
    return f"{site.module_class or 'the model'}{line}"


def _device(request: Request) -> Device:
    if request.dry_run:
        return get_device(request.device)
    return device_of(torch.device("cuda"))


def _say(text: str) -> None:
    print(f"autokernelize: {text}", file=sys.stderr, flush=True)


def read_request(fields: dict[str, Any]) -> Request:
    """The request that a parent has sent."""
    return Request(**{**fields, "libraries": tuple(fields["libraries"]), "tried": tuple(fields["tried"])})


def _end_with(parent: int) -> None:
    """End this process and all that it has started when its parent has ended without ending it."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Answer the request on stdin; whatever else is printed goes to stderr."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    request = read_request(json.load(sys.stdin))
    try:
        reply = asdict(Experiment(request).run())
    except TilegymFxError as error:
        reply = {"status": "error", "problems": [str(error)]}
    json.dump(reply, answers)
    answers.close()


if __name__ == "__main__":
    main()
