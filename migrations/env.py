"""Alembic's entry: run the migrations on the URL given by `app.db.migrate`, or on RATCHET_DATABASE_URL."""

import os

from alembic import context

from app.db.engine import MIGRATING, open_engine
from app.db.tables import metadata

url = context.config.attributes.get("url") or os.environ.get("RATCHET_DATABASE_URL")
if not url:
    raise SystemExit("set RATCHET_DATABASE_URL to the database to migrate, or use `ratchet db upgrade`")

engine = open_engine(url, session=MIGRATING)
try:
    with engine.connect() as connection:
        context.configure(connection=connection, target_metadata=metadata, render_as_batch=True, compare_type=True)
        with context.begin_transaction():
            context.run_migrations()
        connection.commit()
finally:
    engine.dispose()
