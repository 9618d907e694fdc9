"""One member of the consumer group. The database says where to read on; what the broker remembers of it is a hint for onlookers.

Offsets count in one topic of one cluster: they are bound to the ids of both. A topic that was made anew, and a position beyond its end, is
an alarm; it is then read from its beginning, and deduplication passes over what is known.

Embedded broker only: a live consumer may jump over acknowledged records when two producers shared a partition, so a gap in the
offsets is read again from where it began (`facts/ingestion.md`, section 2.5). On a real cluster gaps are legal.

Members share the partitions through the database (see `app.db.ingestion.members`); the broker's group protocol is not used, its offset
store is, so that its usual tools show the lag.
"""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from kafka import KafkaConsumer
from kafka.errors import KafkaConfigurationError, KafkaError, OffsetOutOfRangeError
from kafka.structs import OffsetAndMetadata, TopicPartition

from app.domain.telemetry.events import Topic
from app.domain.telemetry.streams import Delivery, EpochBook, Positions
from app.domain.telemetry.streams import TopicPartition as Place
from app.messaging.cluster import Cluster
from app.messaging.codec import decode
from app.messaging.connecting import connect, unanswered
from app.messaging.producer import physical_name
from app.messaging.profiles import SILENT_S, consumer_settings

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
"""How often topics and fellow members are looked at."""
MAX_GAP_READS = 3
"""How often a gap is read again before it is taken as real; the reconciler brings what was in it."""


class Membership(Protocol):
    """Which partitions are ours."""

    def partitions(self) -> frozenset[int]: ...

    def leave(self) -> None: ...


def open_client(cluster: Cluster, group: str) -> Any:  # noqa: ANN401 - kafka-python ships no types
    """kafka-python's consumer, connected. Raises `KafkaError`."""
    return connect(KafkaConsumer, consumer_settings(cluster) | {"group_id": group})


class KafkaSource:
    """The EventSource port. Not for use from several threads."""

    def __init__(
        self,
        cluster: Cluster,
        epochs: EpochBook,
        membership: Membership,
        *,
        group: str,
        positions: Positions,
        backlog: Callable[[], bool],
        max_records: int = 2_000,
        topic: Topic = Topic.EVENTS,
        client: Callable[[Cluster, str], Any] = open_client,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._open = client
        self._monotonic = monotonic
        self._cluster = cluster
        self._epochs = epochs
        self._membership = membership
        self._group = group
        self._positions = positions
        self._backlog = backlog
        self._max_records = max_records
        self._topic = topic
        self._consumer: Any = None
        self._places: list[Place] = []
        self._next: dict[Place, int] = {}
        self._gap_reads: dict[Place, int] = {}
        self._incarnations: dict[str, str] = {}
        self._looked_at = float("-inf")
        self._heard_at = self._monotonic()

    def poll(self, timeout_s: float) -> list[Delivery]:
        """What came, without what is applied already. Raises `Unavailable`; the next call connects anew."""
        try:
            self._look_around()
            if self._consumer is None:
                time.sleep(min(timeout_s, 0.2))
                return []
            polled = self._consumer.poll(timeout_ms=int(timeout_s * 1000), max_records=self._max_records)
        except OffsetOutOfRangeError as error:
            self._start_over([(place.topic, place.partition) for place in error.args[0]], "the position lies outside the topic")
            return []
        except KafkaConfigurationError:
            raise  # a mistake of ours, which no retry cures
        except KafkaError as error:
            self._discard()
            raise unanswered(self._cluster, error) from error
        self._listen(bool(polled))
        if beyond := self._beyond_the_end():
            self._start_over(beyond, "the position lies beyond the end")
            return []
        return [decode(record) for place, records in polled.items() for record in self._in_order((place.topic, place.partition), records)]

    def commit(self, next_offsets: Mapping[Place, int]) -> None:
        """A hint: onlookers' lag displays read it."""
        if self._consumer is None:
            return
        offsets = {TopicPartition(*place): OffsetAndMetadata(offset, "", -1) for place, offset in next_offsets.items()}
        try:
            self._consumer.commit_async(offsets)
        except (KafkaError, AssertionError) as error:
            log.info("event=commit_failed error=%r", error)

    def high_waters(self) -> Mapping[Place, int]:
        """Ends of the assigned partitions, from the fetches: `end_offsets()` is wrong on the embedded broker."""
        if self._consumer is None:
            return {}
        ends = {(place.topic, place.partition): self._consumer.highwater(place) for place in self._consumer.assignment()}
        return {place: end for place, end in ends.items() if end is not None}

    def incarnations(self) -> Mapping[str, str]:
        """Which topics of their names are read; empty on the embedded broker, whose names carry an epoch."""
        return dict(self._incarnations)

    def jump(self, place: Place, offset: int) -> None:
        """Move the fetch position alone, as the embedded broker's defect does: what is jumped over is noticed and read again."""
        self._consumer.seek(TopicPartition(*place), offset)

    def close(self) -> None:
        """Hand the partitions over."""
        self._discard()
        self._membership.leave()

    # --- inside -----------------------------------------------------------------------------------------------------------

    def _look_around(self) -> None:
        """Follow the topics' epochs and the fellow members: connect, assign, or start afresh when a topic was lost."""
        if self._consumer is not None and self._monotonic() - self._looked_at < LOOK_EVERY_S:
            return
        self._looked_at = self._monotonic()
        mine = self._membership.partitions()
        places = [(topic, partition) for topic in self._readable() for partition in sorted(mine)]
        if self._consumer is not None and places == self._places:
            self._follow_topics()
            return
        if {topic for topic, _ in self._places} - {topic for topic, _ in places}:
            self._discard()  # its cached metadata would make the broker create the lost topic again
        if not places:
            return
        log.info("event=assigned partitions=%s", ",".join(f"{topic}:{partition}" for topic, partition in places))
        self._assign(places)

    def _assign(self, places: list[Place]) -> None:
        if self._consumer is None:
            self._consumer = self._open(self._cluster, self._group)
            self._heard_at = self._monotonic()
        self._consumer.assign([TopicPartition(*place) for place in places])
        positions = self._positions.read()
        self._places, self._next, self._gap_reads = places, {}, {}
        found = self._look_up({topic for topic, _ in places})
        for place in places:
            if place in positions or self._cluster.embedded:
                self._next[place] = positions[place].next_offset if place in positions else 0
                self._consumer.seek(TopicPartition(*place), self._next[place])
            else:
                self._consumer.seek_to_beginning(TopicPartition(*place))
        known = {place: incarnation for place in places if place in positions and (incarnation := positions[place].incarnation) is not None}
        self._incarnations = {topic: before for (topic, _), before in known.items()} | found
        strange = [place for place, before in known.items() if before != self._incarnations[place[0]]]
        if strange:
            self._start_over(strange, "the topic is not the one that was read")

    # --- offsets that no longer count ---

    def _follow_topics(self) -> None:
        """Notice a topic that was deleted and made anew while it was read."""
        found = self._look_up({topic for topic, _ in self._places})
        before, self._incarnations = self._incarnations, self._incarnations | found
        strange = [place for place in self._places if before.get(place[0], found.get(place[0])) != self._incarnations.get(place[0])]
        if strange:
            self._start_over(strange, "the topic was made anew")

    def _look_up(self, topics: set[str]) -> dict[str, str]:
        """Ids of the cluster and of each topic, from the client's metadata (at most five seconds old).

        Without the topics whose id it lacks: a broker that restarts answers so for a moment, which says nothing about what lies there.
        """
        if self._cluster.embedded:
            return {}
        cluster = self._consumer._cluster
        for topic in topics:
            if cluster.topic_id(topic) is None:
                self._consumer.partitions_for_topic(topic)  # asks the brokers
        return {topic: f"{cluster.cluster_id}/{cluster.topic_id(topic)}" for topic in topics if cluster.topic_id(topic) is not None}

    def _beyond_the_end(self) -> list[Place]:
        if self._cluster.embedded:
            return []
        ends = self.high_waters()
        return [place for place, expected in self._next.items() if ends.get(place, expected) < expected]

    def _start_over(self, places: list[Place], why: str) -> None:
        """Read from the beginning. What was applied is known by its identity; what was overwritten in the meantime is lost to us."""
        shown = ",".join(f"{topic}:{partition}@{self._next.get((topic, partition), '?')}" for topic, partition in places)
        log.error("event=offsets_reset partitions=%s alarm=%s: reading from its beginning", shown, why)
        self._positions.forget(places)
        for place in places:
            self._next.pop(place, None)
            self._consumer.seek_to_beginning(TopicPartition(*place))

    def _readable(self) -> list[str]:
        if not self._cluster.embedded:
            return [self._topic]
        return [physical_name(self._topic, epoch) for epoch in self._epochs.readable(self._topic)]

    def _listen(self, heard: bool) -> None:
        if heard:
            self._heard_at = self._monotonic()
        elif self._monotonic() - self._heard_at > SILENT_S:
            self._heard_at = self._monotonic()
            if self._backlog():
                log.warning("event=consumer_rebuilt reason=silent for %.0f s with a backlog", SILENT_S)
                self._discard()

    def _in_order(self, place: Place, records: list[Any]) -> list[Any]:
        """The records from the next expected offset on; after a gap (embedded), only those before it, and the rest is read again."""
        good: list[Any] = []
        for record in records:
            expected = self._next[place] if place in self._next else int(record.offset)
            if record.offset < expected:
                continue
            if record.offset > expected and self._reads_again(place, expected):
                break
            self._next[place] = record.offset + 1
            good.append(record)
        return good

    def _reads_again(self, place: Place, expected: int) -> bool:
        if not self._cluster.embedded or self._gap_reads.get(place, 0) >= MAX_GAP_READS:
            self._gap_reads.pop(place, None)
            return False
        self._gap_reads[place] = self._gap_reads.get(place, 0) + 1
        log.warning("event=gap topic=%s partition=%d expected=%d: reading again", *place, expected)
        self._consumer.seek(TopicPartition(*place), expected)
        return True

    def _discard(self) -> None:
        if self._consumer is not None:
            try:
                self._consumer.close(autocommit=False, timeout_ms=500)
            except KafkaError as error:
                log.debug("event=close_failed error=%r", error)
        self._consumer = None
        self._places = []
