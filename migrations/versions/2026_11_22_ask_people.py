"""ask_people: rule sets replayed for people, and follow-ups that people are asked to read

Expands only: processes of the revision before go on beside it; labels that one of them writes meanwhile ask nobody.

Revision: 0016_ask_people
Follows: 0015_pins
"""

import sqlalchemy as sa
from alembic import op

import app.db.tables

revision = "0016_ask_people"
down_revision = "0015_pins"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "rule_set_replays",
        sa.Column("id", sa.String(length=200), nullable=False),
        sa.Column("policy", sa.String(length=200), nullable=False),
        sa.Column("toml", sa.Text(), nullable=False),
        sa.Column("asked_by", sa.String(length=200), nullable=False),
        sa.Column("asked_at", app.db.tables.UtcMicros(), nullable=False),
        sa.Column("settled_at", app.db.tables.UtcMicros(), nullable=True),
        sa.Column("refused", sa.Text(), nullable=True),
        sa.Column("outcome", sa.JSON(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_rule_set_replays")),
    )
    op.create_index("ix_rule_set_replays_policy", "rule_set_replays", ["policy", "asked_at"])
    op.create_table(
        "follow_up_readings",
        sa.Column("inference_id", sa.String(length=64), nullable=False),
        sa.Column("observation_id", sa.String(length=200), nullable=False),
        sa.Column("policy", sa.String(length=200), nullable=False),
        sa.Column("labelled_at", app.db.tables.UtcMicros(), nullable=False),
        sa.Column("leaned_to", sa.String(length=16), nullable=True),
        sa.Column("unsure", sa.Boolean(), nullable=False),
        sa.Column("mood", sa.String(length=16), nullable=True),
        sa.Column("read_by", sa.String(length=200), nullable=True),
        sa.Column("proven", sa.Boolean(), nullable=True),
        sa.Column("read_at", app.db.tables.UtcMicros(), nullable=True),
        sa.PrimaryKeyConstraint("inference_id", "observation_id", name=op.f("pk_follow_up_readings")),
    )
    for name, column, where in (("open", "labelled_at", "mood IS NULL"), ("read", "read_at", "mood IS NOT NULL")):
        some = sa.text(where)
        op.create_index(f"ix_follow_up_readings_{name}", "follow_up_readings", ["policy", column], sqlite_where=some, postgresql_where=some)


def downgrade() -> None:
    op.drop_table("follow_up_readings")
    op.drop_table("rule_set_replays")
