"""Runs untrusted Python: its own process, no network, limits on CPU, wall time, memory, files and processes.

Isolation: a network namespace without interfaces (as root, or through a user namespace), an unprivileged user where we are root,
an empty temporary folder as the only writable place that it is pointed to, a cleared environment, and rlimits. Where the machine
forbids namespaces the sandbox refuses to run, unless weak isolation was allowed by configuration.

Not covered: the program can read world-readable files (where Python itself is installed in a folder that only root may enter: all
files, through the one capability that is kept for it), and see that it is not production; timing is that of this machine.
"""

import resource
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from app.domain.errors import Refused
from pipelines.evaluation.offline_config import OfflineConfig

_BOOT = """
import ctypes, os, sys
NEWUSER, NEWNET = 0x10000000, 0x40000000
libc = ctypes.CDLL(None, use_errno=True)
strict = sys.argv[1] == "strict"
def folders(path):
    while path != "/":
        path = os.path.dirname(path)
        yield path
isolated = libc.unshare(NEWNET) == 0 or libc.unshare(NEWUSER | NEWNET) == 0
if strict and not isolated:
    sys.stderr.write("no network namespace")
    sys.exit(97)
if os.getuid() == 0:
    keep_reading = any(not os.stat(folder).st_mode & 1 for folder in folders(os.__file__))
    if keep_reading:
        libc.prctl(8, 1, 0, 0, 0)
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
    if keep_reading:
        header, bit = (ctypes.c_uint32 * 2)(0x20080522, 0), 1 << 2
        libc.capset(header, (ctypes.c_uint32 * 6)(bit, bit, 0, 0, 0, 0))
def refuse(event, args):
    if event.startswith("socket.") or event in ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn"):
        raise PermissionError(f"{event} is not available in the sandbox")
sys.addaudithook(refuse)
source = sys.stdin.read()
exec(compile(source, "answer.py", "exec"), {"__name__": "__main__"})
"""


class Outcome(StrEnum):
    """How the program ended."""

    PASSED = "passed"
    """Exit code 0."""
    FAILED = "failed"
    """An exception or another exit code."""
    TIMEOUT = "timeout"
    KILLED = "killed"
    """A limit was hit."""


@dataclass(frozen=True, kw_only=True)
class Execution:
    """What came out."""

    outcome: Outcome
    detail: str
    """Last line of standard error."""


@dataclass(frozen=True, kw_only=True)
class Sandbox:
    """Limits of one execution."""

    cpu_s: int
    wall_s: float
    memory_bytes: int
    file_bytes: int
    strict: bool = True

    @classmethod
    def from_config(cls, config: OfflineConfig) -> "Sandbox":
        """The sandbox that the configuration describes."""
        return cls(
            cpu_s=config.sandbox_cpu_s, wall_s=config.sandbox_wall_s, memory_bytes=config.sandbox_memory_bytes,
            file_bytes=config.sandbox_file_bytes, strict=not config.allow_weak_isolation,
        )  # fmt: skip

    def run(self, program: str) -> Execution:
        """Run a Python program to its end or its limits. Raises `Refused` where the machine cannot isolate it."""
        folder = Path(tempfile.mkdtemp(prefix="ratchet-sandbox-"))
        folder.chmod(0o777)  # the unprivileged user must be able to write here, and nowhere else
        try:
            return self._run_in(folder, program)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def describe(self) -> dict[str, object]:
        """Tools and limits, for the record of the gate: what differs from production is whatever is not listed here."""
        return {
            "tools": f"python {sys.version_info.major}.{sys.version_info.minor}, standard library", "network": False, "cpu_s": self.cpu_s,
            "wall_s": self.wall_s, "memory_bytes": self.memory_bytes, "file_bytes": self.file_bytes, "strict": self.strict,
        }  # fmt: skip

    def _run_in(self, folder: Path, program: str) -> Execution:
        command = [sys.executable, "-I", "-S", "-c", _BOOT, "strict" if self.strict else "weak"]
        try:
            done = subprocess.run(
                command, input=program.encode(errors="replace"), cwd=folder, env={"PYTHONDONTWRITEBYTECODE": "1"}, timeout=self.wall_s,
                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, preexec_fn=self._limit, check=False, start_new_session=True,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return Execution(outcome=Outcome.TIMEOUT, detail=f"longer than {self.wall_s:g} s")
        detail = done.stderr[-400:].decode(errors="replace").strip().rsplit("\n", 1)[-1]
        if done.returncode == 97 and detail == "no network namespace":
            raise Refused(
                "this machine forbids network namespaces: run as root or allow user namespaces, or set offline.allow_weak_isolation"
            )
        if done.returncode < 0:
            return Execution(outcome=Outcome.KILLED, detail=f"signal {-done.returncode}")
        return Execution(outcome=Outcome.PASSED if done.returncode == 0 else Outcome.FAILED, detail=detail)

    def _limit(self) -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (self.cpu_s, self.cpu_s))
        resource.setrlimit(resource.RLIMIT_AS, (self.memory_bytes, self.memory_bytes))
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.file_bytes, self.file_bytes))
        resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
