"""Goes on where it ended: what a stream of units came to is remembered, so that of a longer stream only what is new is followed.

Closed units stay as they are, so the stream of each look begins with that of the look before. Whether it really does is asked of its bytes
(SHA-256 of the part that is known: ten milliseconds for half a million units), never of the caller: a stream that differs is followed from
its beginning. Any split of a stream gives the same state as the whole, so remembering changes no number.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from threading import Lock
from typing import Generic, TypeVar

from pipelines.evaluation.statistics.units import Units

State = TypeVar("State")

SHORTEST = 1024
"""Streams below this are followed whole: that takes no longer than to recognise them."""
MOST = 16_000_000
"""Units of all remembered streams together, of which a path of log E takes 128 MB: the stream that was asked for longest ago goes first. A
canary asks about twenty questions of each of its units, and so does a champion."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Known(Generic[State]):
    """How far a stream was followed."""

    units: int
    fingerprint: bytes
    state: State


class Resumed(Generic[State]):
    """The states of one kind of question: `ask(question, units, start, advance)` is `advance(start, units)`, sooner. For many threads."""

    def __init__(self, *, most: int = MOST, shortest: int = SHORTEST) -> None:
        self._most, self._shortest = most, shortest
        self._known: OrderedDict[tuple[Hashable, bytes], _Known[State]] = OrderedDict()
        self._units = 0
        self._lock = Lock()

    def ask(self, question: Hashable, units: Units, start: State, advance: Callable[[State, Units], State]) -> State:
        """The state after all units. `advance` gets the units that follow on the state, and makes a new one."""
        if len(units) < self._shortest:
            return advance(start, units)
        key = (question, _Fingerprint().over(units, self._shortest))
        with self._lock:
            known = self._known.get(key)
        fingerprint, followed, state = _Fingerprint(), 0, start
        if known is not None and known.units <= len(units) and fingerprint.over(units, known.units) == known.fingerprint:
            followed, state = known.units, known.state
        if followed < len(units):
            state = advance(state, units.between(followed, len(units)))
        self._remember(key, _Known(units=len(units), fingerprint=fingerprint.over(units, len(units)), state=state))
        return state

    def _remember(self, key: tuple[Hashable, bytes], known: _Known[State]) -> None:
        with self._lock:
            before = self._known.pop(key, None)
            self._known[key] = known
            self._units += known.units - (0 if before is None else before.units)
            while self._units > self._most:
                _, gone = self._known.popitem(last=False)
                self._units -= gone.units


class _Fingerprint:
    """Of everything that a bet depends on, over more and more units."""

    def __init__(self) -> None:
        self._columns = [hashlib.sha256() for _ in range(4)]
        self._seen = 0

    def over(self, units: Units, count: int) -> bytes:
        """That of the first `count`, which are no fewer than before and begin with those."""
        new = units.between(self._seen, count)
        for digest, column in zip(self._columns, (new.outcome, new.treated, new.probability, new.baseline), strict=True):
            digest.update(column.data)
        self._seen = count
        return b"".join(digest.digest() for digest in self._columns)
