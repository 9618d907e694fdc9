"""return_labels: labels of a batch that came to nothing by a fault may be used again

Expands only: processes of the revision before go on beside it.

Revision: 0005_return_labels
Follows: 0004_alarms
"""

import sqlalchemy as sa
from alembic import op

revision = "0005_return_labels"
down_revision = "0004_alarms"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "returned_items",
        sa.Column("inference_id", sa.String(length=64), nullable=False),
        sa.Column("batch_id", sa.String(length=64), nullable=False),
        sa.Column("episode_id", sa.String(length=64), nullable=False),
        sa.Column("reward", sa.Float(), nullable=False),
        sa.Column("label_revision", sa.Integer(), nullable=False),
        sa.Column("segment", sa.String(length=200), nullable=False),
        sa.Column("actor", sa.String(length=64), nullable=True),
        sa.PrimaryKeyConstraint("inference_id", "batch_id", name=op.f("pk_returned_items")),
    )
    op.create_index("ix_returned_items_batch_id", "returned_items", ["batch_id"])
    where = sa.text("actor IS NOT NULL")
    op.create_index("ix_returned_items_actor", "returned_items", ["actor"], sqlite_where=where, postgresql_where=where)


def downgrade() -> None:
    op.drop_table("returned_items")
