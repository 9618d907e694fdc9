"""rollouts: which tries at which tasks there are, who holds which, and what they came to

Expands only: processes of the revision before go on beside it.

Revision: 0010_rollouts
Follows: 0008_people
"""

import sqlalchemy as sa
from alembic import op

import app.db.tables

revision = "0010_rollouts"
down_revision = "0008_people"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "rollouts",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("policy", sa.String(length=200), nullable=False),
        sa.Column("taskset", sa.String(length=200), nullable=False),
        sa.Column("task", sa.String(length=200), nullable=False),
        sa.Column("task_hash", sa.String(length=64), nullable=False),
        sa.Column("group_id", sa.String(length=64), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("harness_hash", sa.String(length=64), nullable=False),
        sa.Column("episode_id", sa.String(length=64), nullable=True),
        sa.Column("owner", sa.String(length=200), nullable=True),
        sa.Column("token", sa.Integer(), nullable=False),
        sa.Column("leased_until", app.db.tables.UtcMicros(), nullable=True),
        sa.Column("planned_at", app.db.tables.UtcMicros(), nullable=False),
        sa.Column("closed_at", app.db.tables.UtcMicros(), nullable=True),
        sa.Column("outcome", sa.String(length=24), nullable=True),
        sa.Column("reward", sa.Float(), nullable=True),
        sa.Column("duration_s", sa.Float(), nullable=True),
        sa.Column("turns", sa.Integer(), nullable=True),
        sa.Column("flags", sa.JSON(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_rollouts")),
        sa.UniqueConstraint("episode_id", name=op.f("uq_rollouts_episode_id")),
        sa.UniqueConstraint("group_id", "attempt", name=op.f("uq_rollouts_group_id_attempt")),
    )
    op.create_index("ix_rollouts_taskset", "rollouts", ["policy", "taskset", "planned_at"])
    open_ = sa.text("outcome IS NULL")
    op.create_index("ix_rollouts_open", "rollouts", ["policy", "planned_at"], sqlite_where=open_, postgresql_where=open_)


def downgrade() -> None:
    op.drop_table("rollouts")
