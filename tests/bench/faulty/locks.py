"""Somebody else holds the database for a while: a backup, a migration, a forgotten console."""

import threading
import time

from sqlalchemy import Engine, text
from sqlalchemy.exc import DBAPIError

from app.db.engine import open_engine


class Lock:
    """Keeps every writer of one database out, for so many seconds at each `kill`."""

    def __init__(self, url: str, *, table: str, seconds: float) -> None:
        self._engine: Engine = open_engine(url)
        self._table, self._seconds = table, seconds
        self._held = threading.Lock()

    def kill(self) -> bool:
        """Take the lock; false while it is held already."""
        if not self._held.acquire(blocking=False):
            return False
        threading.Thread(target=self._hold, daemon=True).start()
        return True

    def close(self) -> None:
        """Wait until it is released."""
        with self._held:
            self._engine.dispose()

    def _hold(self) -> None:
        try:
            with self._engine.begin() as connection:  # SQLite: BEGIN IMMEDIATE
                if self._engine.dialect.name == "postgresql":
                    connection.execute(text(f"LOCK TABLE {self._table} IN EXCLUSIVE MODE"))
                time.sleep(self._seconds)
        except DBAPIError:
            pass  # the server was killed, and the lock with it
        finally:
            self._held.release()
