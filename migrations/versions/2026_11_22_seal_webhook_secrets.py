"""seal_webhook_secrets: the signing secrets of webhooks move into a column that the deployment's key alone opens

Expands, and empties `secrets`: a process of the revision before that is still delivering signs nothing, so its deliveries are refused and come
again. What it registers meanwhile is read where it stands and sealed by the next upgrade. The key is `context.config.attributes["seal"]`
(`app.sealing.Seal`); a database without webhooks needs none.

Revision: 0006_seal_webhooks
Follows: 0005_return_labels
"""

import sqlalchemy as sa
from alembic import context, op

from app.domain.errors import BadConfig

revision = "0006_seal_webhooks"
down_revision = "0005_return_labels"
branch_labels = None
depends_on = None

webhooks = sa.table("webhooks", sa.column("id", sa.String), sa.column("secrets", sa.JSON), sa.column("sealed", sa.JSON))


def upgrade() -> None:
    rows = op.get_bind().execute(sa.select(webhooks.c.id, webhooks.c.secrets)).all()
    sealed = {row.id: [_seal().seal(secret, about=row.id) for secret in row.secrets] for row in rows}
    op.add_column("webhooks", sa.Column("sealed", sa.JSON(), nullable=True))
    for webhook_id, texts in sealed.items():
        op.execute(webhooks.update().where(webhooks.c.id == webhook_id).values(sealed=texts, secrets=[]))


def downgrade() -> None:
    for row in op.get_bind().execute(sa.select(webhooks).where(webhooks.c.sealed.is_not(None))).all():
        opened = [_seal().open(sealed, about=row.id) for sealed in row.sealed or ()]
        op.execute(webhooks.update().where(webhooks.c.id == row.id).values(secrets=[secret for secret in opened if secret is not None]))
    with op.batch_alter_table("webhooks") as table:
        table.drop_column("sealed")


def _seal():  # noqa: ANN202 - a Seal, which migrations do not import
    seal = context.config.attributes.get("seal")
    if seal is None:
        raise BadConfig(
            "the database holds webhooks, whose secrets this migration seals with the deployment's key: use `ratchet db upgrade`"
        )
    return seal
