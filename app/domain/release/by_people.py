"""Judged by people, not by traffic: for products too small for a canary to find anything.

The offline gate has passed, people judged blind pairs, and after the promotion a long holdback watches. `judge` is a pure function of what
was agreed before and what was said, so that anybody can decide again. Without votes nothing passes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec

from app.domain.release.gates import CanaryAction, Verdict
from app.domain.release.pairs import ALPHA, VALUES, Favoured, preference_interval

BY_PEOPLE = "judged by people, not by traffic"
BY_TRAFFIC = "judged by traffic"


class Rule(StrEnum):
    """What the interval of the preference has to show."""

    SUPERIOR = "superior"
    """It lies above 0: people favour the candidate."""
    NON_INFERIOR = "non_inferior"
    """It lies above minus the margin."""


class PeopleTerms(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is agreed before anybody votes: `[gates.people]` of the configuration, frozen with each release."""

    enabled: bool = False
    """Let people judge where the plan says that no canary up to `canary_longest_s` finds what matters; off, such a release is refused."""
    votes: int = 60
    """Votes that count, at least; `[offline] blind_pairs` has to keep as many pairs or more."""
    judges: int = 2
    """People behind them, at least, none of whom made another's credential within a day. Nobody has more than their part of the pairs."""
    rule: Rule = Rule.SUPERIOR
    margin: float = 0.10
    """With `non_inferior`: how far below 0 the whole interval may lie, of a preference from -1 to 1."""
    longest_s: float = 1_209_600.0
    """Without an answer by then (two weeks) it is inconclusive, and the champion stays."""
    holdback: float = 0.20
    """Share of the people who stay on the champion before, after a promotion that no traffic judged."""
    holdback_s: float = 2_592_000.0
    """For so long: thirty days."""

    def told(self) -> str:
        """What it takes, in a sentence."""
        shows = "above 0" if self.rule is Rule.SUPERIOR else f"above -{self.margin:g}"
        return (
            f"the offline gate, {self.votes} blind votes of {self.judges} people whose interval lies {shows} within "
            f"{self.longest_s / 86_400:.0f} days, then {self.holdback:.0%} of the people on the champion before for "
            f"{self.holdback_s / 86_400:.0f} days"
        )

    def problem(self) -> str | None:
        """What is wrong with them; None where nothing is."""
        if not 20 <= self.votes <= 1000:
            return f"votes = {self.votes}: an interval over fewer than 20 says nothing, and nobody judges more than 1000"
        if not 1 <= self.judges <= 20:
            return f"judges = {self.judges}: between 1 and 20 people"
        if not 0.0 < self.margin < 1.0:
            return f"margin = {self.margin:g}: above 0 and below 1"
        if not 0.05 <= self.holdback <= 0.5:
            return f"holdback = {self.holdback:g}: what no traffic judged keeps between 0.05 and 0.5 of the people on the champion before"
        if self.longest_s <= 0.0 or self.holdback_s < 86_400.0:
            return "longest_s is above 0, and holdback_s at least a day"
        return None


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What people's votes come to under the terms."""

    action: CanaryAction
    reason: str
    numbers: dict[str, Any]

    @property
    def verdict(self) -> Verdict:
        """Only READY passes."""
        return {CanaryAction.READY: Verdict.PASS, CanaryAction.ABORT: Verdict.FAIL}.get(self.action, Verdict.INCONCLUSIVE)


def judge(terms: PeopleTerms, said: Sequence[Favoured], *, pairs: int, people: int, waited_s: float) -> Judgement:
    """READY, ABORT (people favour the champion for sure), INCONCLUSIVE or CONTINUE. `said`: the votes that count, in order."""
    values = [VALUES[one] for one in said]
    low, high = preference_interval(values)
    least = 0.0 if terms.rule is Rule.SUPERIOR else -terms.margin
    net = math.fsum(values) / len(values) if values else None
    numbers: dict[str, Any] = {
        "said": [one.value for one in said], "pairs": pairs, "people": people, "waited_s": waited_s, "net": net, "low": low, "high": high,
        "alpha": ALPHA, "needed": {"votes": terms.votes, "people": terms.judges, "above": least, "rule": terms.rule.value},
    }  # fmt: skip
    action, why = _decided(terms, len(values), pairs=pairs, people=people, waited_s=waited_s, low=low, high=high, least=least)
    told = "nobody has voted" if net is None else f"preference {net:+.2f} [{low:+.2f}, {high:+.2f}] over {len(values)} votes of {people}"
    return Judgement(action=action, reason=f"{BY_PEOPLE}: {told}; {why}", numbers=numbers)


def _decided(
    terms: PeopleTerms, votes: int, *, pairs: int, people: int, waited_s: float, low: float, high: float, least: float
) -> tuple[CanaryAction, str]:  # fmt: skip
    """(action, why), in order: harm first, then enough votes of enough people, then what they say."""
    act = CanaryAction
    if high < least:
        return act.ABORT, f"people favour the champion: the whole interval lies below {least:+.2f}"
    enough = votes >= terms.votes and people >= terms.judges
    if enough and low > least:
        return act.READY, f"{terms.rule.value.replace('_', '-')}: the whole interval lies above {least:+.2f}"
    if waited_s >= terms.longest_s:
        return act.INCONCLUSIVE, f"no answer within {terms.longest_s / 86_400:.1f} days: the champion stays"
    if votes >= pairs:
        return act.INCONCLUSIVE, f"every pair was judged and the interval does not lie above {least:+.2f}: the champion stays"
    if not enough:
        return act.CONTINUE, f"it takes {terms.votes} votes of {terms.judges} people"
    return act.CONTINUE, f"the interval does not lie above {least:+.2f} yet"
