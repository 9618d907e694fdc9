"""The durable door: many requests, one transaction (group commit), one answer per event.

    append ──▶ waiting list ──▶ writer thread: INSERT … ON CONFLICT DO NOTHING, COMMIT (synchronous=FULL) ──▶ receipts
               (≤ 32 MB)                     whatever arrives during a commit forms the next one

The writer inserts many rows with one statement: sqlite3 lets go of the interpreter's lock at every step of a statement, and
beside a busy event loop each step would wait 5 ms (the switch interval) to get it back.
"""

import asyncio
import random
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from sqlalchemy import Engine, PoolProxiedConnection
from sqlalchemy.engine.interfaces import DBAPIConnection

from app.db.ingestion.inbox_rows import Row, count_answers, insert_rows, unsent_count
from app.db.verdicts import refused_value
from app.domain.errors import BadRequest, Overloaded, Unavailable
from app.domain.ids import utc_now
from app.domain.ports import Clock, Receipt
from app.domain.telemetry.events import CloudEvent, payload_hash
from app.domain.telemetry.moments import check_moments

MAX_IN_FLIGHT_BYTES = 32 * 1024 * 1024
MAX_BACKLOG_ROWS = 1_000_000
MIN_FREE_BYTES = 1024**3
MAX_COMMIT_ROWS = 4_000
ROW_OVERHEAD_BYTES = 300
"""What a waiting event costs beside its payload."""
LOOK_EVERY_S = 1.0
"""How often backlog and free disk are looked at."""
MAX_NAME = 200
"""Length of source, id, type and key, as the table has them."""

Answer = Callable[[list[Receipt] | BaseException], None]


class SqlInbox:
    """The Inbox port over SQL; one per process. Safe to use from several threads and event loops."""

    def __init__(
        self,
        engine: Engine,
        *,
        clock: Clock | None = None,
        max_in_flight_bytes: int = MAX_IN_FLIGHT_BYTES,
        max_backlog_rows: int = MAX_BACKLOG_ROWS,
        min_free_bytes: int = MIN_FREE_BYTES,
        free_bytes: Callable[[], int] | None = None,
    ) -> None:
        self._engine = engine
        # The time of acceptance is the database's: PostgreSQL sets it itself; SQLite's is this machine's.
        self._clock = utc_now if clock is None and engine.dialect.name == "sqlite" else clock
        self._max_in_flight = max_in_flight_bytes
        self._max_backlog = max_backlog_rows
        self._min_free = min_free_bytes
        self._free_bytes = free_bytes or (lambda: _free_bytes(engine))
        self._waiting: deque[tuple[list[Row], int, Answer]] = deque()
        self._wake = threading.Condition()
        self._in_flight = 0
        self._refusal: str | None = None
        self._unreadable: str | None = None
        self._looked_at = float("-inf")
        self._closing = False
        self._connection: PoolProxiedConnection | None = None
        self._thread = threading.Thread(target=self._run, name="inbox-writer", daemon=True)
        self._thread.start()

    async def append(self, events: Sequence[CloudEvent]) -> list[Receipt]:
        """Commit the events and say per event what became of it. Raises `Overloaded`, `Unavailable`, `BadRequest` where the database
        refuses one of them."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[list[Receipt]] = loop.create_future()

        def answer(result: list[Receipt] | BaseException) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits there any more
                loop.call_soon_threadsafe(_resolve, future, result)

        self._submit(events, answer)
        return await future

    def append_blocking(self, events: Sequence[CloudEvent], *, timeout_s: float = 60.0) -> list[Receipt]:
        """`append` for callers without an event loop."""
        future: Future[list[Receipt]] = Future()

        def answer(result: list[Receipt] | BaseException) -> None:
            if isinstance(result, BaseException):
                future.set_exception(result)
            else:
                future.set_result(result)

        self._submit(events, answer)
        return future.result(timeout_s)

    @property
    def in_flight_bytes(self) -> int:
        """Bytes accepted into memory and not yet committed; never above the bound."""
        return self._in_flight

    def close(self) -> None:
        """Commit what waits, then stop."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    def _submit(self, events: Sequence[CloudEvent], answer: Answer) -> None:
        now = self._clock() if self._clock is not None else None
        rows = [_row(event, now) for event in events]
        size = sum(len(row.payload) + ROW_OVERHEAD_BYTES for row in rows)
        with self._wake:
            if self._closing:
                raise Unavailable("the inbox is closing: send the events again in a moment")
            if self._unreadable is not None:
                raise Unavailable(self._unreadable)
            if self._refusal is not None:
                raise Overloaded(self._refusal, retry_after_s=_jittered(15.0))
            if self._in_flight + size > self._max_in_flight:
                raise Overloaded(
                    f"{self._in_flight} bytes wait for their commit already: send more slowly or in smaller batches",
                    retry_after_s=_jittered(1.0),
                )
            self._in_flight += size
            self._waiting.append((rows, size, answer))
            self._wake.notify()

    # --- the writer thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._waiting and not self._closing:
                    self._wake.wait(LOOK_EVERY_S)
                    if not self._waiting:
                        break
                group = self._take()
                if not group and self._closing:
                    break
            if group:
                self._commit(group)
            self._look()
        self._drop_connection()

    def _take(self) -> list[tuple[list[Row], int, Answer]]:
        group: list[tuple[list[Row], int, Answer]] = []
        rows = 0
        while self._waiting and (not group or rows + len(self._waiting[0][0]) <= MAX_COMMIT_ROWS):
            group.append(self._waiting.popleft())
            rows += len(group[-1][0])
        return group

    def _commit(self, group: list[tuple[list[Row], int, Answer]]) -> None:
        try:
            receipts = self._write([row for rows, _, _ in group for row in rows])
        except Exception as error:  # noqa: BLE001 - whatever the driver raises, the callers must hear of it
            self._drop_connection()
            refused = refused_value(error, self._engine.dialect)
            if refused is not None and len(group) > 1:  # one of them: the others are not to be refused with it, nor sent again for ever
                for one in group:
                    self._commit([one])
                return
            failure = refused or Unavailable(f"the inbox could not commit ({error}): check the disk and the database, then send again")
            failure.__cause__ = error
            self._answer(group, None, failure)
        else:
            self._answer(group, receipts, None)

    def _answer(self, group: list[tuple[list[Row], int, Answer]], receipts: list[Receipt] | None, failure: BaseException | None) -> None:
        with self._wake:
            self._in_flight -= sum(size for _, size, _ in group)
        start = 0
        for rows, _, answer in group:
            answer(failure if failure is not None else (receipts or [])[start : start + len(rows)])
            start += len(rows)

    def _write(self, rows: list[Row]) -> list[Receipt]:
        """One transaction; the rows' answers in order."""
        first: dict[tuple[str, str], int] = {}
        for index, row in enumerate(rows):
            first.setdefault((row.source, row.event_id), index)
        fresh = [rows[index] for index in first.values()]
        connection, dialect = self._raw_connection(), self._engine.dialect.name
        if dialect == "sqlite":
            connection.cursor().execute("BEGIN IMMEDIATE")
        try:
            known = insert_rows(connection, dialect, fresh)
            receipts = [_receipt(index, row, rows, first, known) for index, row in enumerate(rows)]
            count_answers(connection, dialect, receipts)
            connection.commit()
        except BaseException:
            connection.rollback()
            raise
        return receipts

    def _raw_connection(self) -> DBAPIConnection:
        if self._connection is None:
            self._connection = self._engine.raw_connection()
        connection = self._connection.dbapi_connection
        assert connection is not None
        return connection

    def _drop_connection(self) -> None:
        if self._connection is not None:
            self._connection.invalidate()
            self._connection = None

    def _look(self) -> None:
        """Decide once a second whether the door is shut: too many rows to send, or too little disk."""
        if time.monotonic() - self._looked_at < LOOK_EVERY_S:
            return
        self._looked_at = time.monotonic()
        try:
            free = self._free_bytes()
            backlog = unsent_count(self._raw_connection(), at_most=self._max_backlog + 1)
            self._raw_connection().rollback()
        except Exception as error:  # noqa: BLE001 - a database that cannot be read accepts nothing
            self._drop_connection()
            self._unreadable = f"the inbox cannot be read ({error}): check the database, then send again"
            return
        self._unreadable = None
        if free < self._min_free:
            self._refusal = f"only {free} bytes of disk are free: make room (at least {self._min_free} bytes) for the inbox"
        elif backlog > self._max_backlog:
            self._refusal = f"more than {self._max_backlog} events wait for the relay: is `ratchet relay` running?"
        else:
            self._refusal = None


def _row(event: CloudEvent, now: datetime | None) -> Row:
    for name, text in (("source", event.source), ("id", event.id), ("type", event.type), ("key", event.key)):
        if len(text) > MAX_NAME or not text or ("\x00" in text) or not (text.isascii() or _encodes(text)):
            raise BadRequest(f"{name} is {text[:40]!r}: use 1 to {MAX_NAME} characters of valid text without NUL", param=name)
    try:
        check_moments(received_at=now or utc_now(), time=event.time)
    except ValueError as error:
        raise BadRequest(str(error), param="time") from error
    return Row(
        source=event.source, event_id=event.id, type=str(event.type), key=event.key, time=event.time,
        payload=event.data, payload_hash=payload_hash(event), received_at=now,
    )  # fmt: skip


def _encodes(text: str) -> bool:
    """Whether the text is valid Unicode (no lone surrogates): one such row would fail the whole group's commit."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _receipt(index: int, row: Row, rows: list[Row], first: dict[tuple[str, str], int], known: dict[tuple[str, str], bytes]) -> Receipt:
    identity = (row.source, row.event_id)
    stored = known.get(identity)
    if stored is None and first[identity] == index:
        return Receipt.ACCEPTED
    if stored is None:
        stored = rows[first[identity]].payload_hash
    return Receipt.DUPLICATE if stored == row.payload_hash else Receipt.CONFLICT


def _resolve(future: "asyncio.Future[list[Receipt]]", result: list[Receipt] | BaseException) -> None:
    if future.done():  # the caller went away
        return
    if isinstance(result, BaseException):
        future.set_exception(result)
    else:
        future.set_result(result)


def _free_bytes(engine: Engine) -> int:
    """Free disk where a SQLite file lies; a server's disk is its own operator's business."""
    database = engine.url.database
    if engine.dialect.name != "sqlite" or not database or database == ":memory:":
        return 1 << 62
    return shutil.disk_usage(Path(database).parent).free


def _jittered(seconds: float) -> float:
    """Between half and one and a half times: refused clients must not come back all at once."""
    return seconds * random.uniform(0.5, 1.5)
