"""How long a run spent computing, as against everything around it."""

import time
from collections.abc import Generator
from contextlib import contextmanager


class Stopwatch:
    """Adds up the wall seconds of the blocks it runs for."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def running(self) -> Generator[None]:
        """Count this block, also when it raises."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds += time.monotonic() - began


class Laps:
    """Wall seconds of what follows one another, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._began = time.monotonic()

    def end(self, name: str) -> None:
        """What began when the one before ended is over."""
        now = time.monotonic()
        self.seconds[name] = round(now - self._began, 3)
        self._began = now
