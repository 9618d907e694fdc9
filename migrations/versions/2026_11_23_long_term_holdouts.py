"""long_term_holdouts: people who stay on one version for months, and what they and others had

Expands only: processes of the revision before go on beside it, and hold nobody.

Revision: 0018_holdouts
Follows: 0017_last_used
"""

import sqlalchemy as sa
from alembic import op

import app.db.tables

revision = "0018_holdouts"
down_revision = "0017_last_used"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "holdouts",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("policy", sa.String(length=200), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("share", sa.Float(), nullable=False),
        sa.Column("began_at", app.db.tables.UtcMicros(), nullable=False),
        sa.Column("ends_at", app.db.tables.UtcMicros(), nullable=False),
        sa.Column("counted_until", app.db.tables.UtcMicros(), nullable=False),
        sa.Column("thresholds", sa.JSON(), nullable=False),
        sa.Column("readings", sa.JSON(), nullable=False),
        sa.Column("read_until", app.db.tables.UtcMicros(), nullable=True),
        sa.Column("ended_at", app.db.tables.UtcMicros(), nullable=True),
        sa.Column("ended_because", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_holdouts")),
    )
    op.create_index("ix_holdouts_policy", "holdouts", ["policy", "began_at"])
    is_open = sa.text("ended_at IS NULL")
    op.create_index("uq_holdouts_open", "holdouts", ["policy"], unique=True, sqlite_where=is_open, postgresql_where=is_open)
    op.create_table(
        "holdout_people",
        sa.Column("holdout", sa.String(length=64), nullable=False),
        sa.Column("week", sa.Integer(), nullable=False),
        sa.Column("person", sa.String(length=64), nullable=False),
        sa.Column("metric", sa.String(length=200), nullable=False),
        sa.Column("held", sa.Boolean(), nullable=False),
        sa.Column("turns", sa.Integer(), nullable=False),
        sa.Column("total", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("holdout", "week", "person", "metric", name=op.f("pk_holdout_people")),
    )
    op.create_index("ix_holdout_people_person", "holdout_people", ["person"])


def downgrade() -> None:
    op.drop_table("holdout_people")
    op.drop_table("holdouts")
