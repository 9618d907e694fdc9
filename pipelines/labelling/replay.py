"""Replays a rule set over turns that were labelled already: what would change, before anything does. Writes nothing."""

import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from app.domain.learning.rewards import DueTurn
from app.domain.policies import PolicyConfig
from pipelines.labelling.labeller import label, spoken
from pipelines.labelling.rule_set import RuleSet

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True, kw_only=True)
class Move:
    """One turn under both rule sets."""

    inference_id: str
    segment: str
    before: float
    after: float
    terms: dict[str, float]
    """What spoke under the replayed rule set."""

    @property
    def change(self) -> float:
        """Reward gained."""
        return self.after - self.before


@dataclass(frozen=True, kw_only=True)
class Replay:
    """The outcome of a replay."""

    turns: int
    changed: int
    before: tuple[float, ...]
    """Quantiles of the rewards at `SHARES` under the labels as they are; empty without turns."""
    after: tuple[float, ...]
    segments: dict[str, tuple[int, float, float]]
    """Per segment: turns, mean reward as labelled, mean reward replayed."""
    movers: tuple[Move, ...]
    """Turns whose reward changes most, the largest change first."""
    excluded: dict[str, int]
    """Turns that the replayed rule set would exclude, by reason."""


def replay(
    labelled: Iterable[tuple[DueTurn, float]], *, config: PolicyConfig, rule_set: RuleSet, now: datetime, movers: int = 10
) -> Replay:
    """Score turns anew and compare with the reward they have."""
    moves: list[Move] = []
    excluded: dict[str, int] = defaultdict(int)
    for turn, before in labelled:
        made = label(turn, config=config, rule_set=rule_set, now=now)
        moves.append(Move(inference_id=made.inference_id, segment=made.segment, before=before, after=made.reward, terms=spoken(made.terms)))
        if made.exclusion is not None:
            excluded[made.exclusion.value] += 1
    changed = [move for move in moves if abs(move.change) > 1e-9]
    return Replay(
        turns=len(moves), changed=len(changed), before=_quantiles([m.before for m in moves]), after=_quantiles([m.after for m in moves]),
        segments=_segments(moves), movers=tuple(sorted(changed, key=lambda m: (-abs(m.change), m.inference_id))[:movers]),
        excluded=dict(excluded),
    )  # fmt: skip


def _quantiles(values: list[float]) -> tuple[float, ...]:
    ordered = sorted(values)
    return tuple(ordered[round((len(ordered) - 1) * share)] for share in SHARES) if ordered else ()


def _segments(moves: list[Move]) -> dict[str, tuple[int, float, float]]:
    by_segment: dict[str, list[Move]] = defaultdict(list)
    for move in moves:
        by_segment[move.segment].append(move)
    return {
        segment: (len(mine), statistics.fmean(m.before for m in mine), statistics.fmean(m.after for m in mine))
        for segment, mine in sorted(by_segment.items())
    }
