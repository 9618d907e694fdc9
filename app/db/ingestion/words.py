"""What a turn said, beside its row: the row is small and written again and again, its words once.

While a process of a revision that looks for words in the turn's row may run, they stay there (`stand_apart`); `ratchet db contract` ends
that and moves what is there. Whoever reads asks both places (`COMPLETION`, `TOOL_CALLS` over `WITH_WORDS`), so nobody waits for the move.
"""

from collections.abc import Collection, Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection, Engine, delete, func, select, update

from app.db import locks
from app.db.chunks import one_of
from app.db.engine import insert_or_ignore
from app.db.tables import compatible_revisions, turn_words, turns
from app.domain.telemetry.turns import TurnServed

APART_SINCE = "0019"
"""Revisions before this one look for words in the turn's row."""
NONE: dict[str, Any] = {"completion": "", "tool_calls": []}
"""What the row holds whose words lie apart, or whose person was erased."""

WITH_WORDS = turns.outerjoin(turn_words, turn_words.c.inference_id == turns.c.inference_id)
COMPLETION = func.coalesce(turn_words.c.completion, turns.c.completion).label("completion")
TOOL_CALLS = func.coalesce(turn_words.c.tool_calls, turns.c.tool_calls).label("tool_calls")


def stand_apart(connection: Connection) -> bool:
    """Whether words lie beside the rows by now: no process may run that looks for them in the rows."""
    older = select(compatible_revisions.c.revision).where(compatible_revisions.c.revision < APART_SINCE).limit(1)
    return connection.execute(older).first() is None


def words_of(turn: TurnServed) -> dict[str, Any]:
    """A turn's words, as columns."""
    return {"completion": turn.completion, "tool_calls": msgspec.to_builtins(turn.tool_calls)}


def put_apart(connection: Connection, served: Sequence[TurnServed]) -> None:
    """Write the words of new turns, those that have any."""
    rows = [{"inference_id": turn.inference_id} | words_of(turn) for turn in served if turn.completion or turn.tool_calls]
    if rows:
        connection.execute(insert_or_ignore(connection, turn_words), sorted(rows, key=lambda row: row["inference_id"]))


def forget_words(connection: Connection, inference_ids: Collection[str]) -> None:
    """Those of these turns, from beside the rows."""
    connection.execute(delete(turn_words).where(one_of(connection, turn_words.c.inference_id, inference_ids)))


def move_apart(engine: Engine, *, after: str, limit: int) -> tuple[int, str | None]:
    """Move the words of the next rows, in order of their ids; returns how many had any, and the last id (None: there are no more)."""
    return locks.settled(engine, lambda connection: _move(connection, after, limit))


def _move(connection: Connection, after: str, limit: int) -> tuple[int, str | None]:
    t = turns.c
    page = select(t.inference_id, t.completion, t.tool_calls).where(t.inference_id > after).order_by(t.inference_id).limit(limit)
    found = connection.execute(page.with_for_update()).all()
    rows = [dict(row._mapping) for row in found if row.completion or row.tool_calls]
    if rows:
        connection.execute(insert_or_ignore(connection, turn_words), rows)
        moved = one_of(connection, t.inference_id, [row["inference_id"] for row in rows])
        connection.execute(update(turns).where(moved).values(NONE))
    return len(rows), found[-1].inference_id if found else None
