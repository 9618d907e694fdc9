"""`ratchet release`: acting goes over HTTP under a key; the database is acted on with `--break-glass`, audited, and by one person only."""

import os
import pwd
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from fastapi import FastAPI
from sqlalchemy import Engine
from starlette.requests import Request
from starlette.responses import Response

from app.api.access import Access
from app.api.errors import problem
from app.api.releases import ReleaseRoom as ApiRoom
from app.api.releases import router
from app.api.sessions import Sessions
from app.db.engine import open_engine
from app.db.keys import SqlKeys
from app.db.people import SqlPeople
from app.db.release_views import SqlReleaseViews
from app.domain.alarms import AlarmKind
from app.domain.errors import RatchetError
from app.domain.ids import utc_now
from app.domain.releases import ReleaseState
from app.domain.terms import Terms
from app.release.desk import ReleaseDesk
from pipelines.__main__ import ratchet
from tests.fakes.gateway import serving
from tests.fakes.people import Town
from tests.fakes.releases import POLICY, ReleaseRoom, release_room

ME = f"user:{pwd.getpwuid(os.getuid()).pw_name}"
CONFIG = f"""
[policies.{POLICY}]
model = "model"
base_name = "tiny"
base_model = "tiny"
"""


@pytest.fixture
def engine(sqlite_url: str) -> Iterator[Engine]:
    engine = open_engine(sqlite_url)
    yield engine
    engine.dispose()


@pytest.fixture
def room(engine: Engine) -> ReleaseRoom:
    return release_room(engine)


@pytest.fixture
def url(engine: Engine, room: ReleaseRoom) -> Iterator[str]:
    api = ApiRoom(desk=room.desk, releases=room.ledger, views=SqlReleaseViews(engine))
    app = FastAPI()
    app.state.access = Access(SqlKeys(engine), clock=utc_now, sessions=Sessions(lambda: ("secret",)), people=SqlPeople(engine))
    app.include_router(router(api))

    def answer(_request: Request, error: Exception) -> Response:
        assert isinstance(error, RatchetError)
        return problem(error).response()

    app.add_exception_handler(RatchetError, answer)
    with serving(app) as address:
        yield address


@pytest.fixture
def terminal(sqlite_url: str, tmp_path: Path, url: str) -> "Terminal":
    (tmp_path / "ratchet.toml").write_text(CONFIG)
    return Terminal(
        {
            "RATCHET_DATABASE_URL": sqlite_url, "RATCHET_DATA": str(tmp_path), "RATCHET_CONFIG": str(tmp_path / "ratchet.toml"),
            "RATCHET_URL": url, "LOGNAME": "somebody-else", "USER": "somebody-else", "COLUMNS": "300",
        }
    )  # fmt: skip


class Terminal:
    """Somebody at a terminal."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment

    def __call__(self, *arguments: str, key: str | None = None) -> Result:
        return CliRunner(env=self.environment | ({"RATCHET_KEY": key} if key else {})).invoke(ratchet, ["release", *arguments])


def person(engine: Engine, name: str) -> str:
    town = Town(engine)
    return town.token(town.person(name))


def test_one_person_cannot_be_two_at_a_terminal(terminal: Terminal, engine: Engine, room: ReleaseRoom) -> None:
    ada, bob = person(engine, "ada"), person(engine, "bob")
    strict = ReleaseDesk(room.ledger, terms=Terms(config_hash="config", approvals=2), clock=room.clock)
    release = replace(room, desk=strict).ready("v2")
    digest = str(release.evidence_digest)
    assert terminal("approve", release.id, "--evidence", digest, key=ada).exit_code == 0
    again = terminal("approve", release.id, "--evidence", digest, key=ada)
    assert "somebody else's" in str(again.exception)
    assert "No such option" in terminal("approve", release.id, "--evidence", digest, "--as", "bob", key=ada).output
    second = terminal("approve", release.id, "--evidence", digest, "--break-glass", "--reason", "hurry")
    assert "the database cannot tell who is who" in str(second.exception)
    assert room.ledger.find(release.id).state is ReleaseState.READY
    done = terminal("approve", release.version_name, "--evidence", digest, key=bob)
    assert done.exit_code == 0, done.exception
    assert "is APPROVED" in done.output


def test_a_yes_is_bound_to_the_evidence_that_was_named(terminal: Terminal, engine: Engine, room: ReleaseRoom) -> None:
    ada, release = person(engine, "ada"), room.ready("v2")
    assert "Missing option '--evidence'" in terminal("approve", release.id, key=ada).output
    for way in ((), ("--break-glass",)):
        other = terminal("approve", release.id, "--evidence", "f" * 64, *way, key=ada)
        assert "look at it again, then approve" in str(other.exception)
    assert room.ledger.find(release.id).state is ReleaseState.READY


def test_without_a_key_nobody_acts_over_http(terminal: Terminal, engine: Engine, room: ReleaseRoom) -> None:
    person(engine, "ada")
    release = room.ready("v2")
    refused = terminal("approve", release.id, "--evidence", str(release.evidence_digest))
    assert "401" in str(refused.exception)


def test_breaking_the_glass_is_audited_and_acts_as_the_user_of_the_machine(terminal: Terminal, engine: Engine, room: ReleaseRoom) -> None:
    promoted = room.champion("v2")
    back = terminal("rollback", promoted.id, "--reason", "rude", "--break-glass")
    assert back.exit_code == 0, back.exception
    assert room.ledger.find(promoted.id).state is ReleaseState.ROLLED_BACK
    (broken,) = [entry for entry in SqlReleaseViews(engine).audit(newest=1000) if entry.action == "release.break_glass"]
    assert (broken.actor, broken.subject, broken.detail["act"], broken.detail["reason"]) == (ME, promoted.id, "rollback", "rude")


def test_two_votes_past_the_service_free_nothing(terminal: Terminal, engine: Engine, room: ReleaseRoom) -> None:
    ada, bob = person(engine, "ada"), person(engine, "bob")
    room.desk.freeze(POLICY, AlarmKind.GAP, actor="system:watch", reason="paid more, no better", release_id="r")
    shown = terminal("alarms", POLICY).output
    assert "gap" in shown
    assert "two people" in shown
    for _ in range(2):
        assert "two people" in str(terminal("unfreeze", POLICY, "--break-glass").exception)
    assert "one vote of two" in terminal("unfreeze", POLICY, key=ada).output
    assert "promotions are free" in terminal("unfreeze", POLICY, key=bob).output
    assert "user:ada, user:bob" in terminal("alarms", POLICY).output, "who ended it"


def test_two_people_lift_a_quarantine(terminal: Terminal, engine: Engine, room: ReleaseRoom) -> None:
    ada, bob = person(engine, "ada"), person(engine, "bob")
    room.desk.roll_back(room.champion("v2").id, actor="user:eve", reason="all versions failed")
    assert "quarantined v2" in terminal("alarms", POLICY).output
    words = ("lift", POLICY, "v2", "--reason", "it was the network")
    assert "two people" in str(terminal(*words, "--break-glass").exception)
    assert "one vote of two" in terminal(*words, key=ada).output
    assert "may serve again" in terminal(*words, key=bob).output
    assert "0 quarantined versions" in str(terminal(*words, key=ada).exception)


def test_every_other_act_goes_both_ways(terminal: Terminal, engine: Engine, room: ReleaseRoom) -> None:
    ada = person(engine, "ada")
    assert "ABORTED" in terminal("abort", room.queued("v2").id, "--reason", "no", key=ada).output
    assert "REJECTED" in terminal("reject", room.ready("v3").id, "--reason", "no", key=ada).output
    assert "ABORTED" in terminal("abort", room.queued("v4").id, "--reason", "no", "--break-glass").output
    assert "REJECTED" in terminal("reject", room.ready("v5").id, "--reason", "no", "--break-glass").output
    assert "the anchor of" in terminal("anchor", POLICY, key=ada).output
    assert "the anchor of" in terminal("anchor", POLICY, "--break-glass").output
    assert "--break-glass" in str(terminal("plant", POLICY, "v1", "--reason", "x").exception)


def test_a_service_that_is_down_says_how_to_go_on(terminal: Terminal, room: ReleaseRoom) -> None:
    terminal.environment["RATCHET_URL"] = "http://127.0.0.1:9"
    assert "--break-glass" in str(terminal("abort", room.queued("v2").id, "--reason", "x").exception)
