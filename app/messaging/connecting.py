"""Connecting a kafka-python client without leaving anything behind when that fails.

Measured with 3.0.12: every `KafkaAdminClient` or `KafkaConsumer` that finds no broker leaves a thread and four file descriptors;
a broker that is away for an hour would cost a relay its last ones.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

from kafka.errors import KafkaError
from kafka.net.compat import KafkaNetClient

Client = TypeVar("Client")


def connect(kind: type[Client], settings: Mapping[str, Any]) -> Client:
    """`kind(**settings)`, whose network thread and sockets are closed when the constructor raises."""
    networks: list[Any] = []

    def network(**options: Any) -> Any:  # noqa: ANN401 - kafka-python ships no types
        networks.append(KafkaNetClient(**options))
        return networks[-1]

    try:
        return kind(**{**settings, "kafka_client": network})
    except KafkaError:
        for opened in networks:
            opened.close()
        raise
