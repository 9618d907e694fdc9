"""Migrations say what `app.db.tables` says, and every step up has a step down that leaves nothing behind."""

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, Inspector, insert, inspect, select, text

from app.db.engine import open_engine, reading, writing
from app.db.ingestion.turn_counts import read_turn_counts, recount
from app.db.learning.labels import lot_of
from app.db.migrate import _config, current_revision, downgrade, head_revision, knows, refuse_unknown, require_head, upgrade
from app.db.release.webhooks import SqlWebhookBook
from app.db.tables import EPOCH, inbox, inbox_eras, labels, metadata, webhooks
from app.domain.errors import BadConfig
from app.domain.ids import utc_now
from tests.conftest import NewDatabase
from tests.fakes.sealed import SEAL


def schema_of(engine: Engine) -> dict[str, object]:
    """Everything a schema consists of, as the database itself tells it."""
    if engine.dialect.name == "sqlite":
        with reading(engine) as connection:
            named = connection.execute(text("SELECT type, name, tbl_name FROM sqlite_master WHERE name NOT LIKE 'sqlite_%'"))
            found: dict[str, object] = {f"{kind} {name}": table for kind, name, table in named}
        seen = inspect(engine)
        return found | _columns(seen)
    with reading(engine) as connection:
        named = connection.execute(text("SELECT indexname, indexdef FROM pg_indexes WHERE schemaname = 'public'"))
        indexes: dict[str, object] = {row[0]: row[1] for row in named}
    seen = inspect(engine)
    return indexes | _columns(seen)


def _columns(seen: Inspector) -> dict[str, object]:
    """Each table's columns and what it checks."""
    return {
        name: [
            sorted(column["name"] for column in seen.get_columns(name)),
            sorted(str(check["sqltext"]) for check in seen.get_check_constraints(name)),
        ]
        for name in seen.get_table_names()
    }


def test_the_migrations_make_the_tables_that_the_code_declares(database_url: str) -> None:
    engine = open_engine(database_url)
    with reading(engine) as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "include_name": is_no_era})
        differences = [str(difference) for difference in compare_metadata(context, metadata)]
    engine.dispose()
    # On PostgreSQL an event is unique within an era: the constraint is each partition's.
    told = ["('add_constraint', UniqueConstraint(Column('source'"] if engine.dialect.name == "postgresql" else []
    assert [difference[: len(told[0])] for difference in differences] == told if told else differences == []


def pragmas_of(engine: Engine) -> dict[str, object]:
    """What SQLite itself says of each table: its columns with type, emptiness and place in the key, whether numbers are given once."""
    with reading(engine) as connection:
        made = {row.name: row.sql for row in connection.execute(text("SELECT name, sql FROM sqlite_master WHERE type = 'table'"))}
        return {
            name: (
                "AUTOINCREMENT" in sql.upper(),
                {row.name: (row.type, row.notnull, row.pk) for row in connection.execute(text(f'PRAGMA table_info("{name}")'))},
            )
            for name, sql in made.items()
            if name in metadata.tables
        }


def test_on_sqlite_tables_made_from_the_code_are_those_that_the_migrations_make(sqlite_url: str, tmp_path: Path) -> None:
    migrated, declared = open_engine(sqlite_url), open_engine(f"sqlite:///{tmp_path / 'declared.db'}")
    metadata.create_all(declared)
    told = pragmas_of(declared)
    assert set(told) == set(metadata.tables)
    assert told == pragmas_of(migrated)
    migrated.dispose()
    declared.dispose()


def is_no_era(name: str | None, kind: str, _parents: object) -> bool:
    """Partitions of the inbox are data, not schema."""
    return kind != "table" or re.fullmatch(r"inbox_\d+", name or "") is None


def test_partial_indexes_hold_the_rows_that_the_code_declares(database_url: str) -> None:
    engine = open_engine(database_url)
    dialect = engine.dialect.name
    table = "sqlite_master" if dialect == "sqlite" else "pg_indexes"
    name, definition = ("name", "sql") if dialect == "sqlite" else ("indexname", "indexdef")
    with reading(engine) as connection:
        made = {row[0]: row[1] or "" for row in connection.execute(text(f"SELECT {name}, {definition} FROM {table}"))}
    for index in (index for table in metadata.tables.values() for index in table.indexes):
        where = index.dialect_options[dialect]["where"]
        assert (where is not None) == (" WHERE " in made[str(index.name)]), index.name
        if where is not None and dialect == "sqlite":
            assert made[str(index.name)].endswith(f"WHERE {where}"), index.name
    engine.dispose()


def test_up_down_and_up_again_gives_the_same_schema_and_down_leaves_nothing(database_url: str) -> None:
    engine = open_engine(database_url)
    before = schema_of(engine)
    downgrade(database_url, "base")
    assert set(inspect(engine).get_table_names()) == {"alembic_version"}
    upgrade(database_url)
    assert current_revision(database_url) == head_revision()
    assert schema_of(engine) == before
    engine.dispose()


@pytest.mark.parametrize("steps", [1])
def test_one_step_down_and_up_keeps_what_is_there(database_url: str, steps: int) -> None:
    engine = open_engine(database_url)
    before = schema_of(engine)
    downgrade(database_url, f"-{steps}")
    assert schema_of(engine) != before
    upgrade(database_url)
    assert schema_of(engine) == before
    engine.dispose()


def columns_of(engine: Engine) -> dict[tuple[str, str], tuple[str, bool, bool]]:
    """Every column: its type, whether it may be empty, and whether a statement that does not name it gets something."""
    seen = inspect(engine)
    found: dict[tuple[str, str], tuple[str, bool, bool]] = {}
    for table in seen.get_table_names():
        for column in seen.get_columns(table):
            given = column["default"] is not None or bool(column.get("autoincrement"))
            found[table, column["name"]] = (str(column["type"]), bool(column["nullable"]), given)
    return found


def promises_of(engine: Engine) -> set[tuple[str, str]]:
    """What rows must keep: unique keys and checks, by table and columns."""
    seen = inspect(engine)
    return {
        (table, str(sorted(filter(None, names))))
        for table in seen.get_table_names()
        for names in (
            *(unique["column_names"] for unique in seen.get_unique_constraints(table)),
            *([str(check["sqltext"])] for check in seen.get_check_constraints(table)),
            *(index["column_names"] for index in seen.get_indexes(table) if index["unique"]),
        )
    }


def allows_more(promise: tuple[str, str], before: set[tuple[str, str]]) -> bool:
    """Whether it is a list of allowed values that was there before with fewer of them."""
    table, listed = promise
    words, a_list = set(re.findall(r"\w+", listed)), "= ANY (ARRAY["
    return any(table == other and a_list in listed and a_list in old and set(re.findall(r"\w+", old)) < words for other, old in before)


def test_what_the_revision_before_writes_and_reads_this_one_takes_and_has(new_postgres_database: NewDatabase) -> None:
    """Expand and contract, revision by revision: nothing that older code names is gone or stricter, and nothing new is asked of it."""
    with new_postgres_database() as url:
        engine = open_engine(url)
        steps = [revision.revision for revision in ScriptDirectory.from_config(_config(url)).walk_revisions()][:-1]
        for revision in steps:
            after, promised = columns_of(engine), promises_of(engine)
            downgrade(url, "-1", seal=SEAL)
            before, promised_before = columns_of(engine), promises_of(engine)
            told = {name: column for name, column in before.items() if name[1] != "version_num"}
            assert {name: after.get(name) for name in told} == told, revision
            tables = {table for table, _ in before}
            asked = [name for name, (_, empty, given) in after.items() if name not in before and name[0] in tables and not (empty or given)]
            assert asked == [], revision
            new = {promise for promise in promised - promised_before if promise[0] in tables}
            assert {promise for promise in new if not allows_more(promise, promised_before)} == set(), revision
        engine.dispose()


def test_nobody_waits_for_an_index_that_is_built(new_postgres_database: NewDatabase) -> None:
    """The migration waits for a transaction that is older than it; those that come meanwhile wait for neither."""
    with new_postgres_database() as url:
        downgrade(url, "0009_roll_labels_up")
        engine = open_engine(url, session={"lock_timeout": "2s"})
        erased = text("INSERT INTO erasures (actor, requested_by, erased_at, report) VALUES (:actor, 'x', 0, '{}')")
        applied = text("INSERT INTO applied_events (source, event_id, applied_at) VALUES ('s', :event, 0)")
        with ThreadPoolExecutor(1) as pool:
            with engine.begin() as older:
                older.execute(applied, {"event": "older"})
                migrating = pool.submit(upgrade, url)
                deadline = time.monotonic() + 30
                while not _waits(engine) and time.monotonic() < deadline:
                    time.sleep(0.05)
                assert _waits(engine)
                with engine.begin() as meanwhile:
                    meanwhile.execute(applied, {"event": "meanwhile"})
                    meanwhile.execute(erased, {"actor": "meanwhile"})
                assert not migrating.done()
            migrating.result(timeout=60)
        assert current_revision(url) == head_revision()
        with reading(engine) as connection:
            broken = connection.execute(text("SELECT count(*) FROM pg_index WHERE NOT indisvalid")).scalar_one()
        assert broken == 0
        engine.dispose()


def _waits(engine: Engine) -> bool:
    with reading(engine) as connection:
        building = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query ILIKE 'CREATE INDEX CONCURRENTLY%'"
        return bool(connection.execute(text(building)).scalar_one())


def the_release_before(url: str, over: threading.Event) -> list[str]:
    """Its door, relay and ingestion, as statements on one connection, until told to stop; the events that it accepted."""
    door = (
        "INSERT INTO inbox (source, event_id, type, key, time, payload, payload_hash, received_at) "
        "VALUES ('s', :event, 't', 'k', 0, 'x', 'h', 0) ON CONFLICT DO NOTHING RETURNING event_id"
    )
    again = "SELECT source, event_id, payload_hash FROM inbox WHERE source = 's' AND event_id = :event"
    unsent = "SELECT seq FROM inbox WHERE relayed_at IS NULL ORDER BY seq LIMIT 100"
    mark = "UPDATE inbox SET relayed_at = 1, applied_at = 1 WHERE seq = ANY(:seqs)"
    engine, accepted = open_engine(url), list[str]()
    with engine.connect() as connection:
        while not over.is_set():
            event = f"e{len(accepted)}"
            with connection.begin():
                accepted += connection.execute(text(door), {"event": event}).scalars()
                assert connection.execute(text(door), {"event": event}).first() is None
                assert connection.execute(text(again), {"event": event}).one().event_id == event
            with connection.begin():
                connection.execute(text(mark), {"seqs": list(connection.execute(text(unsent)).scalars())})
    engine.dispose()
    return accepted


def test_the_inbox_is_parted_into_eras_under_the_release_before_and_back_and_loses_nothing(new_postgres_database: NewDatabase) -> None:
    with new_postgres_database() as url:
        downgrade(url, "0019_words")
        over = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            working = pool.submit(the_release_before, url, over)
            try:
                for act in (lambda: upgrade(url), lambda: downgrade(url, "0019_words"), lambda: upgrade(url)):
                    time.sleep(0.5)
                    act()
                time.sleep(0.5)
            finally:
                over.set()
            accepted = working.result(timeout=60)
        assert len(accepted) > 50
        engine = open_engine(url)
        with reading(engine) as connection:
            found = connection.execute(select(inbox.c.event_id, inbox.c.applied_at).order_by(inbox.c.seq)).all()
            assert [row.event_id for row in found] == accepted
            assert {row.applied_at for row in found[:-1]} == {EPOCH + timedelta(microseconds=1)}
            assert connection.execute(text("SELECT pg_get_serial_sequence('inbox', 'seq')")).scalar_one() is not None
            attached = "SELECT count(*) FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid WHERE c.relname LIKE 'ix_inbox_%_0'"
            assert connection.execute(text(attached)).scalar_one() == 4  # the indexes that were there, none built anew
        engine.dispose()


def test_a_parting_that_was_broken_off_is_finished_by_the_next(new_postgres_database: NewDatabase) -> None:
    with new_postgres_database() as url:
        downgrade(url, "0019_words")
        engine = open_engine(url)
        with writing(engine) as connection:  # as far as a killed migration may have come
            connection.execute(text("CREATE TABLE inbox_eras (era integer PRIMARY KEY, opened_at bigint NOT NULL, closed_at bigint)"))
            connection.execute(text("ALTER TABLE inbox ADD COLUMN era integer NOT NULL DEFAULT 0"))
            connection.execute(text("ALTER TABLE inbox ADD CONSTRAINT inbox_era CHECK (era = 0) NOT VALID"))
        upgrade(url)
        with reading(engine) as connection:
            assert connection.execute(select(inbox_eras.c.era)).scalars().all() == [0]
            assert connection.execute(text("SELECT relkind FROM pg_class WHERE relname = 'inbox'")).scalar_one() == "p"
        engine.dispose()


def test_who_may_use_the_inbox_may_use_it_in_eras(new_postgres_database: NewDatabase) -> None:
    with new_postgres_database() as url:
        downgrade(url, "0019_words")
        engine = open_engine(url)
        with writing(engine) as connection:
            connection.execute(text("CREATE ROLE reader"))
            connection.execute(text("GRANT SELECT, INSERT ON inbox TO reader"))
        upgrade(url)
        with writing(engine) as connection:
            for right, given in (("SELECT", True), ("INSERT", True), ("DELETE", False)):
                assert connection.execute(text(f"SELECT has_table_privilege('reader', 'inbox', '{right}')")).scalar_one() is given
            connection.execute(text("DROP OWNED BY reader"))
            connection.execute(text("DROP ROLE reader"))
        engine.dispose()


def test_every_migration_is_named_by_its_date_and_deed() -> None:
    for file in (Path(__file__).resolve().parents[3] / "migrations" / "versions").glob("*.py"):
        assert file.name[:11].replace("_", "").isdigit(), file.name


def set_revision(url: str, revision: str) -> None:
    """As a newer Ratchet's migration leaves it."""
    engine = open_engine(url)
    with writing(engine) as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = :revision"), {"revision": revision})
    engine.dispose()


def test_code_goes_on_over_a_newer_schema_that_only_expanded(database_url: str) -> None:
    """A rolling upgrade migrates first; a process of the revision before that restarts meanwhile must come up again."""
    set_revision(database_url, "9999_newer")
    require_head(database_url)
    refuse_unknown(database_url)
    assert not knows(database_url)


def test_code_is_refused_over_a_schema_that_it_would_break_on(database_url: str) -> None:
    set_revision(database_url, "9999_newer")
    engine = open_engine(database_url)
    with writing(engine) as connection:
        connection.execute(text("DELETE FROM compatible_revisions"))
    engine.dispose()
    for refuse in (require_head, refuse_unknown):
        with pytest.raises(BadConfig, match="9999_newer"):
            refuse(database_url)


def test_newer_code_is_refused_over_an_older_schema_with_the_command_that_cures_it(database_url: str) -> None:
    downgrade(database_url, "-1")
    with pytest.raises(BadConfig, match="run `ratchet db upgrade`"):
        require_head(database_url)
    refuse_unknown(database_url)
    upgrade(database_url)
    require_head(database_url)


def test_webhook_secrets_are_sealed_on_the_way_up_and_opened_on_the_way_down(database_url: str) -> None:
    downgrade(database_url, "0005_return_labels")
    engine = open_engine(database_url)
    row = {"id": "h", "url": "https://ops.example", "secrets": ["whsec_b", "whsec_a"], "events": [], "created_at": utc_now()}
    with writing(engine) as connection:
        connection.execute(insert(webhooks).values(row))
    with pytest.raises(BadConfig, match="ratchet db upgrade"):
        upgrade(database_url)
    upgrade(database_url, seal=SEAL)
    with reading(engine) as connection:
        kept = connection.execute(select(webhooks)).one()
    assert kept.secrets == []
    assert "whsec_" not in str(kept.sealed)
    assert SqlWebhookBook(engine, SEAL).find("h").secrets == ("whsec_b", "whsec_a")
    downgrade(database_url, "0005_return_labels", seal=SEAL)
    with reading(engine) as connection:
        assert connection.execute(select(webhooks.c.secrets)).scalar_one() == ["whsec_b", "whsec_a"]
    engine.dispose()


def test_what_an_older_process_registers_during_an_upgrade_is_read_and_sealed_later(database_url: str) -> None:
    engine = open_engine(database_url)
    row = {"id": "h", "url": "https://ops.example", "secrets": ["whsec_a"], "events": [], "created_at": utc_now()}
    with writing(engine) as connection:
        connection.execute(insert(webhooks).values(row))
    book = SqlWebhookBook(engine, SEAL)
    assert book.find("h").secrets == ("whsec_a",)
    assert (book.seal_all(), book.seal_all()) == (1, 0)
    with reading(engine) as connection:
        assert connection.execute(select(webhooks.c.secrets)).scalar_one() == []
    assert book.find("h").secrets == ("whsec_a",)
    engine.dispose()


def test_what_the_release_before_wrote_is_counted_and_drawn_after_the_upgrade(database_url: str) -> None:
    downgrade(database_url, "0001_create_schema")
    engine = open_engine(database_url)
    turn = (
        "INSERT INTO turns (inference_id, episode_id, policy, version, kind, source, started_at, finished_at, label_due_at, labelled_at, "
        "segment, finish_reason, train_consent, has_logprobs, prompt_tokens, completion_tokens, tool_calls, stage, arm, probability, "
        "completion, tags) VALUES "
        "(:id, 'e', 'p', 'v', 'answer', 'x', 0, 0, 0, 0, '', 'stop', true, true, 1, 1, '[]', 'c', 'c', 1, '', '{}')"
    )
    label = (
        "INSERT INTO labels (inference_id, revision, current, policy, version, reward, terms, rule_set, segment, held_out, finished_at, "
        "labelled_at) VALUES (:id, 1, true, 'p', 'v', 0.5, '[]', 'r', '', false, 0, 0)"
    )
    item = "INSERT INTO batch_items VALUES ('used', 'B', 'e', 0.5, 1, '', NULL)"
    with writing(engine) as connection:
        for id_ in ("used", "free"):
            connection.execute(text(turn), {"id": id_})
            connection.execute(text(label), {"id": id_})
        connection.execute(text(item))
    upgrade(database_url)
    with reading(engine) as connection:
        assert read_turn_counts(connection) == recount(connection) == [("p", "v", 2, 2)]
        used = connection.execute(select(labels.c.inference_id, labels.c.batch_id).order_by(labels.c.inference_id)).all()
        assert used == [("free", None), ("used", "B")]
        assert connection.execute(select(labels.c.lot).where(labels.c.inference_id == "free")).scalar() == lot_of("e")
    engine.dispose()
