"""A batch that cannot be applied: whose fault it is, and which record's.

The store says `BadRequest` where a record's data is at fault, `Unavailable` where waiting may help, `OwnFault` where code and schema do not
agree. What it raises besides, nobody expected: after a few tries the record that raises it is found by halving and buried like bad data,
so that the rest goes on; unless all of its type raise, which is no fault of the data.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from app.domain.errors import BadRequest, OwnFault, RatchetError
from app.domain.ports import Clock
from app.domain.telemetry.decoding import as_dead_letter
from app.domain.telemetry.streams import AppliedEvent, DeadLetter, EffectBatch, EffectStore

log = logging.getLogger(__name__)

MANY = 5
"""So many records of one type in a row that fail in a way nobody expected, and none that passes: then the fault is ours."""


@dataclass(kw_only=True)
class Isolator:
    """Applies batches; buries what can never be applied."""

    store: EffectStore
    clock: Clock
    tries: int = 3
    pause: Callable[[float], None] = time.sleep
    unexpected: Counter[type] = field(default_factory=Counter[type])
    """Failures in a row, by type of event."""

    def apply(self, batch: EffectBatch) -> int:
        """Apply a batch; returns how many events were new. Raises `Unavailable`, `OwnFault`.

        Halves go without offsets; those follow with the last, empty batch, when everything before them is in the database.
        """
        try:
            new = self.attempt(batch)
            self._passed(batch.events)
            return new
        except Refusal as refusal:
            if not batch.events:
                raise (refusal.__cause__ or refusal) from None
            search = Search(isolator=self, group=batch.group)
            search.split(batch.events, refusal)
            self._judge(search)
            for letter in search.dead:
                log_burial(letter)
            self.store.apply(replace(batch, events=(), dead=(*batch.dead, *search.dead)), now=self.clock())
            return search.new

    def attempt(self, batch: EffectBatch) -> int:
        """One transaction, again where nobody knows why it failed. Raises `Refusal` where it stays so."""
        for attempt in range(self.tries):
            try:
                return self.store.apply(batch, now=self.clock())
            except BadRequest as error:
                raise Refusal(str(error), expected=True) from error
            except RatchetError:
                raise
            except Exception as error:
                log.warning("event=apply_failed attempt=%d records=%d error=%r", attempt + 1, len(batch.events), error)
                if attempt + 1 == self.tries:
                    raise Refusal(f"{type(error).__name__}: {error}", expected=False) from error
                self.pause(0.1)
        raise AssertionError("unreachable")

    def _passed(self, events: Sequence[AppliedEvent]) -> None:
        for kind in {type(event.effect) for event in events}:
            self.unexpected.pop(kind, None)

    def _judge(self, search: "Search") -> None:
        self._passed(search.passed)
        passed = {type(event.effect) for event in search.passed}
        for kind, count in Counter(type(event.effect) for event in search.unexpected).items():
            self.unexpected[kind] = 0 if kind in passed else self.unexpected[kind] + count
            if self.unexpected[kind] > MANY:
                raise OwnFault(
                    f"{self.unexpected[kind]} records of type {kind.__name__} in a row cannot be applied ({search.dead[-1].reason}): "
                    "this is no fault of the data, so nothing more is buried; mend the cause, everything waits"
                )


class Refusal(Exception):
    """A batch that stays refused."""

    def __init__(self, reason: str, *, expected: bool) -> None:
        super().__init__(reason)
        self.expected = expected


@dataclass(kw_only=True)
class Search:
    """Finds the records at fault by halving, and applies the others on the way."""

    isolator: Isolator
    group: str
    new: int = 0
    passed: list[AppliedEvent] = field(default_factory=list[AppliedEvent])
    dead: list[DeadLetter] = field(default_factory=list[DeadLetter])
    unexpected: list[AppliedEvent] = field(default_factory=list[AppliedEvent])

    def split(self, events: Sequence[AppliedEvent], refusal: Refusal) -> None:
        """Look into events that were refused together."""
        if len(events) == 1:
            self.dead.append(as_dead_letter(events[0].delivery, str(refusal)))
            self.unexpected += [] if refusal.expected else events
            return
        for half in (events[: len(events) // 2], events[len(events) // 2 :]):
            try:
                self.new += self.isolator.attempt(EffectBatch(events=tuple(half), group=self.group))
                self.passed += half
            except Refusal as again:
                self.split(half, again)


def log_burial(letter: DeadLetter) -> None:
    """One line per dead letter."""
    place = (letter.topic, letter.partition, letter.offset)
    log.warning("event=dead_letter topic=%s partition=%d offset=%d reason=%s", *place, letter.reason)
