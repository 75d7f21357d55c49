"""The files of a kernel for a region: another inventory's, an adapter, synthesised, or by a hook."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilegym_fx.adapters import adapter_file
from tilegym_fx.candidates import Candidate
from tilegym_fx.errors import TilegymFxError
from tilegym_fx.new import scaffold, templates
from tilegym_fx.schema import Definition
from tilegym_fx.synth import SynthesisError, guards_of, write_kernel

if TYPE_CHECKING:
    from tilegym_fx.inventory import Inventory

HOOK_README = """\
Write the kernel of this draft and leave it here as `kernel.py`.

definition.json   what it computes: `reference` is runnable PyTorch, `inputs` are the parameters in order
attempt.py        what could be synthesised, where anything could
why.txt           why a kernel is wanted: where the region is, how long it takes, what stands in the way

`kernel.py` defines a function named {name} that takes the Definition's inputs in order and returns its
outputs, contiguous, of the reference's dtypes. It may import cuda.tile, torch, the standard library and
tilegym_fx.launch. Kernel functions are called <something>_kernel. An optional `guards.py` holds @guard
functions for patterns/{name}.py. Exit with status 0; anything else is recorded as a discard.
"""


class HookError(TilegymFxError):
    """The hook command failed."""

    advice = "Its output is in the experiment's log"


@dataclass(frozen=True)
class Files:
    """What was written.

    Attributes:
        name: Of the Definition.
        paths: Every file.
        how: In a sentence, for the table of results.
    """

    name: str
    paths: tuple[Path, ...]
    how: str


def copy_exact(candidate: Candidate, inventory: Inventory, root: Path) -> Files:
    """Take over a Definition of another inventory with its Solution, kernel and patterns."""
    definition = inventory.definitions[str(candidate.definition)]
    solution = inventory.solutions[str(candidate.solution)]
    home = inventory.root_of(definition.name).path
    paths = [root / "definitions" / f"{definition.name}.json", root / "solutions" / f"{solution.name}.json"]
    texts = {
        paths[0]: inventory.file_of(definition).read_text(encoding="utf-8"),
        paths[1]: inventory.file_of(solution).read_text(encoding="utf-8"),
    }
    texts |= {root / path: text for path, text in inventory.source_texts(solution.name).items()}
    patterns = home / "patterns" / f"{definition.name}.py"
    if patterns.is_file():
        texts[root / "patterns" / patterns.name] = patterns.read_text(encoding="utf-8")
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return Files(definition.name, tuple(texts), f"exact: {definition.name} of {home.name}")


def promoted_file(candidate: Candidate, inventory: Inventory, root: Path) -> Path:
    """The record that changes when a Definition of ``root`` is found to be verified."""
    return root / inventory.file_of(inventory.definitions[str(candidate.definition)]).relative_to(root)


def promote(candidate: Candidate, inventory: Inventory, root: Path) -> Files:
    """A Definition of ``root`` whose kernel has yet to pass on a GPU; :func:`mark_verified` says when it has."""
    path = promoted_file(candidate, inventory, root)
    return Files(str(candidate.definition), (path,), f"exact: {candidate.definition}, which was not verified before")


def solve_exact(candidate: Candidate, inventory: Inventory, root: Path) -> Files:
    """A kernel for a Definition that has none yet.

    Raises:
        SynthesisError: None can be written.
    """
    definition = inventory.definitions[str(candidate.definition)]
    written = write_kernel(definition, definition.name)
    record = templates.solution(definition.name, definition.name, written.how, written.dtypes)
    kernel = root / "kernels" / f"{definition.name}.py"
    solution = root / "solutions" / f"{definition.name}.json"
    for path, text in ((kernel, written.kernel), (solution, json.dumps(record, indent=2) + "\n")):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    scaffold.laid_out([kernel])
    return Files(definition.name, (kernel, solution), f"exact: the first kernel of {definition.name}")


def adapt(
    draft: Definition, record: Mapping[str, Any], candidate: Candidate, inventory: Inventory, root: Path
) -> Files:
    """A kernel that calls another one through an adapter."""
    assert candidate.adapter is not None
    solution = inventory.solutions[str(candidate.solution)]
    texts = inventory.source_texts(solution.name)
    source = texts[solution.entry_file]
    base = inventory.definitions[str(candidate.definition)]
    kernel = adapter_file(candidate.adapter, draft.name, draft, base, source, solution.entry_function)
    floats = {s.dtype for s in draft.inputs.values() if "float" in s.dtype}
    dtypes = tuple(sorted(floats)) if candidate.adapter.cast else solution.dtypes or templates.DTYPES
    parts = scaffold.Parts(
        dict(record),
        kernel,
        candidate.adapter.sentence(),
        dtypes,
        guards=guards_of(draft, rank_free=False),
        beside=scaffold.files_beside(kernel, solution.entry_file, texts),
    )
    return Files(draft.name, scaffold.write(draft.name, parts, root).new, f"compatible: {candidate.why}")


def synthesise(draft: Definition, record: Mapping[str, Any], root: Path) -> Files:
    """A kernel written from the region itself.

    Raises:
        SynthesisError: None can be written.
    """
    written = write_kernel(draft, draft.name)
    parts = scaffold.Parts(dict(record), written.kernel, written.how, written.dtypes, guards=written.guards)
    return Files(draft.name, scaffold.write(draft.name, parts, root).new, "synthesised")


def ask_hook(hook: str, draft: Definition, record: Mapping[str, Any], why: str, folder: Path, root: Path) -> Files:
    """A kernel that a command writes: a person, or a model.

    Args:
        hook: The command; it gets the folder as its last argument.
        draft: What to compute.
        record: The same as JSON.
        why: Why a kernel is wanted.
        folder: Where the command finds the draft and leaves ``kernel.py``.
        root: Where the files go.

    Raises:
        HookError: The command fails or leaves nothing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "definition.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    (folder / "why.txt").write_text(why + "\n", encoding="utf-8")
    (folder / "README.md").write_text(HOOK_README.format(name=draft.name), encoding="utf-8")
    guards = guards_of(draft, rank_free=False)
    try:
        written = write_kernel(draft, draft.name)
        guards = written.guards
        (folder / "attempt.py").write_text(written.kernel, encoding="utf-8")
    except SynthesisError as error:
        (folder / "attempt.py").write_text(f'"""Nothing could be synthesised: {error.what}."""\n', encoding="utf-8")
    done = subprocess.run([*shlex.split(hook), str(folder)], cwd=folder)
    kernel, own_guards = folder / "kernel.py", folder / "guards.py"
    if done.returncode or not kernel.is_file():
        said = f"ended with status {done.returncode}" if done.returncode else "left no kernel.py"
        raise HookError(f"the hook {shlex.split(hook)[0]!r} {said}")
    if own_guards.is_file():
        guards = own_guards.read_text(encoding="utf-8")
    dtypes = tuple(dict.fromkeys(s.dtype for s in draft.inputs.values() if "float" in s.dtype))
    parts = scaffold.Parts(
        dict(record), kernel.read_text(encoding="utf-8"), "Written by a hook.", dtypes, guards=guards
    )
    return Files(draft.name, scaffold.write(draft.name, parts, root).new, "written by the hook")


def mark_verified(files: Files) -> None:
    """Say in the Definition that its kernel has passed on a GPU: unless named, others are not used."""
    for path in files.paths:
        if path.parent.name == "definitions":
            text = path.read_text(encoding="utf-8")
            said, found = re.subn(r'"status:\w+"', '"status:verified"', text, count=1)
            path.write_text(said if found else _tagged(text), encoding="utf-8")


def _tagged(text: str) -> str:
    record = json.loads(text)
    return json.dumps({**record, "tags": [*record.get("tags", []), "status:verified"]}, indent=2) + "\n"


def keep_drafts(files: Files, root: Path, folder: Path) -> None:
    """Copies of what was written, for whoever wants to go on with it."""
    for path in files.paths:
        target = folder / path.relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
