"""The way into the inbox for everything that is not a turn of our own: one answer per event, in order, after the commit."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from app.api.entry.access import Caller
from app.api.metrics import Metrics
from app.api.telemetry.drafts import Desk, Draft, RetractionDraft, TimedHere
from app.api.telemetry.intake import characters
from app.api.workshop import Workshop
from app.domain.errors import BadRequest
from app.domain.ports import Inbox, Ledger, Receipt
from app.domain.telemetry.events import CloudEvent, Observation

_STATUS = {receipt: receipt.value for receipt in Receipt}


class Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What became of one event."""

    id: str | None
    status: str
    """`accepted`, `duplicate`, `conflict` or `rejected`."""
    reason: str | None = None
    param: str | None = None
    code: str | None = None


@dataclass(frozen=True, kw_only=True)
class Door:
    """Commits events; what is refused never reaches the inbox."""

    inbox: Inbox
    desk: Desk
    ledger: Ledger
    metrics: Metrics
    workshop: Workshop

    async def observe(self, draft: Draft, caller: Caller) -> Answer:
        """One observation. Raises `BadRequest` where it is refused."""
        return (await self.commit([await self.prepared(draft, caller)]))[0]

    async def prepared(self, draft: Draft, caller: Caller) -> CloudEvent:
        """The event of a draft, its texts redacted beside the event loop where there is much to read. Raises as `Desk.observation` does."""
        work = partial(self.desk.observation, draft, caller)
        return await self.workshop.do(work, chars=self.to_redact(draft), share=caller.share)

    def to_redact(self, draft: Draft) -> int:
        """Characters that will be searched for personal data; 0 where no policy asks for it."""
        return characters(draft.said, at_most=self.desk.limits.redacted_chars) if self.desk.redacts else 0

    async def retract(self, draft: RetractionDraft, caller: Caller) -> Answer:
        """One retraction."""
        return (await self.commit([self.desk.retraction(draft, caller)]))[0]

    async def commit(self, prepared: Sequence[CloudEvent | Answer]) -> list[Answer]:
        """Commit the events among the prepared ones; what is an answer already stays one."""
        events = [item for item in prepared if isinstance(item, CloudEvent)]
        receipts = await self.inbox.append(events) if events else []
        if Receipt.CONFLICT in receipts:
            receipts = [await self._settle(event, receipt) for event, receipt in zip(events, receipts, strict=True)]
        settled = iter(receipts)
        answers = [_answer(item, next(settled)) if isinstance(item, CloudEvent) else item for item in prepared]
        self.metrics.count_events([answer.status for answer in answers])
        return answers

    async def _settle(self, event: CloudEvent, receipt: Receipt) -> Receipt:
        """A repeat that left the time to us differs in it alone: that is a duplicate, not a conflict."""
        if receipt is not Receipt.CONFLICT or not isinstance(event, TimedHere):
            return receipt
        stored = await asyncio.to_thread(self.ledger.observation, event.source, event.id)
        if stored is None:
            return receipt
        sent = msgspec.json.decode(event.data, type=Observation)
        return Receipt.DUPLICATE if msgspec.structs.replace(sent, occurred_at=stored.occurred_at) == stored else receipt


def rejected(error: BadRequest, *, event_id: str | None = None) -> Answer:
    """The answer for an event that was refused."""
    return Answer(id=event_id, status="rejected", reason=str(error), param=error.param, code=error.code)


def _answer(event: CloudEvent, receipt: Receipt) -> Answer:
    if receipt is Receipt.CONFLICT:
        return Answer(id=event.id, status="conflict", reason="another event has this id already: it stays", code="conflict")
    return Answer(id=event.id, status=_STATUS[receipt])
