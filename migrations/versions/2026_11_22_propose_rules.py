"""propose_rules: rule sets that people asked for, and what the labeller made of each

Expands only: processes of the revision before go on beside it.

Revision: 0014_propose_rules
Follows: 0013_judging
"""

import sqlalchemy as sa
from alembic import op

import app.db.tables

revision = "0014_propose_rules"
down_revision = "0013_judging"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "rule_set_proposals",
        sa.Column("id", sa.String(length=200), nullable=False),
        sa.Column("policy", sa.String(length=200), nullable=False),
        sa.Column("toml", sa.Text(), nullable=False),
        sa.Column("proposed_by", sa.String(length=200), nullable=False),
        sa.Column("proposed_at", app.db.tables.UtcMicros(), nullable=False),
        sa.Column("settled_at", app.db.tables.UtcMicros(), nullable=True),
        sa.Column("digest", sa.String(length=64), nullable=True),
        sa.Column("refused", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_rule_set_proposals")),
    )
    op.create_index("ix_rule_set_proposals_policy", "rule_set_proposals", ["policy", "proposed_at"])


def downgrade() -> None:
    op.drop_table("rule_set_proposals")
