"""The git repository that kernels are kept in: clean before, one commit an experiment, clean after."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tilegym_fx.errors import TilegymFxError, UsageError, make_folder

#: Folders below the root that experiments write to.
FOLDERS = ("definitions", "solutions", "kernels", "patterns", "tests", "benchmarks")
MESSAGE = "autokernelize: "
_IDENTITY = ("-c", "user.name=tilegym_fx", "-c", "user.email=autokernelize@localhost")


class RepositoryError(TilegymFxError):
    """Git refuses something."""

    advice = "Look at the repository with `git status`"


class Repository:
    """The repository around a root.

    Args:
        root: The inventory root, anywhere inside a work tree.
        init: Make it a repository, with all its files committed, where it is in none.

    Raises:
        UsageError: It is in none, or there is no git.
    """

    def __init__(self, root: Path, *, init: bool = False) -> None:
        self.root = root.resolve()
        if shutil.which("git") is None:
            raise UsageError("there is no git here", advice="Install git: kept kernels are committed")
        if not self._is_inside_a_work_tree():
            if not init:
                raise UsageError(
                    f"{self.root} is in no git repository",
                    advice="Kept kernels are committed: --init makes it one, or name another --root",
                )
            self._init()

    def _is_inside_a_work_tree(self) -> bool:
        try:
            return self._git("rev-parse", "--is-inside-work-tree").strip() == "true"
        except (RepositoryError, OSError):
            return False

    def _init(self) -> None:
        make_folder(self.root)
        self._git("init", "-q")
        self._git("add", "-A")
        self._git(*self._identity(), "commit", "-q", "--no-verify", "--allow-empty", "-m", f"{MESSAGE}start")

    @property
    def head(self) -> str:
        """The current commit; empty before the first."""
        try:
            return self._git("rev-parse", "--verify", "-q", "HEAD").strip()
        except RepositoryError:
            return ""

    @property
    def branch(self) -> str:
        """The branch that commits go to; empty where none is checked out."""
        return self._git("branch", "--show-current").strip()

    def changes(self) -> list[str]:
        """Paths that are not as in the last commit; ignored ones do not count."""
        return self._status("all")

    def changed_tracked(self) -> list[str]:
        """Paths that git knows and that are not as in the last commit."""
        return self._status("no")

    def _status(self, untracked: str) -> list[str]:
        """Changed paths, relative to the root where they are below it."""
        prefix = self._git("rev-parse", "--show-prefix").strip()
        lines = self._git("status", "--porcelain", f"--untracked-files={untracked}").splitlines()
        return [line[3:].removeprefix(prefix) for line in lines]

    def commit(self, files: Sequence[Path], message: str) -> str:
        """Commit files; gives the commit."""
        self._git("add", "--", *(str(file) for file in files))
        self._git(*self._identity(), "commit", "-q", "--no-verify", "--allow-empty", "-m", f"{MESSAGE}{message}")
        return self.head

    def start(self) -> None:
        """Make a first commit where there is none, so that there is something to go back to."""
        if not self.head:
            self._git(*self._identity(), "commit", "-q", "--no-verify", "--allow-empty", "-m", f"{MESSAGE}start")

    def back_to(self, commit: str) -> None:
        """Everything below the root's folders as it was in a commit, and the branch at it."""
        self._git("reset", "-q", "--hard", commit)
        present = [folder for folder in FOLDERS if (self.root / folder).is_dir()]
        if present:
            self._git("clean", "-fdq", "--", *present)

    def is_one_ahead(self, commit: str) -> bool:
        """Whether the last commit is an experiment's, directly on top of ``commit``."""
        try:
            parent = self._git("rev-parse", "HEAD~1").strip()
            subject = self._git("log", "-1", "--format=%s")
        except RepositoryError:
            return False
        return parent == commit and subject.startswith(MESSAGE)

    def _identity(self) -> tuple[str, ...]:
        known = subprocess.run(["git", "config", "user.email"], cwd=self.root, capture_output=True, text=True)
        return () if known.stdout.strip() else _IDENTITY

    def _git(self, *arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=self.root, capture_output=True, text=True)
        if done.returncode:
            said = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[0]
            raise RepositoryError(f"git {arguments[0]} in {self.root}: {said}")
        return done.stdout
