"""Alarms that end, and quarantines that two people can lift

Revision: 0004_alarms
Follows: 0003_bind_offsets
"""

import sqlalchemy as sa
from alembic import op

import app.db.tables

revision = "0004_alarms"
down_revision = "0003_bind_offsets"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "alarms",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("policy", sa.String(length=200), nullable=False),
        sa.Column("kind", sa.String(length=24), nullable=False),
        sa.Column("release_id", sa.String(length=64), nullable=True),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("raised_at", app.db.tables.UtcMicros(), nullable=False),
        sa.Column("raised_by", sa.String(length=200), nullable=False),
        sa.Column("until", sa.Text(), nullable=False),
        sa.Column("ended_at", app.db.tables.UtcMicros(), nullable=True),
        sa.Column("ended_by", sa.Text(), nullable=True),
        sa.Column("end_reason", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_alarms")),
    )
    op.create_index(op.f("ix_alarms_release_id"), "alarms", ["release_id"])
    op.create_index("ix_alarms_policy", "alarms", ["policy", "raised_at"])
    open_ = sa.text("ended_at IS NULL")
    op.create_index("uq_alarms_one_open", "alarms", ["policy", "kind"], unique=True, sqlite_where=open_, postgresql_where=open_)
    op.add_column("quarantine", sa.Column("lift_votes", sa.JSON(), nullable=True))


def downgrade() -> None:
    op.drop_column("quarantine", "lift_votes")
    op.drop_table("alarms")
