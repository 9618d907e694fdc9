"""No box at all: a process with limits, for programs that are trusted. Its files, its user and its network are ours.

What it started ends with it, in a session of its own too, because a reaper stands above it (`reaper.py`). Not covered: everything that a
hostile program does on purpose. Root's processes have no limit of number.
"""

import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from app.domain.errors import BadInput, Refused
from app.domain.learning.boxes import Box, BoxSpec, Ended, Executed, Patch, Talk, checked_path
from app.sandbox.child import Child
from app.sandbox.limits import limited
from app.sandbox.workspaces import changes_between, remove

REAPER = Path(__file__).with_name("reaper.py")


@dataclass(frozen=True)
class ProcessBoxes:
    """The keeper of what needs no keeping."""

    @property
    def python(self) -> str:
        return sys.executable

    def open(self, spec: BoxSpec) -> Box:
        if spec.gateway is not None:
            raise Refused("plain processes have this machine's network and no gateway of their own: keep boxes with bubblewrap")
        if spec.scratch:
            raise Refused("plain processes share this machine's folders and have none of their own: keep boxes with bubblewrap")
        return ProcessBox(spec)

    def sweep(self) -> int:
        return 0

    def describe(self) -> dict[str, object]:
        return {"kept_by": "processes", "network": True, "namespaces": False, "user_per_box": False}


@dataclass
class ProcessBox:
    """A temporary folder, and processes with limits in it. What adds too much to a workspace is not held."""

    spec: BoxSpec
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="ratchet-process-")))
    running: ExitStack = field(default_factory=ExitStack)
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        if self.spec.workspace is not None:
            shutil.copytree(self.spec.workspace, self.folder, dirs_exist_ok=True, symlinks=True)

    def exec(self, argv: Sequence[str], *, stdin: bytes = b"", deadline_s: float, most_output_bytes: int) -> Executed:
        if not self.alive():
            return Executed(ended=Ended.BOX_LOST, code=None, stdout=b"", stderr=b"")
        return self._start(argv).run(stdin, deadline_s=deadline_s, most_output_bytes=most_output_bytes)

    def put(self, path: str, data: bytes) -> None:
        self._need_workspace()
        if not self.alive():
            raise Refused("the box is gone: open another")
        file = self.folder / checked_path(path)
        if any(part.is_symlink() for part in [file, *file.parents] if part.is_relative_to(self.folder)):
            raise BadInput(f"{path} cannot be written in the box: there is a link on the way")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)

    def patch(self) -> Patch:
        return changes_between(self._need_workspace(), self.folder)

    def alive(self) -> bool:
        is_over = self.spec.lifetime_s is not None and time.monotonic() - self.began >= self.spec.lifetime_s
        return self.folder.exists() and not is_over

    def _need_workspace(self) -> Path:
        if self.spec.workspace is None:
            raise Refused("this box has no workspace: ask for one")
        return self.spec.workspace

    def talk(self, argv: Sequence[str]) -> Talk:
        if self.spec.workspace is not None:
            raise Refused("a box with a workspace runs programs one after the other: open one without to speak to a program")
        running = self._start(argv)
        self.running.callback(running.stop)
        return running

    def stop(self) -> None:
        self.running.close()
        remove(self.folder)

    def _start(self, argv: Sequence[str]) -> Child:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(REAPER), *limited(argv, self.spec.limits)], cwd=self.folder, start_new_session=True, bufsize=0,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={"PATH": "/usr/bin:/bin", "HOME": str(self.folder), "PYTHONDONTWRITEBYTECODE": "1"},
        )  # fmt: skip

        def kill() -> None:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)  # to the reaper, which kills

        return Child(process, kill=kill)
