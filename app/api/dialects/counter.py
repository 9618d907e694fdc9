"""What every dialect does alike: read a body, put a score in, correct it, take it back.

The other systems overwrite a score that is sent again under its id; here an accepted event never changes. A correction therefore
becomes a revision with an id of its own (`<id>#2`, `<id>#3`, …), and the revision before it is retracted. So does what is said again
after it was taken back or replaced, unless it has the time of when it was said first: then it is a repetition that came late.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from app.api.chat.style import bounded
from app.api.dialects.naming import SUFFIXES, Signal, drafts
from app.api.entry.access import Access, Caller
from app.api.telemetry.door import Door
from app.api.telemetry.drafts import Draft, RetractionDraft, source_of
from app.api.telemetry.intake import Intake
from app.api.workshop import SMALL_CHARS, breathe
from app.domain.access import Scope
from app.domain.errors import BadRequest
from app.domain.telemetry.events import RETRACTED, CloudEvent, Observation

T = TypeVar("T")
R = TypeVar("R")
MAX_REVISIONS = 32
MOST_BRACKETS = 20_000
"""`{` and `[` in one body: at most two milliseconds to decode."""
EVENT_CHARS = 50
"""What preparing an event costs, in characters to redact: more than ten of them are prepared beside the event loop."""


def or_refused(make: Callable[[], T]) -> T | BadRequest:
    """What comes of it, or why it was refused. One step of work beside the loop."""
    breathe()
    try:
        return make()
    except BadRequest as error:
        return _bare(error)


def _bare(error: BadRequest) -> BadRequest:
    """The error without where it was raised and what caused it: tracebacks hold the frames of who asked, which hold the errors.

    Such circles, thousands of objects a request, are found by the collector alone, 20 ms at a time.
    """
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


@dataclass(frozen=True, kw_only=True)
class Counter:
    """The counter at which other systems' clients hand in their scores."""

    access: Access
    intake: Intake
    door: Door

    @asynccontextmanager
    async def body(
        self, request: Request, *, max_bytes: int | None = None, charged: bool = True, on_loop: bool = True
    ) -> AsyncIterator[tuple[Caller, bytes]]:
        """The caller, allowed to ingest, and the body. Raises `RatchetError`.

        A body of one record is `charged` here; one of several when its records are counted, before any of them is worked on (`charge`).
        Who does not decode it `on_loop` has to see by himself how many objects it makes.
        """
        caller = await self.access.caller(dict(request.scope["headers"]), Scope.INGEST, cost=1 if charged else 0)
        raw = await self.intake.read(request.scope, request.receive, max_bytes=max_bytes)
        try:
            yield caller, bounded(raw, most=MOST_BRACKETS) if on_loop else raw
        finally:
            self.intake.release(len(raw))

    def charge(self, caller: Caller, records: int, *, most: int | None = None) -> None:
        """Count the records of a body against the caller's rate. Raises `Overloaded`; `BadRequest` for more than a body may have."""
        allowed = self.intake.limits.batch_events if most is None else most
        if records > allowed:
            raise BadRequest(f"more than {allowed} in one body: send smaller batches", code="too_many_events")
        self.access.permit(caller, Scope.INGEST, cost=max(1, records))

    async def check(self, signal: Signal, caller: Caller) -> list[Draft]:
        """The observations of a score, all of them valid. Raises `BadRequest`."""
        found = list(drafts(signal, self.door.desk, caller.policy))
        for draft in found:
            await self.door.prepared(draft, caller)
        return found

    async def put(self, signal: Signal, caller: Caller) -> None:
        """Accept a score, or its correction. Raises `BadRequest` and stores nothing where any part of it is wrong."""
        for draft in await self.check(signal, caller):
            await self._put(draft, caller, first=1)

    async def put_all(self, records: Sequence[R], signal_of: Callable[[R], Signal], caller: Caller) -> list[BadRequest | None]:
        """Accept many scores in one commit, each wholly or not at all; for each what was wrong."""
        read = partial(self._read, records, signal_of, caller)
        said, is_long = await self.door.workshop.do(read, chars=EVENT_CHARS * len(records), share=caller.share)
        if is_long:  # each waits for its turn, and others' come between
            return [found if isinstance(found, BadRequest) else await self._refused(self._checked(found, caller)) for found in said]
        work = partial(self._prepared, said, caller)
        chars = EVENT_CHARS * sum(len(found) for found in said if isinstance(found, list))
        ready = await self.door.workshop.do(work, chars=chars, share=caller.share)
        events = [event for found in ready if isinstance(found, list) for event in found]
        answers = iter(await self.door.commit(events))
        taken = [[] if isinstance(d, BadRequest) or isinstance(e, BadRequest) else d for d, e in zip(said, ready, strict=True)]
        told = [[(draft, next(answers).status) for draft in found] for found in taken]
        gone = await self._taken_back([draft for found in told for draft, status in found if status == "duplicate"], caller)
        wrong: list[BadRequest | None] = []
        for found, pairs in zip(ready, told, strict=True):
            again = [draft for draft, status in pairs if status == "conflict" or (status == "duplicate" and draft.id in gone)]
            wrong.append(found if isinstance(found, BadRequest) else await self._refused(self._corrected(again, caller)))
        return wrong

    def _read(
        self, records: Sequence[R], signal_of: Callable[[R], Signal], caller: Caller
    ) -> tuple[list[list[Draft] | BadRequest], bool]:  # fmt: skip
        """The observations of each, and whether there is much in any of them that is searched for personal data."""
        said = [or_refused(partial(self._drafts, record, signal_of, caller)) for record in records]
        parts = (draft for found in said if isinstance(found, list) for draft in found)
        return said, any(self.door.to_redact(draft) > SMALL_CHARS for draft in parts)

    def _drafts(self, record: R, signal_of: Callable[[R], Signal], caller: Caller) -> list[Draft]:
        return list(drafts(signal_of(record), self.door.desk, caller.policy))

    def _prepared(self, said: Sequence[list[Draft] | BadRequest], caller: Caller) -> list[list[CloudEvent] | BadRequest]:
        return [found if isinstance(found, BadRequest) else or_refused(partial(self._events, found, caller)) for found in said]

    def _events(self, found: Sequence[Draft], caller: Caller) -> list[CloudEvent]:
        return [self.door.desk.observation(draft, caller) for draft in found]

    async def _checked(self, found: Sequence[Draft], caller: Caller) -> None:
        for draft in found:
            await self.door.prepared(draft, caller)
        for draft in found:
            await self._put(draft, caller, first=1)

    async def _corrected(self, again: Sequence[Draft], caller: Caller) -> None:
        for draft in again:
            await self._put(draft, caller, first=2)

    @staticmethod
    async def _refused(putting: Awaitable[None]) -> BadRequest | None:
        try:
            await putting
        except BadRequest as error:
            return _bare(error)
        return None

    async def say(self, draft: Draft, caller: Caller) -> None:
        """Accept an observation, or its correction under the same id. Raises `BadRequest`."""
        await self._replace(draft, caller)

    async def replace(self, signal: Signal, caller: Caller) -> None:
        """Accept a correction that is one whatever it says: back to an earlier value is no repetition of that. Raises as `put` does."""
        for draft in await self.check(signal, caller):
            await self._replace(draft, caller)

    async def take_back(self, source: str, score_id: str, caller: Caller) -> None:
        """Retract a score with all its parts and revisions; before it arrived, its first revision."""
        for observation_id in await self._seen(source, score_id, SUFFIXES, caller) or [score_id]:
            await self.door.retract(RetractionDraft(observation_id=observation_id, source=source), caller)

    async def find(self, source: str, score_id: str, caller: Caller) -> Observation | None:
        """A part of a score that was accepted under this id: its value where it has one, else its comment or correction."""
        for suffix in SUFFIXES:
            for observation_id in await self._seen(source, score_id, (suffix,), caller):
                return await asyncio.to_thread(self.door.ledger.observation, source_of(source, caller), observation_id)
        return None

    async def _replace(self, draft: Draft, caller: Caller) -> None:
        """Accept it as the newest revision."""
        assert draft.id is not None
        seen = await self._seen(draft.source or "api", draft.id, ("",), caller)
        newest = max((n for n in range(1, MAX_REVISIONS + 1) if _revision(draft.id, n) in seen), default=1)
        await self._put(draft, caller, first=newest)

    async def _seen(self, source: str, score_id: str, suffixes: Sequence[str], caller: Caller) -> list[str]:
        candidates = [_revision(score_id + suffix, number) for suffix in suffixes for number in range(1, MAX_REVISIONS + 1)]
        return sorted(await asyncio.to_thread(self.door.ledger.seen, source_of(source, caller), candidates))

    async def _taken_back(self, said: Sequence[Draft], caller: Caller) -> set[str | None]:
        """Ids of those of the accepted observations that do not stand any more, where to say them again is to give them again: what has
        a time of its own and is sent with the same is a repetition, however late it comes."""
        ids: dict[str, list[str]] = defaultdict(list)
        for draft in said:
            if draft.occurred_at is None and draft.id is not None:
                ids[source_of(draft.source, caller)].append(draft.id + RETRACTED)
        found = [await asyncio.to_thread(self.door.ledger.seen, source, some) for source, some in ids.items()]
        return {id_.removesuffix(RETRACTED) for some in found for id_ in some}

    async def _put(self, draft: Draft, caller: Caller, *, first: int) -> None:
        """Find the first revision that is free, or says the same and stands, from the `first` on."""
        assert draft.id is not None
        for number in range(first, MAX_REVISIONS + 1):
            revision = msgspec.structs.replace(draft, id=_revision(draft.id, number))
            answer = await self.door.observe(revision, caller)
            if answer.status == "accepted" and number > 1:
                await self.door.retract(RetractionDraft(observation_id=_revision(draft.id, number - 1), source=draft.source), caller)
            again = answer.status == "duplicate" and await self._taken_back([revision], caller)
            if answer.status != "conflict" and not again:
                return
        raise BadRequest(f"{draft.id} was corrected {MAX_REVISIONS} times: send a new score under an id of its own", param="id")


def _revision(observation_id: str, number: int) -> str:
    return observation_id if number == 1 else f"{observation_id}#{number}"


def json_response(value: object, status: int = 200) -> Response:
    """Any JSON value as a response."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")
