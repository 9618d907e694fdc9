"""Alembic's entry: run the migrations on the URL given by `app.db.migrate`, or on RATCHET_DATABASE_URL.

Of several processes that migrate one PostgreSQL database, one does, and the others begin when it is done.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from alembic import context
from sqlalchemy import Engine, func, select

from app.db.engine import MIGRATING, open_engine
from app.db.tables import metadata

url = context.config.attributes.get("url") or os.environ.get("RATCHET_DATABASE_URL")
if not url:
    raise SystemExit("set RATCHET_DATABASE_URL to the database to migrate, or use `ratchet db upgrade`")

ASK_EVERY_S = 0.2


@contextmanager
def alone(engine: Engine) -> Iterator[None]:
    """No other process migrates this database in this block. (SQLite: its writers wait for each other anyway.)

    Asked for again and again: who waits inside a statement is waited for by an index that is built CONCURRENTLY. A process that is killed
    lets go with its connection.
    """
    if engine.dialect.name != "postgresql":
        yield
        return
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as holder:
        mine = select(func.pg_try_advisory_lock(func.hashtextextended("ratchet.migrations", 0)))
        while not holder.execute(mine).scalar_one():
            time.sleep(ASK_EVERY_S)
        yield
        holder.execute(select(func.pg_advisory_unlock_all()))


engine = open_engine(url, session=MIGRATING)
try:
    with alone(engine), engine.connect() as connection:
        context.configure(connection=connection, target_metadata=metadata, render_as_batch=True, compare_type=True)
        with context.begin_transaction():
            context.run_migrations()
        connection.commit()
finally:
    engine.dispose()
