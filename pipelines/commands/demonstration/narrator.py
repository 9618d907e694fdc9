"""Says in plain sentences what changed between two looks at the deployment."""

from collections.abc import Iterator, Sequence

from app.domain.learning.cycles import Cycle, CycleStatus
from app.domain.release.releases import Release, ReleaseState
from pipelines.commands.demonstration.sight import Sight

S = ReleaseState
SENTENCES = {
    S.TRAINED: "{name} was trained",
    S.OFFLINE: "{name} is asked by the offline gates",
    S.QUEUED: "{name} passed the offline gates and waits for its canary",
    S.JUDGING: "{name} waits for people's blind votes: {reason}",
    S.READY: "{name} is not worse on any required metric: READY, a person has to approve",
    S.APPROVED: "{name} was approved",
    S.PROMOTING: "{name} is being promoted",
    S.CHAMPION: "{name} is champion",
    S.SUPERSEDED: "{name} is the previous champion now, kept warm for the holdback",
    S.REJECTED: "{name} was rejected: {reason}",
    S.ABORTED: "{name} was taken back: {reason}",
    S.INCONCLUSIVE: "{name} is inconclusive, the champion stays: {reason}",
    S.EXPIRED: "{name} expired: {reason}",
    S.SUPERSEDED_BY_NEWER: "{name} made room for a newer candidate",
    S.ROLLED_BACK: "{name} was rolled back and quarantined: {reason}",
}


class Narrator:
    """Remembers what was told already."""

    def __init__(self) -> None:
        self._releases: dict[str, tuple[ReleaseState, int | None]] = {}
        self._cycles: dict[int, tuple[CycleStatus, str]] = {}

    def tell(self, sight: Sight, shares: Sequence[float]) -> Iterator[str]:
        """Sentences about what is new; `shares` are the canary's stages."""
        for cycle in reversed(sight.cycles):
            before = self._cycles.get(cycle.slot)
            now = (cycle.status, cycle.step)
            self._cycles[cycle.slot] = now
            if now != before and (sentence := _about_cycle(cycle, before)) is not None:
                yield sentence
        for release in reversed(sight.releases):
            before = self._releases.get(release.id)
            now = (release.state, release.stage)
            self._releases[release.id] = now
            if now != before:
                yield _about_release(release, shares)


def _about_release(release: Release, shares: Sequence[float]) -> str:
    if release.state is S.CANARY:
        return f"{release.version_name} answers {shares[release.stage or 0]:.0%} of the people (canary)"
    return SENTENCES[release.state].format(name=release.version_name, reason=release.reason or "no reason given")


def _about_cycle(cycle: Cycle, before: tuple[CycleStatus, str] | None) -> str | None:
    match cycle.status:
        case CycleStatus.RUNNING if before is None:
            return "a new slot: this replica was elected and cuts a batch from the labels"
        case CycleStatus.RUNNING if cycle.step == "batch":
            return f"batch cut in {cycle.timings.get('batch', 0):.1f} s; the update runs"
        case CycleStatus.RUNNING if cycle.step == "train":
            return f"update done in {cycle.timings.get('train', 0):.1f} s"
        case CycleStatus.HELD | CycleStatus.FAILED:
            return f"the cycle was {cycle.status.value}: {cycle.reason}"
        case _:
            return None
