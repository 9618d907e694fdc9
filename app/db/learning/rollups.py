"""Labels added up per version, hour and segment, in the transaction that writes them: pages read these rows and never the labels.

Values are kept in millionths as integers, so that what a late revision takes away is exactly what was added before it: after any sequence
of revisions and erasures the rows are those that a recount of the current labels gives.

    reward              every label                      term:NAME        what a term said, where it spoke
    survival            share of an edit still there     success          the gold signal, as known when the label was made
    excluded:REASON     labels that are not trained on   (counts only)

The hour is that of the turn's end. Not covered: labels that an older process writes beside this code; `ratchet db recount` mends that.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import Connection, bindparam, delete, insert, select, text

from app.db import engine
from app.db.tables import label_rollups, labels

MILLION = 1_000_000
PAGE = 5_000
REWARD, SURVIVAL, SUCCESS, TERM, EXCLUDED = "reward", "survival", "success", "term:", "excluded:"
COLUMNS = (
    labels.c.inference_id, labels.c.revision, labels.c.current, labels.c.policy, labels.c.version, labels.c.finished_at, labels.c.segment,
    labels.c.reward, labels.c.terms, labels.c.exclusion, labels.c.success,
)  # fmt: skip
"""What of a label is added up."""
Key = tuple[str, str, datetime, str, str]
"""(policy, version, hour, segment, measure)."""


class Sums(NamedTuple):
    """Of one measure; the sums in millionths."""

    n: int = 0
    total: int = 0
    squares: int = 0
    negative: int = 0
    """How many were below zero."""

    def plus(self, value: float, by: int) -> "Sums":
        """With one value more, or less."""
        total, squares = round(value * MILLION), round(value * value * MILLION)
        return Sums(self.n + by, self.total + by * total, self.squares + by * squares, self.negative + by * (value < 0))


def hour_of(moment: datetime) -> datetime:
    """The beginning of its hour."""
    return moment.replace(minute=0, second=0, microsecond=0)


def add_up(connection: Connection, written: Iterable[Any], *, taken_back: Iterable[Any] = ()) -> None:
    """These labels are current now, those are no longer. Rows or mappings with `COLUMNS`."""
    _apply(connection, _sums([(_plain(row), 1) for row in written] + [(_plain(row), -1) for row in taken_back]))


def _plain(row: Any) -> Mapping[str, Any]:  # noqa: ANN401 - a row or its values
    return row if isinstance(row, Mapping) else row._mapping


def _sums(labels_: Iterable[tuple[Mapping[str, Any], int]]) -> dict[Key, Sums]:
    found: dict[Key, Sums] = defaultdict(Sums)
    for label, by in labels_:
        cell = (label["policy"], label["version"], hour_of(label["finished_at"]), label["segment"])
        for measure, value in _measures(label):
            key = (*cell, measure)
            found[key] = found[key].plus(value, by)
    return found


def _measures(label: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Everything one label says, as (measure, value). What is no number says nothing."""
    said: list[tuple[str, Any]] = [(REWARD, label["reward"]), (SUCCESS, label.get("success"))]
    for term in label["terms"]:
        name, value, detail = (
            (term["name"], term.get("value"), term.get("detail") or {}) if isinstance(term, dict) else (term.name, term.value, term.detail)
        )
        said.append((f"{TERM}{name}"[:200], value))
        if name == "edit_persistence":
            said.append((SURVIVAL, detail.get("survival")))
    if label["exclusion"] is not None:
        said.append((f"{EXCLUDED}{label['exclusion']}", 1.0))
    return ((measure, float(value)) for measure, value in said if isinstance(value, int | float) and math.isfinite(value))


def _apply(connection: Connection, sums: Mapping[Key, Sums]) -> None:
    """In sorted order, so that two writers cannot wait for each other in a ring. Rows that came to nothing go."""
    rows = [dict(zip(_NAMES, (*key, *sums[key]), strict=True)) for key in sorted(sums) if any(sums[key])]
    engine.add_up(connection, label_rollups, rows, key=_NAMES[:5], add=Sums._fields)
    for key in (key for key, added in sums.items() if added.n < 0):
        cell = [label_rollups.c[name] == part for name, part in zip(_NAMES, key, strict=False)]
        connection.execute(delete(label_rollups).where(*cell, label_rollups.c.n == 0))


_NAMES = ("policy", "version", "hour", "segment", "measure", *Sums._fields)
_PARTS = tuple(f"gone_{name}" for name in _NAMES[:5])


def recount(connection: Connection) -> dict[Key, Sums]:
    """The same from the labels themselves; it reads the whole table."""
    found: dict[Key, Sums] = defaultdict(Sums)
    for page in _pages(connection):
        for key, sums in _sums((row._mapping, 1) for row in page).items():
            found[key] = Sums(*(one + other for one, other in zip(found[key], sums, strict=True)))
    return dict(found)


def _pages(connection: Connection) -> Iterator[list[Any]]:
    last = ""
    while page := list(connection.execute(_after(last)).all()):
        last = page[-1].inference_id
        yield page


def _after(last: str) -> Any:  # noqa: ANN401 - a select
    return select(*COLUMNS).where(labels.c.current, labels.c.inference_id > last).order_by(labels.c.inference_id).limit(PAGE)


def read_rollups(connection: Connection) -> dict[Key, Sums]:
    """All rows, for a test to compare."""
    rows = connection.execute(select(*(label_rollups.c[name] for name in _NAMES)))
    return {(row.policy, row.version, row.hour, row.segment, row.measure): Sums(*row[5:]) for row in rows}


def rebuild(connection: Connection, *, only_if_empty: bool = False) -> int:
    """Write the rows anew from the labels there are, and how many rows that makes.

    A cell (policy, version, hour, segment) that says more labels than there are stays as it is: what retention took from the labels is
    known here alone, and nothing else takes a label away. Nobody writes labels meanwhile: on PostgreSQL they wait for this transaction,
    on SQLite writers follow each other anyway.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(text("LOCK TABLE labels IN SHARE ROW EXCLUSIVE MODE"))
    if only_if_empty and connection.execute(select(label_rollups.c.n).limit(1)).first() is not None:
        return 0
    before, found = read_rollups(connection), recount(connection)
    kept = {key[:4] for key, sums in before.items() if key[4] == REWARD and sums.n > found.get(key, Sums()).n}
    anew = {key: sums for key, sums in found.items() if key[:4] not in kept}
    gone = sorted(key for key in before if key[:4] not in kept)
    for start in range(0, len(gone), PAGE):
        parts = [dict(zip(_PARTS, key, strict=True)) for key in gone[start : start + PAGE]]
        connection.execute(delete(label_rollups).where(*(label_rollups.c[name] == bindparam(f"gone_{name}") for name in _NAMES[:5])), parts)
    rows = [dict(zip(_NAMES, (*key, *anew[key]), strict=True)) for key in sorted(anew)]
    for start in range(0, len(rows), PAGE):
        connection.execute(insert(label_rollups), rows[start : start + PAGE])
    return len(rows)
