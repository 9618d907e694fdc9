"""What people read and do at a terminal besides releases, against a real service on SQLite; and what a script sees of it."""

import json
import stat
import subprocess
import tracemalloc
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from sqlalchemy import Engine, insert

from app.access import SignIn
from app.api import people, releases
from app.db.access.keys import SqlKeys
from app.db.access.people import SqlPeople
from app.db.engine import open_engine, writing
from app.db.release.release_views import SqlReleaseViews
from app.db.tables import cycles
from app.domain.errors import RatchetError
from app.domain.ids import utc_now
from app.domain.people import Role
from app.domain.release.alarms import AlarmKind
from app.main import create_app
from pipelines.__main__ import ratchet
from tests.fakes.gateway import collaborators, policy_config, serving
from tests.fakes.people import PASSWORD, Town, quick_passwords
from tests.fakes.releases import POLICY, ReleaseRoom, release_room


@pytest.fixture(scope="module")
def engine(sqlite_template: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    data = tmp_path_factory.mktemp("terminal")
    for name in ("ratchet.db", "inbox.db"):
        (data / name).write_bytes(sqlite_template.read_bytes())
    engine = open_engine(f"sqlite:///{data}/ratchet.db")
    yield engine
    engine.dispose()


@pytest.fixture(scope="module")
def room(engine: Engine) -> ReleaseRoom:
    return release_room(engine)


@pytest.fixture(scope="module")
def url(engine: Engine, room: ReleaseRoom) -> Iterator[str]:
    book, crowd, policies = SqlKeys(engine), SqlPeople(engine), {POLICY: policy_config()}
    desk = SignIn(crowd, passwords=quick_passwords(), clock=utc_now)
    routers = [
        releases.router(releases.ReleaseRoom(desk=room.desk, releases=room.ledger, views=SqlReleaseViews(engine))),
        people.router(people.PeopleRoom(people=crowd, keys=book, desk=desk, policies=policies, address="http://here")),
    ]
    app = create_app(collaborators(keys=book, people=crowd, policies=policies, routers=routers, clock=utc_now))
    with serving(app) as address:
        yield address


class Terminal:
    """Somebody at a terminal."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment

    def __call__(self, *words: str, token: str | None = None, typed: str | None = None) -> Result:
        environment = self.environment | ({"RATCHET_TOKEN": token} if token else {})
        return CliRunner(env=environment).invoke(ratchet, list(words), input=typed)

    def json(self, *words: str, token: str | None = None) -> Any:
        """What it prints for scripts."""
        return json.loads(self(*words, "--json", token=token).stdout)


@pytest.fixture
def terminal(url: str, engine: Engine, tmp_path: Path) -> Terminal:
    folder = str(Path(str(engine.url.database)).parent)
    return Terminal({"RATCHET_URL": url, "RATCHET_DATA": folder, "XDG_CONFIG_HOME": str(tmp_path), "COLUMNS": "300"})


@pytest.fixture(scope="module")
def ada(engine: Engine, url: str) -> str:
    town = Town(engine, utc_now)
    return town.token(town.person("ada", Role.ADMIN))


def test_status_says_what_needs_somebody_and_a_script_sees_it_in_the_exit_code(terminal: Terminal, ada: str, room: ReleaseRoom) -> None:
    calm = terminal("status", token=ada)
    assert (calm.exit_code, "nothing needs you" in calm.output) == (0, True), (calm.output, calm.exception)
    release = room.ready("v2")
    waiting = terminal("status", token=ada)
    assert waiting.exit_code == 1
    assert f"--evidence {release.evidence_digest}" in waiting.output
    found = terminal.json("status", token=ada)
    assert [row["id"] for row in found["flight"]] == [release.id]
    assert (found["policies"][0]["policy"], found["policies"][0]["generation"]) == (POLICY, 1)
    room.desk.reject(release.id, approver="user:bob", reason="<b>[red]no\u202e\x1b[31m")
    room.desk.freeze(POLICY, AlarmKind.GAP, actor="system:watch", reason="paid more, no better")
    frozen = terminal("status", "--policy", POLICY, token=ada)
    assert (frozen.exit_code, "0 of 2 votes" in frozen.output) == (1, True)
    for voter in ("user:bob", "user:eve"):
        room.desk.unfreeze(POLICY, actor=voter)
    assert terminal("status", token=ada).exit_code == 0
    assert "no policy is named" in str(terminal("status", "--policy", "none", token=ada).exception)
    lines = terminal("top", "--count", "2", "--every", "0.2", "--json", token=ada).stdout.splitlines()
    assert [json.loads(line)["needs"] for line in lines] == [[], []]
    assert "promotions" in terminal("top", "--count", "1", token=ada).output
    listed = terminal("releases", "--state", "rejected", token=ada).output
    assert release.id in listed
    assert not {"\x1b", "\u202e"} & set(listed), "what somebody wrote does not steer the terminal"


def test_releases_are_listed_and_compared(terminal: Terminal, ada: str, room: ReleaseRoom) -> None:
    one, other = room.champion("v3"), room.ready("v4")
    assert [row["state"] for row in terminal.json("releases", "--limit", "2", token=ada)] == ["READY", "CHAMPION"]
    compared = terminal("diff", one.id, other.id, "--json", token=ada)
    assert compared.exit_code == 1, compared.exception
    assert {"what": "state", "one": "CHAMPION", "other": "READY"} in json.loads(compared.stdout)
    assert terminal("diff", one.id, one.id, token=ada).exit_code == 0
    assert "CHAMPION" in terminal("diff", one.version_name, other.version_name, token=ada).output


def test_slots_tell_what_became_of_each_and_two_that_were_held(terminal: Terminal, ada: str, engine: Engine) -> None:
    def slot(number: int, status: str) -> dict[str, object]:
        started = utc_now() + timedelta(minutes=number)
        return {
            "policy": POLICY, "slot": number, "status": status, "step": "update", "owner": "o", "fencing_token": 1, "attempt": 1,
            "timings": {}, "started_at": started, "finished_at": started + timedelta(seconds=30), "reason": "r",
        }  # fmt: skip

    with writing(engine) as connection:
        connection.execute(insert(cycles), [slot(1, "done"), slot(2, "held")])
    shown = terminal("slots", token=ada)
    assert (shown.exit_code, "held" in shown.output, "30 s" in shown.output) == (0, True, True), shown.exception
    with writing(engine) as connection:
        connection.execute(insert(cycles), [slot(3, "held")])
    assert terminal("slots", "--policy", POLICY, token=ada).exit_code == 1
    assert [row["slot"] for row in terminal.json("slots", token=ada)] == [3, 2, 1]


def test_tail_shows_the_newest_entries_in_order(terminal: Terminal, ada: str) -> None:
    lines = terminal("tail", "--no-follow", "--lines", "3", "--json", token=ada).stdout.splitlines()
    numbers = [json.loads(line)["seq"] for line in lines]
    assert (numbers, len(numbers)) == (sorted(numbers), 3)
    assert "person.added" in terminal("tail", "--no-follow", "--subject", "ada", token=ada).output


def test_logs_are_those_of_this_machine(terminal: Terminal, tmp_path: Path) -> None:
    terminal.environment["RATCHET_DATA"] = str(tmp_path)
    assert "ratchet up" in str(terminal("logs").exception)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "api.log").write_text("one\ntwo\x1b[31m\n")
    (tmp_path / "logs" / "loop.log").write_text("three\n")
    assert terminal("logs", "--lines", "1").output == "api two�[31m\nloop three\n"
    assert json.loads(terminal("logs", "loop", "--json").stdout) == {"process": "loop", "line": "three"}
    assert "api, loop" in str(terminal("logs", "none").exception)


def test_the_end_of_a_log_is_found_without_reading_all_of_it(terminal: Terminal, tmp_path: Path) -> None:
    terminal.environment["RATCHET_DATA"] = str(tmp_path)
    (tmp_path / "logs").mkdir()
    with (tmp_path / "logs" / "api.log").open("wb") as log:
        log.seek(64 << 20)
        log.write(b"\n" + b"a" * 100_000 + b"\n" + b"two\n" * 3)
    tracemalloc.start()
    try:
        said = terminal("logs", "--lines", "4").output.splitlines()
        most_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert said == ["api " + "a" * 100_000, *["api two"] * 3]
    assert most_bytes < 16 << 20


def test_exit_codes_tell_a_script_why(terminal: Terminal, ada: str, engine: Engine) -> None:
    town = Town(engine, utc_now)
    viewer = town.token(town.person("viewer", Role.VIEWER))

    def code(*words: str, token: str | None) -> int:
        error = terminal(*words, token=token).exception
        assert isinstance(error, RatchetError), error
        return error.exit_code

    assert code("releases", token="rk_00000000_wrong") == 3
    assert code("people", "list", token=viewer) == 3
    assert code("diff", "nothing", "nowhere", token=ada) == 2
    assert code("releases", "--url", "http://127.0.0.1:9", token=ada) == 4


def test_somebody_signs_in_at_a_terminal_and_out_again(terminal: Terminal, engine: Engine, tmp_path: Path) -> None:
    Town(engine, utc_now).person("typist")
    wrong = terminal("login", "--name", "typist", typed="wrong\n")
    assert "name or password is wrong" in str(wrong.exception)
    done = terminal("login", typed=f"typist\n{PASSWORD}\n")
    assert "as user:typist (operator)" in done.output, done.exception
    assert PASSWORD not in done.output
    kept = tmp_path / "ratchet" / "tokens.json"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert terminal("releases").exit_code == 0
    token = next(iter(json.loads(kept.read_text()).values()))
    assert "has ended" in terminal("logout").output
    assert terminal("releases", token=token).exception is not None, "whoever kept it"
    assert "nobody is signed in" in str(terminal("logout").exception)
    assert terminal("login", "--token", typed=f"{token}\n").exception is not None
    kept.chmod(0o644)
    assert "chmod 600" in str(terminal("releases").exception)


def test_the_first_admin_comes_by_a_link_that_the_owner_of_the_machine_alone_can_read(tmp_path: Path, sqlite_template: Path) -> None:
    for name in ("ratchet.db", "inbox.db"):
        (tmp_path / name).write_bytes(sqlite_template.read_bytes())
    fresh = Terminal({"RATCHET_DATA": str(tmp_path), "RATCHET_PUBLIC_URL": "https://ratchet.example/"})
    made = fresh("people", "first", "root", "--os-user", "root")
    assert made.exit_code == 0, made.exception
    path = tmp_path / "secrets" / "first_admin_link"
    assert str(path) in made.output
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    link = path.read_text().strip()
    assert link not in made.output, "what a terminal shows, journals keep"
    start, secret = link.split("=")
    assert start == "https://ratchet.example/console/welcome?link"
    engine = open_engine(f"sqlite:///{tmp_path}/ratchet.db")
    SignIn(SqlPeople(engine), passwords=quick_passwords(), clock=utc_now).accept(secret, PASSWORD)
    assert "root can add people already" in str(fresh("people", "first", "eve").exception)
    assert fresh("people", "first", "eve", "--break-glass").exit_code == 0
    assert [person.name for person in SqlPeople(engine).all()] == ["eve", "root"]
    engine.dispose()


def test_people_are_managed_from_a_terminal(terminal: Terminal, ada: str) -> None:
    link = terminal("people", "add", "carl", "--role", "viewer", "--email", "carl@example.com", token=ada)
    assert link.stdout.startswith("http://here/console/welcome?link="), link.exception
    both = terminal("people", "change", "carl", "--role", "viewer", "--role", "operator", "--policy", "tab", token=ada)
    assert "carl is operator, viewer of tab" in both.output
    assert "disabled" in terminal("people", "change", "carl", "--disable", token=ada).output
    assert "enable them first" in str(terminal("people", "invite", "carl", token=ada).exception)
    assert "of all policies" in terminal("people", "change", "carl", "--enable", "--policy", "all", token=ada).output
    assert terminal("people", "invite", "carl", token=ada).output.startswith("http://here/")
    assert "of carl has ended" in terminal("people", "sign-out", "carl", token=ada).output
    assert "nothing to change" in str(terminal("people", "change", "carl", token=ada).exception)
    assert "carl" in terminal("people", "list", token=ada).output
    assert "carl@example.com" in str(terminal.json("people", "list", token=ada))
    assert "manage_people" in terminal("people", "roles", token=ada).output


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_is_told_how_to_complete(shell: str) -> None:
    said = CliRunner().invoke(ratchet, ["completion", shell]).output
    assert f"{shell}_complete" in said
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=said, text=True, check=True)
    word = "stat" if shell == "fish" else "1"
    asking = {"COMP_WORDS": "ratchet stat", "COMP_CWORD": word, "_RATCHET_COMPLETE": f"{shell}_complete"}
    done = CliRunner(env=asking).invoke(ratchet, [], prog_name="ratchet", complete_var="_RATCHET_COMPLETE")
    assert "status" in done.output
