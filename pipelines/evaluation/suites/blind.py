"""Blind pairs out of a comparison: what both versions answered to the same question, for people to judge (`app.domain.release.pairs`).

Drawn by lot among the questions that the versions answered differently: where both say the same there is nothing to choose. A question
counts once, however many tasks of a suite ask it; one whose solution the candidate was trained on is none.
"""

import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from app.domain.release.gates import canonical_json, content_hash
from app.domain.release.pairs import BlindPair, preference_interval
from pipelines.evaluation.suites.asking import Scores
from pipelines.evaluation.suites.suites import Suite, Task


class PairBook(Protocol):
    """Keeps pairs with their release."""

    def keep(self, pairs: list[BlindPair], *, at: datetime) -> None:
        """Those that are there stay as they are."""
        ...

    def of(self, release_id: str) -> list[BlindPair]: ...
    def graded(self, policy: str, suite: str, *, since: datetime) -> list[bool]:
        """Of each vote since then that counts, where person and grader both favour an answer: whether it is the same one. Oldest first."""
        ...


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """A suite's judge held against people who judged the same answers blind."""

    agreed: int
    asked: int
    low: float
    """Of the share of pairs on which both favour the same answer, at 95 %, good at every look."""
    high: float

    def contradicted(self, suite: str, *, least: float) -> str | None:
        """Why the suite is refused, with the cure: people are shown to agree with its judge on fewer pairs than `least`; else None."""
        if self.high >= least:
            return None
        return (
            f"{suite} refused: people favour the answer that its judge favours in {self.agreed} of {self.asked} blind pairs (at most "
            f"{self.high:.0%} of all), {least:.0%} is needed; change the rubric or the judge and the suite's name, or make it advisory"
        )


def calibration_of(agreed: Sequence[bool]) -> Calibration:
    """What people's votes say about the judge. Nothing is known without any: from 0 to 1."""
    low, high = preference_interval([1.0 if one else -1.0 for one in agreed])
    return Calibration(agreed=sum(agreed), asked=len(agreed), low=(1.0 + low) / 2.0, high=(1.0 + high) / 2.0)


class Hearing:
    """Remembers the first answer of each version to each task."""

    def __init__(self) -> None:
        self._said: dict[tuple[str, str, str], str] = {}

    def __call__(self, suite: Suite, task: Task, sample: int, digest: str, text: str) -> None:
        """One answer."""
        if sample == 0:
            self._said[suite.config.name, task.id, digest] = text.replace("\x00", "")  # which no database takes

    def said(self, suite: Suite, task: Task, digest: str) -> str | None:
        """None where it was not asked."""
        return self._said.get((suite.config.name, task.id, digest))


def pairs_of(
    hearing: Hearing, suites: Collection[Suite], scores: Mapping[str, tuple[Scores, Scores]], *, release: str, policy: str,
    champion: str, candidate: str, draw: str, most: int, without: Collection[str] = (),
) -> list[BlindPair]:  # fmt: skip
    """At most so many pairs, `without` the tasks of these ids. The same comparison draws the same ones, however often it is asked."""
    found: dict[bytes, BlindPair] = {}
    for suite in suites:
        for index, task in enumerate(suite.tasks):
            theirs, ours = (hearing.said(suite, task, digest) for digest in (champion, candidate))
            if task.id in without or theirs is None or ours is None or theirs.strip() == ours.strip():
                continue
            champions, candidates = scores[suite.config.name]
            pair = BlindPair(
                id=content_hash([release, draw, suite.config.name, task.id])[:32], release_id=release, policy=policy,
                suite=suite.config.name, task=task.id, cluster=task.cluster, messages=task.messages,
                champion_answer=theirs, candidate_answer=ours, champion_score=float(champions[index, 0]),
                candidate_score=float(candidates[index, 0]), salt=secrets.token_hex(16),
            )  # fmt: skip
            found.setdefault(canonical_json(task.messages), pair)
    return sorted(found.values(), key=lambda pair: pair.id)[:most]


def as_evidence(pairs: Collection[BlindPair]) -> dict[str, Any]:
    """What the offline gate's record says of its pairs, so that approvals bind to them."""
    words = [[p.id, p.messages, p.champion_answer, p.candidate_answer] for p in sorted(pairs, key=lambda pair: pair.id)]
    return {"kept": len(words), "hash": content_hash(words)}
