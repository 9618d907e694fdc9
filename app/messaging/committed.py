"""What ingestion told the broker after its commits: how far its group has read. The database is the authority; this lags behind."""

from typing import Any

from kafka.admin import KafkaAdminClient
from kafka.errors import KafkaError

from app.domain.telemetry.streams import TopicPartition
from app.messaging.cluster import Cluster
from app.messaging.connecting import connect, unanswered
from app.messaging.security import security_settings
from app.messaging.topics import CONNECT_TIMEOUT_MS


def committed(cluster: Cluster, group: str) -> dict[TopicPartition, int]:
    """The group's offsets by topic and partition. Raises `Unavailable`."""
    admin: Any = None
    try:
        settings: dict[str, Any] = {
            "bootstrap_servers": cluster.servers(), "client_id": "ratchet-recover", "request_timeout_ms": CONNECT_TIMEOUT_MS,
            "bootstrap_timeout_ms": CONNECT_TIMEOUT_MS,
        }  # fmt: skip
        admin = connect(KafkaAdminClient, settings | security_settings(cluster))
        found = admin.list_group_offsets([group])[group]
        return {(place.topic, place.partition): told.offset for place, told in found.items() if told.offset >= 0}
    except KafkaError as error:
        raise unanswered(cluster, error) from error
    finally:
        if admin is not None:
            admin.close()
