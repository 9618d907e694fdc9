"""Who is hurt: a loss weighs as much as the turns that it spoils, and silence on more turns is not the same metric."""

import random
from datetime import timedelta

from app.domain.release.gates import CanaryAction
from app.domain.release.sessions import Session
from pipelines.evaluation.config import GatesConfig, Good, MetricClass, MetricConfig
from pipelines.evaluation.counting.drawings import canary_drawing
from pipelines.evaluation.counting.evidence import micros
from pipelines.evaluation.counting.measures import of_unit
from pipelines.evaluation.counting.references import references_of
from pipelines.evaluation.counting.unit_book import UnitBook
from pipelines.evaluation.live.decide import Decision, decide
from tests.fakes.evidence import counted
from tests.fakes.sessions import AT, session
from tests.fakes.watching import small_gates

K = MetricClass
GOLD = MetricConfig(name="task_success", source="observation:task_success", kind=K.GOLD, abort_margin=0.02, margin=0.10)
TURNS = MetricConfig(name="failed_turns", source="observation:task_success", kind=K.GOLD, by_turns=True)
SILENT = MetricConfig(name="abandoned", source="abandoned", kind=K.BEHAVIOUR, good=Good.SAME, abort_margin=0.03)


def judged(config: GatesConfig, history: list[Session], sessions: list[Session]) -> Decision:
    """The decision about these sessions once all of them are complete."""
    references = references_of(config, history)
    book = UnitBook(config, canary_drawing(digest="v2", champion="v1"), references)
    now = max(s.exposed_at for s in sessions) + timedelta(seconds=60)
    book.update(sorted(sessions, key=lambda s: s.exposed_at), now=now)
    evidence = counted(book, references, at=micros(now), n_max={"task_success": 9000}, slos=())
    return decide(config, evidence)


def visits(number: int, arm: str, *, turns: int, success: float, feedback: float, dice: random.Random) -> list[Session]:
    """One person's turns within a second; a turn that nobody reacts to has no signal at all."""
    return [
        session(
            number, arm=arm, inference_id=f"i-{number}-{turn}", actor=f"p-{number}",
            exposed_at=AT + timedelta(seconds=number, milliseconds=turn),
            signals={"task_success": dice.random() < success} if dice.random() < feedback else {},
        ) for turn in range(turns)
    ]  # fmt: skip


def test_the_heaviest_two_percent_losing_thirty_points_is_harm() -> None:
    """-18 points a turn passed 53 % of the time: one person was one unit, however much they use it."""
    dice = random.Random(5)

    def crowd(first: int, count: int, *, loss: float) -> list[Session]:
        made: list[Session] = []
        for number in range(first, first + count):
            arm, heavy = dice.choice(("champion", "candidate")) if loss else "champion", number % 50 == 0
            success = 0.6 - (loss if heavy and arm == "candidate" else 0.0)
            made += visits(number, arm, turns=20 if heavy else 1, success=success, feedback=1.0, dice=dice)
        return made

    history, sessions = crowd(20_000, 1000, loss=0.0), crowd(0, 8000, loss=0.3)
    blind = judged(small_gates(metrics=(GOLD,)), history, sessions)
    seeing = judged(small_gates(metrics=(GOLD, TURNS)), history, sessions)
    assert blind.action is CanaryAction.READY
    assert seeing.action is CanaryAction.ABORT
    assert "failed_turns" in seeing.reason


def test_feedback_on_more_turns_of_a_worse_candidate_is_held() -> None:
    """What is missing counts as failed, so more feedback hides that more of it is bad: 74 % passed."""
    dice, sessions = random.Random(6), list[Session]()
    for number in range(1500):
        arm = dice.choice(("champion", "candidate"))
        success, feedback = (0.45, 0.8) if arm == "candidate" else (0.6, 0.6)  # .36 of all turns either way
        sessions += visits(number, arm, turns=6, success=success, feedback=feedback, dice=dice)
    decision = judged(small_gates(metrics=(GOLD, SILENT)), [], sessions)
    assert decision.action is CanaryAction.HOLD
    assert "feedback coverage per turn" in decision.reason


def test_a_persons_value_by_turns_is_one_less_their_bad_turns_over_the_cap() -> None:
    assert of_unit(TURNS, [1.0, 0.0, 0.0], {"failed_turns": 10.0}) == 0.8
    assert of_unit(TURNS, [0.0] * 30, {"failed_turns": 10.0}) == 0.0  # ten count at most
    assert of_unit(GOLD, [1.0, 0.0, 0.0, 1.0], {}) == 0.5
