"""blind_pairs, blind_votes: answers of both versions side by side, and what people said without knowing which is which

Expands only: processes of the revision before go on beside it.

Revision: 0012_blind_pairs
Follows: 0010_rollouts
"""

import sqlalchemy as sa
from alembic import op

import app.db.tables

revision = "0012_blind_pairs"
down_revision = "0010_rollouts"
branch_labels = None
depends_on = None

UtcMicros = app.db.tables.UtcMicros
Id, Name = sa.String(length=64), sa.String(length=200)


def upgrade() -> None:
    op.create_table(
        "blind_pairs",
        sa.Column("id", Id, nullable=False),
        sa.Column("release_id", Id, nullable=False),
        sa.Column("policy", Name, nullable=False),
        sa.Column("suite", Name, nullable=False),
        sa.Column("task", sa.Text(), nullable=False),
        sa.Column("cluster", sa.Text(), nullable=False),
        sa.Column("messages", sa.JSON(), nullable=False),
        sa.Column("champion_answer", sa.Text(), nullable=False),
        sa.Column("candidate_answer", sa.Text(), nullable=False),
        sa.Column("champion_score", sa.Float(), nullable=False),
        sa.Column("candidate_score", sa.Float(), nullable=False),
        sa.Column("salt", sa.String(length=64), nullable=False),
        sa.Column("kept_at", UtcMicros(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_blind_pairs")),
    )
    for column in ("release_id", "cluster", "kept_at"):
        op.create_index(op.f(f"ix_blind_pairs_{column}"), "blind_pairs", [column])
    op.create_table(
        "blind_votes",
        sa.Column("pair_id", Id, nullable=False),
        sa.Column("voter", Name, nullable=False),
        sa.Column("release_id", Id, nullable=False),
        sa.Column("favoured", sa.String(length=16), nullable=False),
        sa.Column("candidate_left", sa.Boolean(), nullable=False),
        sa.Column("counted", sa.Boolean(), nullable=False),
        sa.Column("proven", sa.Boolean(), nullable=False),
        sa.Column("voted_at", UtcMicros(), nullable=False),
        sa.PrimaryKeyConstraint("pair_id", "voter", name=op.f("pk_blind_votes")),
    )
    op.create_index(op.f("ix_blind_votes_release_id"), "blind_votes", ["release_id"])
    one = sa.text("counted")
    op.create_index("uq_blind_votes_one_counts", "blind_votes", ["pair_id"], unique=True, sqlite_where=one, postgresql_where=one)


def downgrade() -> None:
    op.drop_table("blind_votes")
    op.drop_table("blind_pairs")
