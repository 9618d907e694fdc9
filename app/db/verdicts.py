"""Whose fault it is when the database refuses: the data's, the moment's, or ours. Only faults of the data may bury a record."""

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Dialect, exc

from app.domain.errors import BadRequest, OwnFault, RatchetError, Unavailable

_NO_SUCH = ("no such column", "no such table", "has no column", "has no default", "syntax error")
"""How SQLite says that its schema is another one; PostgreSQL has an error class for it (42)."""
_NOT_NULL, _CHECK = "NOT NULL constraint", "CHECK constraint"


def verdict(error: exc.DBAPIError) -> RatchetError | None:
    """What to raise instead.

    `BadRequest`: the value itself is refused (PostgreSQL class 22, a CHECK). `OwnFault`: a column is missing, renamed or demanded that
    this version does not know. `Unavailable`: everything that may pass. None for a key that is taken: nobody expected it, raise the error.
    """
    told = getattr(error.orig, "diag", None)  # PostgreSQL's whole text has the row: what people said
    said, state = getattr(told, "message_primary", None) or str(error.orig), getattr(error.orig, "sqlstate", None) or ""
    if isinstance(error, exc.DataError) or state == "23514" or _CHECK in said:
        return BadRequest(f"the database refuses a record: {said}")
    demanded = state == "23502" or _NOT_NULL in said
    if demanded or isinstance(error, exc.ProgrammingError | exc.NotSupportedError) or any(words in said for words in _NO_SUCH):
        return OwnFault(
            f"the database's schema is not the one of this version ({said.strip()}): run `ratchet db upgrade`, "
            "or the version that wrote it; nothing was buried, and everything waits"
        )
    if isinstance(error, exc.IntegrityError):
        return None
    return Unavailable(f"the database does not take the batch ({said.strip()}): it is tried again")


def refused_value(error: Exception, dialect: Dialect) -> BadRequest | None:
    """The same verdict on what a driver raised by itself, where it is that the value is at fault; None where it is anything else."""
    if isinstance(error, UnicodeEncodeError | OverflowError):
        return BadRequest(f"the database refuses a record: {error}")
    if not isinstance(error, dialect.loaded_dbapi.Error):
        return None
    wrapped = exc.DBAPIError.instance(None, None, error, dialect.loaded_dbapi.Error, dialect=dialect)
    told = verdict(wrapped) if isinstance(wrapped, exc.DBAPIError) else None
    return told if isinstance(told, BadRequest) else None


@contextmanager
def judged() -> Iterator[None]:
    """Whatever the database, the disk or the bucket says inside becomes an error that says whose fault it is."""
    try:
        yield
    except exc.DBAPIError as error:
        if (told := verdict(error)) is None:
            raise
        raise told from error
    except (exc.StatementError, UnicodeEncodeError, OverflowError) as error:  # sqlite3 raises the last for what is no 64-bit number
        raise BadRequest(f"the database refuses a record: {error}") from error
    except OSError as error:
        raise Unavailable(f"the disk or the bucket does not take it ({error}): check its space and its address") from error
