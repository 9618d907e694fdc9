"""How records reach a broker: two ways, one per kind of cluster.

- `BatchTransmitter` (embedded): whole batches, one request in flight, acks all, not idempotent; fast, and with nothing to wedge.
- `IdempotentTransmitter` (real cluster): kafka-python's producer with idempotence, mended, and a bound on bytes in flight.

Both answer where each record lies, that the broker will never take it, or None where the broker did not say; after a None the caller
throws the transmitter away. A refusal of a whole batch is not yet one of its records: they are asked about one by one.
"""

import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from kafka import KafkaProducer
from kafka.errors import InvalidRecordError, KafkaError, MessageSizeTooLargeError, RecordListTooLargeError
from kafka.protocol.producer import ProduceRequest

from app.domain.telemetry.streams import Ack, OutgoingEvent, Sent, Unsendable
from app.messaging.cluster import Cluster
from app.messaging.codec import encode_headers
from app.messaging.connecting import connect
from app.messaging.profiles import IN_FLIGHT_BYTES, network_settings, producer_settings
from app.messaging.record_batch import partition_of, record_batch
from app.messaging.semaphore import ByteSemaphore

log = logging.getLogger(__name__)

WAIT_S = 12.0
"""A little above the delivery timeout: a future that is older hangs (`facts/ingestion.md`, section 3.1)."""
REQUEST_BYTES = 8 * 1024 * 1024
REQUEST_TIMEOUT_MS = 4_000

Record = tuple[str, OutgoingEvent]
"""Name of a topic at the broker, and what goes there."""


class Transmitter(Protocol):
    """Sends and waits."""

    def send(self, records: Sequence[Record]) -> list[Sent]:
        """Per record where it lies now, why it never will, or None."""
        ...

    def close(self) -> None: ...


class Network(Protocol):
    """A connection to one node."""

    def call(self, request: ProduceRequest) -> Any:  # noqa: ANN401 - kafka-python's response
        """Send a request and wait for its answer. Raises `KafkaError`."""
        ...

    def close(self) -> None: ...


class BatchTransmitter:
    """Whole record batches, one request at a time."""

    def __init__(self, cluster: Cluster, *, network: "Network | None" = None) -> None:
        self._network = network or connect(_Network, network_settings(cluster))

    def send(self, records: Sequence[Record]) -> list[Sent]:
        """Send in requests of a few megabytes; after the first that fails, the rest is not tried."""
        acks: list[Sent] = [None] * len(records)
        waiting = deque(_requests(records))
        while waiting:
            chunk = waiting.popleft()
            try:
                refused = self._send(records, chunk, acks)
                waiting.extendleft([index] for index in reversed(refused))
            except KafkaError as error:
                log.warning("event=request_failed error=%r", error)
                break
        return acks

    def close(self) -> None:
        """Close the connection."""
        self._network.close()

    def _send(self, records: Sequence[Record], chunk: Sequence[int], acks: list[Sent]) -> list[int]:
        """Send one request; returns the records of batches that were refused for what they hold: each is asked about by itself."""
        refused: list[int] = []
        groups: dict[str, dict[int, list[int]]] = {}
        for index in chunk:
            name, outgoing = records[index]
            groups.setdefault(name, {}).setdefault(partition_of(outgoing.event.key.encode()), []).append(index)
        response = self._network.call(_produce_request(records, groups))
        for topic in response.responses:
            for answer in topic.partition_responses:
                indices = groups[topic.name][answer.index]
                if not answer.error_code:
                    for position, index in enumerate(indices):
                        acks[index] = Ack(topic=topic.name, partition=answer.index, offset=answer.base_offset + position)
                    continue
                log.warning("event=produce_refused topic=%s partition=%d error_code=%d", topic.name, answer.index, answer.error_code)
                if answer.error_code in _NEVER and len(indices) == 1:
                    acks[indices[0]] = _refusal(records[indices[0]][1], _NEVER[answer.error_code].__name__)
                elif answer.error_code in _NEVER:
                    refused += indices
        return refused


_NEVER = {error.errno: error for error in (MessageSizeTooLargeError, RecordListTooLargeError, InvalidRecordError)}
"""Error codes of a broker that no repetition changes."""


def _refusal(outgoing: OutgoingEvent, why: str) -> Unsendable:
    return Unsendable(reason=f"the broker does not take a record of {len(outgoing.event.data)} bytes ({why})")


def _requests(records: Sequence[Record]) -> Iterator[Sequence[int]]:
    """Ranges of records that fit into one request each."""
    start, size = 0, 0
    for index, (_, outgoing) in enumerate(records):
        size += len(outgoing.event.data)
        if size > REQUEST_BYTES and index > start:
            yield range(start, index)
            start, size = index, len(outgoing.event.data)
    yield range(start, len(records))


def _produce_request(records: Sequence[Record], groups: dict[str, dict[int, list[int]]]) -> ProduceRequest:
    now_ms = int(time.time() * 1000)
    topic, partition = ProduceRequest.TopicProduceData, ProduceRequest.TopicProduceData.PartitionProduceData

    def batch(indices: list[int]) -> bytes:
        return record_batch([(records[i][1].event, records[i][1].received_at) for i in indices], now_ms=now_ms)

    return ProduceRequest(
        transactional_id=None, acks=-1, timeout_ms=REQUEST_TIMEOUT_MS, max_version=9,
        topic_data=[
            topic(name=name, partition_data=[partition(index=number, records=batch(indices)) for number, indices in parts.items()])
            for name, parts in groups.items()
        ],
    )  # fmt: skip


class _Network:
    """kafka-python's connection to the only node of the embedded broker."""

    def __init__(self, *, kafka_client: Any, bootstrap_timeout_ms: int, **settings: Any) -> None:  # noqa: ANN401 - kafka-python ships no types
        self._client = kafka_client(**settings)
        self._client._net.start()
        self._client._manager.bootstrap(bootstrap_timeout_ms)
        self._node = next(iter(self._client.cluster.brokers())).node_id

    def call(self, request: ProduceRequest) -> Any:  # noqa: ANN401 - kafka-python's response
        """Send a request and wait for its answer. Raises `KafkaError`."""
        return self._client._manager.run(self._call, request)

    async def _call(self, request: ProduceRequest) -> Any:  # noqa: ANN401 - kafka-python's response
        manager = self._client._manager
        connection = await manager.get_connection(self._node, timeout_ms=REQUEST_TIMEOUT_MS)
        return await connection.send_request(request, request_timeout_ms=REQUEST_TIMEOUT_MS)

    def close(self) -> None:
        """Close connection and thread."""
        self._client.close()


class IdempotentTransmitter:
    """kafka-python's producer; thrown away after any failure."""

    def __init__(self, cluster: Cluster, *, producer: Any = None) -> None:  # noqa: ANN401 - kafka-python ships no types
        self._producer: Any = producer or connect(KafkaProducer, producer_settings(cluster))
        self._semaphore = ByteSemaphore(IN_FLIGHT_BYTES)

    def send(self, records: Sequence[Record]) -> list[Sent]:
        """Hand everything to the producer, then wait for each record's future. The producer itself splits batches that are too large."""
        sent = [self._send(name, outgoing) for name, outgoing in records]
        try:
            self._producer.flush(timeout=WAIT_S)
        except KafkaError as error:
            log.warning("event=flush_failed error=%r", error)
        deadline = time.monotonic() + WAIT_S
        return [_outcome(future, outgoing, deadline) for future, (_, outgoing) in zip(sent, records, strict=True)]

    def close(self) -> None:
        """Close without waiting: nothing that was acknowledged depends on it. What its futures hold of the semaphore goes with it."""
        try:
            self._producer.close(timeout=0.2)
        except KafkaError as error:
            log.debug("event=close_failed error=%r", error)

    def _send(self, name: str, outgoing: OutgoingEvent) -> Any:  # noqa: ANN401 - kafka-python's future
        event = outgoing.event
        key, value = event.key.encode(), event.data or None
        size = len(key) + len(event.data)
        if not self._semaphore.acquire(size, timeout_s=WAIT_S):
            return None
        try:
            future = self._producer.send(name, value=value, key=key, headers=encode_headers(event, outgoing.received_at))
        except (KafkaError, ValueError, AssertionError) as error:
            self._semaphore.release(size)
            log.warning("event=send_refused id=%s error=%r", event.id, error)
            return _refusal(outgoing, type(error).__name__) if isinstance(error, tuple(_NEVER.values())) else None
        future.add_both(lambda _result: self._semaphore.release(size))
        return future


def _outcome(future: Any, outgoing: OutgoingEvent, deadline: float) -> Sent:  # noqa: ANN401 - kafka-python's future
    if future is None or isinstance(future, Unsendable):
        return future
    try:
        metadata = future.get(timeout=max(0.0, deadline - time.monotonic()))
    except tuple(_NEVER.values()) as error:
        return _refusal(outgoing, type(error).__name__)
    except KafkaError:
        return None
    return Ack(topic=metadata.topic, partition=metadata.partition, offset=metadata.offset)
