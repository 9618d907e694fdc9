"""bind_offsets: offsets know which topic they count, dead letters know which event they hold, processes say what they wait for

Expands only: processes of the revision before leave the new columns empty, which means "not known".

Revision: 0003_bind_offsets
Follows: 0002_bound_costs
"""

import sqlalchemy as sa
from alembic import op

revision = "0003_bind_offsets"
down_revision = "0002_bound_costs"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("stream_offsets", sa.Column("incarnation", sa.String(length=200), nullable=True))
    op.add_column("dead_letters", sa.Column("source", sa.String(length=200), nullable=True))
    op.add_column("dead_letters", sa.Column("event_id", sa.String(length=200), nullable=True))
    op.create_index("ix_dead_letters_source_event_id", "dead_letters", ["source", "event_id"])
    op.create_table(
        "troubles",
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("since", sa.BigInteger(), nullable=False),
        sa.Column("updated_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_troubles")),
    )


def downgrade() -> None:
    op.drop_table("troubles")
    op.drop_index("ix_dead_letters_source_event_id", table_name="dead_letters")
    op.drop_column("dead_letters", "event_id")
    op.drop_column("dead_letters", "source")
    op.drop_column("stream_offsets", "incarnation")
