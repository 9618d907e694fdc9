"""Blind pairs: one question, the champion's answer and the candidate's, and what people said without knowing which is which.

A pair is one draw of a question. It counts once, by the first vote of somebody whose part is not used up yet (`part_of`), so that each
value that is counted is one person's about one question, and no vote is counted because of what an earlier one said. Later votes on the
same pair show how far people agree. The interval is a betting one: good at every look, at any number of votes.
"""

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

ALPHA = 0.05
STAKES = (0.05, 0.1, 0.2, 0.4, 0.8)
"""Shares of its capital that each bet risks; the capital is spread over them evenly."""


class Choice(StrEnum):
    """What is on the buttons."""

    LEFT = "left"
    RIGHT = "right"
    NEITHER = "neither"
    SAME = "same"


class Favoured(StrEnum):
    """What a choice comes to once it is known which answer was where."""

    CANDIDATE = "candidate"
    CHAMPION = "champion"
    NEITHER = "neither"
    """Both are bad."""
    SAME = "same"


VALUES = {Favoured.CANDIDATE: 1.0, Favoured.CHAMPION: -1.0, Favoured.NEITHER: 0.0, Favoured.SAME: 0.0}


@dataclass(frozen=True, kw_only=True)
class ScoredPair:
    """What counting needs of a pair."""

    id: str
    champion_score: float
    """By the suite's grader."""
    candidate_score: float


@dataclass(frozen=True, kw_only=True)
class BlindPair(ScoredPair):
    """One question with both answers."""

    release_id: str
    policy: str
    suite: str
    task: str
    cluster: str
    """Whose question it was, where the suite says so: it goes when they ask to be forgotten."""
    messages: list[dict[str, Any]]
    champion_answer: str
    candidate_answer: str
    salt: str
    """Decides the sides, with whoever is asked; never shown."""

    def candidate_is_left(self, voter: str) -> bool:
        """Drawn for each pair and person, the same at every look, and unknown to whoever does not know the salt."""
        return hashlib.sha256(f"{self.salt}\n{voter}".encode()).digest()[0] % 2 == 0

    def sides(self, voter: str) -> tuple[str, str]:
        """(left, right) answers as this person is shown them."""
        answers = (self.champion_answer, self.candidate_answer)
        return (answers[1], answers[0]) if self.candidate_is_left(voter) else answers

    def favoured(self, choice: Choice, voter: str) -> Favoured:
        """What their choice comes to."""
        if choice in (Choice.NEITHER, Choice.SAME):
            return Favoured(choice.value)
        return Favoured.CANDIDATE if (choice is Choice.LEFT) is self.candidate_is_left(voter) else Favoured.CHAMPION


@dataclass(frozen=True, kw_only=True)
class BlindVote:
    """What one person said about one pair."""

    pair_id: str
    voter: str
    favoured: Favoured
    candidate_left: bool
    counted: bool
    """Whether it is the one vote with which its pair counts."""
    proven: bool
    """Whether something proved who it was; on an open deployment nothing does."""
    voted_at: datetime


@dataclass(frozen=True, kw_only=True)
class Preference:
    """What the votes about a release come to."""

    pairs: int
    """Also those whose words are gone by now."""
    votes: int
    counted: int
    """Pairs with a vote that counts."""
    people: int
    """Whose votes are counted; all whom nothing proves are one."""
    candidate: int
    champion: int
    neither: int
    same: int
    net: float | None
    """(candidate − champion) / counted: from −1, the champion always, to 1."""
    low: float
    high: float
    """Of what `net` is an estimate of, at 95 %, good at every look."""
    graders_agree: int
    graders_asked: int
    """Counted pairs in which the suite's grader and the person both favour one answer; and those in which it is the same."""
    people_agree: int
    people_asked: int
    """Pairs with two votes or more; and those in which all say the same."""

    def sentence(self) -> str:
        """For whoever reads a release."""
        if not self.pairs:
            return "no blind pairs were kept: the offline suites kept none, or both versions answered alike"
        if self.net is None:
            return f"{self.pairs} blind pairs, none judged yet"
        return (
            f"people who did not know which was which favour the candidate by {self.net:+.2f} [{self.low:+.2f}, {self.high:+.2f}] "
            f"({self.candidate} candidate, {self.champion} champion, {self.same} the same, {self.neither} both bad; "
            f"{self.counted} of {self.pairs} pairs, {self.people} {'person' if self.people == 1 else 'people'})"
        )


def part_of(pairs: int, *, judges: int) -> int:
    """Votes of one person that count at most, where so many have to share the pairs."""
    return math.ceil(pairs / judges)


def next_for(voter: str, pairs: Iterable[str], votes: Sequence[BlindVote], *, part: int) -> str | None:
    """Which pair somebody is shown next: first those that nobody's vote counts for yet, as long as their own part lasts, then others' ones.

    The order is that of the ids, which are drawn.
    """
    mine, taken = {v.pair_id for v in votes if v.voter == voter}, {v.pair_id for v in votes if v.counted}
    left = sorted(set(pairs) - mine)
    counts = sum(v.counted and v.voter == voter for v in votes) < part
    fresh, others = [one for one in left if one not in taken], [one for one in left if one in taken]
    return next(iter([*fresh, *others] if counts else others), None)


def preference_of(pairs: Iterable[ScoredPair], votes: Sequence[BlindVote]) -> Preference:
    """Add the votes up, in the order in which they came."""
    by_id = {pair.id: pair for pair in pairs}
    counted = sorted((v for v in votes if v.counted), key=lambda v: (v.voted_at, v.pair_id))
    values = [VALUES[vote.favoured] for vote in counted]
    number = {kind: sum(vote.favoured is kind for vote in counted) for kind in Favoured}
    low, high = preference_interval(values)
    scored = [(by_id[vote.pair_id], vote.favoured) for vote in counted if vote.pair_id in by_id]
    agreed = [grader_agrees(pair.champion_score, pair.candidate_score, favoured) for pair, favoured in scored]
    said: dict[str, list[Favoured]] = {}
    for vote in votes:
        said.setdefault(vote.pair_id, []).append(vote.favoured)
    several = [words for words in said.values() if len(words) > 1]
    return Preference(
        pairs=max(len(by_id), len(said)), votes=len(votes), counted=len(counted),
        people=len({vote.voter if vote.proven else "" for vote in counted}),
        candidate=number[Favoured.CANDIDATE], champion=number[Favoured.CHAMPION], neither=number[Favoured.NEITHER],
        same=number[Favoured.SAME], net=math.fsum(values) / len(values) if values else None, low=low, high=high,
        graders_agree=sum(1 for one in agreed if one), graders_asked=sum(1 for one in agreed if one is not None),
        people_agree=sum(1 for words in several if len(set(words)) == 1), people_asked=len(several),
    )  # fmt: skip


def grader_agrees(champion_score: float, candidate_score: float, favoured: Favoured) -> bool | None:
    """Whether grader and person favour the same answer; None where one of them favours neither."""
    lead = candidate_score - champion_score
    return None if lead == 0.0 or VALUES[favoured] == 0.0 else (lead > 0.0) is (VALUES[favoured] > 0.0)


def preference_interval(values: Sequence[float], *, alpha: float = ALPHA) -> tuple[float, float]:
    """The means in [-1, 1] that no bet has ever rejected, each end at alpha/2: [-1, 1] while nothing is known."""
    return _lowest(values, alpha / 2.0), -_lowest([-value for value in values], alpha / 2.0)


def _lowest(values: Sequence[float], alpha: float) -> float:
    """The largest m of which "the mean is at most m" was rejected at alpha, to 1e-4; -1 where none was."""
    rejected, kept = -1.0, 1.0
    while kept - rejected > 1e-4:
        middle = (rejected + kept) / 2.0
        if rejects(values, middle, alpha=alpha):
            rejected = middle
        else:
            kept = middle
    return rejected


def rejects(values: Sequence[float], mean: float, *, alpha: float) -> bool:
    """Whether a gambler who bets that the mean lies above this one ever had 1/alpha of what they began with.

    A stake s wins s (v - mean) / (1 + mean): at worst, at v = -1, exactly the share s of the capital is lost. Under "at most this mean"
    the capital grows on average in no step, whatever was seen before (Ville; Waudby-Smith and Ramdas 2024, section 4).
    """
    logs = [0.0] * len(STAKES)
    needed = math.log(len(STAKES) / alpha)
    for value in values:
        logs = [log + math.log1p(stake * (value - mean) / (1.0 + mean)) for log, stake in zip(logs, STAKES, strict=True)]
        top = max(logs)
        if top + math.log(math.fsum(math.exp(log - top) for log in logs)) >= needed:
            return True
    return False
