"""`POST /v1/events`: observations, retractions and imported turns, one or many, with one answer per event.

The fast lane: plain ASGI and msgspec, past FastAPI's routing, which costs more than everything done here.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import msgspec
from starlette.types import Receive, Send
from starlette.types import Scope as AsgiScope

from app.api.dialects import cloudevents
from app.api.entry.access import Access, Caller
from app.api.errors import problem
from app.api.telemetry.door import Answer, Door, rejected
from app.api.telemetry.drafts import members
from app.api.telemetry.intake import Intake
from app.api.workshop import unhurried
from app.domain.access import Scope
from app.domain.errors import BadRequest, RatchetError
from app.domain.telemetry.events import CloudEvent
from app.listening.headers import Headers, header

AT_ONCE = 10_000
"""Commas in a body, those in texts included, up to which its events are looked at on the event loop: half a microsecond a value."""
KEY_CHARS = 176
"""Of an idempotency key; with the number of an event behind it an id, which has 180."""
_encode = msgspec.json.Encoder().encode
_JSON = (b"content-type", b"application/json")
DEDUPE_HEADER = b"ratchet-dedupe-seconds"
"""For how long the same event sent again changes nothing; absent where that is for ever."""


class Answers(msgspec.Struct, frozen=True, kw_only=True):
    """The body of the answer, in the order of the events."""

    results: list[Answer]


@dataclass(frozen=True, kw_only=True)
class EventsRoute:
    """The endpoint as an ASGI application."""

    access: Access
    intake: Intake
    door: Door
    known_for: timedelta | None = None
    """How long an event is known again (`[retention]`); None is for ever."""

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        """Answer 202 when any event was taken, 422 when none was valid, 4xx/503 for the whole body."""
        try:
            status, body, extra = await self._answer(scope, receive)
        except RatchetError as error:
            answer = problem(error)
            self.door.metrics.refused.labels(str(answer.status)).inc()
            status, body = answer.status, answer.body
            extra = [(name.lower().encode(), value.encode()) for name, value in answer.headers.items()]
        headers = [_JSON, (b"content-length", str(len(body)).encode()), *extra]
        if self.known_for is not None:
            headers.append((DEDUPE_HEADER, str(int(self.known_for.total_seconds())).encode()))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _answer(self, scope: AsgiScope, receive: Receive) -> tuple[int, bytes, list[tuple[bytes, bytes]]]:
        headers = dict(scope["headers"])
        caller = await self.access.caller(headers, Scope.INGEST, cost=0)
        body = await self.intake.read(scope, receive)
        read = len(body)
        try:
            if cloudevents.is_binary(headers):
                body = cloudevents.structured(body, headers)
            events = self._charged(body, headers, caller)
            chars = len(body) if self.door.desk.redacts or body.count(b",") > AT_ONCE else 0
            steps = self._prepare(events, body, headers, caller)
            prepared = await self.door.workshop.do(lambda: unhurried(steps, chars=chars), chars=chars, share=caller.share)
            answers = await self.door.commit(prepared)
        finally:
            self.intake.release(read)
        status = 202 if any(answer.status != "rejected" for answer in answers) else 422
        return status, _encode(Answers(results=answers)), []

    def _charged(self, body: bytes, headers: Headers, caller: Caller) -> list[msgspec.Raw]:
        """The events' JSON, each counted against the caller's rate before anything is done with it; a broken body counts as one."""
        events: list[msgspec.Raw] = []
        try:
            events = self._split(body, headers)
        finally:
            self.access.permit(caller, Scope.INGEST, cost=max(1, len(events)))
        if not events:
            raise BadRequest("there is no event in the body", code="empty")
        return events

    def _prepare(self, events: Sequence[msgspec.Raw], body: bytes, headers: Headers, caller: Caller) -> Iterator[CloudEvent | Answer]:
        key = _key(headers)
        enveloped = cloudevents.MARK in body
        for index, raw in enumerate(events):
            fallback = None if key is None else (key if len(events) == 1 else f"{key}:{index}")
            yield self._prepare_one(raw, caller, fallback, enveloped=enveloped)

    def _split(self, body: bytes, headers: Headers) -> list[msgspec.Raw]:
        """The events' JSON: an array's members, an NDJSON body's lines, or the one object."""
        kind = header(headers, b"content-type") or ""
        start = body[:64].lstrip()[:1]
        events: list[msgspec.Raw]
        if "ndjson" in kind or "jsonl" in kind:
            events = [msgspec.Raw(line) for line in body.split(b"\n") if line.strip()]
        elif start == b"[":
            events = members(body, most=self.intake.limits.batch_events)
        else:
            events = [msgspec.Raw(body)]
        limit = self.intake.limits.batch_events
        if len(events) > limit:
            raise BadRequest(f"{len(events)} events are more than {limit} in one body: send smaller batches", code="too_many_events")
        return events

    def _prepare_one(self, raw: msgspec.Raw, caller: Caller, fallback_id: str | None, *, enveloped: bool) -> CloudEvent | Answer:
        desk = self.door.desk
        try:
            if enveloped and cloudevents.MARK in bytes(memoryview(raw)):
                return cloudevents.event(raw, desk, caller)
            draft = desk.decode(raw)
            if draft.id is None and fallback_id is not None:
                draft = msgspec.structs.replace(draft, id=fallback_id)
            return desk.observation(draft, caller)
        except BadRequest as error:
            return rejected(error, event_id=_id_of(raw))


def _key(headers: Headers) -> str | None:
    """What the sender calls the body. Raises `BadRequest`: a longer one would be an id that no database holds."""
    key = header(headers, b"idempotency-key")
    if key is not None and len(key) > KEY_CHARS:
        raise BadRequest(f"the idempotency key has more than {KEY_CHARS} characters", param="idempotency-key")
    return key or None


class _Identified(msgspec.Struct):
    id: str | None = None


_identified = msgspec.json.Decoder(_Identified)


def _id_of(raw: msgspec.Raw) -> str | None:
    """The id of an event that was refused, where it has a readable one."""
    try:
        return _identified.decode(raw).id
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
