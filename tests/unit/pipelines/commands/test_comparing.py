"""Three answers side by side: paired by visit, ranked by gain, never the same question twice."""

from datetime import UTC, datetime
from io import StringIO
from pathlib import Path

from rich.console import Console

from pipelines.commands.demonstration.closing import close
from pipelines.commands.demonstration.comparing import Pair, pairs_of, typical
from pipelines.commands.demonstration.outcome import Outcome
from pipelines.simulation.diary import Diary, Entry

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def entry(number: int, *, version: str, kept: str, question: str | None = None, answer: str = "0123456789") -> Entry:
    asked = question or f"def f{number}():"
    return Entry(at=NOON, version=version, waited_s=1.0, number=number, person=f"p{number}", question=asked, answer=answer, kept=kept)


def test_only_the_same_visit_to_the_two_versions_is_a_pair() -> None:
    before = [entry(1, version="a", kept=""), entry(2, version="a", kept=""), entry(3, version="x", kept="")]
    after = [
        entry(1, version="b", kept="01234"),
        entry(2, version="a", kept="0"),
        entry(3, version="b", kept="0"),
        entry(4, version="b", kept=""),
    ]
    [pair] = pairs_of(before, after, first="a", last="b")
    assert (pair.first.number, pair.gain) == (1, 0.5)


def test_a_pair_is_shown_at_each_quantile_of_the_gain_and_no_question_twice() -> None:
    # gains 0.0, 0.1, …, 0.9 of ten questions: the quantiles 0.9, 0.7 and 0.5 are the gains 0.9, 0.7 and 0.5
    pairs = [Pair(first=entry(n, version="a", kept=""), last=entry(n, version="b", kept="0123456789"[:n])) for n in range(10)]
    assert [round(pair.gain, 1) for pair in typical(pairs)] == [0.9, 0.7, 0.5]
    alike = [
        Pair(first=entry(n, version="a", kept="", question="same"), last=entry(n, version="b", kept="0", question="same")) for n in range(5)
    ]
    assert len(typical(alike)) == 1
    assert typical([]) == []


def outcome() -> Outcome:
    found = Outcome(model="tiny", seed=1, first="v0", last="v1")
    first = entry(1, version="a", kept="", question="def add(a, b):", answer="Sure! Here is\nreturn a")
    last = entry(1, version="b", kept="return a + b", question="def add(a, b):", answer="return a + b\nprint(1)")
    found.pairs = [Pair(first=first, last=last, quantile=0.5)]
    return found


def shown(*, terminal: bool) -> str:
    console = Console(file=StringIO(), width=100, force_terminal=terminal)
    close(console, outcome(), "http://127.0.0.1:8400")
    file = console.file
    assert isinstance(file, StringIO)
    return file.getvalue()


def test_the_last_view_shows_what_was_kept_of_both_answers_and_what_to_do_next() -> None:
    plain = shown(terminal=False)
    assert "    + return a + b" in plain
    assert "    - print(1)" in plain
    assert "    - Sure! Here is" in plain
    assert "v0, 0% kept" in plain
    assert "http://127.0.0.1:8400/console" in plain
    assert [line[:2] for line in plain.splitlines() if line[:2] in ("1.", "2.", "3.")] == ["1.", "2.", "3."]


def test_no_box_is_drawn_where_there_is_no_terminal() -> None:
    assert not set("│─┌┐└┘┃━") & set(shown(terminal=False))
    assert set("│─┃━") & set(shown(terminal=True))


def test_a_diary_is_read_on_from_where_the_last_look_ended(tmp_path: Path) -> None:
    diary = Diary(tmp_path / "diary")
    assert diary.read() == ([], 0)
    diary.path.write_bytes(b'{"at":"2026-01-01T12:00:00Z","version":"a","waited_s":1.5,"number":1,"person":"p"}\n{"at":')
    [first], position = diary.read()
    assert (first.waited_s, first.share) == (1.5, 0.0)
    with diary.path.open("ab") as file:
        file.write(b'"2026-01-01T12:00:01Z","version":"a","waited_s":2.5,"number":2,"person":"q"}\n')
    [second], _ = diary.read(position)
    assert second.number == 2
