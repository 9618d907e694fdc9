"""deployment_facts: what a deployment knows about itself, its id, its newest backup and its newest drill

Expands only.

Revision: 0011_deployment_facts
Follows: 0011_channels
"""

import sqlalchemy as sa
from alembic import op

import app.db.tables

revision = "0011_deployment_facts"
down_revision = "0011_channels"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "deployment_facts",
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("value", sa.JSON(), nullable=False),
        sa.Column("at", app.db.tables.UtcMicros(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_deployment_facts")),
    )


def downgrade() -> None:
    op.drop_table("deployment_facts")
