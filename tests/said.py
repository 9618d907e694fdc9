"""What pages and terminal tables say, word by word, kept in `tests/data/said`: whoever changes what one says changes its file and reads it.

`RATCHET_SAY_ANEW=1 make test ARGS=…` writes the files anew, for somebody to read before they are committed. What differs from one run to
the next is written as what it is: a moment by its distance from the beginning, an age by its unit, an id and a digest by their length, a
number by its first digits.
"""

import os
import re
from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from difflib import unified_diff
from html.parser import HTMLParser
from pathlib import Path

from tests.fakes.clock import FrozenClock

SAID = Path(__file__).parent / "data" / "said"
TOLD = ("href", "action", "name", "value", "aria-current", "checked", "disabled", "class", "d", "points", "min", "max", "type")
"""Attributes that say something: where a link leads, what a field holds, the colour of a state, a line of a chart."""
BREAKS = frozenset(
    {"p", "h1", "h2", "h3", "li", "tr", "table", "form", "svg", "dt", "div", "article", "section", "details", "title", "nav"}
)

_MOMENT = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d(:\d\d(\.\d+)?)?(\+00:00|Z)?")
_DATE = re.compile(r"(?<![\d-])\d{4}-\d\d-\d\d(?![\d-])")
_UUID = re.compile(r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b")
_DIGEST = re.compile(r"(?<![^\W_])((?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{8,64}|\d{12}|\d{64})\b")
"""One of twelve digits has no letter once in 280."""
_KEY = re.compile(r"\brk_[0-9a-f]{8}\b")
_TIME = re.compile(r"(?<!\d)\d\d:\d\d:\d\d(?!\d)")
_AGE = re.compile(r"\b\d+ s (ago|left)\b")
_DAYS = re.compile(r"\b\d+ d (ago|left)\b")
_HOUR = re.compile(r"(?<![\d-])(?!01-01 (10|15|20):00)\d\d-\d\d \d\d:\d\d(?!:)")
"""Month, day and hour of a chart; but not the slots of the tests, which are of the first of January."""
STOOD = FrozenClock().now
"""Where the clocks of tests stand: as far from now as the tests are old."""
_LEFT = re.compile(r"\b(\d+) h (\d+) min left\b")
_NUMBER = re.compile(r"(?<![\w.])\d+\.\d{9,}(e[-+]?\d+)?(?![\w.])")
"""Nine digits of it are kept: the last ones are another processor's, or another numpy's, to say."""


def differences(name: str, text: str) -> list[str]:
    """Lines by which a text is another one than the one that is kept."""
    file = SAID / f"{name}.txt"
    if os.environ.get("RATCHET_SAY_ANEW"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    kept = file.read_text() if file.exists() else ""
    return list(unified_diff(kept.splitlines(), text.splitlines(), f"kept in {file.name}", "said now", lineterm="", n=1))


def settled(text: str, *, since: datetime) -> str:
    """The text without what differs from one run to the next."""
    text = _NUMBER.sub(lambda found: f"{float(found[0]):.9g}", text)
    text = _HOUR.sub("<hour>", _MOMENT.sub(lambda found: _distance(found[0], since), text))
    text = _UUID.sub("<id>", _TIME.sub("<time>", _DATE.sub(lambda found: _day(date.fromisoformat(found[0]), since), text)))
    text = _DIGEST.sub(lambda found: f"<{len(found[0])} digits>", _KEY.sub("rk_<8 digits>", text))
    text = _LEFT.sub(lambda found: f"about {round(int(found[1]) + int(found[2]) / 60)} h left", text)
    return _DAYS.sub(lambda found: f"days {found[1]}", _AGE.sub(lambda found: f"seconds {found[1]}", text))


def _distance(moment: str, since: datetime) -> str:
    at = datetime.fromisoformat(moment)
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    if abs(at - STOOD) < timedelta(days=1):
        return f"<clock {(at - STOOD).total_seconds():+.0f} s>"
    if at.year < 2000:
        return moment  # a slot of a test
    if abs(at - since) > timedelta(days=30):
        return f"<clock {(at - STOOD) / timedelta(days=1):+.0f} d>"
    hours = round((at - since) / timedelta(hours=1), 1)
    return "<now>" if abs(hours) < 0.1 else f"<{hours:+g} h>"


def _day(day: date, since: datetime) -> str:
    days, of_clock = (day - since.date()).days, (day - STOOD.date()).days
    if abs(of_clock) <= 1:
        return f"<clock {of_clock:+d} d>"
    return f"<{days:+d} d>" if abs(days) <= 30 else day.isoformat()


class _Reader(HTMLParser):
    """A page as lines: a line for each row, paragraph and heading, with what its links and fields say."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = [""]
        self._hidden = 0

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        if tag in ("script", "style", "head"):
            self._hidden += 1
        if tag in BREAKS:
            self.lines.append("")
        self.lines[-1] += " | " if tag in ("td", "th") else " "
        told = [f"{name}={value}" for name, value in attrs if name in TOLD and (name, tag) != ("value", "csrf")]
        if told:
            self.lines[-1] += f" <{tag} {' '.join(told)}> "

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in ("script", "style", "head")

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.lines[-1] += data


def read_page(html: str, *, whole: bool = False) -> str:
    """What a page says, a line for each row, paragraph and heading; `whole`: what is the same on every page as well."""
    reader = _Reader()
    reader.feed(html if whole else html.partition("<main")[2].partition("</main>")[0].partition(">")[2])
    return "\n".join(line for line in (" ".join(one.split()) for one in reader.lines) if line) + "\n"
