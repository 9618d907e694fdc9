"""bound_costs: what is asked often has its index, what is counted often has its count

Expands only: processes of the revision before go on beside it. A label that they write has lot 0, so it is drawn like any other.

Revision: 0002_bound_costs
Follows: 0001_create_schema
"""

import hashlib

import sqlalchemy as sa
from alembic import op

revision = "0002_bound_costs"
down_revision = "0001_create_schema"
branch_labels = None
depends_on = None

# name, table, columns, where (PostgreSQL), where (SQLite, where it has other words)
INDEXES: tuple[tuple[str, str, list[str], str, str | None], ...] = (
    ("ix_inbox_to_trim", "inbox", ["applied_at"], "applied_at IS NOT NULL AND length(payload) > 0", None),
    ("ix_inbox_key", "inbox", ["key"], "length(payload) > 0", None),
    ("ix_turns_policy_due", "turns", ["policy", "label_due_at"], "labelled_at IS NULL", None),
    ("ix_turns_policy_relabel", "turns", ["policy", "inference_id"], "needs_relabel", "needs_relabel = 1"),
    ("ix_segments_writing", "segments", ["created_at"], "state = 'writing'", None),
    ("ix_observations_actor", "observations", ["actor"], "actor IS NOT NULL", None),
    ("ix_labels_time", "labels", ["policy", "labelled_at"], "current", "current = 1"),
    ("ix_labels_lot", "labels", ["policy", "lot"], "current AND batch_id IS NULL", "current = 1 AND batch_id IS NULL"),
    (
        "ix_labels_pool", "labels", ["policy", "version", "lot"],
        "current AND NOT held_out AND batch_id IS NULL AND (exclusion IS NULL OR exclusion IN ('empty_completion', 'no_logprobs'))",
        "current = 1 AND held_out = 0 AND batch_id IS NULL AND (exclusion IS NULL OR exclusion IN ('empty_completion', 'no_logprobs'))",
    ),
    ("ix_labels_actor", "labels", ["actor"], "actor IS NOT NULL", None),
    ("ix_batch_items_actor", "batch_items", ["actor"], "actor IS NOT NULL", None),
    ("ix_outbox_key", "outbox", ["key"], "length(payload) > 0", None),
)  # fmt: skip
OLD: tuple[tuple[str, str, list[str], str], ...] = (
    ("ix_turns_due", "turns", ["label_due_at"], "labelled_at IS NULL"),
    ("ix_turns_relabel", "turns", ["inference_id"], "needs_relabel"),
)


def upgrade() -> None:
    op.create_table(
        "turn_counts",
        sa.Column("policy", sa.String(length=200), nullable=False),
        sa.Column("version", sa.String(length=64), nullable=False),
        sa.Column("turns", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("labelled", sa.BigInteger(), server_default="0", nullable=False),
        sa.PrimaryKeyConstraint("policy", "version", name=op.f("pk_turn_counts")),
    )
    op.create_table(
        "compatible_revisions",
        sa.Column("revision", sa.String(length=200), nullable=False),
        sa.PrimaryKeyConstraint("revision", name=op.f("pk_compatible_revisions")),
    )
    op.add_column("segments", sa.Column("state", sa.String(length=16), server_default="whole", nullable=False))
    op.add_column("labels", sa.Column("lot", sa.BigInteger(), server_default="0", nullable=False))
    op.add_column("labels", sa.Column("batch_id", sa.String(length=64), nullable=True))
    op.execute(
        "INSERT INTO turn_counts (policy, version, turns, labelled) "
        "SELECT policy, version, count(*), count(labelled_at) FROM turns GROUP BY policy, version"
    )
    op.execute(
        "UPDATE labels SET batch_id = (SELECT batch_id FROM batch_items WHERE batch_items.inference_id = labels.inference_id) "
        "WHERE inference_id IN (SELECT inference_id FROM batch_items)"
    )
    _draw_lots()
    for name, table, columns, where, sqlite in INDEXES:
        _create(name, table, columns, where, sqlite)
    for name, table, _, _ in OLD:
        op.drop_index(name, table_name=table)


def downgrade() -> None:
    for name, table, columns, where in OLD:
        _create(name, table, columns, where, None)
    for name, table, *_ in INDEXES:
        op.drop_index(name, table_name=table)
    op.drop_column("labels", "batch_id")
    op.drop_column("labels", "lot")
    op.drop_column("segments", "state")
    op.drop_table("compatible_revisions")
    op.drop_table("turn_counts")


def _create(name: str, table: str, columns: list[str], where: str, sqlite: str | None) -> None:
    op.create_index(name, table, columns, sqlite_where=sa.text(sqlite or where), postgresql_where=sa.text(where))


def _draw_lots() -> None:
    """As `app.db.learning.labels.lot_of` draws them; only labels that a batch may still take need one."""
    connection = op.get_bind()
    if connection.dialect.name == "postgresql":
        op.execute(
            "UPDATE labels SET lot = ('x' || substr(md5(turns.episode_id), 1, 15))::bit(60)::bigint "
            "FROM turns WHERE turns.inference_id = labels.inference_id AND labels.current AND labels.batch_id IS NULL"
        )
        return
    episodes = connection.execute(sa.text("SELECT DISTINCT episode_id FROM turns")).scalars().all()
    update = sa.text(
        "UPDATE labels SET lot = :lot WHERE current AND inference_id IN (SELECT inference_id FROM turns WHERE episode_id = :episode)"
    )
    for episode in episodes:
        lot = int(hashlib.md5(episode.encode(), usedforsecurity=False).hexdigest()[:15], 16)
        connection.execute(update, {"lot": lot, "episode": episode})
