"""Corrections: what people turned an answer into, or said of it, as a lesson instead of a number."""

from dataclasses import dataclass
from enum import StrEnum

from app.domain.learning.rewards import DueTurn


class CorrectionKind(StrEnum):
    """What somebody did, the most telling first."""

    DEMONSTRATION = "demonstration"
    """Reported the text that they turned the answer into."""
    EDIT = "edit"
    """Rewrote what the model had put into their file."""
    REGENERATE = "regenerate"
    """Asked again, and kept a later answer."""
    FOLLOW_UP = "follow_up"
    """Complained."""


@dataclass(frozen=True, kw_only=True)
class Correction:
    """What one turn should have been, as far as a person showed it. Made by labelling, eaten by training."""

    inference_id: str
    kind: CorrectionKind
    said: str
    """What stands there now, or what was said: the hint under which the model reads its own answer again."""
    wanted: str | None
    """The whole answer as it should have been; None where only words are known."""
    author: str | None
    """Pseudonym; None where nobody is named."""
    newcomer: bool = False
    """Nothing was heard of the author until a short while ago."""


@dataclass(frozen=True, kw_only=True)
class Reaction:
    """A turn with everything that was observed of it, and what came of asking again."""

    turn: DueTurn
    retries: tuple[DueTurn, ...] = ()
    """Later answers of the episode to a prompt of the same length, oldest first: a prompt that went on would be longer."""
    newcomers: frozenset[str] = frozenset()
    """Of those who said something about it."""
