"""From other systems' scores to our observations: what a score's name, value and trace id mean."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, cast
from uuid import UUID

import msgspec

from app.api.telemetry.drafts import Desk, Draft, ambiguous
from app.domain.errors import BadRequest
from app.domain.policies import SignalConfig, SignalType
from app.domain.telemetry.signals import BUILT_IN, ObservationName

THUMBS = frozenset({
    "thumb", "thumbs", "thumbs_up", "thumbs-up", "user_score", "user-score", "user_feedback", "user-feedback", "feedback", "score",
    "like", "helpful", "user_rating", "rating",
})  # fmt: skip
"""Names under which products send a thumb or a rating."""
YES, NO = (
    frozenset({"thumbs-up", "thumbs_up", "up", "👍", "pass", "yes", "true"}),
    frozenset({"thumbs-down", "thumbs_down", "down", "👎", "fail", "no", "false"}),
)
"""Labels under which they say how it went."""
_FLAGS = frozenset({ObservationName.RATING, ObservationName.UNDO, ObservationName.REGENERATE, ObservationName.TASK_SUCCESS})
Declared = Mapping[str, SignalConfig]
"""The signals of one policy."""
SUFFIXES = ("", ":comment", ":demonstration")


@dataclass(frozen=True, kw_only=True)
class Signal:
    """One score of another system."""

    id: str
    key: str
    value: Any
    inference_id: str | None
    episode_id: str | None = None
    comment: str | None = None
    demonstration: str | None = None
    occurred_at: datetime | None
    source: str
    actor: str | None = None
    tags: dict[str, str] = field(default_factory=dict[str, str])
    """What else the other system said about it, kept beside the value."""


def drafts(signal: Signal, desk: Desk, policy: str | None = None) -> Iterator[Draft]:
    """The observations of a score: its value, its comment, its correction; ids of the latter two derive from the first.

    It is read as the caller's policy declares its signals. Raises `BadRequest` where there is none of the three; and where the policy is
    not known and policies would read it differently.
    """
    value, comment, demonstration = SUFFIXES
    if signal.value is not None:
        yield _draft(signal, value, *_read(signal, desk, policy))
    if signal.comment:
        yield _draft(signal, comment, ObservationName.COMMENT, signal.comment)
    if signal.demonstration:
        yield _draft(signal, demonstration, ObservationName.DEMONSTRATION, signal.demonstration)
    if signal.value is None and not signal.comment and not signal.demonstration:
        raise BadRequest("there is neither a value nor a comment nor a correction", param="value")


def _read(signal: Signal, desk: Desk, policy: str | None) -> tuple[str, object]:
    """Name and value."""
    vocabularies = desk.vocabularies(policy)
    if signal.key not in BUILT_IN and signal.key.lower() not in THUMBS:  # to those that do not declare it, it means nothing
        vocabularies = [signals for signals in vocabularies if signal.key in signals] or [{}]
    read = [_read_by(signal, signals) for signals in vocabularies]
    if any((name, type(value), value) != (read[0][0], type(read[0][1]), read[0][1]) for name, value in read[1:]):
        raise ambiguous(signal.key)
    return read[0]


def _read_by(signal: Signal, declared: Declared) -> tuple[str, object]:
    name = observation_name(signal.key, declared)
    return name, _value(name, _scaled(signal, name, declared), declared)


def observation_name(key: str, declared: Declared) -> str:
    """Ours where the name is one of ours or declared, a rating where it is one of those used for thumbs, else as it is (and refused)."""
    if key in BUILT_IN or key in declared:
        return key
    return ObservationName.RATING if key.lower() in THUMBS else key


def text_of(correction: object) -> str | None:
    """A correction as the text that the answer should have been: a text, or an object with just that. Raises `BadRequest` for others,
    of which a part would be lost."""
    if correction is None or isinstance(correction, str):
        return correction
    values = list(cast("dict[str, object]", correction).values()) if isinstance(correction, dict) else []
    if len(values) != 1 or not isinstance(values[0], str):
        raise BadRequest("a correction is the text that the answer should have been, or an object with that text alone", param="correction")
    return values[0]


def inference_of(trace_id: str | None) -> str | None:
    """The inference a trace id stands for: `tr-<32 hex>` and `<32 hex>` are the UUID without its hyphens."""
    if trace_id is None:
        return None
    found = re.fullmatch(r"(?:tr-)?([0-9a-fA-F]{32})", trace_id)
    return str(UUID(found.group(1))) if found else trace_id


def named_inference(metadata: object) -> str | None:
    """The inference id that a product put into a score's metadata."""
    value = metadata.get("inference_id") if isinstance(metadata, dict) else None
    return value if isinstance(value, str) else None


_METADATA = "metadata."


def beside(metadata: object = None, **said: object) -> dict[str, str]:
    """Whatever else a system says about a score, as tags: each entry of its metadata under `metadata.NAME` (but the inference that it
    names), each part of `said` that is there under its own name; what is no text is kept as JSON."""
    entries = {name: value for name, value in said.items() if value is not None}
    if isinstance(metadata, dict):
        named = {"inference_id"} if named_inference(metadata) is not None else set[str]()
        entries |= {_METADATA + name: value for name, value in cast("dict[str, object]", metadata).items() if name not in named}
    elif metadata is not None:
        entries["metadata"] = metadata
    return {name: value if isinstance(value, str) else msgspec.json.encode(value).decode() for name, value in entries.items()}


def metadata_in(tags: Mapping[str, str]) -> dict[str, str]:
    """The entries of metadata that `beside` put into tags."""
    return {name.removeprefix(_METADATA): text for name, text in tags.items() if name.startswith(_METADATA)}


def structure_in(tags: Mapping[str, str], name: str) -> dict[str, Any] | None:
    """What `beside` put into a tag as JSON; None where it is not there, or another thing. A tag that was redacted is no JSON."""
    try:
        return msgspec.json.decode(tags.get(name, ""), type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):  # a text that somebody gave a tag is of any depth
        return None


def _scaled(signal: Signal, name: str, declared: Declared) -> object:
    """The value, where it says what it means. Raises `BadRequest` for a number under a thumb's name whose scale nobody declared:
    0.2 of 1 and 2 of 5 stars are complaints, and would be read as praise."""
    value = signal.value
    says_so = signal.key == name or name in declared
    if name != ObservationName.RATING or says_so or not isinstance(value, int | float) or value in (0, 1):
        return value
    raise BadRequest(
        f"{signal.key!r} is {value!r}, on which scale? Declare [policies.NAME.signals.{signal.key}] with the type float and its ends",
        param="value", code="scale",
    )  # fmt: skip


def _value(name: str, value: object, declared: Declared) -> object:
    """These systems send booleans as 0 and 1 or as labels: a thumb down is false, not a rating of zero. On a declared scale it is zero."""
    signal = declared.get(name)
    if name not in _FLAGS and (signal is None or signal.type != SignalType.BOOLEAN):
        return value
    if isinstance(value, str):
        return True if value.lower() in YES else False if value.lower() in NO else value
    if signal is not None and signal.low is not None:
        return value
    return bool(value) if isinstance(value, int | float) and value in (0, 1) else value


def _draft(signal: Signal, suffix: str, name: str, value: object) -> Draft:
    return Draft(
        id=signal.id + suffix, name=name, value=value, inference_id=signal.inference_id, episode_id=signal.episode_id,
        occurred_at=signal.occurred_at, source=signal.source, actor=signal.actor,
        tags={**signal.tags, **({"key": signal.key} if signal.key != name else {})},
    )  # fmt: skip
