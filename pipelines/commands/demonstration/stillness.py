"""Whether a run makes progress: not by a clock, but by whether anything that the present part waits for has moved."""

from collections.abc import Hashable
from dataclasses import dataclass

from app.domain.learning.cycles import CycleStatus
from app.domain.release.releases import IN_FLIGHT
from pipelines.commands.demonstration.sight import COUNTS, Sight


@dataclass(kw_only=True)
class Stillness:
    """Remembers when the state last changed. Answers alone are no progress: people go on asking while everything behind them stands."""

    longest_s: float
    """Longer than any single step that reports nothing meanwhile: loading a model, a forward pass, a worker's start."""
    _state: Hashable = None
    _since: float = 0.0

    def begin(self, now: float) -> None:
        """A new wait begins (monotonic seconds)."""
        self._state, self._since = None, now

    def seen(self, sight: Sight, *, now: float) -> float | None:
        """Seconds for which nothing has moved, once they are too many; None before."""
        state = _state_of(sight)
        if state != self._state:
            self._state, self._since = state, now
        lasted = now - self._since
        return lasted if lasted > self.longest_s else None


def _state_of(sight: Sight) -> Hashable:
    """What moves when the loop does: steps of the running cycle, work, states of releases; labels while the loop waits for them."""
    running = [(cycle.slot, cycle.step) for cycle in sight.cycles if cycle.status is CycleStatus.RUNNING]
    work = [(row.task, row.done) for row in sight.progress if row.task not in COUNTS]
    released = [(release.id, release.state, release.stage) for release in sight.releases]
    waits = not running and not any(release.state in IN_FLIGHT for release in sight.releases)
    return len(sight.labels) if waits else None, tuple(running), tuple(sorted(work)), tuple(released)
