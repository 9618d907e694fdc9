"""The inbox in memory, behaving as the real one: for tests of whoever stands in front of it."""

from collections.abc import Sequence

from app.domain.errors import Overloaded
from app.domain.ports import Receipt
from app.domain.telemetry.events import CloudEvent


class MemoryInbox:
    """Keeps events in a dict; set `refusing` to make it shut its door."""

    def __init__(self) -> None:
        self.events: dict[tuple[str, str], CloudEvent] = {}
        self.refusing = False

    async def append(self, events: Sequence[CloudEvent]) -> list[Receipt]:
        """Answer per event as the real inbox does."""
        if self.refusing:
            raise Overloaded("more than 0 events wait for the relay: is `ratchet relay` running?", retry_after_s=1.0)
        return [self._keep(event) for event in events]

    def _keep(self, event: CloudEvent) -> Receipt:
        stored = self.events.setdefault((event.source, event.id), event)
        if stored is event:
            return Receipt.ACCEPTED
        return Receipt.DUPLICATE if (stored.type, stored.data) == (event.type, event.data) else Receipt.CONFLICT
