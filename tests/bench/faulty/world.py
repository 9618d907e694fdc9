"""A deployment of real processes that are killed, paused and restarted, and clients that do not give up."""

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from app.messaging.broker import broker_command
from app.messaging.cluster import announce
from tests.broker import free_port

ROOT = Path(__file__).resolve().parents[3]
RESTART_AFTER_S = 0.3
QUIET_START_S = 0.8
"""What each of many processes takes to start, all at once, on two cores that nobody else uses."""
START_S = 300.0
BATCH = 50

CONFIG = """
[policies.composer]
model = "unused"
base_name = "faults"
base_model = "none"
label_wait_s = 1
lateness_s = 2592000

[relay]
reconcile_every_s = 1.0
resend_after_s = 3.0
stalled_after_s = 8.0
housekeeping_every_s = 5.0

[ingestion]
expire_every_s = 2.0
"""


@dataclass
class Program:
    """One supervised process."""

    name: str
    command: list[str]
    process: "subprocess.Popen[bytes] | None" = None
    paused: bool = False


def _answers(port: int) -> bool:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/status", timeout=5).close()
    except OSError:
        return False
    return True


def _socket_at(port: int) -> str:
    """As the kernel names the socket that connects from this port of loopback; psutil would read its table once for every process."""
    local = f"0100007F:{port:04X}"
    rows = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
    return next((f"socket:[{row[9]}]" for row in rows if row[1] == local), "")


def _sockets_of(pid: int) -> set[str]:
    try:
        return {os.readlink(file) for file in os.scandir(f"/proc/{pid}/fd")}
    except OSError:  # it has just been killed, or closed one
        return set()


def kind_of(name: str) -> str:
    """`relay` of `relay-2`."""
    return name.rpartition("-")[0] or name


class Killable(Protocol):
    """Somebody who comes back."""

    def kill(self) -> bool: ...


@dataclass
class World:
    """Processes over one data folder; whoever dies is restarted."""

    folder: Path
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    doors: int = 1
    api_ports: Sequence[int] = ()
    """Where clients find the doors; without wires that lead to them, at `door_ports`."""
    servers: dict[str, Killable] = field(default_factory=dict[str, Killable])
    """Others that may be killed and come back by themselves."""
    replicas: int = 2
    """Of relay and ingest; of more than two, of label as well."""
    kills: Counter[str] = field(default_factory=Counter[str])
    door_ports: list[int] = field(init=False)
    slowness: float = 1.0
    """How many times as long processes take to start here as on two quiet cores; torment takes its time accordingly."""
    _programs: dict[str, Program] = field(default_factory=dict[str, Program])
    _stop: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.door_ports = [free_port() for _ in range(self.doors)]

    def start(self, *, broker_port: int, broker_front: int) -> None:
        """Start everything and the supervisor; the broker says that it is to be found at `broker_front`, where a wire leads to it."""
        ratchet = [sys.executable, "-m", "pipelines"]
        broker = broker_command(broker_port)
        broker[broker.index("--advertised-listener-url") + 1] = f"tcp://127.0.0.1:{broker_front}"
        announce(self.folder / "broker.json", broker_front)
        commands = {
            "broker": broker,
            **{f"api-{n + 1}": [sys.executable, "-m", "app.main"] for n in range(len(self.door_ports))},
            **{f"{name}-{n + 1}": [*ratchet, name] for name in ("relay", "ingest") for n in range(self.replicas)},
            **{f"label-{n + 1}": [*ratchet, "label"] for n in range(self.replicas if self.replicas > 2 else 1)},
        }  # fmt: skip
        self._programs = {name: Program(name, command) for name, command in commands.items()}
        for program in self._programs.values():
            self._spawn(program)
        threading.Thread(target=self._supervise, daemon=True).start()

    def await_doors(self) -> None:
        """Until each of them answers; whoever is killed needs as long to come back, so nobody is killed more often than that allows."""
        began = time.monotonic()
        for port in self.door_ports:
            while not _answers(port):
                if time.monotonic() - began > START_S:
                    raise TimeoutError(f"the door does not answer: {(self.folder / 'api-1.log').read_text()[-2000:]}")
                time.sleep(0.1)
        self.slowness = max(1.0, (time.monotonic() - began) / (QUIET_START_S * len(self._programs)))

    def whose(self, port: int) -> str:
        """Which kind of process a connection from a port is of."""
        socket = _socket_at(port)
        for program in self._programs.values():
            if program.process is not None and socket in _sockets_of(program.process.pid):
                return kind_of(program.name)
        return "client"

    def _spawn(self, program: Program) -> None:
        own = dict(self.environment)
        if kind_of(program.name) == "api":
            own["RATCHET_PORT"] = str(self.door_ports[int(program.name.rpartition("-")[2]) - 1])
        with (self.folder / f"{program.name}.log").open("ab") as log:
            program.process = subprocess.Popen(program.command, cwd=ROOT, env=own, stdout=log, stderr=log)
        program.paused = False

    def _supervise(self) -> None:
        while not self._stop.wait(0.05):
            with self._lock:
                dead = [p for p in self._programs.values() if p.process is not None and p.process.poll() is not None]
            for program in dead:
                self._stop.wait(RESTART_AFTER_S)
                if not self._stop.is_set():
                    self._spawn(program)

    def kill(self, name: str) -> None:
        """SIGKILL; the supervisor restarts it."""
        if name in self.servers:
            self.kills[name] += self.servers[name].kill()
            return
        process = self._programs[name].process
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGKILL)
            self.kills[name] += 1

    def pause(self, name: str, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after a while."""
        process = self._programs[name].process
        if process is None or process.poll() is not None:
            return
        process.send_signal(signal.SIGSTOP)
        self.kills[f"pause:{name}"] += 1
        threading.Timer(seconds, lambda: process.poll() is None and process.send_signal(signal.SIGCONT)).start()

    def torment(self, *, period_s: float, seed: int, until: threading.Event, longest_pause_s: float) -> threading.Thread:
        """Kill somebody every `period_s` (half to one and a half times), in every fourth case pause them instead, where a pause is any.

        Wires and locks have their turn like processes: their faults are other ones.
        """
        chance = random.Random(seed)
        names = [*self._programs, *self.servers]

        def run() -> None:
            order: list[str] = []
            while not until.wait(self.slowness * period_s * chance.uniform(0.5, 1.5)):
                if not order:  # everybody's turn comes before anybody's second
                    order = chance.sample(names, len(names))
                name = order.pop()
                if longest_pause_s and chance.random() < 0.25 and name not in self.servers:
                    self.pause(name, chance.uniform(1.0, longest_pause_s))
                else:
                    self.kill(name)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    def stop(self) -> None:
        """Kill everything, supervisor first; a second call does nothing."""
        if self._stop.is_set():
            return
        self._stop.set()
        time.sleep(RESTART_AFTER_S + 0.2)
        for program in self._programs.values():
            if program.process is not None and program.process.poll() is None:
                program.process.send_signal(signal.SIGCONT)
                program.process.kill()
                program.process.wait()


def tell(world: World, told: Sequence[dict[str, Any]], *, clients: int, per_s: float) -> None:
    """Post everything, in batches, from several clients; each batch again, with the same ids, until every event in it was taken."""
    batches = [told[start : start + BATCH] for start in range(0, len(told), BATCH)]
    started = time.monotonic()

    def client(mine: range) -> None:
        doors = itertools.cycle(world.api_ports or world.door_ports)
        for number in mine:
            ahead = started + number * BATCH / per_s - time.monotonic()
            if ahead > 0:
                time.sleep(ahead)
            _post_until_taken(doors, batches[number])

    threads = [threading.Thread(target=client, args=[range(n, len(batches), clients)], daemon=True) for n in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _post_until_taken(doors: Iterator[int], events: Sequence[dict[str, Any]]) -> None:
    body = json.dumps(events).encode()
    while True:
        request = urllib.request.Request(f"http://127.0.0.1:{next(doors)}/v1/events", body, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=10) as response:
                results = json.loads(response.read())["results"]
        except (urllib.error.URLError, OSError, ValueError):
            time.sleep(0.2)  # refused, cut off or timed out: nobody knows whether it was taken, so it is sent again
            continue
        refused = [result for result in results if result["status"] not in ("accepted", "duplicate")]
        assert not refused, f"the door refused a good event: {refused[0]}"
        return


def environment(folder: Path, *, port: int | None = None, database_url: str | None = None) -> dict[str, str]:
    """The variables of a deployment in `folder`."""
    (folder / "faults.toml").write_text(CONFIG)
    variables = {
        **{name: value for name, value in os.environ.items() if not name.startswith("RATCHET_")},
        "RATCHET_DATA": str(folder), "RATCHET_CONFIG": str(folder / "faults.toml"), "OMP_NUM_THREADS": "1",
        "RATCHET_LOG_LEVEL": "INFO", "RUST_LOG": "error", "RATCHET_ACTOR_SALT": "the bench's own salt",
    }  # fmt: skip
    told = {"RATCHET_PORT": None if port is None else str(port), "RATCHET_DATABASE_URL": database_url}
    return variables | {name: value for name, value in told.items() if value is not None}
