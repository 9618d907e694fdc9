"""owing segments: found without reading those that owe nothing

Expands only: processes of the revision before take a segment that is `trimming` for none that is to be merged or dropped.

Revision: 0022_owing
Follows: 0021_regions
"""

import sqlalchemy as sa
from alembic import op

revision = "0022_owing"
down_revision = "0021_regions"
branch_labels = None
depends_on = None

_OWING = sa.text("state IN ('trimming', 'dropping')")


def upgrade() -> None:
    op.create_index("ix_segments_owing", "segments", ["name"], sqlite_where=_OWING, postgresql_where=_OWING)


def downgrade() -> None:
    op.drop_index("ix_segments_owing", "segments")
