"""Since when a process has heard nothing of its control plane. A region that is cut off serves on, and says so.

Whoever asks the database or the object storage notes how that went: one line in the log when a part falls silent and one when it answers
again, however many ask meanwhile. A part that nobody asks is not known to be silent.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import TypeVar

from app.domain.errors import RatchetError
from app.domain.ids import utc_now

log = logging.getLogger(__name__)
T = TypeVar("T")


class Part(StrEnum):
    """Of the control plane."""

    DATABASE = "database"
    STORAGE = "storage"


@dataclass(frozen=True, kw_only=True)
class Silence:
    """A part that does not answer."""

    since: datetime
    """When the first question went unanswered."""
    why: str


class Contact:
    """Safe for threads."""

    def __init__(self, *, region: str = "", clock: Callable[[], datetime] = utc_now) -> None:
        self.region = region
        self._clock = clock
        self._lock = threading.Lock()
        self._asked: set[Part] = set()
        self._silences: dict[Part, Silence] = {}

    def heard(self, part: Part) -> None:
        """It answered."""
        with self._lock:
            self._asked.add(part)
            silence = self._silences.pop(part, None)
        if silence is not None:
            log.warning("in contact again part=%s region=%s after_s=%.0f", part, self.region or "-", self._age_s(silence))

    def lost(self, part: Part, why: str, *, for_s: float = 0.0) -> None:
        """It did not, and was asked so long ago."""
        with self._lock:
            self._asked.add(part)
            is_new = part not in self._silences
            self._silences.setdefault(part, Silence(since=self._clock() - timedelta(seconds=for_s), why=why))
        if is_new:
            log.warning("cut off, serving what is here part=%s region=%s error=%s", part, self.region or "-", why)

    def asked(self, part: Part, act: Callable[[], T]) -> T:
        """What a question to it gives; how it went is noted. Raises what the question raises."""
        try:
            found = act()
        except RatchetError as error:
            self.lost(part, str(error))
            raise
        self.heard(part)
        return found

    def let_go(self, part: Part) -> None:
        """Nobody needs it any more: whether it answers is not known, and an alarm about it has to end."""
        with self._lock:
            silence = self._silences.pop(part, None)
        if silence is not None:
            log.warning("not needed any more part=%s region=%s after_s=%.0f", part, self.region or "-", self._age_s(silence))

    def silences(self) -> dict[Part, Silence]:
        """The parts that do not answer now."""
        with self._lock:
            return dict(self._silences)

    def seconds(self) -> dict[tuple[str, ...], float]:
        """For how long each part that was ever asked has been silent, by (region, part); 0 where it answers."""
        silences = self.silences()
        return {(self.region, part): self._age_s(silences[part]) if part in silences else 0.0 for part in sorted(self._asked)}

    def sentence(self) -> str | None:
        """What is silent since when; None where all answers."""
        said = [f"cut off from the {part} since {s.since.isoformat(timespec='seconds')}" for part, s in sorted(self.silences().items())]
        return "; ".join(said) or None

    def _age_s(self, silence: Silence) -> float:
        return max(0.0, (self._clock() - silence.since).total_seconds())
