"""`ratchet release`: acting goes over HTTP under a key; the database is acted on with `--break-glass`, audited, and by one person only."""

import os
import pwd
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner, Result
from sqlalchemy import Engine, insert

from app.db.engine import reading, writing
from app.db.release.audit import entries
from app.db.release.needed_weights import SqlNeededWeights
from app.db.release.release_views import SqlReleaseViews
from app.db.tables import versions
from app.domain.errors import RatchetError
from app.domain.ids import utc_now
from app.domain.release.alarms import AlarmKind
from app.domain.release.releases import ReleaseState
from app.domain.release.terms import Terms
from app.release.desk import ReleaseDesk
from pipelines.__main__ import ratchet
from tests.fakes.gateway import serving
from tests.fakes.people import Town
from tests.fakes.releases import POLICY, ReleaseRoom, release_room
from tests.integration.release.service import release_service

ME = f"user:{pwd.getpwuid(os.getuid()).pw_name}"
CONFIG = f"""
[policies.{POLICY}]
model = "model"
base_name = "tiny"
base_model = "tiny"
"""


@pytest.fixture
def room(sqlite_engine: Engine) -> ReleaseRoom:
    return release_room(sqlite_engine)


@pytest.fixture
def url(sqlite_engine: Engine, room: ReleaseRoom) -> Iterator[str]:
    with serving(release_service(sqlite_engine, room)) as address:
        yield address


@pytest.fixture
def terminal(sqlite_url: str, tmp_path: Path, url: str) -> "Terminal":
    (tmp_path / "ratchet.toml").write_text(CONFIG)
    return Terminal(
        {
            "RATCHET_DATABASE_URL": sqlite_url, "RATCHET_DATA": str(tmp_path), "RATCHET_CONFIG": str(tmp_path / "ratchet.toml"),
            "RATCHET_URL": url, "LOGNAME": "somebody-else", "XDG_CONFIG_HOME": str(tmp_path), "USER": "somebody-else", "COLUMNS": "300",
        }
    )  # fmt: skip


class Terminal:
    """Somebody at a terminal."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment

    def __call__(self, *arguments: str, key: str | None = None) -> Result:
        return CliRunner(env=self.environment | ({"RATCHET_TOKEN": key} if key else {})).invoke(ratchet, ["release", *arguments])


def person(engine: Engine, name: str) -> str:
    town = Town(engine)
    return town.token(town.person(name))


def test_one_person_cannot_be_two_at_a_terminal(terminal: Terminal, sqlite_engine: Engine, room: ReleaseRoom) -> None:
    ada, bob = person(sqlite_engine, "ada"), person(sqlite_engine, "bob")
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


def test_explain_tells_the_story_of_a_release_that_was_taken_back(terminal: Terminal, room: ReleaseRoom) -> None:
    release = room.champion("v2")
    room.desk.roll_back(release.id, actor="user:ada", reason="it is rude")
    told = terminal("explain", release.id).output
    first = [line.partition(": ")[2] for line in told.splitlines() if line.startswith("20")]
    assert first[0] == "tiny-v2 comes, to be held against v1: a candidate was trained"
    assert "ada took it back and barred it: it is rude" in first
    assert "by now nobody met it while it was judged" in first


def test_a_yes_is_bound_to_the_evidence_that_was_named(terminal: Terminal, sqlite_engine: Engine, room: ReleaseRoom) -> None:
    ada, release = person(sqlite_engine, "ada"), room.ready("v2")
    for unnamed in (terminal("approve", release.id, key=ada), terminal("approve", release.id, "--break-glass")):
        assert f"--evidence {release.evidence_digest}" in str(unnamed.exception)
    for way in ((), ("--break-glass",)):
        other = terminal("approve", release.id, "--evidence", "f" * 64, *way, key=ada)
        assert "look at it again, then approve" in str(other.exception)
        short = terminal("approve", release.id, "--evidence", str(release.evidence_digest)[:11], *way, key=ada)
        assert "look at it again, then approve" in str(short.exception)
    assert room.ledger.find(release.id).state is ReleaseState.READY


def test_the_evidence_may_be_named_as_lists_show_it(terminal: Terminal, sqlite_engine: Engine, room: ReleaseRoom) -> None:
    ada, release = person(sqlite_engine, "ada"), room.ready("v2")
    done = terminal("approve", release.id, "--evidence", str(release.evidence_digest)[:12], key=ada)
    assert done.exit_code == 0, done.exception
    assert room.ledger.find(release.id).state is ReleaseState.APPROVED


def test_without_a_key_nobody_acts_over_http(terminal: Terminal, sqlite_engine: Engine, room: ReleaseRoom) -> None:
    person(sqlite_engine, "ada")
    release = room.ready("v2")
    refused = terminal("approve", release.id, "--evidence", str(release.evidence_digest))
    assert "401" in str(refused.exception)


def test_breaking_the_glass_is_audited_and_acts_as_the_user_of_the_machine(
    terminal: Terminal, sqlite_engine: Engine, room: ReleaseRoom
) -> None:
    promoted = room.champion("v2")
    back = terminal("rollback", promoted.id, "--reason", "rude", "--break-glass")
    assert back.exit_code == 0, back.exception
    assert room.ledger.find(promoted.id).state is ReleaseState.ROLLED_BACK
    (broken,) = [entry for entry in SqlReleaseViews(sqlite_engine).audit(newest=1000) if entry.action == "release.break_glass"]
    assert (broken.actor, broken.subject, broken.detail["act"], broken.detail["reason"]) == (ME, promoted.id, "rollback", "rude")


def test_two_votes_past_the_service_free_nothing(terminal: Terminal, sqlite_engine: Engine, room: ReleaseRoom) -> None:
    ada, bob = person(sqlite_engine, "ada"), person(sqlite_engine, "bob")
    room.desk.freeze(POLICY, AlarmKind.GAP, actor="system:watch", reason="paid more, no better", release_id="r")
    shown = terminal("alarms", POLICY).output
    assert "gap" in shown
    assert "two people" in shown
    for _ in range(2):
        assert "two people" in str(terminal("unfreeze", POLICY, "--break-glass").exception)
    assert "one vote of two" in terminal("unfreeze", POLICY, key=ada).output
    assert "promotions are free" in terminal("unfreeze", POLICY, key=bob).output
    assert "user:ada, user:bob" in terminal("alarms", POLICY).output, "who ended it"


def test_two_people_lift_a_quarantine(terminal: Terminal, sqlite_engine: Engine, room: ReleaseRoom) -> None:
    ada, bob = person(sqlite_engine, "ada"), person(sqlite_engine, "bob")
    room.desk.roll_back(room.champion("v2").id, actor="user:eve", reason="all versions failed")
    assert "quarantined v2" in terminal("alarms", POLICY).output
    words = ("lift", POLICY, "v2", "--reason", "it was the network")
    assert "two people" in str(terminal(*words, "--break-glass").exception)
    assert "one vote of two" in terminal(*words, key=ada).output
    assert "may serve again" in terminal(*words, key=bob).output
    assert "0 quarantined versions" in str(terminal(*words, key=ada).exception)


def test_every_other_act_goes_both_ways(terminal: Terminal, sqlite_engine: Engine, room: ReleaseRoom) -> None:
    ada = person(sqlite_engine, "ada")
    assert "ABORTED" in terminal("abort", room.queued("v2").id, "--reason", "no", key=ada).output
    assert "REJECTED" in terminal("reject", room.ready("v3").id, "--reason", "no", key=ada).output
    assert "ABORTED" in terminal("abort", room.queued("v4").id, "--reason", "no", "--break-glass").output
    assert "REJECTED" in terminal("reject", room.ready("v5").id, "--reason", "no", "--break-glass").output
    assert "the anchor of" in terminal("anchor", POLICY, key=ada).output
    assert "the anchor of" in terminal("anchor", POLICY, "--break-glass").output
    assert "--break-glass" in str(terminal("plant", POLICY, "v1", "--reason", "x").exception)


def test_a_known_version_is_planted_past_the_offline_gates_under_the_system_s_own_name_and_stays_marked(
    terminal: Terminal, sqlite_engine: Engine, room: ReleaseRoom
) -> None:
    known(sqlite_engine, "v2")
    assert "QUEUED" in terminal("plant", POLICY, "tiny-v2", "--reason", "a drill", "--break-glass").output
    [planted] = room.ledger.list(policy=POLICY, states=(ReleaseState.QUEUED,))
    assert (planted.digest, planted.initiator, planted.config["forced"]) == ("v2", ME, "a drill")
    with reading(sqlite_engine) as connection:
        acts = [(entry.actor, entry.action) for entry in entries(connection)]
    assert {(ME, "release.break_glass"), (ME, "release.forced")} <= set(acts)
    assert "0 versions" in str(terminal("plant", POLICY, "tiny-v9", "--reason", "a drill", "--break-glass").exception)


def test_a_version_is_pinned_and_unpinned_by_name_and_a_rollback_goes_where_it_is_told(
    terminal: Terminal, sqlite_engine: Engine, room: ReleaseRoom
) -> None:
    ada = person(sqlite_engine, "ada")
    for number in (1, 2, 3):
        known(sqlite_engine, f"v{number}")
    promoted = [room.champion(f"v{number}") for number in (2, 3)]
    assert "v1 is kept until it is unpinned" in terminal("pin", POLICY, "tiny-v1", "--reason", "the good old one", key=ada).output
    again = terminal("pin", POLICY, "v1", "--reason", "mine", key=ada)
    assert "user:ada pinned it" in str(again.exception)
    assert "the good old one" in str(again.exception)
    assert "0 versions of" in str(terminal("pin", POLICY, "v9", "--reason", "x", key=ada).exception)
    assert "v1" in SqlNeededWeights(sqlite_engine, newest=0).needed()
    nowhere = terminal("rollback", promoted[1].id, "--reason", "rude", "--to", "v9", key=ada)
    assert "no version that" in str(nowhere.exception)
    assert room.ledger.find(promoted[1].id).state is ReleaseState.CHAMPION, "nothing else was done instead"
    assert "ROLLED_BACK" in terminal("rollback", promoted[1].id, "--reason", "rude", "--to", "v1", key=ada).output
    assert room.desk.pointer(POLICY).digest == "v1"
    assert "only while something else" in terminal("unpin", POLICY, "v1", "--reason", "over", key=ada).output
    assert "is not pinned" in str(terminal("unpin", POLICY, "v1", "--reason", "over", key=ada).exception)
    for act in ("pin", "unpin"):
        assert terminal(act, POLICY, "v2", "--reason", "glass", "--break-glass").exit_code == 0
    said = [(e.actor, e.action, e.detail["reason"]) for e in SqlReleaseViews(sqlite_engine).audit(newest=1000) if "pinned" in e.action]
    assert said[::-1] == [
        ("user:ada", "version.pinned", "the good old one"), ("user:ada", "version.unpinned", "over"), (ME, "version.pinned", "glass"),
        (ME, "version.unpinned", "glass"),
    ]  # fmt: skip


def known(engine: Engine, digest: str) -> None:
    row = {"digest": digest, "policy": POLICY, "name": f"tiny-{digest}", "kind": "rl", "parent": None, "step": 1, "base_model": "b"}
    with writing(engine) as connection:
        connection.execute(insert(versions).values(**row, licence="Apache-2.0", tags={}, created_at=utc_now()))


def test_an_act_says_what_it_rests_on_and_is_refused_where_that_moved_on(
    terminal: Terminal, sqlite_engine: Engine, room: ReleaseRoom
) -> None:
    ada, promoted = person(sqlite_engine, "ada"), room.champion("v2")
    stale = terminal("rollback", promoted.id, "--reason", "rude", "--generation", "1", key=ada)
    assert isinstance(stale.exception, RatchetError)
    assert (stale.exception.exit_code, "promote of v2" in str(stale.exception)) == (5, True)
    assert room.ledger.find(promoted.id).state is ReleaseState.CHAMPION
    done = terminal("rollback", promoted.id, "--reason", "rude", "--generation", "2", key=ada)
    assert "pointer generation 2" in done.output
    assert str(promoted.evidence_digest)[:12] in done.output


def test_a_lost_answer_is_asked_for_again_and_was_done_already(
    terminal: Terminal, sqlite_engine: Engine, room: ReleaseRoom, url: str
) -> None:
    """Between the terminal and the service something cuts the line after the request, and before the answer."""
    ada, release = person(sqlite_engine, "ada"), room.ready("v2")
    with cutting(url, when=b"/approve") as (address, cut):
        done = terminal("approve", release.id, "--evidence", str(release.evidence_digest), "--url", address, key=ada)
    assert (done.exit_code, cut) == (0, [1]), done.exception
    assert "done already" in done.output
    assert "is APPROVED" in done.output
    said = [entry.action for entry in SqlReleaseViews(sqlite_engine).audit(subject=release.id, newest=50)]
    assert said.count("release.approval") == 1


@contextmanager
def cutting(url: str, *, when: bytes) -> Iterator[tuple[str, list[int]]]:
    """A proxy that hands on one request a connection; the first that names this it lets be done, and answers with nothing."""
    target, cut = httpx.URL(url), list[int]()
    listener = socket.create_server(("127.0.0.1", 0))

    def carry() -> None:
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            with near, socket.create_connection((target.host, target.port or 80)) as far:
                request = near.recv(65_536)
                head, _, body = request.partition(b"\r\n\r\n")
                length = re.search(rb"content-length: (\d+)", head.lower())
                while length is not None and len(body) < int(length[1]):
                    more = near.recv(65_536)
                    request, body = request + more, body + more
                far.sendall(re.sub(rb"(?i)connection: keep-alive", b"connection: close", request))
                answer = b""
                while part := far.recv(65_536):
                    answer += part
                if when in head and not cut:
                    cut.append(1)
                else:
                    near.sendall(answer)

    thread = threading.Thread(target=carry, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", cut
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(5)


def test_a_service_that_is_down_says_how_to_go_on(terminal: Terminal, room: ReleaseRoom) -> None:
    terminal.environment["RATCHET_URL"] = "http://127.0.0.1:9"
    assert "--break-glass" in str(terminal("abort", room.queued("v2").id, "--reason", "x").exception)
