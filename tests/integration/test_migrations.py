"""Migrations say what `app.db.tables` says, and every step up has a step down that leaves nothing behind."""

from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Engine, inspect, text

from app.db.engine import open_engine, reading
from app.db.migrate import current_revision, downgrade, head_revision, upgrade
from app.db.tables import metadata


def schema_of(engine: Engine) -> dict[str, object]:
    """Everything a schema consists of, as the database itself tells it."""
    if engine.dialect.name == "sqlite":
        with reading(engine) as connection:
            named = connection.execute(text("SELECT type, name, tbl_name FROM sqlite_master WHERE name NOT LIKE 'sqlite_%'"))
            return {f"{kind} {name}": table for kind, name, table in named}
    with reading(engine) as connection:
        named = connection.execute(text("SELECT indexname, indexdef FROM pg_indexes WHERE schemaname = 'public'"))
        indexes: dict[str, object] = {row[0]: row[1] for row in named}
    seen = inspect(engine)
    return indexes | {name: sorted(column["name"] for column in seen.get_columns(name)) for name in seen.get_table_names()}


def test_the_migrations_make_the_tables_that_the_code_declares(database_url: str) -> None:
    engine = open_engine(database_url)
    with reading(engine) as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, metadata) == []
    engine.dispose()


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


def test_every_migration_is_named_by_its_date_and_deed() -> None:
    for file in (Path(__file__).resolve().parents[2] / "migrations" / "versions").glob("*.py"):
        assert file.name[:11].replace("_", "").isdigit(), file.name
