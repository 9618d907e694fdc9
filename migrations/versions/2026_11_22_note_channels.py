"""note_channels: which terms decided the outcome of a batch's turn

Expands only: an item that a process of the revision before writes has no channels, and its baseline is that of its segment.

Revision: 0011_channels
Follows: 0007_retention
"""

import sqlalchemy as sa
from alembic import op

revision = "0011_channels"
down_revision = "0007_retention"
branch_labels = None
depends_on = None

TABLES = ("batch_items", "returned_items")


def upgrade() -> None:
    for table in TABLES:
        op.add_column(table, sa.Column("channels", sa.Text(), nullable=False, server_default=""))


def downgrade() -> None:
    for table in TABLES:
        op.drop_column(table, "channels")
