"""People: who they are, how they get in, who made whose credential, and which requests were carried out

Expands only: processes of the revision before go on beside it. Keys that there are, and those that such a process makes, speak for
nobody: they keep their scopes, and what takes a person they can no longer do.

Revision: 0008_people
Follows: 0011_deployment_facts
"""

import sqlalchemy as sa
from alembic import op

import app.db.tables

revision = "0008_people"
down_revision = "0011_deployment_facts"
branch_labels = None
depends_on = None

UtcMicros = app.db.tables.UtcMicros
Id, Name = sa.String(length=64), sa.String(length=200)


def upgrade() -> None:
    op.add_column("api_keys", sa.Column("person_id", Id, nullable=True))
    op.add_column("api_keys", sa.Column("made_by", Name, nullable=True))
    op.create_index(op.f("ix_api_keys_person_id"), "api_keys", ["person_id"])
    op.create_table(
        "people",
        sa.Column("id", Id, nullable=False),
        sa.Column("name", Name, nullable=False),
        sa.Column("email", Name, nullable=True),
        sa.Column("os_user", Name, nullable=True),
        sa.Column("roles", sa.JSON(), nullable=False),
        sa.Column("policy", Name, nullable=True),
        sa.Column("password_hash", sa.Text(), nullable=True),
        sa.Column("subject", sa.Text(), nullable=True),
        sa.Column("created_at", UtcMicros(), nullable=False),
        sa.Column("made_by", Name, nullable=False),
        sa.Column("disabled_at", UtcMicros(), nullable=True),
        sa.Column("failures", sa.Integer(), server_default="0", nullable=False),
        sa.Column("locked_until", UtcMicros(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_people")),
        sa.UniqueConstraint("name", name=op.f("uq_people_name")),
        sa.UniqueConstraint("email", name=op.f("uq_people_email")),
        sa.UniqueConstraint("subject", name=op.f("uq_people_subject")),
    )
    op.create_table(
        "invitations",
        sa.Column("hash", Id, nullable=False),
        sa.Column("person_id", Id, nullable=False),
        sa.Column("made_by", Name, nullable=False),
        sa.Column("made_at", UtcMicros(), nullable=False),
        sa.Column("expires_at", UtcMicros(), nullable=False),
        sa.Column("used_at", UtcMicros(), nullable=True),
        sa.PrimaryKeyConstraint("hash", name=op.f("pk_invitations")),
    )
    op.create_index(op.f("ix_invitations_person_id"), "invitations", ["person_id"])
    op.create_table(
        "browser_sessions",
        sa.Column("hash", Id, nullable=False),
        sa.Column("person_id", Id, nullable=False),
        sa.Column("created_at", UtcMicros(), nullable=False),
        sa.Column("seen_at", UtcMicros(), nullable=False),
        sa.Column("expires_at", UtcMicros(), nullable=False),
        sa.Column("ended_at", UtcMicros(), nullable=True),
        sa.PrimaryKeyConstraint("hash", name=op.f("pk_browser_sessions")),
    )
    op.create_index(op.f("ix_browser_sessions_person_id"), "browser_sessions", ["person_id"])
    op.create_table(
        "credential_acts",
        sa.Column("seq", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("person", Name, nullable=False),
        sa.Column("made_by", Name, nullable=False),
        sa.Column("what", sa.String(length=24), nullable=False),
        sa.Column("at", UtcMicros(), nullable=False),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_credential_acts")),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_credential_acts_person", "credential_acts", ["person", "at"])
    op.create_table(
        "done_requests",
        sa.Column("request_id", Name, nullable=False),
        sa.Column("actor", Name, nullable=False),
        sa.Column("act", Name, nullable=False),
        sa.Column("subject", Name, nullable=False),
        sa.Column("done_at", UtcMicros(), nullable=False),
        sa.PrimaryKeyConstraint("request_id", name=op.f("pk_done_requests")),
    )


def downgrade() -> None:
    for table in ("done_requests", "credential_acts", "browser_sessions", "invitations", "people"):
        op.drop_table(table)
    op.drop_index(op.f("ix_api_keys_person_id"), table_name="api_keys")
    op.drop_column("api_keys", "made_by")
    op.drop_column("api_keys", "person_id")
