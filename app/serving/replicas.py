"""Which engines to ask first: in turn, without those that failed several times in a row, and those of one's own region before others.

    healthy ──(EJECT_AFTER failures in a row)──▶ ejected for 1, 2, 4 … 30 s ──▶ one trial ──▶ healthy, or ejected for twice as long

An ejected engine is still asked where every other one refuses: a request is never lost to our own bookkeeping. A refusal in words (full,
bad request, weights not held) is an answer and no failure.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from app.domain.ports import Holder

EJECT_AFTER = 3
"""Failures in a row: a process that is started again fails once or twice."""
FIRST_S, LONGEST_S = 1.0, 30.0
DOUBLINGS = 5
"""From the first to beyond the longest: whoever fails for hours must not count on for ever."""


@dataclass(frozen=True, kw_only=True)
class Health:
    """What is remembered about one engine."""

    failures: int = 0
    """In a row."""
    until: float = 0.0
    """On the clock given: it is passed over before."""
    fault: str | None = None
    """How it failed the last time."""


def far_from(region: str, holders: Mapping[str, Holder]) -> set[str]:
    """Addresses in other regions; none for who stands in no region."""
    return {address for address, holder in holders.items() if region and holder.region != region}


class Replicas:
    """Belongs to one event loop."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._health: dict[str, Health] = {}
        self._turn = 0

    def ordered(self, urls: Sequence[str], *, far: Collection[str] = ()) -> list[str]:
        """The engines, beginning with another one each time; those that are far after the others, and the ejected ones last."""
        self._turn += 1
        first = self._turn % len(urls) if urls else 0
        return sorted((*urls[first:], *urls[:first]), key=lambda url: (self.ejected(url), url in far))

    def answered(self, url: str) -> None:
        """It did what it was asked, or said in words why not."""
        self._health.pop(url, None)

    def failed(self, url: str, fault: str) -> None:
        """It did not answer, broke off, or said that it is broken."""
        failures = self.health(url).failures + 1
        wait_s = min(LONGEST_S, FIRST_S * 2 ** min(failures - EJECT_AFTER, DOUBLINGS)) if failures >= EJECT_AFTER else 0.0
        self._health[url] = Health(failures=failures, until=self._clock() + wait_s if wait_s else 0.0, fault=fault)

    def silent(self, url: str, fault: str) -> None:
        """It took seconds to find out that it is gone: nobody else waits so long for it, it is ejected at once."""
        self._health[url] = replace(self.health(url), failures=max(self.health(url).failures, EJECT_AFTER - 1))
        self.failed(url, fault)

    def leaves(self, url: str) -> None:
        """It said that it takes no more requests: passed over at once, and tried again soon, because it may be started anew."""
        self._health[url] = replace(self.health(url), until=self._clock() + FIRST_S, fault="it is going away")

    def ejected(self, url: str) -> bool:
        """Whether it is passed over now."""
        return self._clock() < self.health(url).until

    def health(self, url: str) -> Health:
        """What is remembered; nothing bad of one that was never asked."""
        return self._health.get(url, Health())
