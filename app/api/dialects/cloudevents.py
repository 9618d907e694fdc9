"""CloudEvents 1.0 over HTTP: structured, batched (an array of structured ones) and binary mode.

`type` says what `data` is: `ratchet.observation.v1` (a `Draft`; `id`, `source`, `time` come from the envelope),
`ratchet.retraction.v1` (a `RetractionDraft`), `ratchet.turn.v1` (a `TurnServed` of history, `source` `import:<name>`).
"""

from typing import Annotated

import msgspec

from app.api.entry.access import Caller
from app.api.telemetry.drafts import AwareTime, Desk, Draft, EventId, RetractionDraft, decode, refuse_unknown, source_of
from app.api.telemetry.intake import check_tree
from app.domain.errors import BadRequest
from app.domain.learning.rewards import segment_key
from app.domain.telemetry.events import CloudEvent, EventType
from app.domain.telemetry.moments import check_moments
from app.domain.telemetry.turns import Assignment, TurnServed
from app.listening.headers import Headers

MARK = b'"specversion"'
"""Only CloudEvents have this key; inside a JSON text its quotes would be escaped, so that searching the bytes is enough."""


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """The attributes that mean something to us; extension attributes are allowed by the standard and ignored."""

    specversion: str
    id: EventId
    source: Annotated[str, msgspec.Meta(min_length=1, max_length=120)]
    type: str
    time: AwareTime | None = None
    subject: str | None = None
    datacontenttype: str = "application/json"
    data: msgspec.Raw = msgspec.field(default_factory=lambda: msgspec.Raw(b"null"))


ID_CHARS, SOURCE_CHARS, SEGMENT_CHARS = 64, 120, 200
MOST_TOKENS = 2**31 - 1
"""What the columns of turns hold."""
_envelope = msgspec.json.Decoder(Envelope)
_draft = msgspec.json.Decoder(Draft)
_retraction = msgspec.json.Decoder(RetractionDraft)
_turn = msgspec.json.Decoder(TurnServed)


def is_binary(headers: Headers) -> bool:
    """Whether the attributes are in the headers and the body is the data alone."""
    return b"ce-specversion" in headers


def structured(body: bytes, headers: Headers) -> bytes:
    """A binary-mode request as a structured event."""
    attributes: dict[str, object] = {
        name[3:].decode("latin-1"): value.decode("latin-1") for name, value in headers.items() if name.startswith(b"ce-")
    }
    return msgspec.json.encode(attributes | {"data": msgspec.Raw(body or b"null")})


def event(raw: msgspec.Raw, desk: Desk, caller: Caller) -> CloudEvent:
    """The event inside an envelope. Raises `BadRequest`."""
    if len(memoryview(raw)) > desk.limits.event_bytes:
        raise BadRequest(f"the event is larger than {desk.limits.event_bytes} bytes", code="size")
    desk.refuse_crowded(raw)
    envelope: Envelope = decode(_envelope, raw)
    if envelope.specversion != "1.0":
        raise BadRequest(f"specversion {envelope.specversion!r} is not known: send 1.0", param="specversion")
    if envelope.type == EventType.OBSERVATION:
        return desk.observation(_with_envelope(decode(_draft, envelope.data), envelope), caller)
    if envelope.type == EventType.RETRACTION:
        draft: RetractionDraft = decode(_retraction, envelope.data)
        source = draft.source or _source(envelope)
        return desk.retraction(msgspec.structs.replace(draft, source=source, occurred_at=draft.occurred_at or envelope.time), caller)
    if envelope.type == EventType.TURN:
        turn: TurnServed = decode(_turn, envelope.data)
        refuse_unknown(envelope.data, TurnServed)
        return _imported(turn, desk, caller)
    known = ", ".join((EventType.OBSERVATION, EventType.RETRACTION, EventType.TURN))
    raise BadRequest(f"type {envelope.type!r} is not accepted here (known: {known})", param="type", code="unknown_type")


def _with_envelope(draft: Draft, envelope: Envelope) -> Draft:
    return msgspec.structs.replace(
        draft,
        id=envelope.id,
        source=draft.source or _source(envelope),
        occurred_at=draft.occurred_at or envelope.time,
        inference_id=draft.inference_id or (envelope.subject if draft.episode_id is None else None),
    )


def _source(envelope: Envelope) -> str:
    """The envelope's source (a URI reference) in our words: `sdk:<what it says>`, unless it is one of ours already."""
    if envelope.source in ("api", "collector") or envelope.source.startswith(("sdk:", "import:")):
        return envelope.source
    return "sdk:" + "".join(c if c.isalnum() or c in "._-" else "_" for c in envelope.source)[:100]


def _imported(turn: TurnServed, desk: Desk, caller: Caller) -> CloudEvent:
    """History: kept and labelled, never trained on, whatever it claims."""
    if not turn.source.startswith("import:"):
        raise BadRequest("only turns with source `import:<name>` can be sent; others come from the gateway", param="data.source")
    if turn.logprobs is not None or turn.completion_tokens or turn.prompt_tokens:
        raise BadRequest("an imported turn has no tokens and no log-probabilities of ours", param="data.logprobs")
    for field, said in (("routed_experts", turn.routed_experts), ("kept_log_mass", turn.kept_log_mass)):
        if said:
            raise BadRequest(f"an imported turn has no tokens of ours: leave `{field}` out", param=f"data.{field}")
    if turn.payload is not msgspec.UNSET:
        raise BadRequest("an imported turn carries its own content: leave `payload` out", param="data.payload")
    if turn.policy not in desk.policies or caller.policy not in (None, turn.policy):
        raise BadRequest(f"no policy is named {turn.policy!r} for this key", param="data.policy", code="unknown_policy")
    _refuse_oversized(turn)
    try:
        check_moments(received_at=desk.clock(), started_at=turn.started_at, finished_at=turn.finished_at)
    except ValueError as error:
        raise BadRequest(str(error), param=f"data.{str(error).partition(' ')[0]}") from error
    check_tree(msgspec.to_builtins(turn, builtin_types=(bytes,)), desk.limits)
    source = source_of(turn.source, caller)
    turn = desk.imported(msgspec.structs.replace(turn, source=source, assignment=Assignment()))  # a release is not for history to claim
    return CloudEvent(
        id=turn.inference_id, source=source, type=EventType.TURN.value, time=turn.finished_at, key=turn.episode_id,
        data=msgspec.json.encode(turn),
    )  # fmt: skip


def _refuse_oversized(turn: TurnServed) -> None:
    """Refuse words and numbers that no column holds: accepted they would be buried when they are applied.

    Raises `BadRequest` with the field.
    """
    words = {"inference_id": turn.inference_id, "episode_id": turn.episode_id, "version": turn.version}
    for field, word in words.items():
        if not 0 < len(word) <= ID_CHARS:
            raise BadRequest(f"{field} has 1 to {ID_CHARS} characters", param=f"data.{field}")
    if len(turn.source) > SOURCE_CHARS:
        raise BadRequest(f"source has at most {SOURCE_CHARS} characters", param="data.source")
    if turn.kind not in ("answer", "summary"):
        raise BadRequest("kind is `answer` or `summary`", param="data.kind")
    if len(segment_key(turn.segment)) > SEGMENT_CHARS:
        raise BadRequest(f"the segment has more than {SEGMENT_CHARS} characters together", param="data.segment")
    counts = {"usage.prompt_tokens": turn.usage.prompt_tokens, "usage.completion_tokens": turn.usage.completion_tokens}
    for field, number in counts.items():
        if not 0 <= number <= MOST_TOKENS:
            raise BadRequest(f"{field} is {number}: send 0 to {MOST_TOKENS}", param=f"data.{field}")
    if abs(top_k := turn.sampling.top_k or 0) > MOST_TOKENS:
        raise BadRequest(f"sampling.top_k is {top_k}: send at most {MOST_TOKENS}, or 0 for all tokens", param="data.sampling.top_k")
