"""date_retractions: one whose observation never comes is found when it is old, so that it can go

Expands only. Those that are there, and those that processes of the revision before write from now on, count from this moment: the column's
default. Broken off at any step, it is run again.

Revision: 0023_dated
Follows: 0022_owing
"""

import sqlalchemy as sa
from alembic import op

from app.db.tables import UtcMicros
from app.domain.ids import utc_now

revision = "0023_dated"
down_revision = "0022_owing"
branch_labels = None
depends_on = None

INDEX = ("ix_retractions_waiting", "retractions", ["received_at"])
_WAITING = sa.text("NOT matched")


def upgrade() -> None:
    now = UtcMicros().process_bind_param(utc_now(), op.get_context().dialect)
    if op.get_context().dialect.name == "sqlite":
        op.add_column("retractions", sa.Column("received_at", UtcMicros(), nullable=False, server_default=sa.text(str(now))))
        op.create_index(*INDEX, sqlite_where=_WAITING)
        return
    op.execute(
        f"ALTER TABLE retractions ADD COLUMN IF NOT EXISTS received_at bigint NOT NULL DEFAULT {now}"
    )  # a constant: no row is written
    with op.get_context().autocommit_block():
        op.execute("SET lock_timeout = 0")  # it waits for older transactions, in whose way it does not stand
        op.drop_index(*INDEX[:2], if_exists=True, postgresql_concurrently=True)
        op.create_index(*INDEX, postgresql_where=_WAITING, postgresql_concurrently=True)


def downgrade() -> None:
    op.drop_index(*INDEX[:2])
    op.drop_column("retractions", "received_at")
