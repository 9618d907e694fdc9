"""What the demo's director decides from one look: which part is under way, who is let in, what is approved, and when it is enough."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from app.domain.errors import Refused
from app.domain.learning.cycles import Cycle, CycleStatus
from app.domain.release.releases import IN_FLIGHT, Pointer, Release, ReleaseState
from app.domain.release.versions import VersionKind
from app.domain.views.measures import difference
from app.domain.views.operations import Exposed, LabelRow, VersionRow
from pipelines.commands.demonstration.outcome import Outcome
from pipelines.commands.demonstration.planning import Part, Speed, cycle_parts, fit, last_parts
from pipelines.commands.demonstration.profiles import PROFILES
from pipelines.commands.demonstration.screen import Screen
from pipelines.commands.demonstration.sight import look
from pipelines.commands.demonstration.story import Ended, Story, _failures, _part_of
from pipelines.supervisor import Program
from tests.unit.pipelines.commands.test_demonstration import NOW, SHARES, cycle, release, sight
from tests.unit.pipelines.commands.test_stillness import label

S = ReleaseState
SPEED = Speed(cores=2, answers_per_s=5.0, turn_s=0.7)


@dataclass
class Supervisor:
    """Keeps the programs that it was given."""

    processes: dict[str, Program] = field(default_factory=dict[str, Program])
    started: list[str] = field(default_factory=list[str])

    def add(self, program: Program) -> None:
        self.processes[program.name] = program

    def start(self, name: str) -> None:
        self.started.append(name)


@pytest.fixture
def story(tmp_path: Path) -> Iterator[Story]:
    plan = fit(PROFILES["smollm2"], SPEED)
    deployment = SimpleNamespace(url="http://127.0.0.1:1", logs=tmp_path, environment={"A": "b"})
    made = Story(
        deployment=cast("Any", deployment), plan=plan, speed=SPEED, supervisor=cast("Any", Supervisor()),
        outcome=Outcome(model="m", seed=1), seed=7,
        screen=Screen(title="", url="", console=Console(file=StringIO()), shares=()), deadline=None, target=0.0,
        stopping=lambda: False, shares=SHARES,
    )  # fmt: skip
    yield made
    made.close()


def in_state(state: ReleaseState, name: str = "tiny-s1", **changes: Any) -> Release:
    return replace(release(state), version_name=name, id=name, **changes)


@pytest.mark.parametrize("state", list(S))
def test_a_release_on_its_way_to_people_is_a_canary_and_any_other_leaves_it_to_the_cycle(state: ReleaseState) -> None:
    is_canary = state in IN_FLIGHT and state not in (S.TRAINED, S.OFFLINE)
    running = cycle(CycleStatus.RUNNING, "batch")
    assert _part_of(sight(releases=(in_state(state),), cycles=(running,))) is (Part.CANARY if is_canary else Part.UPDATE)


@pytest.mark.parametrize(
    ("cycles", "part"),
    [
        ((), Part.COLLECT),
        ((cycle(CycleStatus.HELD, "batch"),), Part.COLLECT),
        ((cycle(CycleStatus.RUNNING, "elected"),), Part.UPDATE),
        ((cycle(CycleStatus.RUNNING, "batch"),), Part.UPDATE),
        ((cycle(CycleStatus.RUNNING, "train"),), Part.SUITE),
        ((cycle(CycleStatus.FAILED, "train"), cycle(CycleStatus.RUNNING, "judge")), Part.SUITE),
    ],
)
def test_a_cycle_is_an_update_until_it_has_trained(cycles: tuple[Cycle, ...], part: Part) -> None:
    assert _part_of(sight(cycles=cycles)) is part


def test_candidates_that_did_not_pass_count_since_the_last_that_did_without_the_planted_one() -> None:
    looked = sight(releases=(
        in_state(S.ABORTED, "five"), in_state(S.CANARY, "four"), in_state(S.ABORTED, "v1-planted"), in_state(S.EXPIRED, "three"),
        in_state(S.SUPERSEDED, "two"), in_state(S.REJECTED, "one"),
    ))  # fmt: skip
    assert [one.version_name for one in _failures(looked)] == ["five", "three"]
    assert (
        len(_failures(sight(releases=tuple(in_state(state, state.value) for state in S if state not in (S.CHAMPION, S.SUPERSEDED))))) == 5
    )


def test_five_candidates_in_a_row_that_do_not_pass_are_enough(story: Story) -> None:
    failed = [in_state(S.REJECTED, f"s{number}", reason="worse") for number in range(5)]
    assert story._follow(sight(releases=tuple(failed[:4])))
    with pytest.raises(Ended, match=r"5 candidates in a row did not pass \(s0 REJECTED: worse; s1"):
        story._follow(sight(releases=tuple(failed)))


def test_held_out_people_ask_the_first_version_as_soon_as_an_update_computes(story: Story) -> None:
    supervisor = cast("Supervisor", story.supervisor)
    story._follow(sight())
    assert supervisor.started == []
    for _ in range(2):
        story._follow(sight(cycles=(cycle(CycleStatus.RUNNING, "batch"),)))
    assert supervisor.started == ["panel-before"]
    assert (story.screen.phase, story.forecast.part) == (Part.UPDATE.value, Part.UPDATE)
    story._follow(sight())
    assert story.forecast.part is Part.COLLECT, "it has to be collected once more: planned anew"
    assert [part for part, _ in story.forecast.parts].count(Part.CANARY) == 1


@pytest.mark.parametrize(("share", "at_once"), [(1, "24"), (3, "8"), (10, "3")])
def test_the_panel_asks_as_many_questions_and_so_many_at_a_time(story: Story, share: int, at_once: str) -> None:
    story._panel("panel", share=share)
    program = cast("Supervisor", story.supervisor).processes["panel"]
    options = dict(zip(program.command[3::2], program.command[4::2], strict=False))
    assert program.once
    assert "--panel" in program.command
    tail = program.command[program.command.index("--panel") + 1 :]
    assert tail == ("--turns", "96", "--concurrency", at_once, "--seed", "7")
    assert (options["--max-tokens"], options["--horizons"], options["--url"]) == ("48", "0,2", "http://127.0.0.1:1")
    story._people("people")
    assert not cast("Supervisor", story.supervisor).processes["people"].once


def test_the_processes_of_later_comparisons_have_names_of_their_own(story: Story) -> None:
    names: list[str] = []
    for compared in range(4):
        story._compared = compared
        names.append(story._panel_after)
    assert names == ["panel-after", "panel-after", "panel-after-2", "panel-after-3"]


def test_what_is_left_is_so_many_more_cycles_and_the_end_at_the_pace_so_far(story: Story) -> None:
    profile = story.plan.profile
    expected = [2 * sum(lasts for _, lasts in cycle_parts(profile, SPEED)), sum(lasts for _, lasts in last_parts(profile, SPEED))]
    assert story._now_left(2) == pytest.approx(sum(expected))
    story.forecast._began -= 20.0
    story.forecast.reach(Part.COLLECT)
    assert story._now_left(0) == pytest.approx(2 * expected[1], rel=0.05)


def test_labels_of_the_champion_that_are_not_left_out_count_towards_the_next_batch(story: Story) -> None:
    pointer = Pointer(
        policy="composer", digest="v", generation=1, previous=None, anchor="v", holdback=0.0, release_id=None, changed_at=NOW
    )  # fmt: skip
    seen = replace(
        sight(), pointer=pointer, labels=(label(), label(), replace(label(), exclusion="consent"), replace(label(), version="w"))
    )
    assert story._sampled(seen) == (2, 48)
    assert story._sampled(replace(seen, labels=tuple(label() for _ in range(49)))) == (48, 48)
    assert story._sampled(replace(seen, pointer=None)) == (0, 48)


def test_what_people_waited_is_told_apart_by_whether_an_update_computes(story: Story) -> None:
    diary = story._diary("people")
    line = '{{"at":"2026-01-01T12:00:00Z","version":"a","waited_s":{},"number":1,"person":"p"}}\n'
    diary.path.write_text(line.format(1.5))
    story._wait_of_people(sight())
    with diary.path.open("a") as file:
        file.write(line.format(9.0))
    story._diary("panel-before").path.write_text(line.format(4.0))
    story._wait_of_people(sight(cycles=(cycle(CycleStatus.RUNNING, "elected"),)))
    story._wait_of_people(sight(cycles=(cycle(CycleStatus.RUNNING, "train"),)))
    assert (story.outcome.waits, story.outcome.waits_training) == ([1.5], [9.0, 4.0])
    assert list(story.screen.waits) == [1.5, 9.0, 4.0]


class Operator:
    """Approves, or refuses so often."""

    def __init__(self, refusals: int = 0) -> None:
        self.refusals, self.asked = refusals, list[str]()

    def approve(self, release: Release) -> str:
        self.asked.append(f"{release.id} {release.evidence_digest}")
        if self.refusals:
            self.refusals -= 1
            raise Refused("not now")
        return "approved"

    def close(self) -> None:
        pass


def test_each_evidence_is_approved_once_and_a_planted_version_never(story: Story) -> None:
    operator = Operator(refusals=1)
    story._operator.close()
    story._operator = cast("Any", operator)
    ready = in_state(S.READY, "s1", evidence_digest="e1")
    looked = sight(releases=(ready, in_state(S.READY, "s2-planted"), in_state(S.APPROVED, "s3")))
    for _ in range(3):
        story._approve(looked)
    story._approve(sight(releases=(replace(ready, evidence_digest="e2"),)))
    assert operator.asked == ["s1 e1", "s1 e1", "s1 e2"], "refused, approved, and asked anew"


def test_an_approval_that_is_refused_ten_times_ends_it(story: Story) -> None:
    story._operator.close()
    story._operator = cast("Any", Operator(refusals=100))
    looked = sight(releases=(in_state(S.READY, "s1", evidence_digest="e1"),))
    for _ in range(9):
        story._approve(looked)
    with pytest.raises(Ended, match="not now"):
        story._approve(looked)


@pytest.mark.parametrize(
    ("first_s", "last_s", "detect_s", "roll_back_s"), [(-7.0, 2.0, 7.0, 2.0), (-7.0, -1.0, 7.0, 0.0), (None, None, 0.0, 0.0)]
)
def test_harm_lasts_from_the_first_exposure_to_the_decision_and_from_there_to_the_last(
    story: Story, first_s: float | None, last_s: float | None, detect_s: float, roll_back_s: float
) -> None:
    first_at, last_at = (None if seconds is None else NOW + timedelta(seconds=seconds) for seconds in (first_s, last_s))
    exposed = Exposed(requests=9, people=3, first_at=first_at, last_at=last_at, units=12, people_meanwhile=30)
    story.operations = cast("Any", SimpleNamespace(exposed=lambda digest: exposed))
    harm = story._harm_done(in_state(S.ABORTED, "v1-planted", reason="harm"))
    assert (harm.detect_s, harm.roll_back_s, harm.state, harm.reason) == (detect_s, roll_back_s, "ABORTED", "harm")
    assert (harm.requests, harm.people, harm.units, harm.people_meanwhile) == (9, 3, 12, 30)


def test_each_further_look_at_the_gain_has_half_the_error_of_the_one_before(story: Story) -> None:
    before, after = [0.0, 0.1, 0.2] * 4, [0.5, 0.6, 0.7] * 4
    rows = [replace(label(), version=version, tier="panel", persistence=kept, tokens=9) for version, kept in
            [*(("a", kept) for kept in before), *(("b", kept) for kept in after)]]  # fmt: skip
    seen = replace(sight(), labels=tuple(rows))
    story._look = lambda: seen  # type: ignore[method-assign]
    story.operations = cast("Any", SimpleNamespace())
    for compared, error in ((1, 0.05), (2, 0.025), (3, 0.0125)):
        story._compared = compared
        story._gain("a", "b")
        assert story.outcome.persistence == difference(before, after, error=error)
    assert story.outcome.lengths == difference([9.0] * 12, [9.0] * 12)
    assert story.outcome.dissatisfied is None
    assert story.outcome.pairs == []


class Asked:
    """A deployment that counts how often its labels were read."""

    def __init__(self) -> None:
        self.read = 0

    def labels(self, policy: str) -> tuple[LabelRow, ...]:
        self.read += 1
        return (label(),) * self.read

    def __getattr__(self, name: str) -> Any:
        return lambda *_: ()


@pytest.mark.parametrize(("later_s", "read"), [(0.0, 1), (2.99, 1), (3.0, 2)])
def test_labels_are_read_anew_after_three_seconds(later_s: float, read: int) -> None:
    asked = Asked()
    first = look(cast("Any", asked), "composer", NOW)
    second = look(cast("Any", asked), "composer", NOW + timedelta(seconds=later_s), first)
    assert (asked.read, len(second.labels)) == (read, read)
    assert second.labels_read_at == (NOW if read == 1 else NOW + timedelta(seconds=later_s))
    assert second.seen_at == NOW + timedelta(seconds=later_s)


def test_a_run_stands_still_after_five_minutes_of_nothing_on_a_machine_that_needs_no_patience(story: Story) -> None:
    story._stillness.begin(0.0)
    assert story._stillness.seen(sight(), now=0.0) is None
    assert story._stillness.seen(sight(), now=300.0) is None
    assert story._stillness.seen(sight(), now=300.5) == 300.5


@pytest.mark.parametrize(("follow_up", "counted"), [(-1.0, [1.0]), (-0.1, [1.0]), (0.0, [0.0]), (0.5, [0.0]), (1.0, [0.0]), (None, [])])
def test_a_follow_up_below_nought_is_a_dissatisfied_one(follow_up: float | None, counted: list[float]) -> None:
    rows = (replace(label(), version="c", tier="panel", follow_up=follow_up),)
    assert replace(sight(), labels=rows).panel_dissatisfied("c") == counted


def row(digest: str, kind: VersionKind) -> VersionRow:
    return VersionRow(digest=digest, name=digest, kind=kind, parent=None, step=1, created_at=NOW, turns=0)


@pytest.mark.parametrize(("state", "counts"), [(S.CHAMPION, True), (S.SUPERSEDED, True), (S.READY, False), (S.ABORTED, False)])
def test_champions_are_what_training_made_and_people_got(state: ReleaseState, counts: bool) -> None:
    rows = (row("base", VersionKind.BASE), row("d", VersionKind.RL), row("other", VersionKind.RL))
    seen = replace(sight(releases=(release(state), replace(release(S.CHAMPION), digest="base"))), versions=rows)
    assert [version.digest for version in seen.champions] == ["d"] * counts
