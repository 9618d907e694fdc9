"""words_beside_turns: what a turn said lies apart from its row, which is small and written again and again

Expands only, by an empty table: as long as a process of a revision before this one may run, words stay in the turns' rows and everybody
reads them there. `ratchet db contract` ends that, and moves them.

Revision: 0019_words
Follows: 0018_holdouts
"""

import sqlalchemy as sa
from alembic import op

revision = "0019_words"
down_revision = "0018_holdouts"
branch_labels = None
depends_on = None

BACK = "UPDATE turns SET completion = w.completion, tool_calls = w.tool_calls FROM turn_words w WHERE w.inference_id = turns.inference_id"


def upgrade() -> None:
    op.create_table(
        "turn_words",
        sa.Column("inference_id", sa.String(length=64), nullable=False),
        sa.Column("completion", sa.Text(), nullable=False),
        sa.Column("tool_calls", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("inference_id", name=op.f("pk_turn_words")),
    )


def downgrade() -> None:
    op.execute(BACK)
    op.drop_table("turn_words")
