"""The metrics of one process, made from the catalogue: a name that it does not have, or has for another process, is refused."""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from app.domain.errors import RatchetError
from app.domain.readings import Reading, Readings
from app.telemetry.catalogue import CATALOGUE, FROM_DATABASE, Described, Kind

Samples = Callable[[], Mapping[tuple[str, ...], float]]
"""Values by the labels' values, worked out when scraped."""


class Instruments:
    """One registry per process, or per app where tests have several in one process."""

    def __init__(self, process: str, *, version: str = "", libraries: bool = True) -> None:
        self.process = process
        self.registry = CollectorRegistry()
        self.ready = False
        """Whether the process has begun its work."""
        if libraries:
            ProcessCollector(registry=self.registry)
            PlatformCollector(registry=self.registry)
        self.gauge("ratchet_process_info").labels(process, version).set(1)
        self.gauge("ratchet_process_ready").set_function(lambda: float(self.ready))

    def counter(self, name: str) -> Counter:
        """A counter of this process."""
        described = self._described(name, Kind.COUNTER)
        return Counter(name.removesuffix("_total"), described.says, described.labels, registry=self.registry)

    def gauge(self, name: str) -> Gauge:
        """A gauge of this process."""
        described = self._described(name, Kind.GAUGE)
        return Gauge(name, described.says, described.labels, registry=self.registry)

    def histogram(self, name: str) -> Histogram:
        """A histogram of this process, with the catalogue's buckets."""
        described = self._described(name, Kind.HISTOGRAM)
        return Histogram(name, described.says, described.labels, registry=self.registry, buckets=described.buckets)

    def sampled(self, name: str, samples: Samples) -> None:
        """A gauge or counter whose series are worked out when scraped."""
        self.registry.register(_Sampled(self._described(name), samples))

    def told_by(self, readings: Readings) -> None:
        """Show what the database knows."""
        self.registry.register(_Loop(readings))

    def rounds(self, stopping: Callable[[], bool]) -> Callable[[], bool]:
        """`stopping`, counting how often a loop asked it: a loop that does not ask any more is stuck."""
        count, last = self.counter("ratchet_process_rounds_total"), self.gauge("ratchet_process_last_round_timestamp_seconds")

        def asked() -> bool:
            count.inc()
            last.set(time.time())
            return stopping()

        return asked

    def text(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self.registry)

    def _described(self, name: str, kind: Kind | None = None) -> Described:
        described = CATALOGUE[name]
        assert self.process in described.of, f"{name} is not a metric of {self.process}"
        assert kind is None or described.kind is kind, f"{name} is a {described.kind}"
        return described


def _family(described: Described) -> Any:  # noqa: ANN401 - the library's two families have no common type with add_metric
    make = CounterMetricFamily if described.kind is Kind.COUNTER else GaugeMetricFamily
    return make(described.name, described.says, labels=described.labels)


class _Sampled:
    def __init__(self, described: Described, samples: Samples) -> None:
        self._described = described
        self._samples = samples

    def describe(self) -> list[Metric]:
        """Nothing up front: registering must not work anything out."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The family as it is now."""
        family = _family(self._described)
        for labels, value in self._samples().items():
            family.add_metric(labels, value)
        yield family


class _Loop:
    """What the database knows; when it does not answer `ratchet_database_up` is 0 and the rest is missing, never stale."""

    def __init__(self, readings: Readings) -> None:
        self._readings = readings

    def describe(self) -> list[Metric]:
        """Nothing up front: registering must not read the database."""
        return []

    def collect(self) -> Iterator[Metric]:
        """One family for each metric that has samples."""
        try:
            readings = [Reading(metric="ratchet_database_up", value=1.0), *self._readings.readings()]
        except RatchetError:
            readings = [Reading(metric="ratchet_database_up", value=0.0)]
        families: dict[str, Any] = {}
        for reading in readings:
            assert reading.metric in FROM_DATABASE, f"{reading.metric} is not in the catalogue"
            described = CATALOGUE[reading.metric]
            family = families.setdefault(reading.metric, _family(described))
            family.add_metric([reading.labels[label] for label in described.labels], reading.value)
        yield from families.values()
