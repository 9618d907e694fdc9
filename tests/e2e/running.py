"""A real deployment for a test: `ratchet up` with the tiny model in a folder of its own."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import psutil

from app import wiring
from app.db.sight.demonstration import SqlOperations
from app.settings import from_environment
from pipelines.commands.demonstration.profiles import PROFILES, write_config

ROOT = Path(__file__).resolve().parents[2]
PROCESSES = ("broker", "api", "engine", "relay", "ingest", "label", "loop", "watch")


def free_port() -> int:
    """A port nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def ratchet(*arguments: str, environment: dict[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
    """Run a `ratchet` command to its end."""
    command = [sys.executable, "-m", "pipelines", *arguments]
    surroundings = {**os.environ, **(environment or {})}
    return subprocess.run(command, cwd=ROOT, env=surroundings, capture_output=True, text=True, timeout=60 * PATIENCE, check=False)


PATIENCE = 10
"""How many times longer than on an idle machine anything may take: what is waited for is a condition, the time only ends a hang."""


def eventually(claim: Callable[[], bool], what: str, *, within_s: float) -> None:
    """Wait until the claim holds; `within_s` is what an idle machine needs at most."""
    deadline = time.monotonic() + within_s * PATIENCE
    while not claim():
        assert time.monotonic() < deadline, f"not within {within_s * PATIENCE:g} s: {what}"
        time.sleep(0.3)


@dataclass(frozen=True, kw_only=True)
class Up:
    """A running `ratchet up`."""

    supervisor: "subprocess.Popen[str]"
    data: Path
    url: str
    operations: SqlOperations

    def process(self, name: str) -> psutil.Process | None:
        """The supervised process of that name, if it runs."""
        for child in psutil.Process(self.supervisor.pid).children():
            try:
                words = child.cmdline()
            except psutil.Error:  # it died this moment
                continue
            if name in words or (name == "api" and "app.main" in words) or (name == "broker" and "tansu" in " ".join(words)):
                return child
        return None

    def family(self) -> list[psutil.Process]:
        """The supervisor and everything below it."""
        parent = psutil.Process(self.supervisor.pid)
        return [parent, *parent.children(recursive=True)]

    def is_well(self) -> bool:
        """Whether the service and what it depends on answers."""
        try:
            return httpx.get(f"{self.url}/health", timeout=5 * PATIENCE).status_code == 200
        except httpx.TransportError:
            return False

    def kill(self, name: str) -> None:
        """SIGKILL one process and wait until another one runs in its place."""
        victim = self.process(name)
        assert victim is not None, f"{name} does not run"
        victim.kill()
        eventually(lambda: (p := self.process(name)) is not None and p.pid != victim.pid, f"{name} restarted", within_s=20)

    def simulate(self, *options: str) -> "subprocess.Popen[bytes]":
        """Let people use it."""
        command = [sys.executable, "-m", "pipelines.simulation", "--url", self.url, "--horizons", "0,0.7", "--max-tokens", "24", *options]
        with (self.data / "logs" / "people.log").open("ab") as output:
            return subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)


@contextmanager
def deployment(data: Path, *, slot_s: int = 10) -> Generator[Up]:
    """`ratchet up` on `data` for the length of a block."""
    config = write_config(replace(PROFILES["tiny"], min_turns=64), data, slot_s=slot_s)  # cycles sooner; nobody asks how much they learned
    port = free_port()
    command = [sys.executable, "-m", "pipelines", "up", "--data", str(data), "--config", str(config), "--port", str(port)]
    log = data.with_name(f"{data.name}.up.log")  # beside it: a folder in which other things lie keeps its mode
    with log.open("w") as output:
        supervisor = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, text=True, start_new_session=True)
    try:
        eventually(lambda: (data / "logs" / "api.log").exists() or supervisor.poll() is not None, "processes started", within_s=60)
        assert supervisor.poll() is None, log.read_text()
        settings = from_environment({"RATCHET_DATA": str(data), "RATCHET_CONFIG": str(config)})
        up = Up(supervisor=supervisor, data=data, url=f"http://127.0.0.1:{port}", operations=wiring.open_operations(settings))
        eventually(up.is_well, "the service is well", within_s=90)
        yield up
    finally:
        if supervisor.poll() is None:
            supervisor.send_signal(signal.SIGTERM)
        try:
            supervisor.wait(timeout=20 * PATIENCE)
        except subprocess.TimeoutExpired:
            supervisor.kill()
