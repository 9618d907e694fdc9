"""The last view: what people kept of which answer, on a terminal and without one, and where to go from here."""

from datetime import UTC, datetime
from io import StringIO

import pytest
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


def shown(*, terminal: bool, found: Outcome | None = None, width: int = 160) -> str:
    console = Console(file=StringIO(), force_terminal=terminal, width=width, color_system="standard")
    close(console, found or outcome(), "http://127.0.0.1:8400")
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


def test_no_line_is_wrapped_and_what_a_model_wrote_in_brackets_stays() -> None:
    answer = f"    return x[0] + [bold]{'y' * 200}[/bold]"
    pair = Pair(first=entry("v1", answer, ""), last=entry("v2", answer, answer), quantile=0.5)
    lines = shown(terminal=False, found=Outcome(model="tiny", seed=1, first="a", last="b", pairs=[pair]), width=40).splitlines()
    assert lines[4] == f"    - {answer}"
    assert f"    + {answer}" in lines
    assert lines[-1].startswith("3. Production: ")
    assert len(lines[-1]) > 80


@pytest.mark.parametrize(
    ("quantile", "words"),
    [
        (0.9, "one answer in ten gained as much or more"), (0.7, "three answers in ten gained as much or more"), (0.5, "the median gain"),
        (0.3, "a gain"),
    ],
)  # fmt: skip
def test_a_pair_says_how_usual_its_gain_is(quantile: float, words: str) -> None:
    pair = Pair(first=entry("v1", "0123456789", "01"), last=entry("v2", "0123456789", "0123456"), quantile=quantile)
    told = shown(terminal=False, found=Outcome(model="tiny", seed=1, first="a", last="b", pairs=[pair]))
    assert f"a held-out question by panel-1-00007 ({words}: +50%)" in told.splitlines()
    assert "  a, 20% kept (+ kept, - deleted):" in told.splitlines()


def test_the_findings_stand_below_each_other_with_their_names_as_wide_as_the_widest() -> None:
    lines = shown(terminal=False).splitlines()
    at = lines.index("one real turn of the loop: tiny, 0 s")
    assert lines[at - 1] == ""
    assert lines[at + 1 : at + 3] == [
        " promoted                     0: none", " answers, events              0 answers, 0 events accepted over HTTP",
    ]  # fmt: skip
