"""LangSmith's feedback (client 0.14.17): `GET /info`, `POST /feedback` told from TensorZero's by its body, `GET /feedback`, `PATCH` and
`DELETE /feedback/{id}`.

`run_id` is the inference id. `comment` and `correction` become a comment and a demonstration of the same turn.
"""

import asyncio
from collections.abc import Collection, Sequence
from typing import Any

import msgspec
from starlette.responses import Response

from app.api.dialects.counter import Counter
from app.api.dialects.naming import Signal, beside, inference_of, structure_in, text_of
from app.api.entry.access import Caller
from app.api.telemetry.drafts import AwareTime, EventId, Label, TargetId, decode
from app.domain.errors import BadRequest, NotFound
from app.domain.telemetry.events import Observation
from app.domain.telemetry.signals import ObservationName

SOURCE = "sdk:langsmith"
TEXTS = frozenset({ObservationName.COMMENT, ObservationName.DEMONSTRATION})


class LangSmithFeedback(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body as the client sends it; what is `Any` here means nothing to us and is kept beside the value."""

    id: EventId
    key: Label
    run_id: TargetId | None = None
    trace_id: TargetId | None = None
    session_id: TargetId | None = None
    score: float | bool | None = None
    value: Any = None
    comment: str | None = None
    correction: Any = None
    created_at: AwareTime | None = None
    modified_at: AwareTime | None = None
    start_time: AwareTime | None = None
    feedback_source: Any = None
    feedback_config: Any = None
    feedback_group_id: str | None = None
    comparative_experiment_id: str | None = None
    extend_trace_retention: bool | None = None
    extra: Any = None
    error: bool | None = None


class LangSmithUpdate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the client's `update_feedback` sends: the parts that change."""

    score: float | bool | None = None
    value: Any = None
    comment: str | None = None
    correction: Any = None


class _Shape(msgspec.Struct):
    metric_name: Any = None
    key: Any = None


_body = msgspec.json.Decoder(LangSmithFeedback)
_update = msgspec.json.Decoder(LangSmithUpdate)
_shape = msgspec.json.Decoder(_Shape)


def is_feedback(raw: bytes) -> bool:
    """Whether a body posted to `/feedback` is LangSmith's."""
    try:
        shape = _shape.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    return shape.metric_name is None and shape.key is not None


def info() -> dict[str, Any]:
    """What the client asks for before its first request.

    No multipart ingestion: with it the client puts feedback that has a trace id into its queue of traces and tells the caller that it
    succeeded, whatever becomes of it; without it the client waits for our answer. The other figures are the client's own defaults.
    """
    batches = {
        "use_multipart_endpoint": False, "size_limit": 100, "size_limit_bytes": 20_971_520, "scale_up_nthreads_limit": 16,
        "scale_up_qsize_trigger": 1000, "scale_down_nempty_trigger": 4,
    }  # fmt: skip
    return {"version": "0.14.0", "batch_ingest_config": batches, "instance_flags": {}}


async def post(raw: bytes, counter: Counter, caller: Caller) -> Response:
    """Take one piece of feedback; the answer is the body, as LangSmith's is."""
    body: LangSmithFeedback = decode(_body, raw)
    run = body.run_id or body.trace_id
    signal = Signal(
        id=body.id, key=body.key, value=body.score if body.score is not None else body.value, inference_id=inference_of(run),
        episode_id=body.session_id if run is None else None, comment=body.comment, demonstration=text_of(body.correction),
        occurred_at=body.modified_at or body.created_at, source=SOURCE,
        tags=beside(
            label=body.value if body.score is not None else None, feedback_source=body.feedback_source, extra=body.extra, error=body.error,
            feedback_config=body.feedback_config, feedback_group_id=body.feedback_group_id,
            comparative_experiment_id=body.comparative_experiment_id,
        ),
    )  # fmt: skip
    await counter.put(signal, caller)
    return Response(raw, 200, media_type="application/json")


async def patch(feedback_id: str, raw: bytes, counter: Counter, caller: Caller) -> Response:
    """Correct feedback: the update does not repeat what it is about, so that is looked up. Raises `NotFound`, `BadRequest`."""
    body: LangSmithUpdate = decode(_update, raw)
    known = await counter.find(SOURCE, feedback_id, caller)
    if known is None:
        raise NotFound(f"no feedback was accepted under the id {feedback_id!r}: create it first")
    value = body.score if body.score is not None else body.value
    if value is not None and known.name in TEXTS:
        raise BadRequest(
            f"{feedback_id} came without a score, so its name is not known: send the score under an id of its own", param="score"
        )
    signal = Signal(
        id=feedback_id, key=known.tags.get("key", known.name), value=value, inference_id=known.inference_id,
        episode_id=known.episode_id, comment=body.comment,
        demonstration=text_of(body.correction), occurred_at=None, source=SOURCE,
        tags={name: text for name, text in known.tags.items() if name not in ("key", "label")},
    )  # fmt: skip
    await counter.replace(signal, caller)
    return Response(raw, 200, media_type="application/json")


async def listed(
    inference_ids: Sequence[str], keys: Collection[str], sources: Collection[str], counter: Counter, caller: Caller
) -> list[dict[str, Any]]:
    """The standing feedback about these runs under these keys from these kinds of source (all where none is named), as the client's
    `list_feedback` reads it."""
    runs = {inference: run for run in inference_ids if (inference := inference_of(run)) is not None}
    ledger = counter.door.ledger
    heard = await asyncio.to_thread(lambda: ledger.about(inference_ids=list(runs), policy=caller.policy))
    found: dict[str, dict[str, Any]] = {}
    for observation in (h.observation for h in heard if not h.retracted and h.observation.source.partition("@")[0] == SOURCE):
        _add(found, observation, runs[observation.inference_id or ""])
    return [
        item for item in found.values()
        if (not keys or item["key"] in keys) and (not sources or (item["feedback_source"] or {}).get("type") in sources)
    ]  # fmt: skip


def _add(found: dict[str, dict[str, Any]], observation: Observation, run_id: str) -> None:
    """Put an observation into the feedback it is a part of: the score, the comment or the correction."""
    feedback_id, _, part = observation.id.partition("#")[0].partition(":")
    known = found.setdefault(feedback_id, {
        "id": feedback_id, "run_id": run_id, "trace_id": run_id, "key": "unnamed", "score": None, "value": None, "comment": None,
        "correction": None, "created_at": observation.occurred_at, "modified_at": observation.occurred_at,
        "feedback_source": structure_in(observation.tags, "feedback_source"),
    })  # fmt: skip
    known["modified_at"] = max(known["modified_at"], observation.occurred_at)
    if part == "comment":
        known["comment"] = observation.value
    elif part == "demonstration":
        known["correction"] = {"output": observation.value}
    else:
        known["key"] = observation.tags.get("key", observation.name)
        known["score" if isinstance(observation.value, int | float) else "value"] = observation.value
