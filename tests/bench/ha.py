"""Two of every process, one of them killed, paused, cut off or badly connected: `make bench-ha` (`ARGS=--quick`: fewer faults a process)

    people ─▶ balancer ─▶ api 1, 2 ─▶ engine 1, 2            each in a network namespace of its own, on one bridge with
              relay, ingest, label, loop, watch 1, 2 ─▶      PostgreSQL and the broker, of which there is one each

| fault | tool | how it ends |
|---|---|---|
| kill | SIGKILL | started again, after the others have taken over |
| pause | SIGSTOP for longer than a lease | SIGCONT: it wakes up believing that it is in office |
| cut | its end of the veth leaves the bridge: packets vanish, nobody is told | the end comes back |
| poor | nft drops a fifth of its packets in each direction, tc leaves it 2 Mbit/s | both are taken away |
| kill of the broker | SIGKILL: what it held is gone | started again at once, empty |
| kill of postgres | SIGKILL, back half a second later after its own recovery | by itself |
| failover of postgres | SIGKILL, promoted as a standby of itself: on a new timeline | by itself |

After every fault somebody asks anew: `failover_s` is how long, from the fault, until such an answer was given, applied and labelled, the
worst of all faults. What fails is repeated once; only where a server is struck, of which there is one, a product keeps what it has to say
and sends it again for as long as writes may fail (30 s). At the end everything that was promised has to be in the database, once.

The whole takes about 25 minutes on two cores. It comes in pieces: a deployment of its own for the faults of each process, and one for
those of the servers; `--resume FILE` keeps what they found. All processes are there in each.

Ends with {"killed", "paused", "cut", "failed_requests", "lost", "doubled", "slots_lost", "failover_s", …}; exit code 1 where a bound does
not hold, or nothing could be cut off or made poor (no root, network namespaces or nftables) and `--faults` does not leave it out.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, select, true
from sqlalchemy.exc import SQLAlchemyError

from app.db.engine import open_engine, reading
from app.db.tables import cycles, leases, releases, turns
from tests.bench.common.pieces import Pieces, add_pieces, pieces_of
from tests.bench.fleet import network
from tests.bench.fleet.accounts import doubled, ended_cycles, held_up, lost, slots_lost, unlabelled
from tests.bench.fleet.deployment import ROLES, Fleet, Replica
from tests.bench.fleet.network import Network
from tests.bench.fleet.people import People
from tests.broker import free_port
from tests.killable_postgres import KillablePostgres

FAULTS = ("kill", "pause", "cut", "poor")
ON_THE_LINE = ("cut", "poor")
SERVERS = ("broker:kill", "postgres:kill", "postgres:failover")
STRUCK = {server.partition(":")[0] for server in SERVERS}
PAUSE_S = 25.0
"""Leases of the bench are twenty seconds (cycles) and less (the relay's)."""
PATIENCE_S = 90.0
SETTLE_S = 120.0
FAILOVER_S = 30.0


@dataclass(kw_only=True)
class Day:
    """The deployment, its people, and what happened."""

    fleet: Fleet
    people: People
    postgres: KillablePostgres
    database: Engine
    failovers: dict[str, float] = field(default_factory=dict[str, float])
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys((*FAULTS, "failover"), 0))
    unserved: list[str] = field(default_factory=list[str])

    def suffer(self, role: str, fault: str) -> None:
        """One fault, the way back to service, and the end of the fault."""
        victim = self._victim(role)
        name = f"{role}:{fault}"
        self.people.phase = name
        began = time.monotonic()
        end = self._inject(role, victim, fault)
        self.counts[fault] += 1
        took = self._served_again(began)
        if took is None:
            self.unserved.append(name)
        self.failovers[name] = round(PATIENCE_S if took is None else took, 1)
        if fault != "kill":
            time.sleep(max(0.0, PAUSE_S - (time.monotonic() - began)))
        end()
        print(f"# {name} of {victim.name if victim else role}: served again after {self.failovers[name]} s", file=sys.stderr, flush=True)
        self.people.phase = "between"

    def _inject(self, role: str, victim: Replica | None, fault: str) -> Callable[[], None]:
        """Do it; returns what ends it."""
        if victim is None:
            return self._strike(role, fault)
        if fault == "kill":
            victim.send(signal.SIGKILL)
            return lambda: self._restart(victim)
        if fault == "pause":
            victim.send(signal.SIGSTOP)
            return lambda: victim.send(signal.SIGCONT)
        network_ = self.fleet.network
        assert network_ is not None, "nobody is cut off without a network"
        if fault == "poor":
            network_.spoil(victim.name)
            return lambda: network_.mend(victim.name)
        network_.cut(victim.name)
        return lambda: network_.heal(victim.name)

    def _strike(self, server: str, fault: str) -> Callable[[], None]:
        if server == "broker":
            self.fleet.kill_broker()
            self.fleet.start_broker()
        elif fault == "kill":
            self.postgres.kill()
        else:
            self.postgres.fail_over()
        return lambda: None

    def _restart(self, victim: Replica) -> None:
        assert victim.process is not None
        victim.process.wait()
        self.fleet.spawn(victim, victim.tree)
        self.fleet.await_ready(victim)

    def _victim(self, role: str) -> Replica | None:
        """The replica that does the work, where one of the two does; None for a server."""
        replicas = self.fleet.running(role)
        if not replicas:
            return None
        owners = self._owners(role)
        pids = {str(replica.process.pid): replica for replica in replicas if replica.process is not None}
        return next((pids[owner] for owner in owners if owner in pids), replicas[0])

    def _owners(self, role: str) -> list[str]:
        """Ids of the processes that a lease or a running cycle is in the name of; one that runs a cycle is waited for."""
        query = {
            "relay": select(leases.c.owner), "loop": select(cycles.c.owner).where(cycles.c.status == "running"),
        }.get(role)  # fmt: skip
        until = time.monotonic() + (PATIENCE_S if role == "loop" else 0.0)
        while query is not None:
            with reading(self.database) as connection:
                owners = [str(owner).rpartition(":")[2] for owner in connection.execute(query).scalars()]
            if owners or time.monotonic() > until:
                return owners
            time.sleep(0.2)
        return []

    def _served_again(self, began: float) -> float | None:
        """Seconds from the fault until an answer that was asked for after it is labelled; None where there is none in time."""
        while time.monotonic() - began < PATIENCE_S:
            fresh = [id_ for id_, asked in list(self.people.book.answers.items()) if asked > began and id_ in self.people.book.of]
            if fresh and self._arrived(fresh):
                return time.monotonic() - began
            time.sleep(0.2)
        return None

    def _arrived(self, ids: Sequence[str]) -> bool:
        """Whether one of these turns went all the way: labelled, or applied where nobody labels."""
        end = turns.c.labelled_at.is_not(None) if "label" in self.fleet.roles else true()
        try:
            with reading(self.database) as connection:
                query = select(turns.c.inference_id).where(turns.c.inference_id.in_(ids), end).limit(1)
                return connection.execute(query).first() is not None
        except SQLAlchemyError:  # the database is the one that is away
            return False


def day(folder: Path, *, roles: Sequence[str], faults: Sequence[tuple[str, str]], slot_s: int) -> dict[str, Any]:
    """The whole day; figures."""
    port, refusal = free_port(), network.refusal()
    poor = refusal or network.refusal_of_poor()
    with ExitStack() as stack:
        net = None if refusal else stack.enter_context(Network())
        host, clients = ("127.0.0.1", None) if net is None else (net.outside, net.range)
        postgres = stack.enter_context(KillablePostgres(port=port, host=host, clients=clients))
        url = f"postgresql+psycopg://postgres@{host}:{port}/postgres"
        fleet = Fleet(folder=folder, database=url, network=net, roles=roles, slot_s=slot_s)
        stack.callback(fleet.stop)
        keeps_s = FAILOVER_S if {role for role, _ in faults} <= STRUCK else 0.0
        people = People(key=fleet.prepare(), own_answers="engine" not in roles, keeps_s=keeps_s)
        fleet.on_join = lambda replica: people.add(replica.url) if replica.role == "api" else None
        fleet.start()
        database = open_engine(url)
        stack.callback(database.dispose)
        people.start()
        stack.callback(people.stop)
        time.sleep(5)
        said = Day(fleet=fleet, people=people, postgres=postgres, database=database)
        for role, fault in faults:
            if fault not in ON_THE_LINE or (net is not None and (fault == "cut" or poor is None)):
                said.suffer(role, fault)
        time.sleep(5)
        people.stop()
        why, wanted = {"cut": refusal, "poor": poor}, {fault for _, fault in faults}
        return _judged(said) | {f"not_{fault}": reason for fault, reason in why.items() if reason and fault in wanted}


def _judged(said: Day) -> dict[str, Any]:
    book, database = said.people.book, said.database
    labelled = "label" in said.fleet.roles
    until = time.monotonic() + SETTLE_S
    while time.monotonic() < until and (lost(database, book) or (labelled and unlabelled(database))):
        time.sleep(0.5)
    gone, twice, slots = lost(database, book), doubled(database), slots_lost(database)
    ended = ended_cycles(database)
    with reading(database) as connection:
        opened = len(connection.execute(select(releases.c.id)).all())
    return {
        "killed": said.counts["kill"], "paused": said.counts["pause"], "cut": said.counts["cut"],
        "poor": said.counts["poor"], "failed_over": said.counts["failover"],
        "requests": book.requests, "repeated": sum(book.attempts_failed.values()), "failed_requests": len(book.failed),
        "lost": len(gone), "doubled": sum(twice.values()), "slots_lost": len(slots), "unlabelled": unlabelled(database) if labelled else 0,
        "failover_s": max(said.failovers.values(), default=0.0), "failovers": said.failovers, "unserved": said.unserved,
        "cycles": len(ended), "cycles_taken_over": sum(row.attempt > 1 for row in ended), "releases": opened,
        "first_failed": book.failed[:5], "attempts_failed": dict(book.attempts_failed), "first_lost": gone[:3],
        "held_up": held_up(database), "slots": slots[:3], "busy": round(os.getloadavg()[1], 1),
        "twice": {kind: count for kind, count in twice.items() if count},
    }  # fmt: skip


ADDED = (
    "killed", "paused", "cut", "poor", "failed_over", "requests", "repeated", "failed_requests", "lost", "doubled", "slots_lost",
    "unlabelled", "cycles", "cycles_taken_over", "releases",
)  # fmt: skip
ROOMS = ("app", "pipelines", "migrations", "tests/bench/fleet")
"""What the figures depend on, next to this file."""


def together(days: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All pieces as one: sums, the worst failover, and what each said."""
    failovers = {name: took for one in days for name, took in one["failovers"].items()}
    said = {name: [word for one in days for word in one[name]] for name in ("unserved", "first_failed", "first_lost", "slots")}
    refused = {name: one[name] for one in days for name in ("not_cut", "not_poor") if name in one}
    return (
        {name: sum(one[name] for one in days) for name in ADDED}
        | {"failover_s": max(failovers.values(), default=0.0), "failovers": failovers, "busy": max(one["busy"] for one in days)}
        | said
        | refused
    )


def missed(found: dict[str, Any]) -> list[str]:
    """Bounds that do not hold."""
    zero = ("failed_requests", "lost", "doubled", "slots_lost", "unlabelled")
    told = [f"{name} is {found[name]}, 0 is the bound" for name in zero if found[name]]
    told += [f"nothing was served any more after {name}" for name in found["unserved"]]
    told += [f"no {fault} was tried: {found[f'not_{fault}']}" for fault in ON_THE_LINE if f"not_{fault}" in found]
    return told + ([f"failover_s is {found['failover_s']}, {FAILOVER_S:g} is the bound"] if found["failover_s"] > FAILOVER_S else [])


def chosen(roles: Sequence[str], faults: Sequence[str], *, quick: bool) -> dict[str, list[tuple[str, str]]]:
    """Which faults meet whom, by piece; the quick run leaves every third one out, turn by turn, and never a server's."""
    pairs = [(role, fault) for role in roles for fault in faults]
    if quick:
        pairs = [pair for place, pair in enumerate(pairs) if (place + place // len(faults)) % 3 != 2]
    pieces = {role: [pair for pair in pairs if pair[0] == role] for role in roles}
    servers = [(name, fault) for name, _, fault in (server.partition(":") for server in SERVERS)]
    return {name: piece for name, piece in pieces.items() if piece} | {"servers": servers}


def whole(pieces: Pieces, options: argparse.Namespace) -> int:
    """Every piece, and all of them together; the exit code."""
    roles = options.roles.split(",")
    plan = chosen(roles, [fault for fault in options.faults.split(",") if fault], quick=options.quick)
    days: list[dict[str, Any]] = []
    for name in options.only.split(",") if options.only else plan:

        def lived(name: str = name) -> dict[str, Any]:
            with tempfile.TemporaryDirectory(prefix="ratchet-ha-") as folder:
                return day(Path(folder) / "data", roles=roles, faults=plan[name], slot_s=options.slot)

        days.append(pieces.get(name, lived))
        print(f"# {name}: {json.dumps(days[-1])}", file=sys.stderr, flush=True)
    found = together(days)
    told = missed(found)
    print(json.dumps({**found, "missed": told}))
    return 1 if told else 0


def main() -> int:
    """Run it, print it."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.ha")
    parser.add_argument("--quick", action="store_true", help="fewer faults a process")
    parser.add_argument("--roles", default=",".join(ROLES), help="which processes there are")
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--only", help="these pieces: names of processes, `servers`")
    parser.add_argument("--slot", type=int, default=30, help="seconds of a slot of the loop")
    add_pieces(parser)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nothing is left running
    return pieces_of(options, __file__, ROOMS).in_turn(lambda pieces: whole(pieces, options))


if __name__ == "__main__":
    sys.exit(main())
