"""keys_last_used: when a key was last used

Expands only: processes of the revision before go on beside it; what they let in is not noted.

Revision: 0017_last_used
Follows: 0016_ask_people
"""

import sqlalchemy as sa
from alembic import op

import app.db.tables

revision = "0017_last_used"
down_revision = "0016_ask_people"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("api_keys", sa.Column("last_used_at", app.db.tables.UtcMicros(), nullable=True))


def downgrade() -> None:
    op.drop_column("api_keys", "last_used_at")
