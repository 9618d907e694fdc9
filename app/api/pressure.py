"""What people feel who wait for a first word: for whoever makes room for them, asked twice a second, so without a database.

Of this process alone; behind a load balancer each answer is one replica's.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

WINDOW_S = 10.0
KEPT = 2000


@dataclass
class Waits:
    """Waits for the first token, by policy: those of the last seconds, and those that are not over."""

    now: Callable[[], float] = time.monotonic
    _waiting: dict[str, tuple[str, float]] = field(default_factory=dict[str, tuple[str, float]])
    _over: deque[tuple[float, str, float]] = field(default_factory=lambda: deque[tuple[float, str, float]](maxlen=KEPT))

    def begin(self, inference_id: str, policy: str) -> None:
        """Somebody asked."""
        self._waiting[inference_id] = (policy, self.now())

    def end(self, inference_id: str) -> None:
        """The first token came, or nothing will. May be said again."""
        known = self._waiting.pop(inference_id, None)
        if known is not None:
            self._over.append((self.now(), known[0], self.now() - known[1]))

    def read(self, policy: str | None) -> dict[str, Any]:
        """How many wait, and the 95th percentile of all waits of the last seconds; who still waits has waited that long at least."""
        now = self.now()
        waiting = [now - since for whose, since in self._waiting.values() if policy in (None, whose)]
        over = [waited for at, whose, waited in self._over if policy in (None, whose) and now - at <= WINDOW_S]
        waits = sorted(over + waiting)
        return {"waiting": len(waiting), "first_token_p95_s": waits[int(0.95 * len(waits))] if waits else None}
