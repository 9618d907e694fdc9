"""Looking for words in what the broker still holds: `ratchet erase --verify`. It reads everything, and commits nothing."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from kafka import KafkaConsumer
from kafka.errors import KafkaError
from kafka.structs import TopicPartition

from app.domain.errors import Unavailable
from app.domain.telemetry.events import Topic
from app.messaging.cluster import Cluster
from app.messaging.connecting import connect
from app.messaging.profiles import consumer_settings

PATIENCE_S = 20.0
"""A partition that brings nothing for so long and is not at its end cannot be read: then nothing is proved."""


def records_with(
    cluster: Cluster, words: bytes, *, client: Callable[..., Any] = KafkaConsumer, monotonic: Callable[[], float] = time.monotonic
) -> dict[str, int]:
    """Records whose value has these bytes, by topic, over every topic of this product. Raises `Unavailable`."""
    consumer: Any = None
    try:
        consumer = connect(client, consumer_settings(cluster) | {"group_id": None, "client_id": "ratchet-verify"})
        places = [TopicPartition(topic, p) for topic in _ours(consumer.topics()) for p in consumer.partitions_for_topic(topic) or ()]
        found: Counter[str] = Counter({place.topic: 0 for place in places})
        for record in _all(consumer, places, monotonic):
            found[record.topic] += (record.key or b"") != words and words in (record.value or b"")
        return dict(found)
    except KafkaError as error:
        raise Unavailable(f"the broker does not answer ({type(error).__name__}: {error}): topics cannot be looked into") from error
    finally:
        if consumer is not None:
            consumer.close()


def _ours(topics: set[str]) -> list[str]:
    names = tuple(topic.value for topic in Topic)
    return sorted(topic for topic in topics if topic.startswith(names))


def _all(consumer: Any, places: list[TopicPartition], monotonic: Callable[[], float]) -> Iterator[Any]:  # noqa: ANN401 - kafka-python ships no types
    if not places:
        return
    consumer.assign(places)
    consumer.seek_to_beginning(*places)
    heard_at, open_ = monotonic(), set(places)
    while open_:
        for records in consumer.poll(timeout_ms=500).values():
            heard_at = monotonic()
            yield from records
        # The end is what a fetch told (`highwater`): the embedded broker's own answer about ends is wrong.
        open_ = {p for p in open_ if (end := consumer.highwater(p)) is None or consumer.position(p) < end}
        if open_ and monotonic() - heard_at > PATIENCE_S:
            raise Unavailable(f"{len(open_)} partitions bring nothing and are not at their end: topics cannot be looked into")
