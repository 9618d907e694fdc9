"""How many rollouts may ask the engines at once: as many as nobody who waits for an answer notices.

Additive increase, multiplicative decrease (Chiu and Jain 1989): each probe without pressure adds one permit up to the most; a probe near
the bound halves them; a probe over it, or with people waiting at the engines, leaves none. A probe that failed counts as pressure: what is
not known is not idle. Asked every `probe_s` and before each turn, so from pressure to zero new requests it is one probe; a turn that is
being sampled ends by itself (turns are short beside rollouts), and the rollout waits at its turn boundary.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

NEAR = 0.8
"""Of the bound on the wait for a first token: from here on permits are halved."""


@dataclass(frozen=True, kw_only=True)
class Pressure:
    """What people at the engines feel now."""

    first_token_p95_s: float | None
    """None where nobody asked lately."""
    waiting: int


@dataclass(kw_only=True)
class Permits:
    """Shared by all rollouts of a dispatcher."""

    probe: Callable[[], Pressure | None]
    """None where it could not be asked."""
    most: int
    bound_s: float
    most_waiting: int = 0
    probe_s: float = 0.5
    allowed: float = 1.0
    used: int = 0
    zero_since: float | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _asked_at: float = float("-inf")

    def may_ask(self) -> bool:
        """Whether one more request may go out now. Asks for the pressure where the last answer is old."""
        with self._lock:
            now = time.monotonic()
            if now - self._asked_at >= self.probe_s:
                self._asked_at = now
                self.feel(self.probe())
            return self.used < int(self.allowed)

    def feel(self, pressure: Pressure | None) -> None:
        """One step of the rule."""
        wait = None if pressure is None else pressure.first_token_p95_s
        if pressure is None or pressure.waiting > self.most_waiting or (wait is not None and wait > self.bound_s):
            self.allowed = 0.0
        elif wait is not None and wait > NEAR * self.bound_s:
            self.allowed = self.allowed / 2
        else:
            self.allowed = min(float(self.most), self.allowed + 1.0)
        self.zero_since = None if self.allowed >= 1.0 else self.zero_since or time.monotonic()

    def take(self) -> bool:
        """Take one where there is one; `give_back` when the request has ended."""
        if not self.may_ask():
            return False
        with self._lock:
            if self.used >= int(self.allowed):
                return False
            self.used += 1
            return True

    def give_back(self) -> None:
        with self._lock:
            self.used -= 1
