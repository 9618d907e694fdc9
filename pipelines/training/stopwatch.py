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
