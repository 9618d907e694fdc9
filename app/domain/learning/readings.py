"""What people read in a follow-up: asked where the labeller's reader abstained, and by lot where it did not."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum


class Mood(StrEnum):
    """What a follow-up says about the answer before it."""

    DISSATISFIED = "dissatisfied"
    SATISFIED = "satisfied"
    REFINEMENT = "refinement"
    """Asks for a change, without complaint or praise: the next step, not a punishment."""
    NEUTRAL = "neutral"


@dataclass(frozen=True, kw_only=True)
class Said:
    """One message of a conversation."""

    role: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What somebody said of a message."""

    mood: Mood
    leaned_to: Mood | None
    """What the reader would have said; None where it could not read it."""
    unsure: bool
    """Whether the reader abstained; else the message was drawn by lot."""
    by: str
    at: datetime


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A message that somebody is asked to read, in its conversation."""

    inference_id: str
    """Of the answer that it follows."""
    observation_id: str
    episode_id: str
    labelled_at: datetime
    message: str
    conversation: tuple[Said, ...]
    """Answers, and what users wrote after them, up to the message: the oldest first. Prompts are kept as tokens and are not shown."""
    reading: Reading | None = None


@dataclass(frozen=True, kw_only=True)
class Agreed:
    """How far people and the reader agree, over dissatisfied, satisfied and the rest."""

    counted: Mapping[tuple[str, str, bool], int]
    """By (what the reader leaned to, what people said, whether it abstained)."""

    def share(self, *, unsure: bool) -> tuple[int, int]:
        """(agreed, asked) of those that it abstained on, or of those that it was sure of."""
        mine = [(three(reader), three(people), n) for (reader, people, doubt), n in self.counted.items() if doubt == unsure]
        return sum(n for reader, people, n in mine if reader == people), sum(n for _, _, n in mine)

    def kappa(self) -> float | None:
        """Over what the reader was sure of; None below two messages, and where both only ever say one thing."""
        sure: Counter[tuple[str, str]] = Counter()
        for (reader, people, unsure), n in self.counted.items():
            if not unsure:
                sure[three(reader), three(people)] += n
        return cohens_kappa(sure) if sure.total() >= 2 else None


def cohens_kappa(counted: Mapping[tuple[str, str], int]) -> float | None:
    """(observed − expected) / (1 − expected) agreement of two who read the same messages, by what each said (Cohen 1960).

    None where both only ever say the same one thing.
    """
    count = sum(counted.values())
    observed = sum(n for (one, other), n in counted.items() if one == other) / count
    first: Counter[str] = Counter()
    second: Counter[str] = Counter()
    for (one, other), n in counted.items():
        first[one] += n
        second[other] += n
    expected = sum(first[kind] * second[kind] for kind in first) / count**2
    return None if expected >= 1.0 else (observed - expected) / (1.0 - expected)


def three(mood: str) -> str:
    """What is paid for: dissatisfied, satisfied, or something else."""
    return mood if mood in (Mood.DISSATISFIED, Mood.SATISFIED) else "other"
