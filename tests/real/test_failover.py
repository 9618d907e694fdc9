"""PostgreSQL fails over under load, by Patroni and etcd: its machine dies, or is cut off from everybody without a word.

With a synchronous standby nothing that was acknowledged is lost, writes go on within thirty seconds, nobody who asks waits for that, and no
right to act is given out twice. Without one what is lost is found and said.
"""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import httpx
import pytest
from sqlalchemy import Engine

from app.db import leases
from app.db.clock import database_now
from app.db.engine import open_engine, writing
from app.db.operations.server import timeline
from tests.bench.fleet import network
from tests.bench.fleet.accounts import doubled, held_up, lost
from tests.bench.fleet.deployment import Fleet, Replica
from tests.bench.fleet.network import Network
from tests.bench.fleet.people import People
from tests.real.parts import ROOT, missing
from tests.real.patroni import Cluster, Member

pytestmark = [pytest.mark.real, pytest.mark.machine, pytest.mark.timeout(1200)]
WRITES_S = 30.0
ANSWER_S = 12.0
"""An answer of a dozen tokens on two cores beside other work, and the two seconds in which the first who ask find out."""
SETTLE_S = 90.0
ROLES = ("engine", "api", "relay", "ingest")


@pytest.fixture
def net() -> Iterator[Network]:
    if (why := network.refusal()) is not None:
        missing("a network of one's own", why)
    with Network() as made:
        yield made


@dataclass(kw_only=True)
class Story:
    """A deployment on a cluster, with people at work."""

    cluster: Cluster
    fleet: Fleet
    people: People
    database: Engine

    @property
    def api(self) -> Replica:
        """The one that people ask."""
        return self.fleet.replicas["api-1"]

    def spooled(self) -> float:
        """Bytes of answers that wait on the api's disk, as its metrics say."""
        text = httpx.get(f"{self.api.url}/metrics", headers={"x-api-key": self.people.key}, timeout=60.0, trust_env=False).text
        return float(next(line.split()[1] for line in text.splitlines() if line.startswith("ratchet_api_spooled_bytes ")))

    def right_to_act(self) -> tuple[int, int]:
        """The timeline, and the token of a lease that is given out now."""
        with writing(self.database) as connection:
            now = database_now(connection)
            given = leases.acquire(connection, "a test's", "a test", ttl=timedelta(microseconds=1), now=now)
            assert given is not None
            return timeline(connection), given.token

    def fail(self, victim: Member, how: str) -> float:
        """The member that writes is gone; seconds until an observation was accepted that was sent after that."""
        self.people.phase, began = how, time.monotonic()
        if how == "killed":
            victim.signal(signal.SIGKILL)
        else:
            self.cluster.cut(victim)
        while not any(at > began + 1.0 for at in list(self.people.book.accepted)):
            assert time.monotonic() - began < 3 * WRITES_S, self.cluster.logs()
            time.sleep(0.1)
        took = min(at for at in list(self.people.book.accepted) if at > began + 1.0) - began
        time.sleep(3.0)  # answers over the healed database are part of the fault's figures
        self.people.phase = "between"
        return took

    def held_up(self) -> str:
        """Where events are, and the last words of who should have moved them."""
        said = [(self.fleet.folder / "logs" / f"{role}-1.log").read_text(errors="replace")[-1500:] for role in ("relay", "ingest", "api")]
        return "\n".join([str(held_up(self.database)), *said])

    def settled(self) -> list[str]:
        """What was promised and is not there, after everything had its time."""
        until = time.monotonic() + SETTLE_S
        while lost(self.database, self.people.book) and time.monotonic() < until:
            time.sleep(0.5)
        return lost(self.database, self.people.book)


def first_answer(url: str, key: str) -> None:
    """Until the engine has its weights in memory: a process that is ready may load them still."""
    asked = {"model": "composer", "messages": [{"role": "user", "content": "Are you there?"}], "max_tokens": 2}
    ends = time.monotonic() + SETTLE_S
    while httpx.post(f"{url}/v1/chat/completions", json=asked, headers={"x-api-key": key}, timeout=60.0).status_code != 200:
        assert time.monotonic() < ends, "nobody answers"
        time.sleep(0.5)


@contextmanager
def story(folder: Path, cluster: Cluster, *, people: int, settings: dict[str, str]) -> Iterator[Story]:
    """Everything up, people asking."""
    fleet = Fleet(folder=folder, database=cluster.database, roles=ROLES, count=1, settings=settings)
    crowd, database = None, open_engine(cluster.database)
    try:
        crowd = People(key=fleet.prepare(), people=people, retries=0, keeps_s=3 * WRITES_S)
        fleet.start()
        crowd.add(fleet.replicas["api-1"].url)
        first_answer(fleet.replicas["api-1"].url, crowd.key)
        crowd.start()
        time.sleep(5)
        yield Story(cluster=cluster, fleet=fleet, people=crowd, database=database)
    finally:
        if crowd is not None:
            crowd.stop()
        database.dispose()
        fleet.stop()


def test_with_a_synchronous_standby_nothing_is_lost_and_nobody_who_asks_notices(net: Network, tmp_path: Path) -> None:
    with (
        Cluster(net, synchronous=True) as cluster,
        story(tmp_path / "data", cluster, people=4, settings={"RATCHET_STANDBY": "required"}) as told,
    ):
        figures: dict[str, tuple[float, float]] = {}
        for how in ("killed", "cut"):
            victim, before = cluster.leader(), told.right_to_act()
            took = told.fail(victim, how)
            slowest = max(told.people.book.seconds[how])
            figures[how] = (round(took, 1), round(slowest, 1))
            after = told.right_to_act()
            assert after[0] > before[0], "a failover is a new timeline"
            assert after[1] // leases.PER_TIMELINE == after[0], "what it gives out is above everything that an older one gave out"
            cluster.bring_back(victim)
            cluster.await_standby()
        told.people.stop()
        assert told.settled() == [], told.held_up()
        assert sum(doubled(told.database).values()) == 0
        assert told.spooled() == 0.0
        print(f"first write and slowest answer, s: {figures}; {len(told.people.book.answers)} answers")  # noqa: T201 - for EVIDENCE
        assert told.people.book.failed == [], told.people.book.failed[:3]
        assert all(took <= WRITES_S for took, _ in figures.values()), figures
        assert all(slowest <= ANSWER_S for _, slowest in figures.values()), figures


def test_without_one_it_is_refused_where_asked_for_and_what_is_lost_is_found(net: Network, tmp_path: Path) -> None:
    with Cluster(net, synchronous=False) as cluster, story(tmp_path / "data", cluster, people=2, settings={}) as told:
        refused = ratchet(told.fleet, "prepare", RATCHET_STANDBY="required")
        assert refused.returncode == 2
        assert "a commit waits for no standby" in refused.stderr
        told.people.stop()
        assert told.settled() == []
        leader = cluster.leader()
        senders = [process for process in leader.processes() if "walsender" in " ".join(process.cmdline())]
        assert senders, [process.cmdline() for process in leader.processes()]
        senders[0].send_signal(signal.SIGSTOP)  # the standby is a moment behind, as on a busy network
        gone = [f"late-{number}" for number in range(20)]
        for id_ in gone:
            event = {"id": id_, "inference_id": id_, "name": "rating", "value": 1.0}
            key = {"x-api-key": told.people.key}
            sent = httpx.post(f"{told.api.url}/v1/events", json=event, headers=key, timeout=30.0, trust_env=False)
            assert sent.json()["results"][0]["status"] == "accepted"
        leader.signal(signal.SIGKILL)
        cluster.await_leader(besides=leader)
        file = tmp_path / "acknowledged"
        file.write_text("\n".join([*gone, *told.people.book.said]))
        found = ratchet(told.fleet, "recover", "acknowledged", str(file))
        assert {line.split()[0] for line in found.stdout.splitlines() if line.startswith("late-")} == set(gone), found.stdout + found.stderr
        assert not any(id_ in found.stdout for id_ in told.people.book.said), "what the standby had is not called lost"
        assert "no standby is synchronous" in ratchet(told.fleet, "recover", "check").stdout


def ratchet(fleet: Fleet, *words: str, **settings: str) -> "subprocess.CompletedProcess[str]":
    """A command of `ratchet` in this deployment."""
    command = [sys.executable, "-m", "pipelines", *words]
    return subprocess.run(command, cwd=ROOT, env=fleet.variables | settings, capture_output=True, text=True, check=False)
