"""Boxes: where programs run that nobody trusts. What a box is asked for, how what ran in it ended, and the port to whoever keeps boxes.

A box is a machine of its own for one purpose: no network but, where asked for, one socket; none of our files but its own copy of one
folder; limits; and an end that takes every process in it along. What comes out of it is data. Nothing that it says about itself (an exit
code, a line on its pipe) is proof of anything.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import Protocol

from app.domain.errors import BadInput

WORKSPACE = "/work"
"""Where a box has its workspace."""
GATEWAY = "http://127.0.0.1:8080"
"""Where a box with a gateway reaches it; nothing else answers."""
MOST_PATCH_FILES = 2000
MOST_PATCH_BYTES = 8 << 20
TAKEN = frozenset({WORKSPACE, "/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/proc", "/dev", "/tmp", "/run", "/python", "/etc"})
"""Folders at the top of a box's tree that are the system's or ours."""
NEVER_TRAVELS = frozenset({"__pycache__", ".pytest_cache", ".git"})
"""Folders whose content is nobody's work: compiled files and caches would run in the place of the sources beside them."""


class Ended(StrEnum):
    """How a program in a box came to its end."""

    EXITED = "exited"
    """By itself, or by a signal of its own; `Executed.code` says which."""
    TIMEOUT = "timeout"
    """It was still running at its deadline."""
    OOM = "oom"
    """Something in the box was killed because all of it together used more memory than it may."""
    OUTPUT_LIMIT = "output_limit"
    """It wrote more than it may."""
    BOX_LOST = "box_lost"
    """The box went away under it: our fault, never the program's."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the programs of one box may use."""

    cpu_s: int
    """Seconds of processor time, each process."""
    memory_bytes: int
    """Address space of each process, and, where the machine has control groups for us, memory of all of them and their files together."""
    file_bytes: int
    """Longest file, and all of the box's temporary files together."""
    processes: int = 16
    """Processes and threads at a time."""
    workspace_bytes: int = 256 << 20
    """What a box may add to its workspace, all in all."""


@dataclass(frozen=True, kw_only=True)
class BoxSpec:
    """What is asked for."""

    limits: Limits
    workspace: Path | None = None
    """A folder that nobody changes any more; the box has it as `/work` and may change what it sees there. None: nothing lasts."""
    gateway: Path | None = None
    """The socket of the one service that the box may reach; everybody may connect to it. Needs a workspace."""
    lifetime_s: float | None = None
    """After this time the box is gone, whatever runs in it."""
    scratch: tuple[str, ...] = ()
    """Folders at the top of its tree (`/tests`) that it may write, in memory, each up to `limits.file_bytes`. They never travel. Needs a
    workspace."""

    def __post_init__(self) -> None:
        for folder in self.scratch:
            if folder.count("/") != 1 or not folder[1:].isidentifier() or folder in TAKEN:
                raise BadInput(f"{folder!r} is no folder of one plain word at the top of a box, or one that is taken: name another")


@dataclass(frozen=True, kw_only=True)
class Patch:
    """What became of a workspace: by path, the text of each file that is new or another one now, None for what was removed."""

    files: Mapping[str, bytes | None]

    @property
    def digest(self) -> str:
        """SHA-256 over paths and contents."""
        found = hashlib.sha256()
        for path, content in sorted(self.files.items()):
            found.update(f"{path}\0{-1 if content is None else len(content)}\0".encode() + (content or b""))
        return found.hexdigest()


def checked_path(path: str) -> str:
    """A path within a workspace, as it was given. Raises `BadInput`."""
    pure = PurePosixPath(path)
    if not path or pure.is_absolute() or ".." in pure.parts or str(pure) != path or "\0" in path or path == ".":
        raise BadInput(f"{path!r} is no path within a workspace: give one without a leading slash and without ..")
    return path


def travels(path: str) -> bool:
    """Whether a file may be part of a patch at all."""
    return not NEVER_TRAVELS.intersection(PurePosixPath(path).parts)


def checked_patch(files: Mapping[str, bytes | None]) -> Patch:
    """What may travel to another box: a bounded number of text files. Raises `BadInput`."""
    kept = {path: content for path, content in files.items() if travels(path)}
    if len(kept) > MOST_PATCH_FILES or sum(len(content or b"") for content in kept.values()) > MOST_PATCH_BYTES:
        raise BadInput(f"the patch has {len(kept)} files and may have {MOST_PATCH_FILES}, of {MOST_PATCH_BYTES >> 20} MiB together")
    for path, content in kept.items():
        checked_path(path)
        try:
            (content or b"").decode()
        except UnicodeDecodeError:
            raise BadInput(f"{path} in the patch is no UTF-8 text: only sources travel") from None
    return Patch(files=kept)


@dataclass(frozen=True, kw_only=True)
class Executed:
    """What came of one program."""

    ended: Ended
    code: int | None
    """Exit code, 128 + signal for a signal's death; None where it did not end by itself."""
    stdout: bytes
    stderr: bytes


class TalkEnded(Exception):
    """The program on the other end of a talk is gone, late, or says too much."""

    def __init__(self, ended: Ended, detail: str) -> None:
        super().__init__(detail)
        self.ended = ended


class Talk(Protocol):
    """A program that is running in a box, spoken to line by line over its standard input and output."""

    def send(self, line: bytes, *, deadline: float) -> None:
        """Write one line (without its end). `deadline` is a `time.monotonic()`. Raises `TalkEnded`."""
        ...

    def receive(self, *, deadline: float, most_bytes: int) -> bytes:
        """The next line (without its end), of at most `most_bytes`. Raises `TalkEnded`."""
        ...

    def stop(self) -> None:
        """End the program and everything that it started; returns when all of it is gone. May be called again."""
        ...


class Box(Protocol):
    """One box. Used from one thread at a time."""

    def exec(self, argv: Sequence[str], *, stdin: bytes = b"", deadline_s: float, most_output_bytes: int) -> Executed:
        """Run a program to its end or its limits. Whatever it started and left behind ends with it."""
        ...

    def talk(self, argv: Sequence[str]) -> Talk:
        """Start a program to be spoken to. Raises `Refused` where the box has a workspace."""
        ...

    def put(self, path: str, data: bytes) -> None:
        """Write a file of the workspace. Raises `BadInput` for a path that leads out of it, or through a link."""
        ...

    def patch(self) -> Patch:
        """What became of the workspace. Raises `BadInput` for what may not travel: links, devices, too much, no text."""
        ...

    def alive(self) -> bool:
        """Whether it can still run something."""
        ...

    def stop(self) -> None:
        """End everything in the box and forget its files. May be called again."""
        ...


class Boxes(Protocol):
    """Whoever keeps boxes."""

    @property
    def python(self) -> str:
        """Path of the Python interpreter in a box: the standard library and nothing else."""
        ...

    def open(self, spec: BoxSpec) -> Box:
        """A fresh box. Raises `Refused`, with the cure, where this machine cannot keep what a box promises."""
        ...

    def sweep(self) -> int:
        """Take away what keepers left behind that were killed; returns how much that was. Done by itself before the first box."""
        ...

    def describe(self) -> dict[str, object]:
        """How programs are kept apart here, for the record."""
        ...
