"""Topics: created explicitly, and looked at again whenever something went wrong.

The embedded broker makes missing topics by itself, with four partitions: that number is how an empty restart shows.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from kafka.admin import ConfigResource, ConfigResourceType, KafkaAdminClient
from kafka.errors import KafkaConfigurationError, KafkaError, TopicAlreadyExistsError

from app.domain.errors import BadConfig
from app.domain.telemetry.events import Topic
from app.domain.telemetry.streams import PARTITIONS, TopicPartition
from app.messaging.cluster import Cluster
from app.messaging.connecting import connect, unanswered
from app.messaging.options import KafkaConfig, mismatches, topic_settings
from app.messaging.security import security_settings

CONNECT_TIMEOUT_MS = 4_000


@contextmanager
def administering(cluster: Cluster, *, client: Callable[..., Any] = KafkaAdminClient) -> Iterator["TopicAdmin"]:
    """Connect, administer, disconnect. Raises `Unavailable`."""
    admin: Any = None
    try:
        settings: dict[str, Any] = {
            "bootstrap_servers": cluster.servers(), "client_id": "ratchet-admin", "request_timeout_ms": CONNECT_TIMEOUT_MS,
            "bootstrap_timeout_ms": CONNECT_TIMEOUT_MS,
        } | security_settings(cluster)  # fmt: skip
        admin = connect(client, settings)
        yield TopicAdmin(admin, options=None if cluster.embedded else cluster.options, known_for=cluster.known_for)
    except KafkaConfigurationError:
        raise  # a mistake of ours, which no retry cures
    except KafkaError as error:
        raise unanswered(cluster, error) from error
    finally:
        if admin is not None:
            admin.close()


def topic_faults(cluster: Cluster, *, client: Callable[..., Any] = KafkaAdminClient) -> list[str]:
    """How a real cluster's topics differ from the configuration; whether the embedded broker answers. Raises `Unavailable`."""
    with administering(cluster, client=client) as admin:
        there = admin.partitions()
        if cluster.embedded:
            return []
        missing = [f"topic {topic} is not there: `ratchet relay` makes it" for topic in Topic if topic not in there]
        return missing + [sentence for topic in Topic if topic in there for sentence in admin.mismatches(topic)]


class TopicAdmin:
    """What may be done to topics, and asked of the cluster."""

    def __init__(
        self,
        admin: Any,  # noqa: ANN401 - kafka-python ships no types
        *,
        options: KafkaConfig | None,
        known_for: timedelta | None = None,
    ) -> None:
        self._admin = admin
        self._options = options
        """Of a real cluster."""
        self._known_for = known_for

    def partitions(self) -> dict[str, int]:
        """Number of partitions of every topic there is."""
        found = self._admin.describe_topics()
        return {topic["name"]: len(topic["partitions"]) for topic in found if not topic.get("error_code")}

    def create(self, name: str) -> None:
        """Create a topic and wait until it can be written to. Raises `BadConfig` where a cluster refuses."""
        replicas, configs = (1, {}) if self._options is None else (self._options.replication, topic_settings(self._options))
        partitions = PARTITIONS if self._options is None else self._options.partitions
        wanted = {name: {"num_partitions": partitions, "replication_factor": replicas, "configs": configs}}
        answer = self._admin.create_topics(wanted, timeout_ms=CONNECT_TIMEOUT_MS, raise_errors=False)
        for topic in answer["topics"]:
            if self._options is not None and topic["error_code"] not in (0, TopicAlreadyExistsError.errno):
                why = topic.get("error_message") or f"error code {topic['error_code']}"
                raise BadConfig(
                    f"the cluster refuses to create topic {name} with {replicas} replicas ({why}): set replication and "
                    "min_insync_replicas in [kafka] to what its brokers can hold, or create the topic by hand"
                )
        self._admin.wait_for_topics([name], timeout_ms=CONNECT_TIMEOUT_MS)

    def mismatches(self, name: str) -> list[str]:
        """How an existing topic of a real cluster differs from the configuration, a sentence each."""
        assert self._options is not None
        (topic,) = self._admin.describe_topics([name])
        found = self._admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, name)], config_filter="all")
        told = next(iter(found.values()), {}).get(name, {})
        return mismatches(
            self._options, name, partitions=len(topic["partitions"]),
            replication=min((len(partition["replica_nodes"]) for partition in topic["partitions"]), default=0),
            settings={setting: str(data["value"]) for setting, data in told.items() if data.get("value") is not None},
            known_for=self._known_for,
        )  # fmt: skip

    def committed(self, group: str) -> dict[TopicPartition, int]:
        """How far a group says that it has read. The database is the authority; this lags behind."""
        found = self._admin.list_group_offsets([group])[group]
        return {(place.topic, place.partition): told.offset for place, told in found.items() if told.offset >= 0}

    def delete(self, name: str) -> None:
        """Delete a topic; the only way the embedded broker gives memory back."""
        self._admin.delete_topics([name], timeout_ms=CONNECT_TIMEOUT_MS, raise_errors=False)
