"""Replicas of every process over one PostgreSQL and one embedded broker; each can be started from other code, replaced and broken.

A role has seats. Most of them are taken; a replacement is started in a free one before the replica that it replaces is told to end.
"""

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
import psutil

from app.messaging.broker import broker_command
from app.settings import models_folder
from pipelines.commands.demonstration.profiles import PROFILES, write_config
from pipelines.commands.running.deployment import QUIET
from tests.bench.fleet.images import Images
from tests.bench.fleet.network import Network
from tests.broker import free_port

ROOT = Path(__file__).resolve().parents[3]
ROLES = ("engine", "api", "relay", "ingest", "label", "loop", "watch")
START_S = 240.0
"""Two slow cores import torch for every replica of engine, loop and label, beside whatever else runs."""
END_S = 60.0
MEEK = 19
"""`nice` of a replacement that is not ready yet."""
PRE_STOP_S = 1.0
"""After the balancer took an api out, until it is told to end: the chart's `preStop` sleeps for five seconds."""
SECRETS = ("RATCHET_ACTOR_SALT", "RATCHET_SESSION_SECRETS", "RATCHET_WEBHOOK_KEYS", "RATCHET_ENGINE_KEY")


@dataclass(kw_only=True)
class Replica:
    """One process."""

    name: str
    role: str
    host: str
    port: int
    """Of an api or an engine, what it serves at; of the others, where it shows its metrics."""
    log: Path
    tree: Path = ROOT
    """The code that it runs."""
    process: "subprocess.Popen[bytes] | None" = None

    @property
    def url(self) -> str:
        """Where it is reached."""
        return f"http://{self.host}:{self.port}"

    @property
    def alive(self) -> bool:
        """Whether it was started and has not ended."""
        return self.process is not None and self.process.poll() is None

    def ready(self) -> bool:
        """Whether it says so, by itself."""
        path = {"api": "/status", "engine": "/health"}.get(self.role, "/ready")
        try:
            return httpx.get(self.url + path, timeout=2.0, trust_env=False).status_code == 200
        except httpx.TransportError:
            return False

    def send(self, number: signal.Signals) -> None:
        """A signal, where there is somebody to get it."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)


@dataclass(kw_only=True)
class Fleet:
    """The deployment. `database` as seen from the replicas."""

    folder: Path
    database: str
    network: Network | None = None
    roles: Sequence[str] = ROLES
    """Of the processes that there are; without `loop` nothing is learned, and without Ray everything starts in a tenth of the time."""
    count: int = 2
    """Replicas of every process."""
    slot_s: int = 15
    settings: Mapping[str, str] = field(default_factory=dict[str, str])
    """More variables of every process."""
    own: Mapping[str, Mapping[str, str]] = field(default_factory=dict[str, Mapping[str, str]])
    """And of single replicas, by name."""
    tree: Path = ROOT
    """The code that whoever starts runs, until somebody is replaced."""
    images: Images | None = None
    """What each tree runs from; None: from the tree itself."""
    replicas: dict[str, Replica] = field(default_factory=dict[str, Replica])
    on_leave: Callable[[Replica], None] = lambda _: None
    """Told before a replica is told to end, as a balancer is."""
    on_join: Callable[[Replica], None] = lambda _: None
    """Told when a replica is ready."""
    _broker: "subprocess.Popen[bytes] | None" = None
    _broker_port: int = field(default_factory=free_port)
    _environment: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def variables(self) -> dict[str, str]:
        """Of a command that is run in this deployment."""
        return {**self._environment, "PYTHONPATH": str(self.tree)}

    # --- from nothing to a deployment that answers ------------------------------------------------------------------------

    def prepare(self) -> str:
        """Configuration, schema, first version; returns a key that may do everything."""
        tiny = models_folder() / "tiny"  # by its place, because the release before knows no models by name
        if self.images is not None:
            tiny = Path(shutil.copytree(tiny, self.folder / "tiny"))
        profile = replace(PROFILES["tiny"], min_turns=64, max_turns=96, model=str(tiny))
        config = write_config(profile, self.folder, slot_s=self.slot_s)
        (self.folder / "logs").mkdir()
        kept = {name: value for name, value in os.environ.items() if not name.startswith("RATCHET_")}
        self._environment = {
            **kept, **QUIET, **{name: secrets.token_hex(24) for name in SECRETS}, "RATCHET_DATA": str(self.folder),
            "RATCHET_CONFIG": str(config), "OMP_NUM_THREADS": "1", "RATCHET_DATABASE_URL": self.database, "RUST_LOG": "error",
            **self.settings,
        }  # fmt: skip
        self._take_seats()
        if self.images is not None:
            self.images.give()
        self.command("prepare", tree=self.tree)
        # past the service, which does not run yet
        return self.command("keys", "create", "--name", "bench", "--scope", "admin", "--break-glass", tree=self.tree).split()[0]

    def _take_seats(self) -> None:
        for role in self.roles:
            for number in range(1, self.count + 2):
                name = f"{role}-{number}"
                host = "127.0.0.1" if self.network is None else self.network.join(name)
                log = self.folder / "logs" / f"{name}.log"
                self.replicas[name] = Replica(name=name, role=role, host=host, port=free_port(), log=log)

    def start(self, *, in_turn: bool = False) -> None:
        """The broker, then `count` replicas of every process, each ready; `in_turn`: the first of each before any second one."""
        self.start_broker()
        seats = [[f"{role}-{number}" for role in self.roles] for number in range(1, self.count + 1)]
        for names in seats if in_turn else [[name for row in seats for name in row]]:
            for name in names:
                self.spawn(self.replicas[name], self.tree)
            for name in names:
                self.await_ready(self.replicas[name])

    def command(self, *arguments: str, tree: Path) -> str:
        """A command of `ratchet` as the code in `tree` has it; returns what it printed. Raises `RuntimeError`."""
        environment = {**self._environment, "PYTHONPATH": str(tree)}
        if self.network is not None:  # it runs outside, where the database is at the same address
            environment["RATCHET_HOST"] = self.network.outside
        command, environment = self._run(tree, "once", arguments, environment)
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"ratchet {' '.join(arguments)} ended with {done.returncode}: {done.stderr.strip()[-1500:]}")
        return done.stdout

    # --- one process ------------------------------------------------------------------------------------------------------

    def spawn(self, replica: Replica, tree: Path, *, meekly: bool = False) -> None:
        """Start it, without waiting; `meekly`: on what others leave of the cores, until it is ready."""
        replica.tree = tree
        inside = ("nice", f"-n{MEEK}") if meekly else ()
        inside += () if self.network is None else self.network.inside(replica.name)
        command, environment = self._run(tree, replica.name, self._arguments(replica), self._of(replica))
        with replica.log.open("ab") as log:
            replica.process = subprocess.Popen(
                [*inside, *command], cwd=tree, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment, start_new_session=True
            )

    def _run(self, tree: Path, name: str, words: Sequence[str], variables: dict[str, str]) -> tuple[list[str], dict[str, str]]:
        """What runs `ratchet` with these words, and the variables for it: a process, or a container of the tree's image."""
        if self.images is None:
            return [sys.executable, "-m", "pipelines", *words], variables
        return self.images.command(tree, self._container(name), words, variables)

    def _container(self, name: str) -> str:
        return f"{self.folder.parent.name}-{name}"

    def _arguments(self, replica: Replica) -> list[str]:
        if replica.role != "engine":
            return [replica.role]
        return ["engine", "--host", replica.host, "--port", str(replica.port), "--rows", "32", "--threads", "1", "--drain", "30"]

    def _of(self, replica: Replica) -> dict[str, str]:
        engines = ",".join(r.url for r in self.replicas.values() if r.role == "engine")
        own = {"PYTHONPATH": str(replica.tree), "RATCHET_ENGINES": engines, "RATCHET_HOST": replica.host}
        where = {"api": {"RATCHET_PORT": str(replica.port)}, "engine": {}}.get(
            replica.role, {"RATCHET_METRICS": f"{replica.host}:{replica.port}"}
        )
        return {**self._environment, **own, **where, **self.own.get(replica.name, {})}

    def await_ready(self, replica: Replica) -> None:
        """Wait for it. Raises `TimeoutError` with the end of its log."""
        deadline = time.monotonic() + START_S
        while not replica.ready():
            if time.monotonic() > deadline or not replica.alive:
                raise TimeoutError(f"{replica.name} is not ready: {replica.log.read_text(errors='replace')[-1500:]}")
            time.sleep(0.1)
        self.on_join(replica)

    def end(self, replica: Replica) -> None:
        """Take it out of service, tell it to end, and wait until it has."""
        self.on_leave(replica)
        if replica.role == "api":
            time.sleep(PRE_STOP_S)
        replica.send(signal.SIGTERM)
        if replica.process is not None:
            replica.process.wait(END_S)

    def replace(self, old: Replica, *, tree: Path) -> Replica:
        """Put one that runs the code in `tree` in its place: ready first, then the old one leaves.

        It begins on what others leave of the cores: importing takes ten seconds of one, and elsewhere it has a machine of its own.
        """
        free = next(r for r in self.replicas.values() if r.role == old.role and not r.alive)
        self.spawn(free, tree, meekly=True)
        self.await_ready(free)
        assert free.process is not None
        if self.images is not None:
            self.images.hasten(self._container(free.name))
        os.setpriority(os.PRIO_PGRP, free.process.pid, os.getpriority(os.PRIO_PROCESS, 0))  # all of its threads
        self.end(old)
        return free

    def running(self, role: str | None = None) -> list[Replica]:
        """Who is alive."""
        return [replica for replica in self.replicas.values() if replica.alive and role in (None, replica.role)]

    # --- the broker, and the end ------------------------------------------------------------------------------------------

    def start_broker(self) -> None:
        """Empty, where it was before."""
        host = "127.0.0.1" if self.network is None else self.network.outside
        command = [word.replace("tcp://127.0.0.1", f"tcp://{host}") for word in broker_command(self._broker_port)]
        (self.folder / "broker.json").write_text(json.dumps({"address": f"{host}:{self._broker_port}"}))
        with (self.folder / "logs" / "broker.log").open("ab") as log:
            self._broker = subprocess.Popen(command, stdout=log, stderr=log, env={**self._environment})

    def kill_broker(self) -> None:
        """SIGKILL: all that it held is gone."""
        if self._broker is not None:
            self._broker.kill()
            self._broker.wait()

    def stop(self) -> None:
        """Kill everything that is left."""
        children: list[psutil.Process] = []
        for replica in self.replicas.values():
            if replica.alive and replica.process is not None:
                children += psutil.Process(replica.process.pid).children(recursive=True)  # Ray's
                replica.process.kill()
                replica.process.wait()
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        if self.images is not None:
            self.images.remove([self._container(name) for name in self.replicas])
        self.kill_broker()
