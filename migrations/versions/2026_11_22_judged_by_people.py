"""releases: the state JUDGING, in which people judge what no traffic can

Expands only where nobody uses it: switch `[gates.people] enabled` on after every process is of this revision.

Revision: 0013_judging
Follows: 0012_blind_pairs
"""

from alembic import op

revision = "0013_judging"
down_revision = "0012_blind_pairs"
branch_labels = None
depends_on = None

BEFORE = (
    "TRAINED", "OFFLINE", "QUEUED", "CANARY", "READY", "APPROVED", "PROMOTING", "CHAMPION", "SUPERSEDED", "REJECTED", "ABORTED",
    "INCONCLUSIVE", "EXPIRED", "SUPERSEDED_BY_NEWER", "ROLLED_BACK",
)  # fmt: skip


def upgrade() -> None:
    _allow((*BEFORE[:4], "JUDGING", *BEFORE[4:]))


def downgrade() -> None:
    op.execute("UPDATE releases SET state = 'INCONCLUSIVE', reason = 'its judging ended with a downgrade' WHERE state = 'JUDGING'")
    _allow(BEFORE)


def _allow(states: tuple[str, ...]) -> None:
    named, said = op.f("ck_releases_state"), "state IN (" + ", ".join(f"'{state}'" for state in states) + ")"
    if op.get_bind().dialect.name == "sqlite":
        # copying a table leaves its check constraints behind: the new one is all there is
        with op.batch_alter_table("releases", recreate="always") as batch:
            batch.create_check_constraint(named, said)
        return
    op.drop_constraint(named, "releases", type_="check")
    op.create_check_constraint(named, "releases", said)
