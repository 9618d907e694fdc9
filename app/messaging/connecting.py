"""Connecting a kafka-python client without leaving anything behind when that fails, and saying why it failed.

Measured with 3.0.12: every `KafkaAdminClient` or `KafkaConsumer` that finds no broker leaves a thread and four file descriptors;
a broker that is away for an hour would cost a relay its last ones. And whatever the reason, a wrong password or a certificate that is
not believed, what it raises is "Unable to bootstrap".
"""

import socket
import ssl
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from kafka.errors import KafkaError
from kafka.net.compat import KafkaNetClient

from app.domain.errors import Unavailable
from app.messaging.cluster import Cluster

PROBE_S = 2.0
Client = TypeVar("Client")


def connect(kind: Callable[..., Client], settings: Mapping[str, Any]) -> Client:
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


def unanswered(cluster: Cluster, error: KafkaError) -> Unavailable:
    """That a cluster does not answer, with the cure, as far as a connection of our own can tell."""
    return Unavailable(f"the broker does not answer ({type(error).__name__}: {error}): {_cure(cluster)}")


def _cure(cluster: Cluster) -> str:
    if cluster.embedded:
        return "is it running?"
    options = cluster.options
    try:
        stays = _greet(cluster)
    except ssl.SSLCertVerificationError as refused:
        return f"its certificate is not believed ({refused.verify_message}): check ca_file and check_hostname in [kafka]"
    except ssl.SSLError as refused:
        return f"TLS ends with {refused.reason}: check security, certificate_file and key_file in [kafka]"
    except OSError as refused:
        return f"is it running? ({refused})"
    if not stays:
        return "it closes the connection: does it ask for a certificate (certificate_file and key_file in [kafka])?"
    if options.sasl_mechanism is not None:
        return "it is there and does not let us in: check sasl_mechanism and username in [kafka], and RATCHET_KAFKA_PASSWORD"
    return "it is there: does security in [kafka] say what it asks for?"


def _greet(cluster: Cluster) -> bool:
    """Connect as a client does, as far as SASL; whether the server then waits for us to speak. Raises `OSError`, which TLS's are."""
    options = cluster.options
    host, _, port = cluster.servers().split(",")[0].strip().rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_S) as plain:
        if not options.security.endswith("SSL"):
            return True
        context = ssl.create_default_context(cafile=options.ca_file)
        context.check_hostname = options.check_hostname
        if options.certificate_file is not None:
            context.load_cert_chain(options.certificate_file, options.key_file)
        with context.wrap_socket(plain, server_hostname=host.strip("[]")) as secured:
            secured.settimeout(PROBE_S / 4)
            try:
                return secured.recv(1) != b""  # since TLS 1.3 a server that wants a certificate says so, or goes, only now
            except TimeoutError:
                return True
