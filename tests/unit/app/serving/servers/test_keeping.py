"""What a server in place should hold by its role and by who else is ready, when a failure is tried again, and what is said meanwhile."""

import logging
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from app.contact import Contact, Part
from app.domain.errors import Refused, Unavailable
from app.domain.ports import EngineState
from app.serving.servers.control import Control
from app.serving.servers.held import Held
from app.serving.servers.residency import Adapters, InPlace, KeptServer, keep_versions, require_adapter
from tests.fakes.engines import MemoryEngineLedger

OLD, NEW, MID = "a" * 64, "b" * 64, "c" * 64
READY, FAILED = EngineState.READY, EngineState.FAILED


class Server:
    """A control that only says what it holds; what is to be loaded cannot be."""

    url, scheme, name = "http://server", "vllm+", "vLLM"

    def __init__(self, digest: str | None = OLD) -> None:
        self.digest = digest
        self.tried: list[str] = []

    def held(self) -> Held:
        return Held(base=self.digest or "base", version=None, adapters=frozenset())

    def path(self, digest: str) -> Path:
        self.tried.append(digest)
        raise Refused("no such weights")


class Room:
    """A ledger, a clock that is moved by hand, and a server."""

    def __init__(self, role: str = "champion", *, holds: str | None = OLD) -> None:
        self.now, self.server = 100.0, Server(holds)
        self.ledger = MemoryEngineLedger(address="vllm+http://server")
        kept = SimpleNamespace(control=cast("Control", self.server), weights=self.server, seen={}, look=None)
        self.residency = InPlace(
            cast("KeptServer", kept), self.ledger, policy="composer", role=role, linger_s=0.0, clock=lambda: self.now, contact=Contact()
        )

    def wants(self, **roles: list[str]) -> "Room":
        self.ledger.by_role = roles
        self.ledger.wants = {("composer", digest) for digests in roles.values() for digest in digests}
        return self

    def goal(self) -> str | None:
        wanted = {digest: ["composer"] for _, digest in self.ledger.wants}
        return self.residency._goal(self.server.held().base_digest, wanted)


def test_the_champion_s_server_follows_the_champion_whoever_else_is_ready() -> None:
    assert Room().goal() is None
    assert Room().wants(champion=[NEW], previous=[OLD]).goal() == NEW
    assert Room().wants(champion=[OLD], candidate=[NEW]).goal() == OLD


@pytest.mark.parametrize(
    ("roles", "elsewhere", "goal"),
    [
        ({"champion": [OLD], "candidate": [NEW]}, [], OLD), ({"champion": [OLD], "candidate": [NEW]}, ["http://other"], NEW),
        ({"champion": [MID], "candidate": [NEW]}, [], NEW), ({"champion": [MID], "previous": [OLD], "candidate": [NEW]}, [], NEW),
    ],
)  # fmt: skip
def test_the_candidate_s_server_leaves_a_champion_only_to_somebody_else(
    roles: dict[str, list[str]], elsewhere: list[str], goal: str
) -> None:
    room = Room("candidate").wants(**roles)
    room.ledger.elsewhere[OLD] = elsewhere
    room.ledger.states["composer", OLD] = (READY, None)
    assert room.goal() == goal


def test_weights_that_cannot_be_taken_are_told_and_tried_again_half_a_minute_later() -> None:
    room = Room(holds=None).wants(champion=[NEW])
    room.residency.turn()
    assert room.ledger.states["composer", NEW] == (FAILED, "no such weights")
    assert room.server.tried == [NEW]
    room.ledger.states.clear()
    room.now += 29.9
    room.residency.turn()
    assert (room.server.tried, room.ledger.states["composer", NEW]) == ([NEW], (FAILED, "no such weights"))
    room.now += 0.1
    room.residency.turn()
    assert room.server.tried == [NEW, NEW]


def test_adapters_that_cannot_be_taken_are_tried_again_likewise_and_another_policy_s_are_nobody_s() -> None:
    server, now, ledger = Server(), [100.0], MemoryEngineLedger()
    kept = cast("KeptServer", SimpleNamespace(control=server, weights=server, seen={}))
    adapters = Adapters(kept, ledger, only=frozenset({"composer"}), clock=lambda: now[0])
    ledger.wants = {("composer", NEW), ("tab", MID)}
    for later_s, tried in ((0.0, 1), (29.9, 1), (0.1, 2)):
        now[0] += later_s
        adapters.turn()
        assert (server.tried, ledger.states) == ([NEW] * tried, {("composer", NEW): (FAILED, "no such weights")})


class Turns:
    """A residency whose rounds go as they are told."""

    def __init__(self, *faults: Exception | None) -> None:
        self.faults, self.contact = [*faults], Contact()

    def turn(self) -> None:
        fault = self.faults.pop(0)
        if fault is not None:
            raise fault


class Rounds(threading.Event):
    """Lets so many rounds pass."""

    def __init__(self, rounds: int) -> None:
        super().__init__()
        self.waited: list[float | None] = []
        self._rounds = rounds

    def wait(self, timeout: float | None = None) -> bool:
        self.waited.append(timeout)
        if len(self.waited) == self._rounds:
            self.set()
        return True


def kept(residency: Turns, rounds: int, **options: Any) -> list[float | None]:
    stop = Rounds(rounds)
    keep_versions(cast("InPlace", residency), stop=stop, **options)
    return stop.waited


def test_a_server_that_is_away_is_waited_for_and_told_once_until_it_was_back(caplog: pytest.LogCaptureFixture) -> None:
    away = Unavailable("vLLM does not answer")
    residency = Turns(away, away, None, away)
    assert kept(residency, 4) == [1.0] * 4
    assert caplog.messages == ["residency waits error=vLLM does not answer"] * 2
    assert residency.faults == []


def test_a_ledger_that_is_away_is_told_by_whoever_asks_it_and_not_again(caplog: pytest.LogCaptureFixture) -> None:
    residency = Turns(Unavailable("the database is away"))
    with caplog.at_level(logging.ERROR):
        residency.contact.lost(Part.DATABASE, "no route")
    kept(residency, 1, every_s=0.5)
    assert "residency waits" not in caplog.text


def test_whoever_was_told_to_stop_takes_no_turn() -> None:
    stop = threading.Event()
    stop.set()
    keep_versions(cast("InPlace", Turns()), stop=stop)


def test_a_whole_model_is_no_adapter_and_says_where_it_can_be_kept(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=f"{NEW[:12]} is a whole model: keep it on a server with `ratchet engine --vllm URL --in-place`"):
        require_adapter(tmp_path, NEW, base=OLD)
