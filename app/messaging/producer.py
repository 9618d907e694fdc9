"""The one producer: sends rows, waits for the broker's word on each, and starts afresh after any failure."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import datetime, timedelta

from kafka.errors import KafkaError

from app.domain.errors import BadConfig
from app.domain.ids import utc_now
from app.domain.ports import Clock
from app.domain.telemetry.events import Topic
from app.domain.telemetry.streams import PARTITIONS, Ack, EpochBook, OutgoingEvent, Sent
from app.messaging.cluster import Cluster
from app.messaging.connecting import unanswered
from app.messaging.topics import TopicAdmin, administering
from app.messaging.transmitters import BatchTransmitter, IdempotentTransmitter, Transmitter

log = logging.getLogger(__name__)

ROTATE_BYTES = 256 * 1024 * 1024
ROTATE_BATCHES = 50_000
ROTATE_AGE = timedelta(hours=1)


def physical_name(topic: str, epoch: int | None) -> str:
    """`ratchet.events.7` on the embedded broker, `ratchet.events` on a real cluster."""
    return topic if epoch is None else f"{topic}.{epoch}"


class KafkaSink:
    """The EventSink port. Not for use from several threads."""

    def __init__(
        self, cluster: Cluster, epochs: EpochBook, *, clock: Clock = utc_now, transmit: Callable[[Cluster], Transmitter] | None = None,
        administer: Callable[[Cluster], AbstractContextManager[TopicAdmin]] = administering,
    ) -> None:  # fmt: skip
        self._administer = administer
        self._transmit = transmit or (BatchTransmitter if cluster.embedded else IdempotentTransmitter)
        self._cluster = cluster
        self._epochs = epochs
        self._clock = clock
        self._transmitter: Transmitter | None = None
        self._names: dict[str, str] = {}
        self._bytes: Counter[str] = Counter()
        self._batches: Counter[str] = Counter()
        self._condemned: list[str] = []
        self._next_offset: dict[tuple[str, int], int] = {}
        self._opened: dict[str, datetime] = {}
        self._started = clock()
        self._compared = False

    def send(self, events: Sequence[OutgoingEvent]) -> list[Sent]:
        """Send and wait. Raises `Unavailable` when no connection can be made; single failures are None in the answer."""
        transmitter = self._connect()
        acks: list[Sent] = transmitter.send([(self._names[event.topic], event) for event in events])
        self._bytes.update(_bytes_by_topic(events))
        self._batches.update(dict.fromkeys({event.topic for event in events}, PARTITIONS))
        if self._went_back([ack for ack in acks if isinstance(ack, Ack)]):
            log.warning("event=offsets_went_back reason=the broker restarted empty: nothing of this batch counts as sent")
            acks = [None for _ in acks]
            self._next_offset.clear()
        if None in acks:
            log.warning("event=send_failed failed=%d of=%d", acks.count(None), len(acks))
            self._discard()
        return acks

    def check_topics(self) -> None:
        """Create what is missing; open new epochs of what the broker lost or made anew itself. Raises `Unavailable`, `BadConfig`."""
        with self._administer(self._cluster) as admin:
            there = admin.partitions()
            for topic in Topic:
                self._names[topic] = self._checked(topic, there, admin)
            if not self._cluster.embedded and not self._compared:
                self._compare(admin)

    def _compare(self, admin: TopicAdmin) -> None:
        """Once a process: hold the topics to the configuration, so that what would fail in a month fails at the start."""
        told = [sentence for topic in Topic for sentence in admin.mismatches(topic)]
        if told:
            raise BadConfig("; ".join(told))
        self._compared = True

    def _checked(self, topic: str, there: dict[str, int], admin: TopicAdmin) -> str:
        epoch = self._epochs.current(topic) if self._cluster.embedded else None
        name = physical_name(topic, epoch)
        if there.get(name) == self._cluster.partitions:
            return name
        if not self._cluster.embedded:
            if name in there:
                raise BadConfig("; ".join(admin.mismatches(name)))
            admin.create(name)
            return name
        return self._open_epoch(topic, admin, lost=epoch is not None)

    def _open_epoch(self, topic: str, admin: TopicAdmin, *, lost: bool) -> str:
        epoch = self._epochs.open_next(topic, lost=lost, now=self._clock())
        name = physical_name(topic, epoch)
        admin.create(name)
        self._bytes[topic] = self._batches[topic] = 0
        self._opened[topic] = self._clock()
        log.log(
            logging.WARNING if lost else logging.INFO, "event=epoch_opened topic=%s epoch=%d broker_lost_the_last=%s", topic, epoch, lost
        )
        return name

    def live_topics(self) -> frozenset[str]:
        """Names of the topics that the broker still holds."""
        if not self._cluster.embedded:
            return frozenset(Topic)
        return frozenset(physical_name(topic, epoch) for topic in Topic for epoch in self._epochs.readable(topic))

    def rotate(self, *, applied_before: datetime) -> None:
        """Embedded only: open the next epoch of a topic that is too big or too old; delete closed ones that are applied to the end.

        Deleting takes two calls: readers let go of the epoch first, or their requests for metadata would make the broker create it again.
        """
        if not self._cluster.embedded or not self._names:
            return
        due = [topic for topic in Topic if self._is_due(topic)]
        over = [(topic, epoch) for topic in Topic for epoch, closed_at in self._epochs.closed(topic) if closed_at < applied_before]
        for topic in due:
            self.rotate_now(topic)
        if self._condemned:
            with self._administer(self._cluster) as admin:
                for name in self._condemned:
                    admin.delete(name)
                    log.info("event=topic_deleted topic=%s", name)
        self._condemned = [physical_name(topic, epoch) for topic, epoch in over]
        for topic, epoch in over:
            self._epochs.deleted(topic, epoch, now=self._clock())

    def rotate_now(self, topic: str) -> None:
        """Open the next epoch of a topic of the embedded broker; the old one stays readable until it is applied."""
        with self._administer(self._cluster) as admin:
            self._names[topic] = self._open_epoch(topic, admin, lost=False)

    def close(self) -> None:
        """Throw the producer away; nothing that was acknowledged depends on it."""
        self._discard()

    # --- inside -----------------------------------------------------------------------------------------------------------

    def _is_due(self, topic: str) -> bool:
        used = self._bytes[topic]
        old = used > 0 and self._clock() - self._opened.get(topic, self._started) > ROTATE_AGE
        return used > ROTATE_BYTES or self._batches[topic] > ROTATE_BATCHES or old

    def _connect(self) -> Transmitter:
        if self._transmitter is None:
            self.check_topics()
            try:
                self._transmitter = self._transmit(self._cluster)
            except KafkaError as error:
                raise unanswered(self._cluster, error) from error
        return self._transmitter

    def _went_back(self, acks: Sequence[Ack]) -> bool:
        """Whether the broker gave an offset twice: it restarted empty and made the topic anew, where nobody reads."""
        back = any(ack.offset < self._next_offset.get((ack.topic, ack.partition), 0) for ack in acks)
        for ack in acks:
            place = (ack.topic, ack.partition)
            self._next_offset[place] = max(ack.offset + 1, self._next_offset.get(place, 0))
        return back and self._cluster.embedded

    def _discard(self) -> None:
        if self._transmitter is not None:
            self._transmitter.close()
        self._transmitter = None


def _bytes_by_topic(events: Sequence[OutgoingEvent]) -> Counter[str]:
    sizes: Counter[str] = Counter()
    for event in events:
        sizes[event.topic] += len(event.event.data) + len(event.event.key)
    return sizes
