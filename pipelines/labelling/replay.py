"""Replays a rule set over turns that were labelled already: what would change, before anything does. Writes no label."""

import logging
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import datetime
from itertools import takewhile
from typing import Protocol

from app.domain.learning.rewards import Labelled, TermScore
from app.domain.learning.rule_sets import AskedReplay, Mover, Replay, Shift
from app.domain.policies import PolicyConfig
from app.domain.ports import Clock
from pipelines.labelling.labeller import label
from pipelines.labelling.rule_set import RuleSet, refusal

log = logging.getLogger(__name__)
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
ASKED_TURNS, ASKED_S, ASKED_MOVERS = 5_000, 15.0, 50
"""A replay for somebody who waits: so many of the newest labels, or what fits into this time, in which no turn is labelled."""


class Asked(Protocol):
    """Replays that people ask for."""

    def waiting(self, policy: str) -> AskedReplay | None:
        """The oldest that waits."""
        ...

    def settle(self, asked: AskedReplay, *, outcome: Replay | None, refused: str | None, now: datetime) -> bool: ...


Stored = Callable[[], AbstractContextManager[Iterator[Labelled]]]
"""Opens the newest labels of the policy, newest first."""


def answer(
    book: Asked,
    stored: Stored,
    *,
    policy: str,
    config: PolicyConfig,
    read: Callable[[str], RuleSet],
    clock: Clock,
    learn_from_rollouts: bool = False,
) -> bool:
    """Replay what somebody asked for, one at a time; False where nobody waits. What `read` raises is why it is refused."""
    asked = book.waiting(policy)
    if asked is None:
        return False
    try:
        rule_set = read(asked.toml)
    except Exception as error:  # noqa: BLE001 - a term's own code may raise anything, and one labeller serves all policies
        book.settle(asked, outcome=None, refused=refusal(error), now=clock())
        return True
    ends = time.monotonic() + ASKED_S
    with stored() as labelled:
        some = takewhile(lambda _: time.monotonic() < ends, labelled)
        found = replay(
            some, config=config, rule_set=rule_set, now=clock(), movers=ASKED_MOVERS, learn_from_rollouts=learn_from_rollouts
        )  # fmt: skip
    named = replace(found, name=rule_set.config.name, digest=rule_set.digest)
    book.settle(asked, outcome=named, refused=None, now=clock())
    log.info("event=rules_replayed policy=%s digest=%s by=%s turns=%d", policy, rule_set.digest[:12], asked.asked_by, found.turns)
    return True


def replay(
    labelled: Iterable[Labelled],
    *,
    config: PolicyConfig,
    rule_set: RuleSet,
    now: datetime,
    movers: int = 10,
    learn_from_rollouts: bool = False,
) -> Replay:
    """Score turns anew and compare with the labels they have; `learn_from_rollouts` as in labelling."""
    moves: list[Mover] = []
    excluded: dict[str, int] = defaultdict(int)
    for turn, before, terms in labelled:
        made = label(turn, config=config, rule_set=rule_set, now=now, learn_from_rollouts=learn_from_rollouts)
        paid = {term["name"]: term["weight"] * term["value"] for term in terms if term["value"] is not None}
        move = Mover(
            inference_id=made.inference_id, segment=made.segment, before=before, after=made.reward, paid_before=paid,
            paid_after=_paid(made.terms),
        )  # fmt: skip
        moves.append(move)
        if made.exclusion is not None:
            excluded[made.exclusion.value] += 1
    changed = [move for move in moves if abs(move.change) > 1e-9]
    return Replay(
        turns=len(moves), changed=len(changed), before=_quantiles([m.before for m in moves]), after=_quantiles([m.after for m in moves]),
        segments=_segments(moves), terms=_shifts(moves), excluded=dict(excluded),
        movers=tuple(sorted(changed, key=lambda m: (-abs(m.change), m.inference_id))[:movers]),
    )  # fmt: skip


def _paid(scores: Sequence[TermScore]) -> dict[str, float]:
    return {score.name: score.weight * score.value for score in scores if score.value is not None}


def _shifts(moves: Sequence[Mover]) -> Mapping[str, Shift]:
    names = sorted({name for move in moves for name in (*move.paid_before, *move.paid_after)})
    found: dict[str, Shift] = {}
    for name in names:
        before = [move.paid_before[name] for move in moves if name in move.paid_before]
        after = [move.paid_after[name] for move in moves if name in move.paid_after]
        found[name] = Shift(spoke_before=len(before), mean_before=_mean(before), spoke_after=len(after), mean_after=_mean(after))
    return found


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0


def _quantiles(values: list[float]) -> tuple[float, ...]:
    ordered = sorted(values)
    return tuple(ordered[round((len(ordered) - 1) * share)] for share in SHARES) if ordered else ()


def _segments(moves: Sequence[Mover]) -> dict[str, tuple[int, float, float]]:
    by_segment: dict[str, list[Mover]] = defaultdict(list)
    for move in moves:
        by_segment[move.segment].append(move)
    return {
        segment: (len(mine), statistics.fmean(m.before for m in mine), statistics.fmean(m.after for m in mine))
        for segment, mine in sorted(by_segment.items())
    }
