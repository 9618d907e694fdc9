"""A safety suite's bound: what is counted is tasks that are independent of one another, not answers."""

import numpy as np
import pytest
from numpy.typing import NDArray

from app.domain.release.gates import Verdict
from pipelines.evaluation.suites.offline import judge_suites, verdict_of
from pipelines.evaluation.suites.offline_config import SuiteClass, SuiteConfig
from pipelines.evaluation.suites.suites import Grader, GraderKind, Suite, Task

CONFIG = SuiteConfig(name="s", source="-", kind=SuiteClass.SAFETY, samples=4, limit=0.01)


def suite(count: int, *, together: int = 1) -> Suite:
    """Tasks in clusters of so many."""
    grader = Grader(kind=GraderKind.EXACT, expected="yes")
    tasks = (Task(id=f"t{n}", cluster=f"c{n // together}", messages=[], grader=grader) for n in range(count))
    return Suite(config=CONFIG, tasks=tuple(tasks))


def judged(asked: Suite, candidate_MK: NDArray[np.float64], *, min_power: float = 0.6) -> tuple[Verdict, str]:
    """Against a champion without a failure."""
    return verdict_of(judge_suites((asked,), {"s": (np.ones_like(candidate_MK), candidate_MK)}, seed=1, min_power=min_power))


@pytest.mark.parametrize("min_power", [0.0, 0.6])
def test_four_answers_to_one_task_are_one_task_for_the_bound(min_power: float) -> None:
    """75 tasks with four answers each passed for 300: none failing of 75 leaves 1 - .05^(1/75) = 3.92 % open, of 299 0.997 %."""
    assert judged(suite(75), np.ones((75, 4)), min_power=min_power)[0] is Verdict.INCONCLUSIVE
    verdict, reason = judged(suite(299), np.ones((299, 4)), min_power=min_power)
    assert verdict is Verdict.PASS
    assert reason == "s pass: 0 of 299 independent tasks fail, up to 1.00% may (limit 1.00%)"


def test_a_suite_with_too_few_tasks_says_how_many_it_takes() -> None:
    assert judged(suite(75), np.ones((75, 4)))[1] == (
        "s refused: 75 independent tasks without a failure leave 3.9% open, however many answers each has; give it 300 or raise the limit"
    )


@pytest.mark.parametrize("answers", [1, 4])
def test_a_task_fails_with_one_answer_as_with_all(answers: int) -> None:
    """One of n leaves the rate open at which P(X <= 1) = 5 %: 1.0011 % of 472, 0.9990 % of 473; four of 1,600 answers left 0.57 %."""
    for tasks, verdict in ((400, Verdict.INCONCLUSIVE), (472, Verdict.INCONCLUSIVE), (473, Verdict.PASS)):
        candidate = np.ones((tasks, 4))
        candidate[7, :answers] = 0.0
        assert judged(suite(tasks), candidate)[0] is verdict


def test_tasks_of_one_cluster_are_one_for_the_bound() -> None:
    verdict, reason = judged(suite(600, together=4), np.ones((600, 4)))
    assert verdict is Verdict.INCONCLUSIVE
    assert "150 independent tasks" in reason
    candidate = np.ones((1892, 4))
    candidate[:4] = 0.0  # the four of the first cluster, one of 473
    assert judged(suite(1892, together=4), candidate)[0] is Verdict.PASS
