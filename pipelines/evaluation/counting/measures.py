"""What is measured on one turn, per source of a metric, before it is brought to [0, 1] and oriented."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from app.domain.release.sessions import Session
from app.domain.telemetry.turns import FinishReason, ToolVerdict
from pipelines.evaluation.config import Good, MetricConfig, Missing

FAULTS = frozenset({FinishReason.ERROR.value, FinishReason.TIMEOUT.value})
CODE = "```"
REFUSAL = re.compile(
    r"\b(i('m| am) (sorry|unable|not able)|i (can('t|not)|won't|will not) (help|do|assist|provide|comply|answer)|as an ai\b)", re.IGNORECASE
)
REFUSAL_WITHIN = 200
"""A refusal announces itself at the beginning; further down the words are usually quoted."""


def measured(metric: MetricConfig, session: Session, thresholds: Mapping[str, float]) -> float | None:
    """The metric's value on this turn in [0, 1], oriented so that good is up; None where the signal is missing.

    `thresholds` replaces an unset threshold by metric name (the champion's p95 of `length`).
    """
    raw = raw_value(metric, session)
    if raw is None:
        return None
    threshold = metric.threshold if metric.threshold is not None or metric.by_turns else thresholds.get(metric.name)
    if threshold is None and is_referred(metric):
        return None
    if metric.relative and threshold is not None:
        value = raw / (raw + threshold) if raw > 0.0 else 0.0
    elif threshold is not None:
        value = float(raw >= threshold)
    else:
        value = min(1.0, max(0.0, (raw - metric.low) / (metric.high - metric.low)))
    return 1.0 - value if metric.good is Good.DOWN else value


def is_referred(metric: MetricConfig) -> bool:
    """Whether its values mean something only beside the champion's: a quantile or the median, known before the canary."""
    return metric.threshold is None and (metric.relative or metric.quantile is not None or metric.source == "length")


def raw_value(metric: MetricConfig, session: Session) -> float | None:
    """The value in its own unit; None where the signal is missing."""
    return _price(metric, session) if metric.source == "price" else _raw(metric.source, session)


def counted_missing(metric: MetricConfig) -> float:
    """What a turn without the signal counts as, oriented (intention to treat)."""
    return 1.0 if metric.missing is Missing.BEST else 0.0


def of_unit(metric: MetricConfig, values: Sequence[float], thresholds: Mapping[str, float]) -> float:
    """A person's value from those of their turns, in [0, 1]: the mean, or, counted by turns, 1 - bad turns / cap, good is up.

    Mean effects on the latter are effects on the number of bad turns a person has, in units of the cap, fixed before the canary.
    """
    if not values:
        return counted_missing(metric)
    if not metric.by_turns:
        return sum(values) / len(values)
    cap = metric.turns_cap or thresholds.get(metric.name, 1.0)
    return 1.0 - min(1.0, sum(1.0 - value for value in values) / cap)


def is_fault(session: Session) -> bool:
    """The system failed to answer; a client that went away is no fault."""
    return not session.served or session.finish_reason in FAULTS


def _raw(source: str, session: Session) -> float | None:
    if source == "fault":
        return float(is_fault(session))
    if not session.served:
        return None
    kind, _, name = source.partition(":")
    match kind:
        case "term":
            return None if session.terms is None else session.terms.get(name)
        case "observation":
            return number((session.signals or {}).get(name))
        case "has":
            return None if not session.labelled else float(_truthy((session.signals or {}).get(name)))
        case "reward" | "excluded" | "abandoned":
            return _from_label(kind, session)
        case _:
            return _from_turn(kind, session)


def _price(metric: MetricConfig, session: Session) -> float | None:
    """In tokens of the answer."""
    return metric.prompt_price * session.prompt_tokens + session.completion_tokens if session.served else None


def _from_label(source: str, session: Session) -> float | None:
    if not session.labelled:
        return None
    match source:
        case "reward":
            return session.reward
        case "excluded":
            return float(session.excluded)
        case _:
            return float(not session.signals)


def _from_turn(source: str, session: Session) -> float | None:
    match source:
        case "invalid_tool_call":
            return float(any(verdict != ToolVerdict.VALID for verdict in session.tool_verdicts))
        case "time_to_first_token":
            return session.time_to_first_token_s
        case "total_time":
            return session.total_s
        case "length":
            return float(session.completion_tokens)
        case "tools":
            return float(len(session.tool_verdicts))
        case "acts":
            return float(acts(session))
        case "asks":
            return float(not acts(session) and session.completion.rstrip().endswith("?"))
        case "refuses":
            return float(REFUSAL.search(session.completion[:REFUSAL_WITHIN]) is not None)
        case _:
            raise AssertionError(f"unchecked source {source}")


def acts(session: Session) -> bool:
    """The answer does something that can be used: code, or a tool call."""
    return CODE in session.completion or bool(session.tool_verdicts)


def number(value: object) -> float | None:
    """An observation's value as a number: a flag, a number, or the share of an edit that is left; None for anything else."""
    if isinstance(value, bool | int | float):
        return float(value)
    if isinstance(value, Mapping):
        left = cast(Mapping[str, Any], value).get("four_gram")
        return float(left) if isinstance(left, int | float) else None
    return None


def _truthy(value: object) -> bool:
    return value is not None and value is not False
