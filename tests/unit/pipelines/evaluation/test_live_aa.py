"""The live A/A: the champion against itself measures this deployment's own false alarms, and says the same whenever it is asked."""

from datetime import timedelta

import msgspec
import numpy as np
import pytest

from pipelines.evaluation.counting.drawings import canary_drawing
from pipelines.evaluation.counting.evidence import Evidence, micros
from pipelines.evaluation.counting.references import references_of
from pipelines.evaluation.counting.unit_book import UnitBook
from pipelines.evaluation.live.live_aa import LOTS, LiveAA, live_aa, live_aa_after, told
from tests.fakes.evidence import counted
from tests.fakes.sessions import AT, people, session
from tests.fakes.watching import small_gates

CONFIG = small_gates()


def evidence_of(count: int, *, candidate: float = 0.6, champion: float = 0.6) -> Evidence:
    sessions, references = people(count, candidate=candidate, champion=champion), references_of(CONFIG, [])
    book, now = UnitBook(CONFIG, canary_drawing(digest="v2", champion="v1"), references), AT + timedelta(hours=2)
    book.update(sessions, now=now)
    return counted(book, references, at=micros(now), n_max={"task_success": count}, slos=())


def test_the_champion_is_no_harm_to_itself_however_bad_the_candidate_is() -> None:
    """Only the champion's people are drawn once more: 20 lots at 5 % each, five alarms or more are one case in 400."""
    found = live_aa(CONFIG, evidence_of(2000, candidate=0.2))
    assert (found.comparisons, found.allowed) == (LOTS, 0.05)
    assert found.alarms < 5


def test_after_a_promotion_whoever_got_the_champion_is_drawn_once_more_and_not_its_holdback() -> None:
    """The champion is the treated arm there: bad people on the version before it are nobody's harm. Two of 20 at 1 % are one case in 60."""
    found = live_aa_after(CONFIG, evidence_of(1000, candidate=0.6, champion=0.1))
    assert (found.comparisons, found.allowed) == (LOTS, 0.01)
    assert found.alarms < 2
    assert live_aa_after(CONFIG, evidence_of(60)).comparisons == 0


def test_the_lots_follow_from_the_evidence() -> None:
    evidence = evidence_of(800)
    assert live_aa(CONFIG, evidence) == live_aa(CONFIG, msgspec.structs.replace(evidence))


def test_the_lots_are_the_same_where_a_processor_says_another_last_digit() -> None:
    """Numpy adds up in another order where vectors are wider, and one bit of an outcome drew other lots: the story of a release told other
    false alarms on another machine."""
    many = [evidence_of(count) for count in (500, 600, 700, 800)]
    assert [live_aa(CONFIG, elsewhere(evidence)) for evidence in many] == [live_aa(CONFIG, evidence) for evidence in many]


def elsewhere(evidence: Evidence) -> Evidence:
    """The same evidence with every outcome a last digit nearer to a half."""
    return msgspec.structs.replace(
        evidence,
        lanes=tuple(
            msgspec.structs.replace(lane, outcomes={name: np.nextafter(lane.array(name), 0.5).tobytes() for name in lane.outcomes})
            for lane in evidence.lanes
        ),
    )


def test_too_few_people_compare_nothing() -> None:
    assert live_aa(CONFIG, evidence_of(60)).comparisons == 0


def test_a_verdict_is_told_with_those_of_earlier_ones() -> None:
    """3 of 100: ± sqrt(.03 * .97 / 100)."""
    found = LiveAA(comparisons=20, alarms=1, allowed=0.05)
    assert told(found, before=(2, 80)) == "the champion against itself: 3 false alarms in 100 (3.0% ± 1.7%, allowed: 5%)"
    assert "too few people" in told(LiveAA(comparisons=0, alarms=0, allowed=0.05), before=(0, 0))


@pytest.mark.parametrize(
    ("alarms", "comparisons", "before", "said"),
    [
        (0, 20, (0, 0), "0 false alarms in 20 (0.0% ± 5.0%, allowed: 5%)"),  # as if it were one: sqrt(1 * 20/20**3)
        (0, 20, (0, 80), "0 false alarms in 100 (0.0% ± 1.0%, allowed: 5%)"),
        (20, 20, (0, 0), "20 false alarms in 20 (100.0% ± 5.0%, allowed: 5%)"),  # sqrt(20 * 1/20**3)
        (1, 10, (4, 90), "5 false alarms in 100 (5.0% ± 2.2%, allowed: 5%)"),
    ],
)
def test_a_rate_of_false_alarms_is_told_with_its_error(alarms: int, comparisons: int, before: tuple[int, int], said: str) -> None:
    found = told(LiveAA(comparisons=comparisons, alarms=alarms, allowed=0.05), before=before)
    assert found == f"the champion against itself: {said}"


def test_two_hundred_people_of_the_champion_are_compared_and_fewer_are_not() -> None:
    sessions = [session(n, arm="candidate" if n % 2 else "champion", reward=0.1) for n in range(399)]
    for count, comparisons in ((399, 1), (398, 0)):
        references = references_of(CONFIG, [])
        book, now = UnitBook(CONFIG, canary_drawing(digest="v2", champion="v1"), references), AT + timedelta(hours=2)
        book.update(sessions[:count], now=now)
        evidence = counted(book, references, at=micros(now), n_max={"task_success": count}, slos=())
        assert live_aa(CONFIG, evidence, lots=1).comparisons == comparisons
