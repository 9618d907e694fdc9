"""Labels turns whose wait is over: one pure function per turn, one transaction per batch of turns.

```
 turns due (finished_at + wait ≤ now) ──▶ facts + joined observations ──▶ terms of the active rule set ──▶ reward, or exclusion
 turns to re-label (a late observation, not in a batch yet) ─────────────────────────────────────────────▶ next revision
```

Time is the wall clock, so that labels come although nothing else does; but while accepted events wait to be applied, it stands still at the
moment when the oldest of them was accepted: lag delays labels, it never makes them blind.

Every turn gets a label whether or not anything came. The reward is the weighted sum of the terms that spoke; a turn about which no
term but the costs spoke gets the rule set's default reward plus those costs, and is excluded from training unless the rule set
says otherwise.
"""

import logging
import math
from collections.abc import Sequence
from datetime import datetime
from typing import Protocol

import msgspec

from app.domain.errors import BadRequest
from app.domain.learning.rewards import UNREADABLE, Credit, DueTurn, Exclusion, Label, Term, TermScore, TurnFacts
from app.domain.policies import PolicyConfig
from app.domain.release.assignment import unit_interval
from app.domain.telemetry.events import is_imported, is_rollout
from app.domain.telemetry.signals import ObservationName
from app.domain.telemetry.traceparent import TRACEPARENT
from app.domain.telemetry.turns import MIXED_VERSIONS, UNSCORABLE, FinishReason
from app.telemetry.traces import NOWHERE, Traces
from pipelines.labelling.rule_set import RuleSet
from pipelines.labelling.terms import COSTS

log = logging.getLogger(__name__)


class LabelBook(Protocol):
    """Where due turns come from and labels go."""

    def due(self, policy: str, *, now: datetime, limit: int) -> list[DueTurn]:
        """Turns whose wait is over and that have no label, and turns marked for another one, oldest first."""
        ...

    def write(self, made: Sequence[Label], *, now: datetime) -> None:
        """Make these the current labels, in one transaction; a turn that went into a batch meanwhile keeps the label it has."""
        ...


def label_due(
    book: LabelBook,
    *,
    policy: str,
    config: PolicyConfig,
    rule_set: RuleSet,
    now: datetime,
    limit: int,
    complete_until: datetime | None = None,
    learn_from_rollouts: bool = False,
    traces: Traces = NOWHERE,
) -> int:
    """Label one batch of due turns; returns how many.

    Everything accepted before `complete_until` (`now` where it is not given) is applied: what is due later waits, so that a label never
    misses what had been said in time and was merely on its way.
    """
    due = book.due(policy, now=min(now, complete_until or now), limit=limit)
    if due:
        made = [label(turn, config=config, rule_set=rule_set, now=now, learn_from_rollouts=learn_from_rollouts) for turn in due]
        for one in made:
            unread = [score.name for score in one.terms if score.abstained == UNREADABLE]
            if unread:
                log.warning("event=term_unreadable policy=%s inference_id=%s terms=%s", policy, one.inference_id, ",".join(unread))
        book.write(made, now=now)
        if traces.on:
            tell(traces, due, made, now=now)
    return len(due)


def tell(traces: Traces, due: Sequence[DueTurn], made: Sequence[Label], *, now: datetime) -> None:
    """A span for each traced turn, from when it was served until it had its label; with the rule set, and not what anybody said."""
    for turn, label in zip(due, made, strict=True):
        if (parent := turn.facts.tags.get(TRACEPARENT)) is None:
            continue
        traces.tell(
            "label", parent=parent, started=turn.facts.finished_at, ended=now, ratchet__policy=label.policy,
            ratchet__inference_id=label.inference_id, ratchet__rule_set=label.rule_set, ratchet__revision=label.revision,
            ratchet__exclusion=label.exclusion or "", ratchet__observations=len(turn.observations),
        )  # fmt: skip


def label(turn: DueTurn, *, config: PolicyConfig, rule_set: RuleSet, now: datetime, learn_from_rollouts: bool = False) -> Label:
    """The label of one turn; pure, so that a replay gives the same. Without `learn_from_rollouts` practice is labelled and left out."""
    facts = turn.facts
    scores = tuple(_scored(term, turn, weight) for term, weight in rule_set.terms)
    spoke = [score for score in scores if score.value is not None]
    is_signal = any(score.name not in COSTS for score in spoke)
    reward = sum(score.weight * (score.value or 0.0) for score in spoke) + (0.0 if is_signal else rule_set.config.default_reward)
    held_out = is_held_out(facts, config)
    exclusion = _of_practice(turn, learned=learn_from_rollouts) or _exclusion(facts, is_signal=is_signal, rule_set=rule_set)
    return Label(
        inference_id=facts.inference_id, policy=facts.policy, version=facts.version, reward=reward, terms=scores, rule_set=rule_set.digest,
        revision=turn.revision + 1, exclusion=exclusion, labelled_at=now,
        segment=facts.segment, actor=facts.actor, held_out=held_out,
    )  # fmt: skip


def _scored(term: Term, turn: DueTurn, weight: float) -> TermScore:
    """What the term says, and whether it is about the turn itself or about what came of it."""
    credit: Credit = getattr(term, "credit", Credit.OUTCOME)
    try:
        score = term.score(turn.facts, turn.observations, weight=weight)
        if score.value is not None and not math.isfinite(weight * score.value):
            raise OverflowError
    except Exception as error:  # noqa: BLE001 - one labeller serves all policies, and what one term makes of one turn must not end it
        why = str(error)[:200] if isinstance(error, BadRequest) else type(error).__name__  # others may quote what people wrote
        score = TermScore(name=term.name, value=None, weight=weight, abstained=UNREADABLE, detail={"error": why})
    return msgspec.structs.replace(score, credit=credit)


def is_held_out(facts: TurnFacts, config: PolicyConfig) -> bool:
    """Drawn once per person (per episode where nobody is named), so that nobody is half in and half out; practice is nobody's."""
    if is_rollout(facts.source):
        return False
    return unit_interval("held-out", facts.policy, facts.actor or facts.episode_id) < config.held_out_share


def _of_practice(turn: DueTurn, *, learned: bool) -> Exclusion | None:
    """Why a rollout's turn is not learned from; nothing that people say makes a turn of theirs a fault."""
    if not is_rollout(turn.facts.source) or turn.facts.erased:
        return None
    if any(said.name == ObservationName.ENVIRONMENT_FAULT for said in turn.observations):
        return Exclusion.ENVIRONMENT_FAULT
    return None if learned else Exclusion.ROLLOUT


def _exclusion(facts: TurnFacts, *, is_signal: bool, rule_set: RuleSet) -> Exclusion | None:
    reasons: list[tuple[Exclusion, bool]] = [
        (Exclusion.ERASED, facts.erased),
        (Exclusion.IMPORTED, is_imported(facts.source)),
        (Exclusion.NO_CONSENT, not facts.train_consent),
        (Exclusion.ENGINE_FAULT, facts.finish_reason is FinishReason.ERROR),
        (Exclusion.EMPTY_COMPLETION, facts.completion_tokens == 0),
        (Exclusion.MIXED_VERSIONS, MIXED_VERSIONS in facts.tags),
        (Exclusion.NO_RATIO, UNSCORABLE in facts.tags),
        (Exclusion.NO_LOGPROBS, not facts.has_logprobs),
        (Exclusion.NO_SIGNAL, not is_signal and not rule_set.config.train_without_signal),
    ]
    return next((reason for reason, holds in reasons if holds), None)


def spoken(scores: Sequence[TermScore]) -> dict[str, float]:
    """Values by term of those that spoke."""
    return {score.name: score.value for score in scores if score.value is not None}
