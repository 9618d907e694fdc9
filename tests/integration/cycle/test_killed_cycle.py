"""A whole cycle, killed in each of its steps after the step was done and before it was recorded, and taken over by another replica.

agronholm/apscheduler#429: the run is handed over before it is done, so a crash in the middle loses it. And MLflow down: the cycle goes on.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy import func, select, update

from app import wiring
from app.db.engine import open_engine, reading, writing
from app.db.tables import batch_items, batches, gate_results, labels, releases, training_runs, versions
from app.domain.errors import Unavailable
from app.domain.ids import utc_now
from app.domain.learning.cycles import Cycle, CycleStatus
from app.domain.policies import PolicyConfig
from app.domain.ports import ProgressLog
from app.domain.release.gates import GateName, GateResult
from app.domain.release.releases import ReleaseState
from app.domain.release.versions import TrainingRun, Version
from app.settings import Settings, from_environment
from pipelines.config import LoopConfig, loop_config
from pipelines.cycle import LOOP, Case, CyclePorts, run_cycle
from pipelines.projection import Projection, project_once
from pipelines.training.ports import States, TrainingPorts
from pipelines.training.states import LocalStates
from tests.fakes.console import browser
from tests.fakes.learning import FakeProgress, FakeRegistry, FakeTrajectories, LocalTrainers, sample_turns, small_snapshot
from tests.fakes.releases import answer, deployed
from tests.integration.batching.rows import add_turn

LEASE = timedelta(seconds=60)
POLICY = PolicyConfig(model="tiny", base_name="tiny", base_model="ratchet/tiny-random")
CONFIG = loop_config({
    "batching": {"min_turns": 8, "max_turns": 24},
    "training": {
        "dtype": "float32", "turns_per_step": 12, "learning_rate": 1e-3, "threads": 1,
        "guards": {"min_turns": 8, "max_kl_champion": 50.0, "max_kl_anchor": 50.0},
    },
})  # fmt: skip
STEPS = ("batch", "train", "register", "open", "judge", "queue")


class Killed(BaseException):
    """SIGKILL: nothing after it happens."""


@dataclass
class DyingBook:
    """The cycle book of a replica that dies when it wants to record `step`."""

    book: Any
    step: str
    died: list[str] = field(default_factory=list[str])

    def advance(self, cycle: Cycle, *, step: str, changes: Mapping[str, Any]) -> Cycle:
        if step == self.step:
            self.died.append(step)
            raise Killed(step)
        return self.book.advance(cycle, step=step, changes=changes)

    def finish(self, cycle: Cycle, *, status: CycleStatus, reason: str | None, now: datetime) -> None:
        self.book.finish(cycle, status=status, reason=reason, now=now)


class AwayRegistry(FakeRegistry):
    """MLflow does not answer."""

    def register(self, version: Version, *, folder: Path, run: TrainingRun | None, card: str) -> None:
        raise Unavailable("MLflow does not answer")


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A deployment whose people used the first version enough to learn from."""

    settings: Settings
    trajectories: FakeTrajectories

    def run(
        self, cycle: Cycle, *, book: Any, registry: FakeRegistry, config: LoopConfig = CONFIG, ahead: str | None = None,
        asked: list[Case] | None = None, rehearsed: list[tuple[str, str]] | None = None, progress: ProgressLog | None = None,
        states: States | None = None,
    ) -> None:  # fmt: skip
        """One attempt of a cycle by a replica that has just started. `asked` takes the cases that the gates were asked about, `rehearsed`
        champion and batch of what may be asked before."""
        settings = self.settings
        training = TrainingPorts(
            trajectories=self.trajectories, weights=wiring.open_weights(settings), runs=wiring.run_store(settings),
            progress=progress or wiring.progress_log(settings), folder=settings.data / "training", trainers=LocalTrainers(),
            states_elsewhere=states,
        )  # fmt: skip
        run_cycle(cycle, policy=POLICY, config=config, ports=CyclePorts(
            cycles=book, batches=wiring.batch_store(settings), versions=wiring.version_book(settings), weights=training.weights,
            releases=wiring.release_desk(settings), registry=registry, training=training, progress=training.progress,
            judges={gate: _pass(gate, asked) for gate in (GateName.TRAINING_HEALTH, GateName.OFFLINE)}, pretrained=lambda _: None,
            clock=utc_now, ahead=lambda _: ahead,
            rehearse=lambda champion, batch: None if rehearsed is None else rehearsed.append((champion, batch.id)),
        ))  # fmt: skip

    def counted(self) -> dict[str, int]:
        engine = open_engine(self.settings.database_url)
        with reading(engine) as connection:
            tables = (batches, batch_items, training_runs, versions, releases, gate_results)
            found = {table.name: connection.execute(select(func.count()).select_from(table)).scalar_one() for table in tables}
        engine.dispose()
        return found


def _pass(gate: GateName, asked: list[Case] | None) -> Any:
    def ask(case: Case) -> GateResult:
        if asked is not None:
            asked.append(case)
        return answer(gate, case.candidate.digest)

    return ask


@pytest.fixture
def loop(sqlite_url: str, tmp_path: Path) -> Loop:
    return used(sqlite_url, tmp_path, [(1, 2, 3)] * 24)


@pytest.fixture
def stepwise(sqlite_url: str, tmp_path: Path) -> Loop:
    """What was asked in several ways is learned in several steps."""
    return used(sqlite_url, tmp_path, [(1, 2, 3 + number % 6) for number in range(24)])


def used(sqlite_url: str, tmp_path: Path, prompts: list[tuple[int, ...]]) -> Loop:
    settings = from_environment({"RATCHET_DATA": str(tmp_path / "data"), "RATCHET_DATABASE_URL": sqlite_url})
    small_snapshot(tmp_path / "small", seed=3)
    digest = deployed(settings, tmp_path / "small")
    turns = sample_turns(tmp_path / "small", prompts, version=digest, length=6, seed=1)
    trajectories, dice = FakeTrajectories(), random.Random(1)
    trajectories.write("segment-1", turns)
    engine = open_engine(sqlite_url)
    for turn in turns:
        add_turn(engine, turn.inference_id, episode=turn.episode_id, version=digest, reward=dice.uniform(-1.0, 1.0), completion_tokens=6)
    engine.dispose()
    return Loop(settings=settings, trajectories=trajectories)


def test_the_champion_may_begin_with_its_half_before_the_update_does(loop: Loop) -> None:
    book, rehearsed, asked, started = wiring.cycle_book(loop.settings), list[tuple[str, str]](), list[Case](), utc_now()
    champion = wiring.release_ledger(loop.settings).pointer("composer").digest
    first = book.elect("composer", 0, owner="dies", now=started, lease=LEASE)
    assert first is not None
    with pytest.raises(Killed):
        loop.run(first, book=DyingBook(book, "train"), registry=FakeRegistry(), rehearsed=rehearsed)
    assert len(rehearsed) == 1, "before the update has ended"
    second = book.take_over("composer", owner="survives", now=started + 2 * LEASE, lease=LEASE)
    assert second is not None
    loop.run(second, book=book, registry=FakeRegistry(), rehearsed=rehearsed, asked=asked)
    assert {case.run.batch_id for case in asked} == {batch for _, batch in rehearsed}
    assert [digest for digest, _ in rehearsed] == [champion, champion], "a resumed slot begins anew, with the same comparison"


@pytest.mark.parametrize("step", STEPS)
def test_a_cycle_killed_in_a_step_is_finished_by_another_replica_with_one_of_everything(loop: Loop, step: str) -> None:
    book = wiring.cycle_book(loop.settings)
    started = utc_now()
    first = book.elect("composer", 0, owner="dies", now=started, lease=LEASE)
    assert first is not None
    dying = DyingBook(book, step)
    with pytest.raises(Killed):
        loop.run(first, book=dying, registry=FakeRegistry())
    assert dying.died == [step]
    assert book.take_over("composer", owner="early", now=started, lease=LEASE) is None, "the lease still holds"

    second = book.take_over("composer", owner="survives", now=started + 2 * LEASE, lease=LEASE)
    assert second is not None
    loop.run(second, book=book, registry=FakeRegistry())
    ended = book.find("composer", 0)
    assert (ended.status, ended.attempt) == (CycleStatus.DONE, 2), ended.reason
    assert book.take_over("composer", owner="third", now=started + 9 * LEASE, lease=LEASE) is None
    assert loop.counted() == {
        "batches": 1, "batch_items": 24, "training_runs": 1, "versions": 2, "releases": 2, "gate_results": 2,
    }  # fmt: skip
    (candidate,) = wiring.release_ledger(loop.settings).list(policy="composer", states={ReleaseState.QUEUED})
    assert (candidate.id, candidate.initiator) == (ended.release_id, LOOP)


def test_with_the_registry_down_the_cycle_queues_its_candidate_and_the_projection_makes_up_for_it(loop: Loop) -> None:
    book, settings = wiring.cycle_book(loop.settings), loop.settings
    cycle = book.elect("composer", 0, owner="a", now=utc_now(), lease=LEASE)
    assert cycle is not None
    loop.run(cycle, book=book, registry=AwayRegistry())
    assert book.find("composer", 0).status is CycleStatus.DONE
    (queued,) = wiring.release_ledger(settings).list(policy="composer", states={ReleaseState.QUEUED})

    def projection(registry: FakeRegistry) -> Projection:
        return Projection(
            releases=wiring.release_ledger(settings), versions=wiring.version_book(settings), weights=wiring.open_weights(settings),
            runs=wiring.run_store(settings), registry=registry,
        )  # fmt: skip

    project_once(["composer"], projection(AwayRegistry()))  # still away: told, nothing more
    back = FakeRegistry()
    project_once(["composer"], projection(back))
    assert queued.digest in {version.digest for version in back.versions}


def test_a_run_that_a_guard_held_does_not_burn_its_labels(loop: Loop) -> None:
    book = wiring.cycle_book(loop.settings)
    strict = msgspec.structs.replace(CONFIG.training, guards=msgspec.structs.replace(CONFIG.training.guards, max_kl_champion=1e-9))
    for slot, training, expected in ((0, strict, CycleStatus.HELD), (1, CONFIG.training, CycleStatus.DONE)):
        cycle = book.elect("composer", slot, owner="a", now=utc_now(), lease=LEASE)
        assert cycle is not None
        loop.run(cycle, book=book, registry=FakeRegistry(), config=msgspec.structs.replace(CONFIG, training=training))
        ended = book.find("composer", slot)
        assert ended.status is expected, ended.reason
    assert loop.counted()["batch_items"] == 24, "the second slot learned from what the first had held"


class AwayStates(LocalStates):
    """The storage stops answering before anything can be taken away."""

    def end_run(self, run_id: str) -> None:
        raise Unavailable("the storage does not answer")


def interrupted(by: BaseException, left: Path) -> FakeProgress:
    """What ends an update as soon as it has left a checkpoint there."""
    progress = FakeProgress()

    def interrupt(count: int) -> None:
        if list(left.glob("*/checkpoint-*")):
            raise by

    progress.on_report = interrupt
    return progress


SLOW = msgspec.structs.replace(CONFIG.training, turns_per_step=4, checkpoint_every_s=0.0, learning_rate=1e-6)
STEPWISE = msgspec.structs.replace(CONFIG, training=SLOW)
"""Several steps, none of them so long that a guard ends the update."""


@pytest.mark.parametrize("answers", [True, False])
def test_an_update_that_failed_leaves_no_checkpoints(stepwise: Loop, answers: bool) -> None:
    book, left = wiring.cycle_book(stepwise.settings), stepwise.settings.data / "training" / "runs"
    cycle = book.elect("composer", 0, owner="a", now=utc_now(), lease=LEASE)
    assert cycle is not None
    states = None if answers else AwayStates(stepwise.settings.data / "training")
    lost = interrupted(Unavailable("a training worker was lost"), left)
    stepwise.run(cycle, book=book, registry=FakeRegistry(), config=STEPWISE, progress=lost, states=states)
    ended = book.find("composer", 0)
    assert (ended.status, ended.reason) == (CycleStatus.FAILED, "a training worker was lost")
    assert [path.name for path in left.iterdir()] == ([] if answers else ["composer-0"])
    cycle = book.elect("composer", 1, owner="a", now=utc_now(), lease=LEASE)
    assert cycle is not None
    stepwise.run(cycle, book=book, registry=FakeRegistry(), config=STEPWISE)
    assert book.find("composer", 1).status is CycleStatus.DONE
    assert list(left.iterdir()) == []


def test_a_killed_update_s_checkpoints_stay_until_it_is_resumed_or_given_up(stepwise: Loop) -> None:
    book, left, now = wiring.cycle_book(stepwise.settings), stepwise.settings.data / "training" / "runs", utc_now()
    cycle = book.elect("composer", 0, owner="a", now=now, lease=LEASE)
    for attempt in (1, 2):
        assert cycle is not None
        with pytest.raises(Killed):
            stepwise.run(cycle, book=book, registry=FakeRegistry(), config=STEPWISE, progress=interrupted(Killed(), left))
        assert list(left.glob("composer-0/checkpoint-*")) != []
        cycle = book.take_over("composer", owner="b", now=now + 2 * attempt * LEASE, lease=LEASE)
    assert cycle is None
    assert book.find("composer", 0).status is CycleStatus.FAILED
    cycle = book.elect("composer", 1, owner="a", now=now, lease=LEASE)
    assert cycle is not None
    stepwise.run(cycle, book=book, registry=FakeRegistry(), config=STEPWISE)
    assert list(left.iterdir()) == []


def test_a_run_and_its_candidates_page_say_which_share_of_a_days_labels_was_used(loop: Loop) -> None:
    engine = open_engine(loop.settings.database_url)
    with writing(engine) as connection:
        connection.execute(update(labels).values(labelled_at=utc_now() - timedelta(hours=1)))
    book = wiring.cycle_book(loop.settings)
    cycle = book.elect("composer", 0, owner="a", now=utc_now(), lease=LEASE)
    assert cycle is not None
    three_in_four = msgspec.structs.replace(CONFIG.batching, max_turns=18)
    loop.run(cycle, book=book, registry=FakeRegistry(), config=msgspec.structs.replace(CONFIG, batching=three_in_four))
    with reading(engine) as connection:
        assert connection.execute(select(training_runs.c.metrics)).scalar_one()["labels_used_share"] == 0.75
    sheet = browser(engine).get(f"/console/releases/{book.find('composer', 0).release_id}?policy=composer&sheet=training&as=json").json()
    engine.dispose()
    assert {"figure": "labels_used_share", "value": 0.75} in sheet


def test_a_slot_continues_from_the_candidate_that_is_judged_and_is_held_against_the_champion(loop: Loop) -> None:
    book, desk, cases = wiring.cycle_book(loop.settings), wiring.release_desk(loop.settings), list[Case]()
    half = msgspec.structs.replace(CONFIG, batching=msgspec.structs.replace(CONFIG.batching, max_turns=12))
    champion = desk.pointer("composer").digest
    ledger = wiring.release_ledger(loop.settings)
    for slot in (0, 18_000, 36_000):
        newest = next((r for r in ledger.list(policy="composer", states={ReleaseState.CANARY, ReleaseState.QUEUED})), None)
        cycle = book.elect("composer", slot, owner="a", now=utc_now(), lease=LEASE)
        assert cycle is not None
        loop.run(cycle, book=book, registry=FakeRegistry(), config=half, ahead=None if newest is None else newest.digest, asked=cases)
        if slot == 0:
            desk.start_canary(ledger.list(policy="composer", states={ReleaseState.QUEUED})[0].id)
    first, second = cases[0].candidate, cases[2].candidate
    assert (first.parent, second.parent, second.step) == (champion, first.digest, first.step + 1)
    assert {case.champion.digest for case in cases} == {champion}, "every gate compares with what would be replaced"
    known = wiring.release_ledger(loop.settings).list(policy="composer")
    assert [r.state for r in known if r.digest == second.digest] == [ReleaseState.QUEUED]
    assert len(cases) == 4, "the third slot finds no labels that nobody learned from"
