"""Whose fault it is that a database refuses: the record's, the schema's, or one that passes."""

import pytest
from sqlalchemy import exc

from app.db.verdicts import judged, verdict
from app.domain.errors import BadRequest, OwnFault, RatchetError, Unavailable


class Said(Exception):
    """What a driver raises."""

    def __init__(self, words: str, state: str | None = None) -> None:
        super().__init__(words)
        self.sqlstate = state


def told(kind: type[exc.DBAPIError], words: str, state: str | None = None) -> RatchetError | None:
    return verdict(kind("INSERT", {}, Said(words, state)))


@pytest.mark.parametrize(
    ("kind", "words", "state", "fault"),
    [
        (exc.DataError, "value too long", "22001", BadRequest), (exc.IntegrityError, "CHECK constraint failed: x", None, BadRequest),
        (exc.IntegrityError, "violates check", "23514", BadRequest),
        (exc.IntegrityError, "NOT NULL constraint failed: t.c", None, OwnFault),
        (exc.IntegrityError, "null value", "23502", OwnFault), (exc.ProgrammingError, "relation does not exist", "42P01", OwnFault),
        (exc.NotSupportedError, "no", None, OwnFault), (exc.OperationalError, "no such table: turns", None, OwnFault),
        (exc.OperationalError, "table turns has no column named x", None, OwnFault),
        (exc.OperationalError, "disk I/O error", None, Unavailable),
        (exc.OperationalError, "database is locked", None, Unavailable),
        (exc.IntegrityError, "UNIQUE constraint failed", "23505", type(None)),
    ],
)  # fmt: skip
def test_a_refusal_is_somebodys_fault(kind: type[exc.DBAPIError], words: str, state: str | None, fault: type) -> None:
    found = told(kind, words, state)
    assert type(found) is fault
    assert found is None or words in str(found)


def test_what_happens_inside_is_judged() -> None:
    for raised, fault in (
        (exc.OperationalError("INSERT", {}, Said("disk I/O error")), Unavailable),
        (UnicodeEncodeError("utf-8", "\ud800", 0, 1, "no"), BadRequest),
        (exc.StatementError("too large", "INSERT", {}, ValueError("x")), BadRequest), (OSError(28, "No space left on device"), Unavailable),
    ):  # fmt: skip
        with pytest.raises(fault), judged():
            raise raised
    taken = exc.IntegrityError("INSERT", {}, Said("UNIQUE constraint failed", "23505"))
    with pytest.raises(exc.IntegrityError), judged():
        raise taken
