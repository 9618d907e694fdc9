"""Which cluster this is: the embedded broker on loopback, or a real one; each has its own client profile."""

import json
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from app.domain.errors import Unavailable
from app.domain.telemetry.streams import PARTITIONS
from app.messaging.options import KafkaConfig


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """An address to connect to. The embedded one's is read from a file at every connection: the broker may come back elsewhere."""

    bootstrap: str | None
    """host:port,… of a real cluster; None for the embedded broker."""
    address_file: Path
    """Where the embedded broker says on which port it listens."""
    options: KafkaConfig = KafkaConfig()
    """How a real cluster is spoken to, and what its topics must be."""
    password: str | None = field(default=None, repr=False)
    known_for: timedelta | None = None
    """How long an event is known again, where that is not for ever: no topic may keep it longer."""

    @property
    def embedded(self) -> bool:
        """Whether this is the broker in memory on this machine."""
        return self.bootstrap is None

    @property
    def partitions(self) -> int:
        """Of every topic."""
        return PARTITIONS if self.embedded else self.options.partitions

    def servers(self) -> str:
        """Bootstrap servers. Raises `Unavailable` while the embedded broker was never started."""
        if self.bootstrap is not None:
            return self.bootstrap
        try:
            return str(json.loads(self.address_file.read_text())["address"])
        except (OSError, ValueError, KeyError) as error:
            raise Unavailable(f"no embedded broker has been started here ({self.address_file}): run `ratchet broker`") from error


def announce(address_file: Path, port: int) -> None:
    """Write the embedded broker's address, whole or not at all."""
    address_file.parent.mkdir(parents=True, exist_ok=True)
    partial = address_file.with_suffix(".partial")
    partial.write_text(json.dumps({"address": f"127.0.0.1:{port}"}))
    partial.replace(address_file)


def announced_port(address_file: Path) -> int | None:
    """The port of the last start, so that a restarted broker is found where it was."""
    try:
        return int(str(json.loads(address_file.read_text())["address"]).rpartition(":")[2])
    except (OSError, ValueError, KeyError):
        return None
