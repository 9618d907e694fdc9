"""Boxes: where programs run that nobody trusts. What a box is asked for, how what ran in it ended, and the port to whoever keeps boxes.

A box is a machine of its own for one purpose: no network, none of our files, limits, and an end that takes every process in it along.
What comes out of it is data. Nothing that it says about itself (an exit code, a line on its pipe) is proof of anything.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


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


@dataclass(frozen=True, kw_only=True)
class BoxSpec:
    """What is asked for."""

    limits: Limits


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
    """One box. Used from the thread that opened it."""

    def exec(self, argv: Sequence[str], *, stdin: bytes = b"", deadline_s: float, most_output_bytes: int) -> Executed:
        """Run a program to its end or its limits. Whatever it started and left behind ends with it."""
        ...

    def talk(self, argv: Sequence[str]) -> Talk:
        """Start a program to be spoken to."""
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
