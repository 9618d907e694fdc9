"""pin_versions: versions whose weights people want kept

Expands only: processes of the revision before go on beside it; where one of them removes weights, it does not know of pins yet.

Revision: 0015_pins
Follows: 0014_propose_rules
"""

import sqlalchemy as sa
from alembic import op

import app.db.tables

revision = "0015_pins"
down_revision = "0014_propose_rules"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "pinned_versions",
        sa.Column("policy", sa.String(length=200), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("pinned_by", sa.String(length=200), nullable=False),
        sa.Column("pinned_at", app.db.tables.UtcMicros(), nullable=False),
        sa.PrimaryKeyConstraint("policy", "digest", name=op.f("pk_pinned_versions")),
    )


def downgrade() -> None:
    op.drop_table("pinned_versions")
