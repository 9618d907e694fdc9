"""`ratchet doctor` names what is wrong with a deployment and the cure, and everything else in spite of it."""

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from fsspec import register_implementation
from fsspec.implementations.memory import MemoryFileSystem
from sqlalchemy import delete, insert, update

from app import wiring
from app.db.engine import open_engine, writing
from app.db.operations.examination import BACKUP, DRILL, SqlDeploymentState
from app.db.tables import audit, deployment_facts, engine_versions
from app.domain.errors import BadConfig, RatchetError, Unavailable
from app.domain.ids import utc_now
from app.domain.release.versions import Version, VersionKind
from app.policy.storage.claiming import MARK, claim, faults
from app.settings import Settings, from_environment
from pipelines.__main__ import ratchet
from pipelines.commands.examination.findings import State, fail, look, ok, warn, worst
from tests.fakes.releases import POLICY
from tests.integration.serving.running import engine as running_engine


class Terminal:
    """Somebody beside a data folder with a deployed policy and no process running."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        model = folder / "model"
        model.mkdir()
        (model / "READY").write_text("digest")
        (folder / "ratchet.toml").write_text(f'[policies.{POLICY}]\nmodel = "model"\nbase_name = "tiny"\nbase_model = "tiny"\n')
        self.folder = folder
        self.environment = {"RATCHET_DATA": str(folder), "RATCHET_CONFIG": str(folder / "ratchet.toml"), "COLUMNS": "300"}
        self.settings = from_environment(self.environment)

    def __call__(self, *arguments: str, **environment: str) -> Result:
        return CliRunner().invoke(ratchet, arguments, env={**self.environment, **environment})

    def told(self, *arguments: str, **environment: str) -> dict[str, list[dict[str, str]]]:
        found: dict[str, list[dict[str, str]]] = {}
        for row in json.loads(self("doctor", "--json", *arguments, **environment).stdout):
            found.setdefault(row["check"], []).append(row)
        return found


@pytest.fixture
def terminal(tmp_path: Path, tiny_model: Path, migrated: Callable[[Settings], None]) -> Terminal:
    made = Terminal(tmp_path / "data")
    migrated(made.settings)
    digest = wiring.open_weights(made.settings).publish(tiny_model)
    base = Version(
        digest=digest, policy=POLICY, name="tiny-base", kind=VersionKind.BASE, parent=None, step=0, run_id=None, created_at=utc_now(),
        base_model="ratchet/tiny-random", licence="Apache-2.0",
    )  # fmt: skip
    wiring.version_book(made.settings).add(base)
    wiring.release_desk(made.settings).bootstrap(base, actor="system:loop")
    return made


def test_a_deployment_without_processes_is_told_what_lacks_and_everything_else(terminal: Terminal) -> None:
    result = terminal("doctor")
    assert result.exit_code == 1
    told = terminal.told()
    states = {name: {row["state"] for row in rows} for name, rows in told.items()}
    assert states.keys() == {
        "configuration", "schema", "database", "clock", "broker", "storage", "tracking", "secrets", "engines", "doors", "boxes",
        "audit", "backup",
    }  # fmt: skip
    assert {"broker", "engines"} == {name for name, found in states.items() if "fail" in found}, told
    assert "run `ratchet broker`" in told["broker"][0]["says"]
    assert all(row["cure"] for rows in told.values() for row in rows if row["state"] == "warn")
    assert {row["cure"].split(" (")[0] for row in told["backup"]} == {"make one", "restore one"}


def test_one_check_alone_and_its_exit_code(terminal: Terminal) -> None:
    assert terminal("doctor", "--only", "schema").exit_code == 0
    assert terminal("doctor", "--only", "backup").exit_code == 0, "a warning is no failure"
    assert terminal("doctor", "--only", "backup", "--strict").exit_code == 1
    assert "no check is called xyz" in terminal("doctor", "--only", "xyz").output


def test_a_backup_that_was_noted_is_known(terminal: Terminal) -> None:
    assert terminal("backup", "note", "--detail", "s3://b").exit_code == 0
    assert terminal("backup", "note", "--drill").exit_code == 0
    assert [row["state"] for row in terminal.told("--only", "backup")["backup"]] == ["ok", "ok"]


def test_an_edited_audit_chain_is_told(terminal: Terminal) -> None:
    engine = open_engine(terminal.settings.database_url)
    with writing(engine) as connection:
        connection.execute(update(audit).where(audit.c.seq == 1).values(actor="somebody else"))
    engine.dispose()
    assert [row["state"] for row in terminal.told("--only", "audit")["audit"]] == ["fail"]


def test_an_engine_with_weights_that_the_database_does_not_know_is_told(terminal: Terminal) -> None:
    """A database that was restored to yesterday beside engines of today."""
    engine = open_engine(terminal.settings.database_url)
    now = utc_now()
    row: dict[str, object] = {"engine_id": "e1", "policy": POLICY, "digest": "f" * 64, "address": "http://x", "state": "ready"}
    row |= {"changed_at": now, "seen_at": now}
    with writing(engine) as connection:
        connection.execute(insert(engine_versions), row)
    state = SqlDeploymentState(engine)
    assert state.unknown({held.digest for held in state.held()}) == {"f" * 64}
    assert state.unknown(set(state.champions().values())) == set()
    engine.dispose()


def test_engines_are_told_one_by_one_with_what_each_of_them_cannot_do(terminal: Terminal, tiny_model: Path) -> None:
    engine, now = open_engine(terminal.settings.database_url), utc_now()
    (champion,) = SqlDeploymentState(engine).champions().values()

    def told(*held: tuple[str, str, str, str | None]) -> list[tuple[str, str]]:
        with writing(engine) as connection:
            connection.execute(delete(engine_versions))
            for name, digest, state, detail in held:
                row = {"engine_id": name, "policy": POLICY, "digest": digest, "address": "http://x", "state": state, "detail": detail}
                connection.execute(insert(engine_versions).values(**row, changed_at=now, seen_at=now))
        with running_engine(wiring.open_weights(terminal.settings)) as running:
            return [(row["state"], row["says"]) for row in terminal.told("--only", "engines", RATCHET_ENGINES=running.url)["engines"]]

    assert told() == [("fail", f"none holds the champion of {POLICY}, {champion[:12]}")]
    assert told(("one", champion, "ready", None), ("two", champion, "ready", None), ("three", champion, "failed", "no memory")) == [
        ("fail", f"three cannot hold {champion[:12]}: no memory"), ("ok", f"2 hold the champion of {POLICY}, {champion[:12]}")
    ]  # fmt: skip
    assert told(("one", champion, "ready", "off by 0.2"), ("two", "f" * 64, "ready", None)) == [
        ("fail", f"one computes other log-probabilities for {champion[:12]}: off by 0.2"),
        ("fail", "an engine holds ffffffffffff, which this database does not know"),
        ("ok", f"1 hold the champion of {POLICY}, {champion[:12]}"),
    ]
    engine.dispose()


def test_secrets_that_others_may_read_and_a_registry_that_is_away_are_told(terminal: Terminal) -> None:
    terminal("doctor", "--only", "secrets")
    salt = next(path for path in terminal.settings.secrets.iterdir())
    salt.chmod(0o644)
    loose = terminal.told("--only", "secrets")["secrets"]
    assert ("fail", f"others may read {salt}") in [(row["state"], row["says"]) for row in loose]
    away = terminal.told("--only", "tracking", RATCHET_MLFLOW_URI="http://127.0.0.1:9")["tracking"]
    assert [row["state"] for row in away] == ["warn"], "the loop goes on without it"
    assert "MLflow at http://127.0.0.1:9 does not answer" in away[0]["says"]


class Locked(BaseHTTPRequestHandler):
    """Lets nobody in."""

    def do_GET(self) -> None:
        self.send_error(401)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


def test_a_registry_that_lets_nobody_in_is_told_without_who_asked(tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Locked) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        place = f"127.0.0.1:{server.server_port}"
        settings = from_environment({"RATCHET_DATA": str(tmp_path), "RATCHET_MLFLOW_URI": f"http://ada:open-sesame@{place}"})
        with pytest.raises(Unavailable, match=rf"^MLflow at {place} does not answer \(HTTP 401\): check RATCHET_MLFLOW_URI$"):
            wiring.check_tracking(settings)
        server.shutdown()
    with pytest.raises(Unavailable, match=rf"^MLflow at {place} does not answer \(.*refused.*\): check RATCHET_MLFLOW_URI$"):
        wiring.check_tracking(settings)


def test_a_laptop_without_keys_is_warned_and_a_service_that_others_reach_fails(terminal: Terminal) -> None:
    strong = {"RATCHET_ACTOR_SALT": "s" * 40, "RATCHET_SESSION_SECRETS": "t" * 40}
    assert "warn" in {row["state"] for row in terminal.told("--only", "secrets", **strong)["secrets"]}
    assert "fail" in {row["state"] for row in terminal.told("--only", "secrets", RATCHET_HOST="0.0.0.0", **strong)["secrets"]}
    weak = terminal.told("--only", "secrets", RATCHET_HOST="0.0.0.0", RATCHET_ACTOR_SALT="short")["secrets"]
    assert [row["state"] for row in weak] == ["fail"]
    assert "RATCHET_ACTOR_SALT" in weak[0]["says"]


def test_a_backup_that_is_old_is_told_with_its_age(terminal: Terminal) -> None:
    engine = open_engine(terminal.settings.database_url)
    SqlDeploymentState(engine).note(BACKUP, {}, at=utc_now() - timedelta(days=9))
    engine.dispose()
    assert terminal.told("--only", "backup")["backup"][0]["says"].startswith("the last backup was 9.0 days ago")


@pytest.mark.parametrize(
    ("backup_h", "drill_h", "states"), [(25.9, 167.9, ["ok", "ok"]), (26.1, 167.9, ["warn", "ok"]), (25.9, 168.1, ["ok", "warn"])]
)
def test_a_backup_is_of_a_day_and_a_drill_of_a_week(terminal: Terminal, backup_h: float, drill_h: float, states: list[str]) -> None:
    engine = open_engine(terminal.settings.database_url)
    for what, hours in ((BACKUP, backup_h), (DRILL, drill_h)):
        SqlDeploymentState(engine).note(what, {}, at=utc_now() - timedelta(hours=hours))
    engine.dispose()
    assert [row["state"] for row in terminal.told("--only", "backup")["backup"]] == states


def test_two_deployments_on_one_bucket_are_refused_before_anything_starts(terminal: Terminal, tmp_path: Path) -> None:
    wiring.claim_places(terminal.settings)
    assert (terminal.folder / "segments" / MARK).read_text() == wiring.deployment_state(terminal.settings).identity()
    wiring.claim_places(terminal.settings)
    other = Terminal(tmp_path / "other")
    theirs = {"RATCHET_SEGMENTS": terminal.settings.segments, "RATCHET_WEIGHTS": terminal.settings.weights}
    settings = from_environment({**other.environment, **theirs})
    wiring.upgrade_schema(settings)
    with pytest.raises(BadConfig, match="belongs to another deployment"):
        wiring.claim_places(settings)


def test_the_same_deployment_restored_elsewhere_keeps_its_places(terminal: Terminal) -> None:
    wiring.claim_places(terminal.settings)
    engine = open_engine(terminal.settings.database_url)
    with writing(engine) as connection:  # another database with the rows of this one
        rows = [dict(row._mapping) for row in connection.execute(deployment_facts.select())]
    engine.dispose()
    assert [row["name"] for row in rows] == ["identity"]
    assert rows[0]["value"]["id"] == (terminal.folder / "weights" / MARK).read_text()


class Forgetful(MemoryFileSystem):
    """Storage that takes whatever comes, as rclone's S3 does."""

    protocol = "forgetful"

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        super().pipe_file(path, value, mode="overwrite", **kwargs)


def test_a_place_says_what_it_keeps(tmp_path: Path) -> None:
    assert faults(str(tmp_path / "bucket"), setting="RATCHET_WEIGHTS") == []
    assert list((tmp_path / "bucket").iterdir()) == []
    register_implementation("forgetful", Forgetful, clobber=True)
    assert "ignores If-None-Match" in faults("forgetful://bucket", setting="RATCHET_WEIGHTS")[0]


def test_a_place_that_cannot_be_spoken_to_is_refused_with_the_cure() -> None:
    with pytest.raises(BadConfig, match="pip install"):
        claim("nowhere://bucket", "one", setting="RATCHET_WEIGHTS")


def test_a_standby_that_is_required_and_missing_is_refused(postgres_url: str, tmp_path: Path) -> None:
    environment = {"RATCHET_DATA": str(tmp_path), "RATCHET_DATABASE_URL": postgres_url, "RATCHET_ACTOR_SALT": "x" * 40}
    wiring.refuse_one_machine(from_environment(environment))
    with pytest.raises(BadConfig, match="commit waits for no standby"):
        wiring.refuse_one_machine(from_environment({**environment, "RATCHET_STANDBY": "required"}))
    with pytest.raises(BadConfig, match="RATCHET_STANDBY is 'yes'"):
        from_environment({**environment, "RATCHET_STANDBY": "yes"})


def test_an_empty_database_without_a_standby_is_refused_and_stays_empty(postgres_server: str, tmp_path: Path) -> None:
    """The first `ratchet prepare` of a deployment meets no schema, and has to say no all the same."""
    url = postgres_server.format("template1")
    settings = from_environment({"RATCHET_DATA": str(tmp_path), "RATCHET_DATABASE_URL": url, "RATCHET_STANDBY": "required"})
    with pytest.raises(BadConfig, match="commit waits for no standby"):
        wiring.refuse_one_machine(settings)


def test_a_database_url_that_takes_the_timeouts_away_is_told(postgres_url: str) -> None:
    engine = open_engine(postgres_url)
    assert SqlDeploymentState(engine).unlimited() == []
    engine.dispose()
    forgetful = open_engine(f"{postgres_url}&options=-c%20statement_timeout%3D0")
    assert SqlDeploymentState(forgetful).unlimited() == ["statement_timeout"]
    forgetful.dispose()


@pytest.mark.parametrize(
    ("options", "told"),
    [("", {"no standby is synchronous": False}), ("&options=-c%20synchronous_commit%3Doff", {"synchronous_commit is off": True})],
)
def test_what_may_lose_an_event_with_this_machine_alone_is_told_from_what_a_failover_may_lose(
    postgres_url: str, options: str, told: dict[str, bool]
) -> None:
    engine = open_engine(postgres_url + options)
    server = SqlDeploymentState(engine).server()
    engine.dispose()
    assert server is not None
    of_this_server = {"fsync is off": True, "full_page_writes is off": True}
    assert {weak.what: weak.here for weak in server.weaknesses()} == of_this_server | told


def test_what_a_restore_would_leave_out_is_told(postgres_url: str) -> None:
    engine = open_engine(postgres_url)
    server = SqlDeploymentState(engine).server()
    engine.dispose()
    assert server is not None
    told = server.unarchived()
    assert told is not None
    assert told[0] == "no log is archived: a restore goes back to the last base backup"
    assert replace(server, archives=True).unarchived() == (
        "a file of its log is archived when it is full", "set archive_timeout = '30s': what is in the open file is lost with the disk",
    )  # fmt: skip
    assert replace(server, archives=True, archived_every_s=30).unarchived() is None
    assert replace(server, archives=True, archived_every_s=60).unarchived() is None
    assert (replace(server, archives=True, archived_every_s=300).unarchived() or ("",))[0] == "a file of its log is archived after 300 s"


def test_a_check_that_breaks_hides_no_other() -> None:
    def refuses() -> list[object]:
        raise RatchetError("the sentence, with its cure")

    def breaks() -> list[object]:
        raise KeyError("bug")

    found = look([("one", refuses), ("two", breaks), ("three", lambda: [ok("three", "fine"), warn("three", "old", "renew")])])  # type: ignore[list-item] - they only raise
    assert [finding.state for finding in found] == [State.FAIL, State.FAIL, State.OK, State.WARN]
    assert found[0].says == "the sentence, with its cure"
    assert "KeyError" in found[1].says
    assert (worst(found), worst(found[2:]), worst([])) == (State.FAIL, State.WARN, State.OK)
    assert "cure: do" in fail("x", "y", "do").line()
