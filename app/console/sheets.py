"""Tables of the pages: each one is also a CSV and a JSON file, from the same rows."""

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from app.console.wording import clock_time

MOST = 2_000
"""Characters of a cell on a page. The file beside the table has all of them."""
FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""What a spreadsheet would take for the beginning of a formula."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One value: as it is shown, and as it is."""

    text: str
    value: Any = None
    """For the files; the text where there is none."""
    kind: str = ""
    """`n` for numbers, `at` for moments, `code`, `state` (a word with its colour and shape), or nothing."""
    href: str | None = None
    note: str = ""
    """Small print below."""

    @property
    def short(self) -> str:
        """As much as a page can show."""
        return self.text if len(self.text) <= MOST else self.text[:MOST] + " …"


def cell(value: object, *, kind: str = "", href: str | None = None, note: str = "") -> Cell:
    """A cell from a plain value."""
    match value:
        case None:
            return Cell(text="–", kind=kind, href=href, note=note)
        case bool():
            return Cell(text="yes" if value else "no", value=value, kind=kind, href=href, note=note)
        case datetime():
            return Cell(text=clock_time(value), value=value.isoformat(), kind=kind or "at", href=href, note=note)
        case int():
            return Cell(text=f"{value:,}", value=value, kind=kind or "n", href=href, note=note)
        case float():
            return Cell(text=f"{value:.4g}", value=value, kind=kind or "n", href=href, note=note)
        case _:
            return Cell(text=str(value), value=value, kind=kind, href=href, note=note)


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """One table."""

    name: str
    """In the address of its files."""
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]] = field(default_factory=tuple)
    after: str | None = None
    """Where the next page of rows begins."""
    empty: str = "nothing yet"
    """What stands there without rows: what would fill it."""

    def csv(self) -> str:
        """RFC 4180, with a byte-order mark for spreadsheets; no cell is a formula."""
        out = io.StringIO()
        writer = csv.writer(out)
        writer.writerow(self.columns)
        writer.writerows([defused(one) for one in row] for row in self.rows)
        return "\ufeff" + out.getvalue()

    def json(self) -> str:
        """A list of objects."""
        plain = [{name: _plain(one) for name, one in zip(self.columns, row, strict=True)} for row in self.rows]
        return json.dumps(plain, ensure_ascii=False, default=str)


def _plain(one: Cell) -> Any:  # noqa: ANN401 - whatever JSON takes
    return one.value if one.value is not None or one.text == "–" else one.text


def defused(one: Cell) -> str:
    """The cell as text that no spreadsheet computes: a quote before what would begin a formula. Numbers stay numbers."""
    value = _plain(one)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    text = "" if value is None else value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return f"'{text}" if text.startswith(FORMULA) else text
