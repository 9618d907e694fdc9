"""Prometheus metrics of this process, and of the whole loop as the database knows it (read when scraped)."""

from collections import Counter as TallyOf
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from app.domain.errors import RatchetError
from app.domain.ports import Reads


class Metrics:
    """One registry per app, so that two apps in one process (tests) do not collide."""

    def __init__(self, reads: Reads | None = None) -> None:
        self.registry = CollectorRegistry()
        self._events = Counter("ratchet_api_events", "Events at the door by answer.", ["status"], registry=self.registry)
        self._event_counts = {status: self._events.labels(status) for status in ("accepted", "duplicate", "conflict", "rejected")}
        self.turns = Counter(
            "ratchet_api_turns", "Turns served by this process.", ["policy", "version", "arm", "finish_reason"], registry=self.registry
        )
        self.request_s = Histogram(
            "gen_ai_server_request_duration_seconds", "Whole answers.", ["policy"], registry=self.registry,
            buckets=(0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120),
        )  # fmt: skip
        self.first_token_s = Histogram(
            "gen_ai_server_time_to_first_token_seconds", "Until the first token.", ["policy"], registry=self.registry,
            buckets=(0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
        )  # fmt: skip
        self.tokens = Counter("gen_ai_client_token_usage", "Tokens.", ["policy", "type"], registry=self.registry)
        self.refused = Counter("ratchet_api_refused", "Requests refused before any work.", ["code"], registry=self.registry)
        self.in_flight_bytes = Gauge("ratchet_api_in_flight_bytes", "Request bodies being worked on.", registry=self.registry)
        self.redacted = Counter("ratchet_api_redacted", "Personal data replaced, by kind.", ["kind"], registry=self.registry)
        if reads is not None:
            self.registry.register(_LoopCollector(reads))

    def count_events(self, statuses: Sequence[str]) -> None:
        """Count answers of the door."""
        for status, count in (TallyOf(statuses) if len(statuses) > 1 else dict.fromkeys(statuses, 1)).items():
            self._event_counts[status].inc(count)

    def text(self, policy: str | None = None) -> bytes:
        """The exposition format, of one policy's series where one is named. Reads the database: call it in a thread."""
        return generate_latest(self.registry if policy is None else _OfPolicy(self.registry, policy))


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


class _LoopCollector:
    """What the database knows; when it does not answer `ratchet_database_up` is 0 and the rest is missing, never stale."""

    def __init__(self, reads: Reads) -> None:
        self._reads = reads

    def describe(self) -> list[Metric]:
        """Nothing up front: registering must not read the database."""
        return []

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("ratchet_database_up", "Whether the database answers.")
        try:
            counters, turns, backlog = self._reads.counters(), self._reads.turns_per_version(), self._reads.backlog()
        except RatchetError:
            up.add_metric([], 0)
            yield up
            return
        up.add_metric([], 1)
        yield up
        ledger = CounterMetricFamily("ratchet_ledger", "Durable counts of the loop.", labels=["policy", "name"])
        for policy, name, value in counters:
            ledger.add_metric([policy, name], value)
        yield ledger
        served = GaugeMetricFamily("ratchet_turns", "Turns per version.", labels=["policy", "version"])
        labelled = GaugeMetricFamily("ratchet_turns_labelled", "Labelled turns per version.", labels=["policy", "version"])
        for policy, version, count, done in turns:
            served.add_metric([policy, version], count)
            labelled.add_metric([policy, version], done)
        yield served
        yield labelled
        for name, value in backlog.items():
            yield GaugeMetricFamily(f"ratchet_{name}", "Backlog of the loop.", value=value)
