"""Boxes that are open before anybody asks: opening one takes longer than most of what runs in it.

A box that waited is asked whether it still lives, and how long it still will, before it is handed out; a dead one is stopped and another
opened in its place, so nobody ever gets one.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from app.domain.errors import RatchetError


class Living(Protocol):
    """What a pool needs of a box."""

    def alive(self) -> bool: ...
    def stop(self) -> None: ...


T = TypeVar("T", bound=Living)


@dataclass
class WarmPool(Generic[T]):
    """`size` boxes in waiting, filled again by a thread of its own after each one that is taken."""

    open: Callable[[], T]
    size: int
    most_age_s: float = 600.0
    """One that waited longer is not handed out: it has to live through what begins in it."""
    discarded: int = 0
    """How many were dead or too old when their turn came."""
    _waiting: "deque[tuple[float, T]]" = field(default_factory=lambda: deque[tuple[float, T]]())
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _closed: bool = False
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to fill."""
        self._thread = threading.Thread(target=self._fill, daemon=True, name="warm-boxes")
        self._thread.start()

    def take(self) -> T:
        """A living box: one that waited, or a fresh one. Raises what opening raises."""
        while True:
            with self._changed:
                entry = self._waiting.popleft() if self._waiting else None
                self._changed.notify_all()
            if entry is None:
                return self.open()
            opened_at, box = entry
            if time.monotonic() - opened_at <= self.most_age_s and box.alive():
                return box
            self.discarded += 1
            box.stop()

    def close(self) -> None:
        """Stop those that wait."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        while self._waiting:
            self._waiting.popleft()[1].stop()

    def _fill(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or len(self._waiting) < self.size)
                if self._closed:
                    return
            try:
                box = self.open()
            except RatchetError:  # whoever takes next opens one, and is told why it cannot be
                with self._changed:
                    self._changed.wait(1.0)
                continue
            with self._changed:
                self._waiting.append((time.monotonic(), box))
                self._changed.notify_all()
