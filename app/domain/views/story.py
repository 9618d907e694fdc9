"""The story of a release in plain words: what became of it, when, by whom and why, for whoever did not follow it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from app.domain.release.alarms import Alarm
from app.domain.release.releases import Release, ReleaseState
from app.domain.views.rows import StepRow
from app.domain.views.waiting import Scene, waits_for

S = ReleaseState


WORDS = {
    S.TRAINED: "{name} comes, to be held against {champion}",
    S.OFFLINE: "its answers are compared with those of {champion}, before anybody meets it",
    S.QUEUED: "nothing spoke against it so far, and it waits for its turn",
    S.CANARY: "the first people meet it",
    S.JUDGING: "no traffic can judge it, so people judge blind pairs and nobody is served by it",
    S.READY: "the evidence is there, and people are asked",
    S.APPROVED: "{who} said yes",
    S.PROMOTING: "{who} begins to let it out",
    S.CHAMPION: "it serves, in the place of {champion}",
    S.SUPERSEDED: "its time is over",
    S.REJECTED: "{who} stopped it, and {champion} stayed",
    S.ABORTED: "{who} stopped it, and {champion} stayed",
    S.INCONCLUSIVE: "there was no answer, and {champion} stayed",
    S.EXPIRED: "it went no further, and {champion} stayed",
    S.SUPERSEDED_BY_NEWER: "it went no further, and {champion} stayed",
    S.ROLLED_BACK: "{who} took it back and barred it",
}
"""What a move to each state means."""
SPECIAL: dict[tuple[ReleaseState | None, ReleaseState], str] = {
    (None, S.CHAMPION): "it serves, and was held against nothing",
    (S.APPROVED, S.READY): "what was approved holds no more, and people are asked again",
    (S.SUPERSEDED, S.CHAMPION): "it serves again",
    (S.ROLLED_BACK, S.SUPERSEDED): "it is barred no more",
}
"""Where it depends on the state before."""
AMENDED = {S.CANARY: "more people meet it"}


class Met(Protocol):
    """Who was served in one stage and arm of a canary (`app.domain.views.pages.Served`)."""

    @property
    def arm(self) -> str: ...
    @property
    def requests(self) -> int: ...
    @property
    def people(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class Told:
    """One sentence of it."""

    at: datetime
    words: str

    def sentence(self) -> str:
        """With its time, UTC."""
        return f"{self.at:%Y-%m-%d %H:%M:%S}: {self.words}"


def story_of(
    release: Release, *, champion: str, steps: Iterable[StepRow], alarms: Sequence[Alarm] = (), served: Iterable[Met] = (),
    scene: Scene | None = None,
) -> list[Told]:  # fmt: skip
    """In the order in which it happened. `champion` is the name of the version it is compared with; whom it met is told last, and then
    what it waits for, where it does."""
    told = [Told(at=step.occurred_at, words=_step(release, step, champion)) for step in steps]
    told += [Told(at=a.raised_at, words=f"an alarm was raised ({a.kind}): {a.reason}; it ends when {a.until}") for a in alarms]
    told += [
        Told(at=a.ended_at, words=f"the alarm ({a.kind}) was ended by {_who(a.ended_by or '')}: {a.end_reason}")
        for a in alarms if a.ended_at is not None
    ]  # fmt: skip
    told.sort(key=lambda one: one.at)
    told.append(Told(at=release.changed_at, words=f"by now {_met(release, served)}"))
    waits = None if scene is None else waits_for(release, scene)
    return told if scene is None or waits is None else [*told, Told(at=scene.now, words=f"it waits for {waits}")]


def _step(release: Release, step: StepRow, champion: str) -> str:
    """What one move means. An amendment (a ramp, one approval of two) moves to the state it was in."""
    before, after = None if step.from_state is None else S(step.from_state), S(step.to_state)
    words = AMENDED.get(after, "{who}") if before is after else SPECIAL.get((before, after), WORDS[after])
    told = words.format(name=release.version_name, champion=champion, who=_who(step.actor))
    return f"{told}: {step.reason or 'no reason given'}"


def _met(release: Release, served: Iterable[Met]) -> str:
    mine = [row for row in served if row.arm == "candidate"]
    if release.config.get("by_people") is not None and not mine:
        return "nobody met it while it was judged: people judged it, not traffic"
    if not mine:
        return "nobody met it while it was judged"
    widest, requests = max(row.people for row in mine), sum(row.requests for row in mine)
    return f"{requests:,} of its answers reached people while it was judged, at most {widest:,} of them in one stage"


def _who(actor: str) -> str:
    kind, _, name = actor.partition(":")
    return name if kind == "user" and name else f"the {name}" if kind == "system" and name else actor or "nobody"
