"""The last view: what people kept of which answer, on a terminal and without one, and where to go from here."""

from datetime import UTC, datetime
from io import StringIO

from rich.console import Console

from pipelines.commands.demonstration.closing import close
from pipelines.commands.demonstration.comparing import Pair
from pipelines.commands.demonstration.outcome import Outcome
from pipelines.commands.demonstration.planning import Part
from pipelines.simulation.diary import Entry

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def entry(version: str, answer: str, kept: str) -> Entry:
    return Entry(
        at=NOW, version=version, waited_s=1.0, number=3, person="panel-1-00007", question="def add(x, y):", answer=answer, kept=kept
    )


def outcome() -> Outcome:
    pair = Pair(first=entry("v1", "sure!\n    return x", ""), last=entry("v2", "    return x\nprint(x)", "    return x"), quantile=0.9)
    return Outcome(
        model="tiny", seed=1, first="tiny-base", last="tiny-s1", pairs=[pair], waits=[1.0, 3.0, 2.0], waits_training=[6.0],
        parts=[(Part.START, 12.4), (Part.UPDATE, 40.0)],
    )  # fmt: skip


def shown(*, terminal: bool) -> str:
    console = Console(file=StringIO(), force_terminal=terminal, width=160, color_system="standard")
    close(console, outcome(), "http://127.0.0.1:8400")
    file = console.file
    assert isinstance(file, StringIO)
    return file.getvalue()


def test_without_a_terminal_every_line_says_whether_it_was_kept_and_there_are_no_boxes() -> None:
    lines = shown(terminal=False).splitlines()
    heading = "a held-out question by panel-1-00007 (one answer in ten gained as much or more: +57%)"
    assert lines[1:9] == [
        heading, "    | def add(x, y):", "  tiny-base, 0% kept (+ kept, - deleted):", "    - sure!", "    -     return x",
        "  tiny-s1, 57% kept (+ kept, - deleted):", "    +     return x", "    - print(x)",
    ]  # fmt: skip
    assert not set("│─┌┐└┘┃━\x1b") & set("".join(lines))


def test_every_way_of_ending_says_where_to_go_from_here() -> None:
    for terminal in (False, True):
        assert "1. Connect a product: send its questions to http://127.0.0.1:8400/v1 as to any OpenAI endpoint" in shown(terminal=terminal)


def test_on_a_terminal_what_was_kept_is_green_and_the_rest_is_struck_through() -> None:
    told = shown(terminal=True)
    assert "\x1b[32m    return x" in told
    assert "\x1b[2;9mprint(x)" in told
    assert "\x1b[2;9msure!" in told, "nothing of the first answer was kept"


def test_the_findings_say_how_long_people_waited_and_how_long_each_part_took() -> None:
    rows = dict(outcome().rows())
    assert rows["people waited for an answer"] == "2.0 s (median); 6.0 s while an update computed on the same cores"
    assert rows["time"] == "start 12 s, update 40 s"
    assert "people waited for an answer" not in dict(Outcome(model="tiny", seed=1).rows())
