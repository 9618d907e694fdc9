"""Observation names and the shape of each one's value: what the HTTP door accepts and labelling may rely on.

| name               | value                                                                                                     |
|--------------------|-----------------------------------------------------------------------------------------------------------|
| `edit_persistence` | `MeasuredPersistence`, or `RawEdit` (texts, measured by us), one observation per horizon                  |
| `follow_up`        | text: the user's next message                                                                             |
| `rating`           | true/false (a thumb) or a number in [-1, 1], or on the scale declared under `signals.rating`              |
| `tool_call`        | `ToolOutcome`                                                                                             |
| `regenerate`       | true (false: an offered regeneration was declined)                                                        |
| `undo`             | true (false: a redo took the undo back)                                                                   |
| `task_success`     | true/false, or a number in [0, 1]                                                                         |
| `latency`          | seconds as a number ≥ 0, or `Latency`                                                                     |
| `comment`          | text                                                                                                      |
| `demonstration`    | text: what the user turned the answer into                                                                |
| `environment_fault`| text: which part of ours failed a rollout; its turns are not learned from                                 |

Further names are declared per policy (`[policies.NAME.signals.SIGNAL]`): boolean, float (on a scale from `low` to `high`) or text. What
they say is paid for by the term `signal:SIGNAL` of a rule set.
"""

import math
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, TypeVar, cast

import msgspec

from app.domain.errors import BadRequest
from app.domain.policies import Level, SignalConfig, SignalType

T = TypeVar("T")
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
EditName = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
Rating = Annotated[float, msgspec.Meta(ge=-1, le=1)]


MOST_CHARACTERS = 10**9
"""Of an edit, at the door alone: what was accepted before there was a bound stays readable."""


class ObservationName(StrEnum):
    """The built-in names."""

    EDIT_PERSISTENCE = "edit_persistence"
    FOLLOW_UP = "follow_up"
    RATING = "rating"
    TOOL_CALL = "tool_call"
    REGENERATE = "regenerate"
    UNDO = "undo"
    TASK_SUCCESS = "task_success"
    LATENCY = "latency"
    COMMENT = "comment"
    DEMONSTRATION = "demonstration"
    ENVIRONMENT_FAULT = "environment_fault"


class MeasuredPersistence(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much of an edit is left at one horizon, measured by the client (facts/rl.md, section 5.2)."""

    horizon_s: Seconds
    four_gram: Share
    no_revert: Share | None = None
    """None where the edit inserted into nothing, so that there is nothing to revert to."""
    length: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Characters inserted: the weight of this edit among several of one turn; None weighs all alike."""
    edit: EditName | None = None
    """Which edit of the turn. A second measurement of the same edit at the same horizon corrects the first; without a name it is about
    another edit."""
    ended: bool = False
    """Observation stopped here (file closed, session over): later horizons are censored, not zero."""


class RawEdit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Texts from which persistence at one horizon is measured by labelling."""

    horizon_s: Seconds
    before: str
    """What stood there before the edit: the whole file when `start` is given, else the replaced range."""
    inserted: str
    """What the model put there."""
    after: str
    """What stands there now: the whole file when `start` is given, else the same range as carried along by the editor."""
    start: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Character offset of the edit in `before`; with it `before` and `after` are whole files and the region is carried through by us."""
    replaced: Annotated[int, msgspec.Meta(ge=0)] = 0
    """With `start`: how many characters of `before` the edit replaced."""
    edit: EditName | None = None
    """Which edit of the turn; without a name, edits with the same texts are the same."""
    ended: bool = False
    """Observation stopped here: later horizons are censored, not zero."""


class ToolOutcome(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What became of a tool call of the turn when the product ran it."""

    name: str
    ok: bool
    call_id: str | None = None
    error: str | None = None
    duration_s: Seconds | None = None


class Latency(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Latency as the user felt it."""

    total_s: Seconds
    time_to_first_token_s: Seconds | None = None


_TEXT = frozenset({ObservationName.FOLLOW_UP, ObservationName.COMMENT, ObservationName.DEMONSTRATION, ObservationName.ENVIRONMENT_FAULT})
_FLAG = frozenset({ObservationName.REGENERATE, ObservationName.UNDO})
BUILT_IN = frozenset(name.value for name in ObservationName)


def check_value(name: str, value: object, declared: Mapping[str, SignalConfig], *, level: Level) -> None:
    """Refuse an unknown name or a value of another shape. Raises `BadRequest` that names the field.

    `level` is what the observation is about; a declared signal of the other level is refused.
    """
    _refuse_infinite(value)
    signal = declared.get(name)
    if name == ObservationName.RATING and signal is not None and signal.low is not None and not isinstance(value, bool):
        _check_declared(name, signal, value)
        return
    if name in BUILT_IN:
        _check_built_in(name, value)
        return
    if signal is None:
        known = ", ".join(sorted(BUILT_IN | set(declared)))
        raise BadRequest(
            f"no observation is named {name!r} (known: {known}); declare it under [policies.NAME.signals.{name}] or correct the name",
            param="name", code="unknown_name",
        )  # fmt: skip
    if signal.level != level:
        field = "inference_id" if signal.level == Level.TURN else "episode_id"
        raise BadRequest(f"{name!r} is declared with level {signal.level.value}: set {field}", param=field)
    _check_declared(name, signal, value)


def _refuse_infinite(value: object) -> None:
    """JSON has neither infinity nor NaN: they would be stored as null, with a success."""
    if isinstance(value, float) and not math.isfinite(value):
        raise BadRequest(f"{value} is no number that can be kept: send a finite one", param="value", code="not_finite")


def _check_built_in(name: str, value: object) -> None:
    if name == ObservationName.EDIT_PERSISTENCE:
        _check_persistence(value)
    elif name in _TEXT:
        if not isinstance(value, str):
            convert(value, str, "value")
    elif name in _FLAG:
        convert(value, bool, "value")
    elif name == ObservationName.RATING:
        convert(value, bool if isinstance(value, bool) else Rating, "value")
    elif name == ObservationName.TASK_SUCCESS:
        convert(value, bool if isinstance(value, bool) else Share, "value")
    elif name == ObservationName.TOOL_CALL:
        convert(value, ToolOutcome, "value")
    else:
        convert(value, Latency if isinstance(value, dict) else Seconds, "value")


def _check_persistence(value: object) -> None:
    if _has_texts(value):
        convert(value, RawEdit, "value")
        return
    measured: MeasuredPersistence = convert(value, MeasuredPersistence, "value")
    if measured.length is not None and measured.length > MOST_CHARACTERS:
        raise BadRequest(f"value.length is more than {MOST_CHARACTERS} characters: send how many were inserted", param="value.length")


def _has_texts(value: object) -> bool:
    return isinstance(value, dict) and not {"before", "inserted", "after"}.isdisjoint(cast(dict[str, object], value))


def _check_declared(name: str, signal: SignalConfig, value: object) -> None:
    python = {SignalType.BOOLEAN: bool, SignalType.FLOAT: float, SignalType.TEXT: str}[signal.type]
    if python is float and isinstance(value, bool):
        raise BadRequest(f"{name!r} is declared as float, not boolean", param="value")
    number = convert(value, python, "value")
    if signal.low is not None and signal.high is not None and not signal.low <= float(number) <= signal.high:
        raise BadRequest(f"{name!r} is declared from {signal.low:g} to {signal.high:g}, and this is {float(number):g}", param="value")


def convert(value: object, shape: type[T] | Any, field: str) -> T:  # noqa: ANN401 - `Annotated` types are no `type`
    """`msgspec.convert` that raises `BadRequest` with the field's path."""
    try:
        return msgspec.convert(value, shape)
    except msgspec.ValidationError as error:
        message, path = split_path(str(error))
        param = field + path if path else _named_field(field, message)
        raise BadRequest(f"{param}: {message}", param=param) from error


def split_path(text: str) -> tuple[str, str]:
    """A msgspec message and the path in it: ("Expected `str`, got `int`", ".a.b") from "… - at `$.a.b`"."""
    message, separator, path = text.partition(" - at `$")
    return message, path.rstrip("`") if separator else ""


def _named_field(field: str, message: str) -> str:
    """The field with the name of the part that is unknown or missing."""
    for marker in ("contains unknown field `", "missing required field `"):
        if marker in message:
            return f"{field}.{message.split(marker)[1].rstrip('`')}"
    return field
