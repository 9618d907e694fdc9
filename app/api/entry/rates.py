"""How much a key, a session or the feedback about an answer may do in a second, and what every answer says of it."""

import math
from collections.abc import Callable
from contextvars import ContextVar

from app.domain.errors import Overloaded


class Bucket:
    """A token bucket of one second's worth (at least one token)."""

    def __init__(self, rate_per_s: float, now: Callable[[], float]) -> None:
        self._rate = rate_per_s
        self._size = max(1.0, rate_per_s)
        self._now = now
        self._tokens = self._size
        self._at = now()

    def take(self, count: int) -> None:
        """Take `count` tokens; a batch larger than the bucket needs a full one, and whoever comes next waits until it is paid for.

        Raises `Overloaded`.
        """
        self._fill()
        wanted = min(float(count), self._size)
        if self._tokens < wanted:
            wait_s = (wanted - self._tokens) / self._rate
            raise Overloaded(f"this key's limit is {self._rate:g} a second: come back in {wait_s:.1f} s", retry_after_s=wait_s)
        self._tokens -= count

    def owe(self, count: int) -> None:
        """Take `count` tokens more of what is let in already; whoever comes next waits until they are paid."""
        self._fill()  # while a body came, no more gathered than at any other time
        self._tokens -= count

    def left(self) -> float:
        """Tokens that could be taken now."""
        self._fill()
        return self._tokens

    def _fill(self) -> None:
        now = self._now()
        self._tokens = min(self._size, self._tokens + (now - self._at) * self._rate)
        self._at = now

    def headers(self) -> list[tuple[bytes, bytes]]:
        """The limit, what is left of it and in how many seconds it is whole again (IETF draft ratelimit-headers, as of version 07)."""
        left = self.left()
        seconds = math.ceil((self._size - left) / self._rate)
        figures = ((b"ratelimit-limit", self._size), (b"ratelimit-remaining", max(0.0, left)), (b"ratelimit-reset", seconds))
        return [(name, str(int(value)).encode()) for name, value in figures]


class Spending:
    """What the request at hand has to do with rates, for its answer's headers."""

    buckets: list[Bucket]

    def __init__(self) -> None:
        self.buckets = []

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Of the rate of which the least is left: a session has its own, beside its key's."""
        return min(self.buckets, key=Bucket.left).headers() if self.buckets else []


SPENDING: ContextVar["Spending | None"] = ContextVar("spending", default=None)
