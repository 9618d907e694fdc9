"""The api's metrics: its own, and those of the whole loop as the database knows it (read when scraped)."""

from collections import Counter as TallyOf
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric

from app.api.pressure import Waits
from app.contact import Contact, Part
from app.domain.readings import Reading, Readings
from app.telemetry.instruments import Instruments


class Metrics:
    """One registry per app, so that two apps in one process (tests) do not collide."""

    def __init__(self, readings: Readings | None = None, *, version: str = "", contact: Contact | None = None) -> None:
        own = self.instruments = Instruments("api", version=version)
        events = own.counter("ratchet_api_events_total")
        self._event_counts = {status: events.labels(status) for status in ("accepted", "duplicate", "conflict", "rejected")}
        self.turns = own.counter("ratchet_api_turns_total")
        self.request_s = own.histogram("gen_ai_server_request_duration_seconds")
        self.first_token_s = own.histogram("gen_ai_server_time_to_first_token_seconds")
        self.tokens = own.counter("gen_ai_client_token_usage_total")
        self.refused = own.counter("ratchet_api_refused_total")
        self.in_flight_bytes = own.gauge("ratchet_api_in_flight_bytes")
        self.spooled_bytes = own.gauge("ratchet_api_spooled_bytes")
        self.redacted = own.counter("ratchet_api_redacted_total")
        self.shadows = own.counter("ratchet_api_shadow_total")
        self.shadow_s = own.histogram("ratchet_api_shadow_seconds")
        self.shadow_tokens = own.counter("ratchet_api_shadow_tokens_total")
        self.waits = Waits()
        self.skew_s = own.gauge("ratchet_clock_skew_seconds")
        heard = contact or Contact()
        own.sampled("ratchet_control_plane_silent_seconds", heard.seconds)
        if readings is not None:
            own.told_by(_Noted(readings, heard))

    def count_events(self, statuses: Sequence[str]) -> None:
        """Count answers of the door."""
        for status, count in (TallyOf(statuses) if len(statuses) > 1 else dict.fromkeys(statuses, 1)).items():
            self._event_counts[status].inc(count)

    def text(self, policy: str | None = None) -> bytes:
        """The exposition format, of one policy's series where one is named. Reads the database: call it in a thread."""
        registry = self.instruments.registry
        return generate_latest(registry if policy is None else _OfPolicy(registry, policy))


class _Noted:
    """Readings, of which is noted whether the database gave them: a scrape comes where nobody asks for an answer."""

    def __init__(self, inner: Readings, contact: Contact) -> None:
        self._inner = inner
        self._contact = contact

    def readings(self) -> list[Reading]:
        """See `Readings`."""
        return self._contact.asked(Part.DATABASE, self._inner.readings)


class _OfPolicy(CollectorRegistry):
    """The series of another registry that are labelled with one policy; those of no policy are everybody's sums and left out."""

    def __init__(self, whole: CollectorRegistry, policy: str) -> None:
        super().__init__()
        self._whole = whole
        self._policy = policy

    def collect(self) -> Iterator[Metric]:
        for family in self._whole.collect():
            family.samples = [sample for sample in family.samples if sample.labels.get("policy") == self._policy]
            if family.samples:
                yield family
