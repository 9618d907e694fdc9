"""Labels added up per version, hour and segment

Expands only. `ratchet db upgrade` fills the rows from the labels there are; what an older labeller writes afterwards is missing in them until
`ratchet db recount`.

Revision: 0009_roll_labels_up
Follows: 0006_seal_webhooks
"""

import sqlalchemy as sa
from alembic import op

import app.db.tables

revision = "0009_roll_labels_up"
down_revision = "0006_seal_webhooks"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("labels", sa.Column("success", sa.Float(), nullable=True))
    op.create_table(
        "label_rollups",
        sa.Column("policy", sa.String(length=200), nullable=False),
        sa.Column("version", sa.String(length=64), nullable=False),
        sa.Column("hour", app.db.tables.UtcMicros(), nullable=False),
        sa.Column("segment", sa.String(length=200), nullable=False),
        sa.Column("measure", sa.String(length=200), nullable=False),
        sa.Column("n", sa.BigInteger(), nullable=False),
        sa.Column("total", sa.BigInteger(), nullable=False),
        sa.Column("squares", sa.BigInteger(), nullable=False),
        sa.Column("negative", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("policy", "version", "hour", "segment", "measure", name=op.f("pk_label_rollups")),
    )
    op.create_index("ix_label_rollups_hour", "label_rollups", ["policy", "hour"])
    op.create_index("ix_releases_policy_created", "releases", ["policy", "created_at", "id"])
    op.create_index("ix_versions_policy_created", "versions", ["policy", "created_at", "digest"])
    op.create_index("ix_audit_subject", "audit", ["subject", "seq"])


def downgrade() -> None:
    op.drop_index("ix_audit_subject", table_name="audit")
    op.drop_index("ix_versions_policy_created", table_name="versions")
    op.drop_index("ix_releases_policy_created", table_name="releases")
    op.drop_table("label_rollups")
    op.drop_column("labels", "success")
