"""regions: in which region an engine stands

Expands only: processes of the revision before report without it, and their engines are of no region.

Revision: 0021_regions
Follows: 0020_eras
"""

import sqlalchemy as sa
from alembic import op

revision = "0021_regions"
down_revision = "0020_eras"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("engine_versions", sa.Column("region", sa.String(length=200), nullable=False, server_default=""))


def downgrade() -> None:
    op.drop_column("engine_versions", "region")
