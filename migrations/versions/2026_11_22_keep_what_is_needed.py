"""keep_what_is_needed: what is old is found by an index, so that it can go

Expands only, by indexes that are built beside the traffic (PostgreSQL: CONCURRENTLY, which waits for no writer and lets none wait). One that
was broken off leaves an index that is not valid; it is dropped and built again.

Revision: 0007_retention
Follows: 0009_roll_labels_up
"""

import sqlalchemy as sa
from alembic import op

revision = "0007_retention"
down_revision = "0009_roll_labels_up"
branch_labels = None
depends_on = None

# name, table, columns, where
INDEXES: tuple[tuple[str, str, list[str], str | None], ...] = (
    ("ix_applied_events_time", "applied_events", ["applied_at"], None),
    ("ix_turns_labelled", "turns", ["labelled_at"], "labelled_at IS NOT NULL"),
    ("ix_observations_stray", "observations", ["received_at"], "status = 'orphan'"),
    ("ix_segments_time", "segments", ["created_at", "name"], None),
)


def upgrade() -> None:
    if op.get_context().dialect.name == "sqlite":
        for name, table, columns, where in INDEXES:
            op.create_index(name, table, columns, sqlite_where=sa.text(where) if where else None)
        return
    with op.get_context().autocommit_block():
        op.execute("SET lock_timeout = 0")  # it waits for older transactions, in whose way it does not stand
        for name, table, columns, where in INDEXES:
            op.drop_index(name, table_name=table, if_exists=True, postgresql_concurrently=True)
            op.create_index(name, table, columns, postgresql_where=sa.text(where) if where else None, postgresql_concurrently=True)


def downgrade() -> None:
    for name, table, *_ in INDEXES:
        op.drop_index(name, table_name=table)
