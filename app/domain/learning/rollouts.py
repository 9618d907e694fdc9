"""Rollouts: one try of a policy at one task in a box, how it may end, and the book that says who is at work on which.

Only what the model itself did is paid or punished. What the machinery did wrong leaves the loss and the group's mean alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Protocol


class Outcome(StrEnum):
    """How a rollout ended: a closed list."""

    SOLVED = "solved"
    FAILED = "failed"
    TURN_LIMIT = "turn_limit"
    """As many turns as it may have; graded on what is there."""
    TOKEN_LIMIT = "token_limit"
    AGENT_TIMEOUT = "agent_timeout"
    """Still at work at its deadline; graded on what is there."""
    TOOL_ABUSE = "tool_abuse"
    """More memory, output or workspace than it may have, or a patch that may not travel. Never solved."""
    BOX_LOST = "box_lost"
    SETUP_FAILED = "setup_failed"
    GRADER_FAILED = "grader_failed"
    GATEWAY_FAILED = "gateway_failed"
    STALE = "stale"
    """It began more versions ago than turns may be learned from: nobody's fault, and of no use."""

    @property
    def is_of_the_model(self) -> bool:
        """Whether it says something about the model: paid or punished, and part of its group's mean."""
        return self in OF_THE_MODEL


OF_THE_MODEL = frozenset(
    {Outcome.SOLVED, Outcome.FAILED, Outcome.TURN_LIMIT, Outcome.TOKEN_LIMIT, Outcome.AGENT_TIMEOUT, Outcome.TOOL_ABUSE}
)


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One try, as the book has it."""

    id: str
    policy: str
    taskset: str
    task: str
    task_hash: str
    group: str
    """The tries at one task that are compared with each other."""
    attempt: int
    harness_hash: str
    episode: str | None = None
    """Set when it begins; no two rollouts have one."""
    outcome: Outcome | None = None
    reward: float | None = None
    token: int = 0
    """The fencing token of whoever is at work on it: each taking is one more."""
    flags: tuple[str, ...] = ()
    """What the audit of its transcript found."""


@dataclass(frozen=True, kw_only=True)
class Closed:
    """What a rollout came to."""

    outcome: Outcome
    reward: float | None
    """None where the outcome is not of the model."""
    duration_s: float
    turns: int
    flags: tuple[str, ...] = ()
    """What the audit of its transcript found."""


class RolloutBook(Protocol):
    """Which rollouts there are, and who holds which. Its clock is the database's."""

    def plan(self, planned: Sequence[Rollout]) -> None:
        """Write down rollouts that are to be made."""
        ...

    def take(self, policy: str, *, owner: str, ttl: timedelta, at_most: int) -> list[Rollout]:
        """Those that nobody holds, the oldest first, now held by `owner` under a token above every earlier one."""
        ...

    def begin(self, rollout: Rollout, episode: str) -> None:
        """Bind it to its episode. Raises `LeaseLost`."""
        ...

    def renew(self, rollout: Rollout, *, ttl: timedelta) -> None:
        """Hold it longer. Raises `LeaseLost`."""
        ...

    def close(self, rollout: Rollout, closed: Closed) -> None:
        """Write what it came to, once. Raises `LeaseLost` for whoever does not hold it any more."""
        ...

    def history(self, policy: str, taskset: str, *, newest: int | None = None) -> list[Rollout]:
        """A taskset's, all or so many of the newest, the oldest first."""
        ...

    def durations_s(self, policy: str, taskset: str) -> list[float]:
        """How long the last hundred took."""
        ...
