"""Topics: created explicitly, and looked at again whenever something went wrong.

The embedded broker makes missing topics by itself, with four partitions: that number is how an empty restart shows.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kafka.admin import KafkaAdminClient
from kafka.errors import KafkaConfigurationError, KafkaError

from app.domain.errors import Unavailable
from app.domain.streams import PARTITIONS
from app.messaging.cluster import Cluster
from app.messaging.connecting import connect

CONNECT_TIMEOUT_MS = 4_000


@contextmanager
def administering(cluster: Cluster) -> Iterator["TopicAdmin"]:
    """Connect, administer, disconnect. Raises `Unavailable`."""
    admin: Any = None
    try:
        settings: dict[str, Any] = {
            "bootstrap_servers": cluster.servers(), "client_id": "ratchet-admin", "request_timeout_ms": CONNECT_TIMEOUT_MS,
            "bootstrap_timeout_ms": CONNECT_TIMEOUT_MS,
        }  # fmt: skip
        admin = connect(KafkaAdminClient, settings)
        yield TopicAdmin(admin, replicas=1 if cluster.embedded else 3)
    except KafkaConfigurationError:
        raise  # a mistake of ours, which no retry cures
    except KafkaError as error:
        raise Unavailable(f"the broker does not answer ({type(error).__name__}: {error}): is it running?") from error
    finally:
        if admin is not None:
            admin.close()


class TopicAdmin:
    """What may be done to topics."""

    def __init__(self, admin: Any, *, replicas: int) -> None:  # noqa: ANN401 - kafka-python ships no types
        self._admin = admin
        self._replicas = replicas

    def partitions(self) -> dict[str, int]:
        """Number of partitions of every topic there is."""
        found = self._admin.describe_topics()
        return {topic["name"]: len(topic["partitions"]) for topic in found if not topic.get("error_code")}

    def create(self, name: str) -> None:
        """Create a topic with `PARTITIONS` partitions and wait until it can be written to."""
        configs = {} if self._replicas == 1 else {"min.insync.replicas": "2"}
        wanted = {name: {"num_partitions": PARTITIONS, "replication_factor": self._replicas, "configs": configs}}
        self._admin.create_topics(wanted, timeout_ms=CONNECT_TIMEOUT_MS, raise_errors=False)
        self._admin.wait_for_topics([name], timeout_ms=CONNECT_TIMEOUT_MS)

    def delete(self, name: str) -> None:
        """Delete a topic; the only way the embedded broker gives memory back."""
        self._admin.delete_topics([name], timeout_ms=CONNECT_TIMEOUT_MS, raise_errors=False)
