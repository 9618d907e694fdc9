"""A real embedded broker for tests, killed and restarted at will."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from app.messaging.broker import broker_command
from app.messaging.cluster import Cluster, announce


class Broker:
    """The Tansu process of one test."""

    def __init__(self, folder: Path) -> None:
        self.address_file = folder / "broker.json"
        self.cluster = Cluster(bootstrap=None, address_file=self.address_file)
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, empty, where it was before."""
        self._process = subprocess.Popen(
            broker_command(self.port), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, "RUST_LOG": "error"}
        )
        announce(self.address_file, self.port)
        wait_for_port(self.port)

    def kill(self) -> None:
        """SIGKILL: all it held is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """SIGSTOP."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)


@contextmanager
def running_broker(folder: Path) -> Iterator[Broker]:
    """A broker that is gone at the end."""
    broker = Broker(folder)
    broker.start()
    try:
        yield broker
    finally:
        broker.kill()


def free_port() -> int:
    """A port of the loopback address that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for_port(port: int, timeout_s: float = 120.0, *, host: str = "127.0.0.1") -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex((host, port)) == 0:
                return
        time.sleep(0.02)
    raise TimeoutError(f"nobody listens on {host}:{port}")
