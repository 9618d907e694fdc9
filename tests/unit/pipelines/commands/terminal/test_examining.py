"""What `ratchet doctor` finds on one machine, in which words, and how one finding or a broken check weighs on its exit code."""

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta

import pytest
from sqlalchemy import update

from app import wiring
from app.db.access.keys import SqlKeys
from app.db.engine import writing
from app.db.operations.examination import BACKUP, DRILL, SqlDeploymentState
from app.db.tables import audit
from app.domain.access import Scope
from app.domain.errors import BadConfig
from app.domain.ids import utc_now
from pipelines.commands.examination import checks, doors
from pipelines.commands.examination.findings import Finding, State, fail, look, ok, warn, worst
from tests.unit.pipelines.commands.terminal.at_a_terminal import Terminal


@pytest.fixture
def terminal(terminal: Terminal) -> Terminal:
    """With weights in its folder."""
    (terminal.folder / "READY").write_text("digest")
    return terminal


def told(found: Iterator[Finding]) -> list[tuple[str, str]]:
    return [(one.state.value, one.says) for one in found]


# --- findings --------------------------------------------------------------------------------------------------------------------


def test_a_finding_is_a_line_with_its_cure_below_it() -> None:
    assert ok("clock", "right").line() == "ok    clock         right"
    assert warn("clock", "late", "wind it").line() == "warn  clock         late\n                    cure: wind it"
    assert fail("clock", "gone").line() == "fail  clock         gone"
    assert fail("clock", "gone", "buy one").row() == {"check": "clock", "state": "fail", "says": "gone", "cure": "buy one"}


@pytest.mark.parametrize(
    ("states", "found"),
    [
        ((), State.OK), ((State.OK,), State.OK), ((State.OK, State.WARN, State.OK), State.WARN),
        ((State.FAIL, State.WARN, State.OK), State.FAIL),
    ],
)  # fmt: skip
def test_the_worst_finding_counts(states: tuple[State, ...], found: State) -> None:
    assert worst([Finding(check="c", state=state, says="") for state in states]) is found


def test_a_check_that_breaks_is_a_finding_and_the_others_are_heard(caplog: pytest.LogCaptureFixture) -> None:
    def refused() -> Iterator[Finding]:
        yield ok("first", "half of it")
        raise BadConfig("name a policy")

    def buggy() -> Iterator[Finding]:
        raise ZeroDivisionError("by nothing")

    with caplog.at_level(logging.ERROR):
        found = look([("first", refused), ("second", buggy), ("third", lambda: [ok("third", "fine")])])
    assert [(one.check, one.state.value, one.says) for one in found] == [
        ("first", "fail", "name a policy"), ("second", "fail", "the check itself broke (ZeroDivisionError: by nothing)"),
        ("third", "ok", "fine"),
    ]  # fmt: skip
    assert "check failed name=second" in caplog.text
    assert found[1].cure == "report it; the traceback is in the log"


def test_the_doctor_looks_where_it_is_told_to_and_a_warning_is_no_failure_unless_it_is_strict(terminal: Terminal) -> None:
    both = terminal("doctor", "--only", "schema", "--only", "backup")
    assert both.exit_code == 0
    assert [line.split()[1] for line in both.stdout.splitlines() if not line.startswith(" ")] == ["schema", "backup", "backup"]
    assert terminal("doctor", "--only", "schema", "--strict").exit_code == 0
    assert terminal("doctor", "--only", "backup", "--strict").exit_code == 1
    rows = json.loads(terminal("doctor", "--only", "backup", "--json").stdout)
    assert [row["state"] for row in rows] == ["warn", "warn"]
    unknown = terminal("doctor", "--only", "schema", "--only", "zzz", "--only", "aaa")
    assert (unknown.exit_code, "no check is called aaa, zzz: there are configuration, schema, " in unknown.output) == (2, True)


# --- assumptions -----------------------------------------------------------------------------------------------------------------


def test_a_sound_deployment_on_one_machine_is_told_in_its_own_words(terminal: Terminal) -> None:
    settings = terminal.settings
    assert told(checks.configuration(settings)) == [("ok", f"{settings.config}: policies tab")]
    assert told(checks.database(settings)) == [("ok", "SQLite: one machine, durable with its disk")]
    [(state, said)] = told(checks.clock(settings))
    assert (state, said.endswith(" s from the database's"), said[0] in "+-") == ("ok", True, True)
    [(state, said)] = told(checks.schema(settings))
    assert (state, said.endswith(", which this code runs on")) == ("ok", True)
    stored = told(checks.storage(settings))
    assert {state for state, _ in stored} == {"ok"}
    assert all(said.endswith(": ours alone, reads what was written, makes nothing twice") for _, said in stored)
    assert told(doors.doors(replace(settings, engines=()))) == [
        ("ok", "everything that this deployment leans on is on this machine alone"),
    ]


def test_the_model_of_a_policy_has_to_be_there(terminal: Terminal) -> None:
    (terminal.folder / "READY").unlink()
    with pytest.raises(BadConfig, match="make model"):
        list(checks.configuration(terminal.settings))


def test_keys_that_were_never_made_that_all_ended_and_one_that_is_good(terminal: Terminal) -> None:
    good, never = ("ok", "salt, session secret and webhook key are there"), "no API key was ever made: this machine may do everything"
    settings, keys = terminal.settings, SqlKeys(terminal.engine)
    assert told(checks.secrets(settings)) == [("warn", never), good]
    assert told(checks.secrets(replace(settings, standby_required=True))) == [("fail", never), good]
    key, _ = keys.create(name="product", scopes=[Scope.INGEST])
    assert told(checks.secrets(settings)) == [good]
    keys.revoke(key.prefix)
    assert told(checks.secrets(settings)) == [("warn", "no API key is good, so nobody gets in"), good]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_secret_that_others_may_read_is_named_with_the_command_that_mends_it(terminal: Terminal, mode: int) -> None:
    settings = terminal.settings
    SqlKeys(terminal.engine).create(name="product", scopes=[Scope.INGEST])
    list(checks.secrets(settings))
    loose = sorted(settings.secrets.iterdir())[0]
    loose.chmod(mode)
    [found] = checks.secrets(settings)
    assert (found.state.value, found.says, found.cure) == ("fail", f"others may read {loose}", f"chmod 600 {loose}")


def test_the_audit_chain_is_told_with_its_head_or_with_what_is_wrong(terminal: Terminal) -> None:
    settings = terminal.settings
    wiring.write_audit(settings, actor="user:ada", action="a", subject="s", detail={})
    [(state, said)] = told(checks.audit(settings))
    head = said.removeprefix("1 entries, head ")
    assert (state, len(head)) == ("ok", 12)
    with writing(terminal.engine) as connection:
        connection.execute(update(audit).values(actor="user:eve"))
    [(state, _)] = told(checks.audit(settings))
    assert state == "fail"


@pytest.mark.parametrize(
    ("name", "hours", "state", "said"),
    [
        (BACKUP, 25.9, "ok", "the last backup was 25.9 hours ago"), (BACKUP, 26.1, "warn", "the last backup was 1.1 days ago"),
        (DRILL, 167.9, "ok", "the last drill was 167.9 hours ago"), (DRILL, 180.0, "warn", "the last drill was 7.5 days ago"),
    ],
)  # fmt: skip
def test_a_backup_lasts_a_day_and_a_drill_a_week(terminal: Terminal, name: str, hours: float, state: str, said: str) -> None:
    note_at(terminal, name, utc_now() - timedelta(hours=hours))
    kind = "backup" if name == BACKUP else "drill"
    found = {one.says.split()[-1] if "never" in one.says else one.says.split()[2]: one for one in checks.backup(terminal.settings)}
    assert (found[kind].state.value, found[kind].says) == (state, said)
    other = {"backup": "drill", "drill": "backup"}[kind]
    assert (found[other].state.value, found[other].says) == ("warn", f"there never was a {other}")
    assert ("--drill" in found[other].cure) is (other == "drill")


def note_at(terminal: Terminal, name: str, moment: datetime) -> None:
    SqlDeploymentState(terminal.engine).note(name, {}, at=moment)


# --- doors -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bootstrap", ["127.0.0.1:9092", "localhost:9092,127.0.0.1:9093", "[::1]:9092"])
def test_a_broker_on_this_machine_alone_is_no_door(terminal: Terminal, bootstrap: str) -> None:
    assert told(doors.broker(replace(terminal.settings, kafka_bootstrap=bootstrap))) == []


@pytest.mark.parametrize("url", ["http://127.0.0.1:5000", "http://localhost", "sqlite:///x.db", "file:///x", "https://[::1]:5000"])
def test_a_registry_on_this_machine_or_in_a_file_is_no_door(terminal: Terminal, url: str) -> None:
    assert told(doors.tracking(replace(terminal.settings, mlflow_uri=url))) == []


def test_engines_and_databases_on_this_machine_are_no_doors(terminal: Terminal) -> None:
    settings = terminal.settings
    here = replace(settings, engines=("http://127.0.0.1:8401", "vllm+http://localhost:8000/", "sglang+http://[::1]:8000"))
    assert told(doors.engines(here)) == []
    local = "postgresql+psycopg://u:p@127.0.0.1/x"
    assert told(doors.database(replace(settings, database_url=local, inbox_url=local))) == []


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, []), ({"RAY_ADDRESS": ""}, []), ({"RAY_ADDRESS": "auto"}, []), ({"RAY_ADDRESS": "127.0.0.1:6379"}, []),
        ({"RAY_ADDRESS": "ray://localhost:10001"}, []),
        ({"RAY_ADDRESS": "head:6379"}, [("fail", "Ray at head:6379 lets anybody in who reaches it")]),
        ({"RAY_ADDRESS": "ray://head:10001", "RAY_AUTH_MODE": "no"}, [("fail", "Ray at ray://head:10001 lets anybody in who reaches it")]),
        ({"RAY_ADDRESS": "ray://head:10001", "RAY_AUTH_MODE": "token"}, [("ok", "Ray at ray://head:10001 asks who comes")]),
    ],
)  # fmt: skip
def test_a_ray_cluster_elsewhere_has_to_ask_for_a_token(environment: dict[str, str], found: list[tuple[str, str]]) -> None:
    assert told(doors.ray(environment)) == found
