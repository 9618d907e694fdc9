"""The built-in terms: each answers one question about a turn, or abstains with a reason."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

import msgspec

from app.domain.errors import BadRequest
from app.domain.learning.rewards import Aggregation, Credit, Term, TermScore, TurnFacts
from app.domain.policies import Level, SignalConfig
from app.domain.telemetry.events import Observation, is_rollout
from app.domain.telemetry.signals import Latency, MeasuredPersistence, ObservationName, RawEdit, check_value
from app.domain.telemetry.turns import FinishReason, ToolVerdict
from pipelines.labelling.aggregate import aggregate
from pipelines.labelling.follow_up.term import FollowUp
from pipelines.labelling.persistence import Look, no_revert, similarity, survival
from pipelines.labelling.regions import region_now

ABSENT = "no_observation"
SIGNAL = "signal:"
"""A term of this name and a signal's reads what the policy declares under it."""
Signals = Mapping[str, SignalConfig]
MOST = 1e9
"""Of a weight or a param, either way: so that every reward is a number that can be kept."""
Number = Annotated[float, msgspec.Meta(ge=-MOST, le=MOST)]
Positive = Annotated[float, msgspec.Meta(gt=0, le=MOST)]
"""What a rule set may give as a param. NaN is neither."""


def of_name(observations: Sequence[Observation], *names: str, signals: Signals | None = None) -> list[Observation]:
    """Those of these names, in order; `signals` is what the turn's policy declares.

    Raises `BadRequest` for a value of another shape or scale: the door knows a turn's policy only where the sender says it, and takes
    what any policy declares where not.
    """
    mine = [o for o in observations if o.name in names]
    declared = signals or {}
    for one in mine:
        level = declared[one.name].level if one.name in declared else Level.TURN
        try:
            check_value(one.name, one.value, declared, level=level)
        except BadRequest as error:
            raise BadRequest(f"{one.id}: {error}") from error
    return mine


class EditPersistence:
    """[0, 1] plus `shift`: mean over the observed horizons of what survived of the turn's edits, each weighted by its length."""

    name = "edit_persistence"

    def __init__(self, *, shift: Number = 0.0) -> None:
        self._shift = shift

    def score(self, turn: TurnFacts, observations: Sequence[Observation], *, weight: float) -> TermScore:
        """Survival of the edits; abstains where none was reported."""
        mine = of_name(observations, ObservationName.EDIT_PERSISTENCE)
        if not mine:
            return TermScore(name=self.name, value=None, weight=weight, abstained=ABSENT)
        looks = _looks(mine)
        curve = survival(looks)
        value = sum(curve.values()) / len(curve)
        detail = {"survival": value, "horizons": {f"{h:g}": v for h, v in curve.items()}, "edits": len({look.edit for look in looks})}
        return TermScore(name=self.name, value=value + self._shift, weight=weight, evidence=tuple(o.id for o in mine), detail=detail)


def _looks(observations: Sequence[Observation]) -> list[Look]:
    """What was reported about edits. Of measurements without a name, those at one horizon are about the first, the second … edit."""
    unnamed: Counter[float] = Counter()
    looks: list[Look] = []
    for observation in observations:
        look = _measured(observation.value) if "inserted" in observation.value else _given(observation.value)
        if not look.edit:
            unnamed[look.horizon_s] += 1
            look = replace(look, edit=f"unnamed {unnamed[look.horizon_s]}")
        looks.append(look)
    return looks


def _given(value: Any) -> Look:  # noqa: ANN401 - a JSON value, checked at the door
    given = msgspec.convert(value, MeasuredPersistence)
    return Look(
        edit=given.edit or "", horizon_s=given.horizon_s, four_gram=given.four_gram, no_revert=given.no_revert, length=given.length,
        ended=given.ended,
    )  # fmt: skip


def _measured(value: Any) -> Look:  # noqa: ANN401 - a JSON value, checked at the door
    """Measure an edit reported as texts; one without a name is known by what it replaced with what, and where."""
    raw = msgspec.convert(value, RawEdit)
    if raw.start is None:
        replaced, now = raw.before, raw.after
    else:
        replaced = raw.before[raw.start : raw.start + raw.replaced]
        now = region_now(before=raw.before, start=raw.start, replaced=raw.replaced, inserted=raw.inserted, after=raw.after)
    return Look(
        edit=raw.edit or f"{raw.start}:{replaced}>{raw.inserted}", horizon_s=raw.horizon_s, four_gram=similarity(now, raw.inserted),
        no_revert=no_revert(before=replaced, ai=raw.inserted, now=now) if replaced else None,
        length=max(len(raw.inserted), len(replaced)), ended=raw.ended,
    )  # fmt: skip


class Rating:
    """[-1, 1]: the user's thumb or score; a score on a declared scale is mapped to it linearly."""

    name = "rating"

    def __init__(self, *, aggregation: Aggregation = Aggregation.LATEST, signals: Signals | None = None) -> None:
        self._aggregation = aggregation
        self._signals = signals or {}
        self._scale = self._signals.get(ObservationName.RATING)

    def score(self, turn: TurnFacts, observations: Sequence[Observation], *, weight: float) -> TermScore:
        """The rating; a thumb down is -1."""
        mine = of_name(observations, ObservationName.RATING, signals=self._signals)
        if not mine:
            return TermScore(name=self.name, value=None, weight=weight, abstained=ABSENT)
        values = [self._worth(o.value) for o in mine]
        return TermScore(name=self.name, value=aggregate(values, self._aggregation), weight=weight, evidence=tuple(o.id for o in mine))

    def _worth(self, value: bool | float) -> float:
        if isinstance(value, bool):
            return 1.0 if value else -1.0
        scaled = self._scale.reward(value) if self._scale is not None else None
        return float(value) if scaled is None else scaled


class DeclaredSignal:
    """[-1, 1]: a signal that the policy declares, by its type and direction: a boolean is 1 or -1, a float lies linearly on its scale."""

    def __init__(self, *, of: str, signals: Signals | None = None, aggregation: Aggregation = Aggregation.LATEST) -> None:
        """Raises `ValueError` for a signal that is known and cannot pay; with `signals` None nothing is known."""
        if signals is not None and of not in signals:
            raise ValueError(f"no signal {of!r} is declared: declare it under [policies.NAME.signals.{of}]")
        self.name = f"{SIGNAL}{of}"
        self._of, self._aggregation = of, aggregation
        self._signal = signals[of] if signals is not None else None
        if self._signal is not None and self._signal.reward(0.0) is None:
            raise ValueError(
                f"{of!r} is {self._signal.type.value} without a scale: give it low and high under [policies.NAME.signals.{of}]"
            )

    def score(self, turn: TurnFacts, observations: Sequence[Observation], *, weight: float) -> TermScore:
        """What was said of it on the turn or its episode."""
        mine = of_name(observations, self._of, signals={self._of: self._signal}) if self._signal is not None else []
        if not mine or self._signal is None:
            return TermScore(name=self.name, value=None, weight=weight, abstained=ABSENT if self._signal is not None else "undeclared")
        values = [worth for o in mine if (worth := self._signal.reward(o.value)) is not None]
        value = aggregate(values, self._aggregation)
        return TermScore(
            name=self.name, value=value, weight=weight, evidence=tuple(o.id for o in mine), detail={"said": [o.value for o in mine]}
        )


class Undo:
    """-1 when the user undid the answer or asked for another one."""

    name = "undo"

    def score(self, turn: TurnFacts, observations: Sequence[Observation], *, weight: float) -> TermScore:
        """-1 for the last word being an undo or a regeneration, 0 for one taken back."""
        mine = of_name(observations, ObservationName.UNDO, ObservationName.REGENERATE)
        if not mine:
            return TermScore(name=self.name, value=None, weight=weight, abstained=ABSENT)
        return TermScore(name=self.name, value=-1.0 if mine[-1].value else 0.0, weight=weight, evidence=tuple(o.id for o in mine))


class ToolCalls:
    """-1 for a broken tool call: it is an answer that failed, never a reason to drop the turn."""

    name = "tool_calls"
    credit = Credit.PROCESS

    def __init__(self, *, valid: Number = 0.1, broken: Number = -1.0) -> None:
        self._valid, self._broken = valid, broken

    def score(self, turn: TurnFacts, observations: Sequence[Observation], *, weight: float) -> TermScore:
        """`broken` if any call does not parse or fails in the product, `valid` if all are fine; abstains without calls."""
        outcomes = of_name(observations, ObservationName.TOOL_CALL)
        if not turn.tool_calls and not outcomes:
            return TermScore(name=self.name, value=None, weight=weight, abstained="no_tool_call")
        broken = sum(call.verdict is not ToolVerdict.VALID for call in turn.tool_calls) + sum(not o.value["ok"] for o in outcomes)
        value = self._broken if broken else self._valid
        return TermScore(name=self.name, value=value, weight=weight, evidence=tuple(o.id for o in outcomes), detail={"broken": broken})


class Clarification:
    """Prices a question instead of an edit, which would otherwise escape every term about edits."""

    name = "clarification"
    credit = Credit.PROCESS

    def __init__(self, *, cost: Number = 0.3) -> None:
        self._cost = cost

    def score(self, turn: TurnFacts, observations: Sequence[Observation], *, weight: float) -> TermScore:
        """-cost when the answer is only a question and no edit of it was reported; abstains otherwise."""
        asked = is_question(turn.completion) and not of_name(observations, ObservationName.EDIT_PERSISTENCE)
        if not asked:
            return TermScore(name=self.name, value=None, weight=weight, abstained="no_question")
        return TermScore(name=self.name, value=-self._cost, weight=weight)


def is_question(text: str) -> bool:
    """Whether an answer is a question to the user rather than work: it ends with a question mark and contains no code."""
    stripped = text.strip()
    return stripped.endswith("?") and "```" not in stripped and "\n    " not in stripped


class Finish:
    """Prices the exits: none of them is free."""

    name = "finish"
    credit = Credit.PROCESS

    def __init__(self, *, timeout: Number = -0.5, aborted: Number = -0.3, length: Number = -0.1) -> None:
        self._values = {FinishReason.TIMEOUT: timeout, FinishReason.ABORTED: aborted, FinishReason.LENGTH: length}

    def score(self, turn: TurnFacts, observations: Sequence[Observation], *, weight: float) -> TermScore:
        """The price of how the turn ended; abstains where it ended by itself."""
        value = self._values.get(turn.finish_reason)
        if value is None:
            return TermScore(name=self.name, value=None, weight=weight, abstained="ended_by_itself")
        return TermScore(name=self.name, value=value, weight=weight, detail={"finish_reason": turn.finish_reason.value})


class Length:
    """The concave length penalty −C_{k,q}(x), C = ((1+kx)^{1−q} − 1)/(k(1−q)) (facts/rl.md, section 3.3)."""

    name = "length"
    credit = Credit.PROCESS

    def __init__(self, *, k: Number = 1.0, q: Number = 0.5, scale_tokens: Number = 256.0) -> None:
        if k <= 0 or q < 0 or scale_tokens <= 0:
            raise ValueError("k and scale_tokens must be positive and q at least 0")
        self._k, self._q, self._scale = k, q, scale_tokens

    def score(self, turn: TurnFacts, observations: Sequence[Observation], *, weight: float) -> TermScore:
        """Never abstains, but is no signal by itself: it says what an answer cost, not what it was worth."""
        return TermScore(name=self.name, value=-length_penalty(turn.completion_tokens / self._scale, k=self._k, q=self._q), weight=weight)


def length_penalty(x: float, *, k: float, q: float) -> float:
    """C_{k,q}(x): 0 at 0, slope (1+kx)^−q; ln(1+kx)/k as q → 1, x at q = 0, bounded by 1/(k(q−1)) for q > 1."""
    if abs(q - 1.0) < 1e-9:
        return math.log1p(k * x) / k
    return math.expm1((1.0 - q) * math.log1p(k * x)) / (k * (1.0 - q))


class LatencyCost:
    """[-1, 0]: how far the answer took longer than the target."""

    name = "latency"
    credit = Credit.PROCESS

    def __init__(self, *, target_s: Positive = 10.0) -> None:
        self._target_s = target_s

    def score(self, turn: TurnFacts, observations: Sequence[Observation], *, weight: float) -> TermScore:
        """0 within the target, then falling to -1 at twice the target; as the user felt it where that was reported."""
        mine = of_name(observations, ObservationName.LATENCY)
        felt = (turn.finished_at - turn.started_at).total_seconds()
        if mine:
            value = mine[-1].value
            felt = msgspec.convert(value, Latency).total_s if isinstance(value, dict) else float(value)
        over = min(max(felt / self._target_s - 1.0, 0.0), 1.0)
        return TermScore(name=self.name, value=-over, weight=weight, evidence=tuple(o.id for o in mine), detail={"felt_s": felt})


class TaskSuccess:
    """[0, 1]: whether the task got done. Leave it out of the rule set to keep it as a gold metric of the gates."""

    name = "task_success"

    def score(self, turn: TurnFacts, observations: Sequence[Observation], *, weight: float) -> TermScore:
        """The latest word on it."""
        mine = of_name(observations, ObservationName.TASK_SUCCESS)
        if not mine:
            return TermScore(name=self.name, value=None, weight=weight, abstained=ABSENT)
        return TermScore(name=self.name, value=float(mine[-1].value), weight=weight, evidence=tuple(o.id for o in mine))


class Practice:
    """[0, 1]: whether a rollout's task got done; abstains about what people asked for, where that is a gold metric of the gates."""

    name = "practice"

    def score(self, turn: TurnFacts, observations: Sequence[Observation], *, weight: float) -> TermScore:
        """The grade."""
        if not is_rollout(turn.source):
            return TermScore(name=self.name, value=None, weight=weight, abstained="no_rollout")
        return msgspec.structs.replace(TaskSuccess().score(turn, observations, weight=weight), name=self.name)


BUILT_IN: dict[str, Callable[..., Term]] = {
    term.name: term
    for term in (EditPersistence, FollowUp, Rating, Undo, ToolCalls, Clarification, Finish, Length, LatencyCost, TaskSuccess, Practice)
}
COSTS = frozenset({Length.name, LatencyCost.name})
"""Terms that always speak about every turn: they price an answer, but are not a signal that somebody reacted to it."""
