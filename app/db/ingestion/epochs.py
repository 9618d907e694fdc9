"""Topic epochs of the embedded broker."""

from datetime import datetime

from sqlalchemy import Engine, insert, select, update

from app.db.engine import reading, writing
from app.db.tables import topic_epochs
from app.db.verdicts import judged


class SqlEpochs:
    """The EpochBook port."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def current(self, topic: str) -> int | None:
        """The epoch being written; None before the first."""
        t = topic_epochs.c
        with reading(self._engine) as connection:
            return connection.execute(select(t.epoch).where(t.topic == topic, t.closed_at.is_(None))).scalar()

    def open_next(self, topic: str, *, lost: bool, now: datetime) -> int:
        """Close the current epoch and open the next; `lost` says that the broker no longer has any of the old ones."""
        t = topic_epochs.c
        with writing(self._engine) as connection:
            last = connection.execute(select(t.epoch).where(t.topic == topic).order_by(t.epoch.desc()).limit(1)).scalar()
            connection.execute(update(topic_epochs).where(t.topic == topic, t.closed_at.is_(None)).values(closed_at=now))
            if lost:
                connection.execute(update(topic_epochs).where(t.topic == topic, t.deleted_at.is_(None)).values(deleted_at=now))
            connection.execute(insert(topic_epochs), {"topic": topic, "epoch": (last or 0) + 1, "opened_at": now})
        return (last or 0) + 1

    def readable(self, topic: str) -> list[int]:
        """Epochs that the broker may still hold, oldest first; the last is the current one. Raises `Unavailable`."""
        t = topic_epochs.c
        with judged(), reading(self._engine) as connection:
            statement = select(t.epoch).where(t.topic == topic, t.deleted_at.is_(None)).order_by(t.epoch)
            return list(connection.execute(statement).scalars())

    def closed(self, topic: str) -> list[tuple[int, datetime]]:
        """Epochs that are closed and not deleted yet, with when they were closed."""
        t = topic_epochs.c
        with reading(self._engine) as connection:
            statement = select(t.epoch, t.closed_at).where(t.topic == topic, t.closed_at.is_not(None), t.deleted_at.is_(None))
            return [(row.epoch, row.closed_at) for row in connection.execute(statement.order_by(t.epoch))]

    def deleted(self, topic: str, epoch: int, *, now: datetime) -> None:
        """The epoch's topic is gone from the broker."""
        t = topic_epochs.c
        with writing(self._engine) as connection:
            connection.execute(update(topic_epochs).where(t.topic == topic, t.epoch == epoch).values(deleted_at=now))
