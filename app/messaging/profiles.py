"""Client settings per kind of cluster, each line measured or explained in `facts/ingestion.md`, section 3.5."""

from typing import Any

from kafka.producer.transaction_manager import TransactionManager, TransactionState
from kafka.version import __version__

from app.messaging.cluster import Cluster
from app.messaging.security import security_settings

IN_FLIGHT_BYTES = 32 * 1024 * 1024
SILENT_S = 15.0
"""A consumer that is silent this long although there is a backlog is rebuilt."""

_PRODUCER: dict[str, Any] = {
    "acks": "all",
    "linger_ms": 20,
    "batch_size": 262_144,
    "delivery_timeout_ms": 10_000,
    "request_timeout_ms": 4_000,
    "max_block_ms": 4_000,
    "bootstrap_timeout_ms": 4_000,
    "reconnect_backoff_max_ms": 1_000,
    "allow_auto_create_topics": False,
    "metrics_enabled": False,
}

_CONSUMER: dict[str, Any] = {
    "enable_auto_commit": False,
    "auto_offset_reset": "earliest",
    "bootstrap_timeout_ms": 4_000,
    "reconnect_backoff_max_ms": 1_000,
    "allow_auto_create_topics": False,
    "metadata_max_age_ms": 5_000,
    "metrics_enabled": False,
}


def producer_settings(cluster: Cluster) -> dict[str, Any]:
    """kafka-python's producer for a real cluster: idempotent, with the fix below."""
    mend_idempotence()
    compression = cluster.options.compression
    return (
        _PRODUCER
        | {"enable_idempotence": True, "bootstrap_servers": cluster.servers(), "client_id": "ratchet-relay"}
        | {"compression_type": None if compression == "none" else compression, "max_request_size": cluster.options.max_message_bytes}
        | security_settings(cluster)
    )


def network_settings(cluster: Cluster) -> dict[str, Any]:
    """The embedded broker's connection: an empty restart breaks idempotent producers for good, so whole batches go without."""
    return {
        "bootstrap_servers": cluster.servers(),
        "client_id": "ratchet-relay",
        "bootstrap_timeout_ms": 4_000,
        "request_timeout_ms": 4_000,
        "reconnect_backoff_max_ms": 1_000,
        "max_in_flight_requests_per_connection": 1,
    }


def consumer_settings(cluster: Cluster) -> dict[str, Any]:
    """Embedded: fetches wait 200 ms; shorter ones stall the broker, longer ones are latency."""
    embedded = {"fetch_max_wait_ms": 200, "receive_message_max_bytes": 1 << 30}
    special: dict[str, Any] = embedded if cluster.embedded else {"auto_offset_reset": "none"}  # a reset is ours to notice
    return _CONSUMER | special | {"bootstrap_servers": cluster.servers(), "client_id": "ratchet-ingest"} | security_settings(cluster)


def mend_idempotence() -> None:
    """Keep kafka-python 3.0.12's idempotent producer from hanging for ever after one stall longer than the delivery timeout.

    `reset_producer_id()` forgets the id but stays READY, so no new one is ever asked for (section 3.1). Other versions are left alone.
    """
    if __version__ != "3.0.12" or getattr(TransactionManager, "mended", False):
        return
    reset = TransactionManager.reset_producer_id

    def reset_producer_id(self: Any) -> None:  # noqa: ANN401 - kafka-python ships no types
        with self._lock:
            reset(self)
            self._current_state = TransactionState.UNINITIALIZED

    TransactionManager.reset_producer_id = reset_producer_id
    setattr(TransactionManager, "mended", True)  # noqa: B010 - it declares no such attribute
