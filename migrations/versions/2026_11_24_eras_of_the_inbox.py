"""eras_of_the_inbox: on PostgreSQL the inbox's rows lie in partitions, and go with them

Expands only. The table that is there becomes the first partition, unread and unmoved: a check that all of its rows are of era 0 is validated
beside the traffic; then names change hands in one short transaction, for whose lock nobody waits longer than ten seconds. Processes of the
revision before write into the open era by the column's default. Broken off at any step, it is run again.

Revision: 0020_eras
Follows: 0019_words
"""

import sqlalchemy as sa
from alembic import op

import app.db.tables

revision = "0020_eras"
down_revision = "0019_words"
branch_labels = None
depends_on = None

INDEXES = {
    "ix_inbox_to_send": "(seq) WHERE relayed_at IS NULL",
    "ix_inbox_unconfirmed": "(relayed_at) WHERE relayed_at IS NOT NULL AND applied_at IS NULL",
    "ix_inbox_to_trim": "(applied_at) WHERE applied_at IS NOT NULL AND length(payload) > 0",
    "ix_inbox_key": "(key) WHERE length(payload) > 0",
}
NOW = "(extract(epoch FROM clock_timestamp()) * 1000000)::bigint"
GRANTS = """
    DO $$ DECLARE given record; BEGIN
      FOR given IN SELECT CASE grantee WHEN 0 THEN 'PUBLIC' ELSE grantee::regrole::text END AS whom, privilege_type
        FROM pg_class, aclexplode(relacl) WHERE oid = '{old}'::regclass AND grantee <> relowner
      LOOP EXECUTE format('GRANT %s ON {new} TO %s', given.privilege_type, given.whom); END LOOP;
    END $$"""
SEQUENCE = "DO $$ BEGIN EXECUTE format('ALTER SEQUENCE %s OWNED BY {new}.seq', pg_get_serial_sequence('{old}', 'seq')); END $$"


def upgrade() -> None:
    if op.get_context().dialect.name == "sqlite":
        op.create_table("inbox_eras", *_columns())
        op.add_column("inbox", sa.Column("era", sa.Integer(), nullable=False, server_default=sa.text("0")))
        return
    op.create_table("inbox_eras", *_columns(), if_not_exists=True)
    op.execute("ALTER TABLE inbox ADD COLUMN IF NOT EXISTS era integer NOT NULL DEFAULT 0")
    op.execute("ALTER TABLE inbox DROP CONSTRAINT IF EXISTS inbox_era, ADD CONSTRAINT inbox_era CHECK (era = 0) NOT VALID")
    with op.get_context().autocommit_block():
        op.execute("ALTER TABLE inbox VALIDATE CONSTRAINT inbox_era")
    op.execute("LOCK TABLE inbox IN ACCESS EXCLUSIVE MODE")
    op.execute("ALTER TABLE inbox RENAME TO inbox_0")
    for name in INDEXES:
        op.execute(f"ALTER INDEX {name} RENAME TO {name}_0")
    for name in ("pk_inbox", "uq_inbox_source_event_id"):
        op.execute(f"ALTER TABLE inbox_0 RENAME CONSTRAINT {name} TO {name}_0")
    op.execute("CREATE TABLE inbox (LIKE inbox_0 INCLUDING DEFAULTS) PARTITION BY LIST (era)")
    for name, what in INDEXES.items():
        op.execute(f"CREATE INDEX {name} ON inbox {what}")
    op.execute("ALTER TABLE inbox ATTACH PARTITION inbox_0 FOR VALUES IN (0)")
    op.execute("ALTER TABLE inbox_0 DROP CONSTRAINT inbox_era")
    op.execute(SEQUENCE.format(old="inbox_0", new="inbox"))
    op.execute(GRANTS.format(old="inbox_0", new="inbox"))
    op.execute(f"INSERT INTO inbox_eras (era, opened_at) VALUES (0, {NOW}) ON CONFLICT DO NOTHING")


def _columns() -> list[sa.schema.SchemaItem]:
    return [
        sa.Column("era", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("opened_at", app.db.tables.UtcMicros(), nullable=False),
        sa.Column("closed_at", app.db.tables.UtcMicros(), nullable=True),
        sa.PrimaryKeyConstraint("era", name=op.f("pk_inbox_eras")),
    ]


def downgrade() -> None:
    """Copies the rows into one table; of an event that was accepted in several eras the row stays that is not applied yet, else the first."""
    if op.get_context().dialect.name == "sqlite":
        op.drop_column("inbox", "era")
        op.drop_table("inbox_eras")
        return
    op.execute("LOCK TABLE inbox IN ACCESS EXCLUSIVE MODE")
    op.execute("CREATE TABLE inbox_whole (LIKE inbox INCLUDING DEFAULTS)")
    op.execute(
        "INSERT INTO inbox_whole SELECT DISTINCT ON (source, event_id) * FROM inbox ORDER BY source, event_id, applied_at NULLS FIRST, seq"
    )
    op.execute(SEQUENCE.format(old="inbox", new="inbox_whole"))
    op.execute(GRANTS.format(old="inbox", new="inbox_whole"))
    op.execute("DROP TABLE inbox")
    op.execute("ALTER TABLE inbox_whole RENAME TO inbox")
    op.execute("ALTER TABLE inbox DROP COLUMN era")
    op.execute(
        "ALTER TABLE inbox ADD CONSTRAINT pk_inbox PRIMARY KEY (seq), ADD CONSTRAINT uq_inbox_source_event_id UNIQUE (source, event_id)"
    )
    for name, what in INDEXES.items():
        op.execute(f"CREATE INDEX {name} ON inbox {what}")
    op.drop_table("inbox_eras")
