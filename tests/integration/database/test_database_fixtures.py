"""The databases handed to the tests are what they say: migrated, empty, and nobody else's."""

from sqlalchemy import create_engine, inspect, text

from app.db.migrate import current_revision, head_revision


def test_a_database_is_migrated(database_url: str) -> None:
    assert current_revision(database_url) == head_revision()


def test_what_one_test_writes_the_next_does_not_see(database_url: str) -> None:
    engine = create_engine(database_url)
    with engine.begin() as connection:
        assert not inspect(connection).has_table("left_behind")
        connection.execute(text("CREATE TABLE left_behind (id INTEGER)"))
    engine.dispose()


def test_nor_does_the_one_after_it(database_url: str) -> None:
    test_what_one_test_writes_the_next_does_not_see(database_url)


def test_postgres_is_postgres(postgres_url: str) -> None:
    engine = create_engine(postgres_url)
    with engine.connect() as connection:
        version: str = connection.execute(text("SELECT version()")).scalar_one()
    engine.dispose()
    assert version.startswith("PostgreSQL 18")
