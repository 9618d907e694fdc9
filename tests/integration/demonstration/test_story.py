"""The demo from its first look to its exit, on a stage: what it waits for, what it does about trouble, and what it leaves running."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from xml.etree import ElementTree

import psutil
import pytest

from app.db.engine import reading
from app.db.release.audit import entries
from app.domain.release.releases import ReleaseState
from pipelines.commands.demo import perform
from pipelines.commands.demonstration.outcome import Outcome
from pipelines.commands.demonstration.planning import TARGET_S, Part
from pipelines.commands.demonstration.story import PANEL_BEFORE, POLICY
from pipelines.simulation.diary import Diary
from tests.integration.demonstration.stage import PANEL_TURNS, USED, Theatre, theatre


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """The demo takes SIGINT and SIGTERM for itself; the next test wants them as they were."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


def performed(
    played: Theatre, *, limit_s: float | None = None, late: bool = False, stay: bool = False, picture: Path | None = None
) -> Outcome:
    """The whole demo, which began long ago where it is `late`; no process of it is left."""
    outcome, now = Outcome(model="tiny", seed=1), time.monotonic()
    before, deadline = {child.pid for child in psutil.Process().children()}, None if limit_s is None else now + limit_s
    perform(played.stage, outcome, played.screen, began=now - TARGET_S * late, deadline=deadline, stay=stay, picture=picture)
    assert {child.pid for child in psutil.Process().children()} <= before, "everything that was started has ended"
    return outcome


def test_the_whole_demo_keeps_its_promises_and_says_what_it_found(tmp_path: Path, sqlite_url: str, tiny_model: Path) -> None:
    picture = tmp_path / "view.svg"
    with theatre(tmp_path / "data", sqlite_url, tiny_model) as played:
        outcome = performed(played, picture=picture)
        room = played.backstage
        releases = {release.version_name: release for release in room.ledger.list(policy=POLICY)}
        with reading(room.state) as connection:
            approvals = [entry for entry in entries(connection) if entry.action == "release.approved"]
    assert outcome.failures == []
    assert (outcome.promoted, outcome.first, outcome.last) == (["tiny-rl-s1"], "tiny-base", "tiny-rl-s1")
    assert outcome.persistence is not None
    answered = len(Diary(tmp_path / "data" / "logs" / f"{PANEL_BEFORE}.diary").read()[0])
    assert PANEL_TURNS <= answered < PANEL_TURNS + 4, "whoever is being answered is answered to the end"
    assert outcome.persistence.first.n >= answered, "and more where a route is a second old when the panel asks again"
    assert outcome.persistence.difference == pytest.approx(0.7, abs=0.03)  # 0.8 or 0.9 instead of 0.1 or 0.2
    assert outcome.dissatisfied is not None
    assert (outcome.dissatisfied.first.mean, outcome.dissatisfied.second.mean) == (1.0, 0.0)
    assert outcome.anchor_budget_used == [USED]
    assert outcome.harm is not None
    harm = outcome.harm
    assert (harm.state, harm.requests, harm.people, harm.people_meanwhile, harm.units) == ("ABORTED", 3, 2, 4, 4)
    assert releases[harm.version].state is ReleaseState.ABORTED
    assert [part for part, _ in outcome.parts][-2:] == [Part.COMPARE, Part.HARM], "each in its own time"
    assert [(entry.actor, entry.subject) for entry in approvals] == [("user:demo-operator", releases["tiny-rl-s1"].id)], (
        "the planted version is nobody's to approve"
    )
    assert not any(played.backstage.trained_beside), "training rests while held-out people are measured"
    assert {pair.first.question == pair.last.question for pair in outcome.pairs} == {True}
    assert len(outcome.pairs) == 3
    assert len(outcome.waits) + len(outcome.waits_training) >= 2 * PANEL_TURNS
    assert "everybody is served by the champion again" in played.said
    assert "a held-out question by panel-1-" in played.said
    assert "1. Connect a product: send its questions to http://127.0.0.1:" in played.said
    assert "tiny-rl-s1" in " ".join(ElementTree.parse(picture).getroot().itertext())


def test_a_gain_that_is_not_clear_is_looked_for_again_at_half_the_error_and_three_times_at_most(
    tmp_path: Path, sqlite_url: str, tiny_model: Path
) -> None:
    gains = [(0.1, 0.2), (0.0, 1.0), (0.8, 0.9)]
    with theatre(tmp_path / "data", sqlite_url, tiny_model, gains=gains) as played:
        outcome = performed(played)
    assert outcome.failures == []
    assert outcome.promoted == ["tiny-rl-s1", "tiny-rl-s2", "tiny-rl-s3"]
    assert outcome.last == "tiny-rl-s3"
    assert outcome.persistence is not None
    assert outcome.persistence.level == pytest.approx(1 - 0.05 / 4)
    assert played.said.count("the gain is not clear yet (") == 2
    assert not any(played.backstage.trained_beside)


def test_a_second_promotion_is_left_out_where_it_would_end_too_late(tmp_path: Path, sqlite_url: str, tiny_model: Path) -> None:
    with theatre(tmp_path / "data", sqlite_url, tiny_model, gains=[(0.8, 0.9)] * 2, promotions=2, at_once=1) as played:
        outcome = performed(played, late=True)
    assert outcome.promoted == ["tiny-rl-s1"]
    assert "it is left out" in played.said


def test_two_promotions_are_waited_for_where_there_is_time(tmp_path: Path, sqlite_url: str, tiny_model: Path) -> None:
    with theatre(tmp_path / "data", sqlite_url, tiny_model, gains=[(0.8, 0.9)] * 2, promotions=2, at_once=2) as played:
        outcome = performed(played)
    assert (outcome.promoted, outcome.last) == (["tiny-rl-s1", "tiny-rl-s2"], "tiny-rl-s2")
    assert "it is left out" not in played.said


def test_candidates_that_fail_one_after_the_other_end_it_with_their_reasons(tmp_path: Path, sqlite_url: str, tiny_model: Path) -> None:
    with theatre(tmp_path / "data", sqlite_url, tiny_model, fails=True, candidates=5, at_once=5) as played:
        outcome = performed(played)
    assert outcome.trouble is not None
    assert outcome.trouble.startswith("5 candidates in a row did not pass (tiny-rl-s5 REJECTED: fewer of its answers parse; tiny-rl-s4")
    assert "no candidate was promoted" in outcome.failures


def test_it_ends_in_the_time_that_was_given_and_says_what_it_waited_for(tmp_path: Path, sqlite_url: str, tiny_model: Path) -> None:
    with theatre(tmp_path / "data", sqlite_url, tiny_model, candidates=0) as played:
        outcome = performed(played, limit_s=1.0)
    assert outcome.trouble == f"the time given with --minutes was over while: {played.screen.phase}"


def test_a_run_in_which_nothing_moves_ends_and_names_what_does_not_run(tmp_path: Path, sqlite_url: str, tiny_model: Path) -> None:
    with theatre(tmp_path / "data", sqlite_url, tiny_model, patience=0.002, broken=("ingest",)) as played:
        outcome = performed(played)
    logs = tmp_path / "data" / "logs"
    assert outcome.trouble is not None
    assert outcome.trouble.endswith(f"while: the processes start. Not running: ingest. The logs are in {logs}")
    assert f"ingest ended (exit code 3); it is started again in 0.5 s (log: {logs}/ingest.log)" in played.said


def test_a_planter_that_breaks_is_told_with_its_log(tmp_path: Path, sqlite_url: str, tiny_model: Path) -> None:
    with theatre(tmp_path / "data", sqlite_url, tiny_model) as played:
        played.environment["RATCHET_DATABASE_URL"] = f"sqlite:///{tmp_path}/nobody.db"
        with pytest.raises(RuntimeError, match=r"planting failed with exit code 1: see .*plant\.log"):
            performed(played)
    assert "run `ratchet db upgrade`" in (tmp_path / "data" / "logs" / "plant.log").read_text()


def test_a_demo_that_ends_early_plants_nothing_afterwards(tmp_path: Path, sqlite_url: str, tiny_model: Path) -> None:
    with theatre(tmp_path / "data", sqlite_url, tiny_model) as played, when(played, "now the demo plants a damaged version", ctrl_c):
        outcome = performed(played)
        assert all(release.initiator == "system:loop" for release in played.backstage.ledger.list(policy=POLICY))
    assert outcome.trouble == "it was interrupted"


def test_an_approval_that_is_refused_again_and_again_ends_it(tmp_path: Path, sqlite_url: str, tiny_model: Path) -> None:
    with theatre(tmp_path / "data", sqlite_url, tiny_model, approvers=2) as played:
        outcome = performed(played)
    assert outcome.trouble is not None
    assert outcome.trouble.startswith("demo-operator was refused: ")
    assert "needs 2 people" in outcome.trouble


def test_ctrl_c_ends_it_with_what_is_known(tmp_path: Path, sqlite_url: str, tiny_model: Path) -> None:
    with theatre(tmp_path / "data", sqlite_url, tiny_model, candidates=0) as played, when(played, "simulated developers ask", ctrl_c):
        outcome = performed(played, stay=True)
    assert outcome.trouble == "it was interrupted"
    assert "Everything keeps running" not in played.said, "whoever wants to leave is not kept"


def test_who_stays_has_everything_running_until_ctrl_c_and_is_told_of_crashes(tmp_path: Path, sqlite_url: str, tiny_model: Path) -> None:
    logs = tmp_path / "data" / "logs"

    def kill_the_loop() -> None:
        os.kill(int((logs / "loop.pid").read_text()), signal.SIGKILL)

    with (
        theatre(tmp_path / "data", sqlite_url, tiny_model, candidates=0) as played,
        when(played, "Everything keeps running", kill_the_loop),
        when(played, "loop ended (SIGKILL)", ctrl_c),
    ):
        outcome = performed(played, limit_s=1.0, stay=True)
    assert f"Everything keeps running: {played.stage.deployment.url}/console. Ctrl-C ends it." in played.said
    assert outcome.failures[0].startswith("the time given with --minutes was over")


def ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@contextmanager
def when(played: Theatre, said: str, act: Callable[[], None]) -> Iterator[None]:
    """Act once that was said."""
    stop, acted = threading.Event(), threading.Event()

    def wait() -> None:
        while not stop.wait(0.05):
            if said in played.said:
                acted.set()
                act()
                return

    threading.Thread(target=wait, daemon=True).start()
    yield
    stop.set()
    assert acted.is_set(), f"it was not said: {said}"
