"""The demo's view: live on a terminal, a line now and then elsewhere, and the same facts in both."""

from dataclasses import replace
from datetime import timedelta
from io import StringIO

from rich.console import Console

from app.domain.learning.cycles import CycleStatus
from app.domain.release.releases import Pointer, ReleaseState
from app.domain.views.measures import measure
from app.domain.views.operations import VersionRow
from app.domain.views.rows import ProgressRow
from pipelines.commands.demonstration.narrator import Narrator
from pipelines.commands.demonstration.planning import Forecast, Part
from pipelines.commands.demonstration.screen import Screen
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
