"""No box at all: a process with limits, for programs that are trusted. Its files, its user and its network are ours.

What it started ends with it, in a session of its own too, because a reaper stands above it (`reaper.py`). Not covered: everything that a
hostile program does on purpose. Root's processes have no limit of number.
"""

import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from app.domain.boxes import Box, BoxSpec, Executed, Talk
from app.sandbox.child import Child
from app.sandbox.limits import limited

REAPER = Path(__file__).with_name("reaper.py")


@dataclass(frozen=True)
class ProcessBoxes:
    """The keeper of what needs no keeping."""

    @property
    def python(self) -> str:
        return sys.executable

    def open(self, spec: BoxSpec) -> Box:
        return ProcessBox(spec)

    def sweep(self) -> int:
        return 0

    def describe(self) -> dict[str, object]:
        return {"kept_by": "processes", "network": True, "namespaces": False, "user_per_box": False}


@dataclass
class ProcessBox:
    """A temporary folder, and processes with limits in it."""

    spec: BoxSpec
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="ratchet-process-")))
    running: ExitStack = field(default_factory=ExitStack)

    def exec(self, argv: Sequence[str], *, stdin: bytes = b"", deadline_s: float, most_output_bytes: int) -> Executed:
        return self._start(argv).run(stdin, deadline_s=deadline_s, most_output_bytes=most_output_bytes)

    def talk(self, argv: Sequence[str]) -> Talk:
        running = self._start(argv)
        self.running.callback(running.stop)
        return running

    def stop(self) -> None:
        self.running.close()
        shutil.rmtree(self.folder, ignore_errors=True)

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
