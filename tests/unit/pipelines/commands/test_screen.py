"""The demo's view: live on a terminal, a line now and then elsewhere, and the same facts in both."""

import re
import time
from collections import defaultdict
from dataclasses import replace
from datetime import timedelta
from io import StringIO
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console
from rich.text import Text

from app.domain.learning.cycles import CycleStatus
from app.domain.release.releases import Pointer, ReleaseState
from app.domain.views.measures import measure
from app.domain.views.operations import VersionRow
from app.domain.views.rows import ProgressRow
from pipelines.commands.demonstration.narrator import Narrator
from pipelines.commands.demonstration.planning import Forecast, Part
from pipelines.commands.demonstration.screen import Screen, _way
from pipelines.commands.demonstration.sight import Sight
from tests.unit.pipelines.commands.test_demonstration import NOW, SHARES, cycle, release, sight
from tests.unit.pipelines.commands.test_stillness import label


def version(digest: str, *, kept: list[float]) -> VersionRow:
    return VersionRow(
        digest=digest, name=f"tiny-{digest}", kind="rl", parent=None, step=1, created_at=NOW, turns=len(kept),
        persistence=measure(kept, low=0, high=1), dissatisfied=None, success=None, reward=None,
    )  # fmt: skip


def work(task: str, done: float, *, age_s: float = 0.0, **detail: object) -> ProgressRow:
    return ProgressRow(task=task, done=done, total=12, detail=detail, updated_at=NOW - timedelta(seconds=age_s))


def busy() -> Sight:
    pointer = Pointer(
        policy="composer", digest="c", generation=2, previous="b", anchor="b", holdback=0.1, release_id=None, changed_at=NOW
    )  # fmt: skip
    return replace(
        sight(
            releases=(
                replace(release(ReleaseState.CANARY, stage=1), version_name="tiny-s3"),
                replace(release(ReleaseState.REJECTED, reason="fewer parse"), id="r0", version_name="tiny-s2"),
            )
        ),
        pointer=pointer,
        versions=(version("b", kept=[0.2] * 9), version("c", kept=[0.6] * 10)),
        progress=(work("training", 5, loss=0.12345), work("suite", 7, age_s=60), work("holdback", 3)),
        accepted_events=100,
    )


def screen(*, terminal: bool = False) -> Screen:
    console = Console(file=StringIO(), force_terminal=terminal, width=170, height=40, color_system=None, legacy_windows=False)
    found = Screen(title="Ratchet · tiny", url="http://127.0.0.1:8400", console=console, shares=SHARES)
    found.forecast = Forecast(parts=[(Part.COLLECT, 60.0)])
    found.waits.extend([1.0, 9.0, 2.0])
    return found


def said(shown: Screen) -> str:
    file = shown.console.file
    assert isinstance(file, StringIO)
    return file.getvalue()


def test_without_a_terminal_a_line_tells_how_far_it_is_and_the_next_one_comes_later() -> None:
    shown = screen()
    shown.phase = "the update runs"
    with shown.shown():
        shown.update(busy())
        shown.update(busy())
    [line] = said(shown).splitlines()
    for fact in (
        "the update runs", "about 60 s left", "people wait 2.0 s for an answer", "champion tiny-c, persistence 0.60", "tiny-s3 CANARY 25%",
        "training 5/12",
    ):  # fmt: skip
        assert fact in line
    assert "suite" not in line, "a row that nobody has written for a minute belongs to work that is over"
    assert "holdback" not in line, "what only counts is no work"


def test_on_a_terminal_the_view_shows_versions_candidates_and_what_happened() -> None:
    shown = screen(terminal=True)
    shown.sampled = (30, 48)
    with shown.shown():
        shown.say("a slot began")
        shown.update(busy())
        assert "a slot began" not in said(shown).split("starting")[0], "while it is live, what happened stands in the view"
    told = said(shown)
    for fact in (
        "Ratchet · tiny", "30/48", "training", "loss 0.123", "tiny-c ★", "tiny-b (previous)", "●●●◉○○○○ CANARY 25%", "REJECTED",
        "fewer parse", "a slot began", "console http://127.0.0.1:8400/console",
    ):  # fmt: skip
        assert fact in told, fact
    shown.say("it is over")
    assert said(shown).rstrip().endswith("it is over"), "after the view, lines again"


def test_events_a_second_are_those_of_the_last_looks() -> None:
    shown = screen()
    assert shown.events_per_s == 0.0
    shown.update(busy())
    shown.update(replace(busy(), accepted_events=150))
    assert shown.events_per_s == 500.0  # 50 within less than a tenth of a second


def test_a_cycle_is_told_from_its_election_to_its_update() -> None:
    narrator, told = Narrator(), list[str]()
    for step in ("elected", "batch", "train", "judge"):
        told += narrator.tell(sight(cycles=(cycle(CycleStatus.RUNNING, step),)), SHARES)
    assert told == [
        "a new slot: this replica was elected and cuts a batch from the labels", "batch cut in 0.1 s; the update runs",
        "update done in 4.2 s",
    ]  # fmt: skip


def test_measures_count_held_out_people_alone() -> None:
    of = {"version": "c", "persistence": 0.5, "follow_up": -0.2, "tokens": 9}
    rows = (
        replace(label(), **of, tier="panel"),
        replace(label(), **of, tier="pro"),
        replace(label(), **of | {"version": "b"}, tier="panel"),
    )
    seen = replace(sight(), labels=rows)
    assert (seen.panel("c"), seen.panel_lengths("c"), seen.panel_dissatisfied("c")) == ([0.5], [9.0], [1.0])
    unread = replace(label(), version="c", tier="panel")
    assert replace(sight(), labels=(unread,)).panel("c") == []


# --- the view, line by line --------------------------------------------------------------------------------------------------------


def picture(shown: Screen, seen: Sight, path: Path) -> list[str]:
    """The lines of the picture within its frame, by where the letters stand."""
    shown.save(seen, path)
    lines = defaultdict[float, list[str]](lambda: [" "] * 150)
    for text in ElementTree.parse(path).getroot().iter("{http://www.w3.org/2000/svg}text"):
        at = round(float(text.get("x", "0")) / 12.2)
        lines[float(text.get("y", "0"))][at : at + len(text.text or "")] = (text.text or "").replace("\xa0", " ")
    return ["".join(letters).strip("│\n ") for _, letters in sorted(lines.items())][2:-1]


def at_work(*, happened: int = 14) -> Screen:
    shown = screen()
    shown._began -= 75.2
    shown.sampled, shown.phase, shown.forecast = (30, 48), "the update runs", Forecast(parts=[(Part.COLLECT, 25.0)])
    for number in range(happened):
        shown.say(f"sentence {number}")
    return shown


def test_the_view_gives_every_part_its_lines_and_the_newest_of_what_happened_the_rest(tmp_path: Path) -> None:
    heads = ("version", "labelled turns", "edit persistence", "dissatisfied follow-ups", "task success")
    lines = picture(at_work(), busy(), tmp_path / "view.svg")
    assert len(lines) == 36
    assert lines[:8] == [
        "01:15  the update runs   0 events/s",
        "━" * 30 + "╺" + "━" * 9 + "  75%  about 25 s left · people wait 2.0 s for an answer",
        "console http://127.0.0.1:8400/console",
        "",
        "labels for the next batch  " + "━" * 25 + "╺" + "━" * 14 + "  30/48",
        "training                   " + "━" * 16 + "╸" + "━" * 23 + "  5/12   loss 0.123",
        "",
        "",
    ]
    assert re.split(r"\s{2,}", lines[10]) == [*heads]
    assert [line.split("  ")[0] for line in lines[11:18]] == ["tiny-b (previous)", "tiny-c ★", "", "", "", "", ""]
    assert [" ".join(line.split()) for line in lines[18:22]] == [
        "candidate its way why", "tiny-s3 ●●●◉○○○○ CANARY 25%", "tiny-s2 REJECTED fewer parse", "",
    ]  # fmt: skip
    assert lines[26:] == [f"01:15  sentence {number}" for number in range(4, 14)]


def test_the_view_has_room_for_five_works_six_versions_and_six_candidates(tmp_path: Path) -> None:
    seen = replace(
        busy(),
        progress=tuple(work(f"work {number}", number) for number in range(6)),
        versions=tuple(version(f"v{number}", kept=[0.5] * 4) for number in range(8)),
        releases=tuple(replace(release(ReleaseState.REJECTED), id=f"r{number}", version_name=f"c{number}") for number in range(8)),
    )
    lines = picture(at_work(happened=1), seen, tmp_path / "view.svg")
    shown = [line.split()[0] if line else "" for line in lines]
    assert [" ".join(line.split()[:2]) for line in lines[5:10]] == ["work 0", "work 1", "work 2", "work 3", ""]
    assert shown[11:18] == ["tiny-v2", "tiny-v3", "tiny-v4", "tiny-v5", "tiny-v6", "tiny-v7", ""]
    assert shown[19:26] == ["c0", "c1", "c2", "c3", "c4", "c5", ""]
    assert lines[26:28] == ["01:15  sentence 0", ""]


@pytest.mark.parametrize(("height", "shown"), [(30, 29), (44, 43), (45, 44), (60, 44)])
def test_a_live_view_leaves_a_line_of_the_terminal_free_and_takes_no_more_than_44(height: int, shown: int) -> None:
    found = screen(terminal=True)
    found.console.height = height
    with found.shown():
        found.update(busy())
    lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\r", "", said(found)).splitlines()
    assert sum(bool({*"╭│╰"} & {*line}) for line in lines) == shown


def test_done_is_what_is_over_of_what_is_over_and_to_come() -> None:
    shown = at_work(happened=0)
    assert shown.done == pytest.approx(0.75, abs=0.01)
    shown.update(busy())
    assert "[###############.....] 75% the update runs" in said(shown)
    shown.forecast = None
    assert shown.done == pytest.approx(1.0)


def test_a_line_is_due_fifteen_seconds_after_the_last() -> None:
    shown = screen()
    shown._told_at = time.monotonic() - 14.0
    shown.update(busy())
    assert said(shown) == ""
    shown._told_at -= 1.0
    shown.update(busy())
    assert len(said(shown).splitlines()) == 1


@pytest.mark.parametrize(("age_s", "is_shown"), [(14.9, True), (15.0, False)])
def test_work_is_under_way_until_its_row_is_fifteen_seconds_old(age_s: float, is_shown: bool) -> None:
    shown = screen()
    shown.update(replace(busy(), progress=(work("training", 5, age_s=age_s),)))
    assert ("training 5/12" in said(shown)) is is_shown


def test_events_a_second_are_counted_over_the_last_twelve_looks() -> None:
    shown = screen()
    for number in range(14):
        shown.update(replace(busy(), accepted_events=number * number))
    shown._rate[-1] = (shown._rate[0][0] + 3.0, 13 * 13)  # the oldest is the third, of which 2 · 2 were accepted
    assert shown.events_per_s == pytest.approx(55.0)


def test_what_people_waited_is_the_median_of_the_last_twenty_answers() -> None:
    shown = screen()
    shown.waits.extend([5.0] * 10 + [7.0] * 9 + [6.0])
    shown.waits.append(7.0)  # the first of the fives is gone: nine, a six, and ten sevens
    assert len(shown.waits) == 20
    shown.update(busy())
    assert "people wait 6.5 s for an answer" in said(shown)


def test_of_a_work_s_detail_the_first_three_values_that_are_short_and_known_are_shown(tmp_path: Path) -> None:
    fits, long = "x" * 38, "y" * 39
    seen = replace(busy(), progress=(work("training", 5, a=fits, b=long, c=None, d=1.23456, e=7, f=8),))
    assert picture(at_work(), seen, tmp_path / "view.svg")[5].split("5/12   ")[1] == f"a {fits} d 1.23 e 7"


@pytest.mark.parametrize(("stage", "share"), [(None, "5%"), (0, "5%"), (2, "50%"), (3, "50%")])
def test_a_canary_is_shown_with_the_share_of_its_stage_or_of_the_last(stage: int | None, share: str) -> None:
    shown = screen()
    shown.update(sight(releases=(release(ReleaseState.CANARY, stage=stage),)))
    assert f"tiny-rl-s1 CANARY {share}" in said(shown)
    assert "champion none" in said(shown)


def test_work_beyond_its_total_fills_the_bar_and_no_more(tmp_path: Path) -> None:
    seen = replace(busy(), progress=(work("training", 15), replace(work("idle", 0), total=0)))
    lines = picture(at_work(), seen, tmp_path / "view.svg")
    assert lines[5] == "training                   " + "━" * 40 + "  15/12"
    assert lines[6] == "idle                       " + "━" * 40 + "  0/0"


@pytest.mark.parametrize(
    ("state", "style"),
    [
        (ReleaseState.CHAMPION, "green"), (ReleaseState.SUPERSEDED, "green"), (ReleaseState.ABORTED, "red"), (ReleaseState.EXPIRED, "red"),
        (ReleaseState.READY, "yellow"), (ReleaseState.CANARY, "yellow"),
    ],
)  # fmt: skip
def test_a_way_is_green_red_or_not_yet_at_its_end(state: ReleaseState, style: str) -> None:
    shown = _way(release(state), SHARES)
    assert str(shown.style) == style
    assert (state.value in shown.plain, "○" in shown.plain) == (True, style == "yellow")


def test_a_candidate_that_waits_is_called_by_its_state() -> None:
    assert _way(release(ReleaseState.READY), SHARES).plain == "●●●●◉○○○ READY"


def test_what_is_shown_below_the_view_at_the_end_is_in_the_picture_too(tmp_path: Path) -> None:
    shown = at_work(happened=1)
    shown.save(busy(), tmp_path / "bare.svg")
    shown.save(busy(), tmp_path / "view.svg", [Text("first-below"), Text("second-below")])
    bare, view = ((tmp_path / name).read_text() for name in ("bare.svg", "view.svg"))
    assert ("first-below" in view, "second-below" in view, "below" in bare) == (True, True, False)
    assert "@font-face" not in view, "nothing is fetched from a stranger's server"
    assert "make&#160;demo" in view or "make demo" in view
