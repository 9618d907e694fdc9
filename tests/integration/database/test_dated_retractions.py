"""Retractions know when they came since a revision of their own: those before it, and those of older processes, came at the upgrade."""

from datetime import datetime, timedelta

from sqlalchemy import Engine, select, text

from app.db.engine import open_engine, reading, writing
from app.db.migrate import downgrade, upgrade
from app.db.tables import retractions
from app.db.upkeep.past import retire_waiting
from app.domain.ids import utc_now

OLDER = text("INSERT INTO retractions (source, observation_id, occurred_at) VALUES ('api', :id, 0)")
"""As the revision before writes one."""


def received(engine: Engine) -> dict[str, datetime]:
    with reading(engine) as connection:
        found = connection.execute(select(retractions.c.observation_id, retractions.c.received_at))
        return {row.observation_id: row.received_at for row in found}


def test_what_was_taken_back_before_the_upgrade_or_by_older_processes_beside_it_counts_from_the_upgrade(database_url: str) -> None:
    downgrade(database_url, "0022_owing")
    engine = open_engine(database_url)
    with writing(engine) as connection:
        connection.execute(OLDER, {"id": "before"})
    began = utc_now()
    upgrade(database_url)
    with writing(engine) as connection:
        connection.execute(OLDER, {"id": "beside"})
    moments = received(engine)
    assert set(moments) == {"before", "beside"}
    assert all(began <= moment <= utc_now() for moment in moments.values())
    for before, gone in ((began, 0), (utc_now() + timedelta(seconds=1), 2)):
        with writing(engine) as connection:
            assert retire_waiting(connection, before=before, limit=9) == gone
    engine.dispose()


def test_a_dating_that_was_broken_off_is_finished_by_the_next(postgres_url: str) -> None:
    downgrade(postgres_url, "0022_owing")
    engine = open_engine(postgres_url)
    with writing(engine) as connection:  # as far as a killed migration may have come
        connection.execute(text("ALTER TABLE retractions ADD COLUMN received_at bigint NOT NULL DEFAULT 7"))
        connection.execute(text("CREATE INDEX ix_retractions_waiting ON retractions (received_at)"))
    upgrade(postgres_url)
    with reading(engine) as connection:
        made = connection.execute(text("SELECT indexdef FROM pg_indexes WHERE indexname = 'ix_retractions_waiting'")).scalar_one()
    assert made.endswith("WHERE (NOT matched)")
    engine.dispose()
