"""The offline gate over engines whose answers are known."""

import random
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import msgspec
import numpy as np
import pytest

from app.domain.errors import Unavailable
from app.domain.release.assignment import unit_interval
from app.domain.release.gates import GateResult, Verdict
from app.domain.release.pairs import BlindPair
from app.domain.telemetry.serving import GenerateRequest, GenerationChunk
from app.domain.telemetry.turns import FinishReason
from app.sandbox.processes import ProcessBoxes
from pipelines.evaluation.suites.blind import Hearing, as_evidence, calibration_of, pairs_of
from pipelines.evaluation.suites.execution import Examination
from pipelines.evaluation.suites.offline import OfflineGate, judge_suites, verdict_of
from pipelines.evaluation.suites.offline_config import OfflineConfig, SuiteClass, SuiteConfig
from pipelines.evaluation.suites.rehearsal import Rehearsal
from pipelines.evaluation.suites.suites import Grader, GraderKind, Suite, Task
from tests.fakes.clock import FrozenClock


class AnsweringEngines:
    """Answers `yes` or `no` per version and task; counts what it was asked."""

    def __init__(self, answers: dict[str, set[str]], *, finish: FinishReason = FinishReason.STOP) -> None:
        self.answers, self.finish = answers, finish
        self.asked: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerationChunk]:
        self.asked.append(request)
        if request.digest not in self.answers:
            raise Unavailable(f"no engine holds {request.digest}")
        task = request.messages[0]["content"]
        text = "yes" if task in self.answers[request.digest] else "no"
        yield GenerationChunk(text=text, tokens=[1], logprobs=[-0.5], finish_reason=self.finish, prompt_tokens=[1])


@asynccontextmanager
async def connected(engines: Any) -> AsyncGenerator[Any]:
    yield engines


class RememberedScores:
    """The `ScoreBook` port in a dict."""

    def __init__(self) -> None:
        self.kept: dict[tuple[str, str], list[list[float]]] = {}
        self.tests: list[tuple[float, bool]] = []

    def find(self, digest: str, suite: str) -> list[list[float]] | None:
        return self.kept.get((digest, suite))

    def save(self, digest: str, suite: str, scores: list[list[float]], *, at: datetime) -> None:
        self.kept[digest, suite] = scores

    def tested(self, policy: str, suite: str, *, gate: str, since: datetime) -> list[tuple[float, bool]]:
        return self.tests


class ReportedProgress:
    """The `ProgressLog` port in a list."""

    def __init__(self) -> None:
        self.reports: list[tuple[str, float, float]] = []

    def report(self, policy: str, task: str, done: float, total: float, detail: dict[str, Any]) -> None:
        self.reports.append((task, done, total))


def tasks(count: int, *, critical: bool = False) -> tuple[Task, ...]:
    grader = Grader(kind=GraderKind.EXACT, expected="yes")
    return tuple(Task(id=f"t{i}", messages=[{"role": "user", "content": f"t{i}"}], grader=grader, critical=critical) for i in range(count))


def suite(count: int = 40, *, kind: SuiteClass = SuiteClass.CORE, margin: float = 0.1, critical: bool = False) -> Suite:
    config = SuiteConfig(name="known", source="-", kind=kind, margin=margin, samples=2, limit=0.2)
    return Suite(config=config, tasks=tasks(count, critical=critical))


def gate(
    engines: Any, judged: Suite, scores: RememberedScores | None = None, rehearsal: Rehearsal | None = None, *, rehearse: bool = True
) -> OfflineGate:  # fmt: skip
    return OfflineGate(
        config=OfflineConfig(engine_wait_s=0.0, rehearse=rehearse), suites=(judged,), connect=lambda: connected(engines),
        scores=scores or RememberedScores(), progress=ReportedProgress(), judge=None, clock=FrozenClock(),
        examination=Examination.from_config(OfflineConfig(), ProcessBoxes()), rehearsal=rehearsal,
    )  # fmt: skip


def solved(*numbers: int) -> set[str]:
    return {f"t{i}" for i in numbers}


def test_a_candidate_as_good_as_the_champion_passes_with_every_number_in_the_evidence() -> None:
    engines = AnsweringEngines({"champion": solved(*range(30)), "candidate": solved(*range(30))})
    result = gate(engines, suite()).decide(policy="p", candidate="candidate", champion="champion")
    assert result.verdict is Verdict.PASS
    # 30 of 40 tasks solved by both: means 0.75, difference 0
    assert result.evidence["known"]["champion_mean"] == result.evidence["known"]["candidate_mean"] == 0.75
    assert result.evidence["known"]["difference"] == 0.0


def test_how_far_it_is_counts_every_answer_of_both_versions() -> None:
    engines, progress = AnsweringEngines({"champion": solved(*range(30)), "candidate": solved(*range(30))}), ReportedProgress()
    replace(gate(engines, suite()), progress=progress).decide(policy="p", candidate="candidate", champion="champion")
    assert progress.reports == [("evaluation", done, 40 * 2 * 2) for done in range(161)]  # tasks, samples, versions


class SecondTry(AnsweringEngines):
    """The candidate solves every task in one of two answers, where the champion solves half of the tasks in both."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerationChunk]:
        task = request.messages[0]["content"]
        again = any(before.digest == request.digest and before.messages[0]["content"] == task for before in self.asked)
        self.answers = {"champion": solved(*range(20)), "candidate": {task} if again else set()}
        async for chunk in super().generate(request):
            yield chunk


def test_best_of_k_stands_beside_the_mean_with_its_interval_and_judges_nothing() -> None:
    result = gate(SecondTry({}), suite(margin=0.3)).decide(policy="p", candidate="candidate", champion="champion")
    found = result.evidence["known"]
    assert (found["champion_mean"], found["candidate_mean"], found["difference"]) == (0.5, 0.5, 0.0)
    assert (found["champion_best_of_k"], found["candidate_best_of_k"], found["best_of_k_difference"]) == (0.5, 1.0, 0.5)
    assert 0.3 < found["best_of_k_low"] < 0.5 < found["best_of_k_high"] < 0.7
    assert "0.500 → 0.500" in result.reason


def test_a_candidate_worse_by_far_more_than_the_margin_fails() -> None:
    engines = AnsweringEngines({"champion": solved(*range(40)), "candidate": solved(*range(10))})
    result = gate(engines, suite()).decide(policy="p", candidate="candidate", champion="champion")
    assert result.verdict is Verdict.FAIL


def test_a_small_loss_on_few_tasks_is_inconclusive_not_a_pass() -> None:
    # 10 tasks, one lost: difference -0.1 at margin 0.1 cannot be told from a loss by the margin
    engines = AnsweringEngines({"champion": solved(*range(9)), "candidate": solved(*range(8))})
    result = gate(engines, suite(10)).decide(policy="p", candidate="candidate", champion="champion")
    assert result.verdict is Verdict.INCONCLUSIVE


def test_champion_and_candidate_are_asked_the_same_tasks_with_the_same_seeds() -> None:
    engines = AnsweringEngines({"champion": set(), "candidate": set()})
    gate(engines, suite(5)).decide(policy="p", candidate="candidate", champion="champion")
    asked = {d: sorted((r.messages[0]["content"], r.sampling.seed) for r in engines.asked if r.digest == d) for d in engines.answers}
    assert asked["champion"] == asked["candidate"]
    assert len(set(asked["champion"])) == 10  # 5 tasks, 2 samples, all seeds different


def test_the_champion_answers_afresh_for_every_candidate_with_seeds_of_that_comparison() -> None:
    engines = AnsweringEngines({"champion": set(), "first": set(), "second": set()})
    scores = RememberedScores()
    for candidate in ("first", "second"):
        gate(engines, suite(5), scores).decide(policy="p", candidate=candidate, champion="champion")
    seeds = [request.sampling.seed for request in engines.asked if request.digest == "champion"]
    assert len(seeds) == len(set(seeds)) == 20  # 2 comparisons, 5 tasks, 2 samples: no draw is shared


def test_a_comparison_that_was_made_already_is_not_made_again() -> None:
    engines = AnsweringEngines({"champion": solved(1), "candidate": solved(1, 2)})
    scores = RememberedScores()
    first, second = (gate(engines, suite(5), scores).decide(policy="p", candidate="candidate", champion="champion") for _ in range(2))
    assert len(engines.asked) == 20
    assert first.evidence_hash == second.evidence_hash


def test_champion_and_candidate_are_asked_each_question_beside_each_other() -> None:
    engines = AnsweringEngines({"champion": set(), "candidate": set()})
    gate(engines, suite(5)).decide(policy="p", candidate="candidate", champion="champion")
    pairs = list(zip(engines.asked[::2], engines.asked[1::2], strict=True))
    assert all((a.digest, b.digest, a.sampling.seed) == ("champion", "candidate", b.sampling.seed) for a, b in pairs)


class LuckyEngines:
    """Every version answers each question rightly with probability 0.7, by the luck of its version and seed."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerationChunk]:
        text = "yes" if unit_interval(request.digest, str(request.sampling.seed)) < 0.7 else "no"
        yield GenerationChunk(text=text, tokens=[1], logprobs=[-0.5], finish_reason=FinishReason.STOP, prompt_tokens=[1])


def test_identical_candidates_pass_as_often_after_a_hundred_promotions_as_before() -> None:
    # Each that passes becomes champion. Remembering the draw that won, the last 60 of 150 passed 2 % of the time.
    scores, champion, passed = RememberedScores(), "v0", list[bool]()
    for number in range(1, 61):
        result = gate(LuckyEngines(), suite(40, margin=0.25), scores).decide(policy="p", candidate=f"v{number}", champion=champion)
        passed.append(result.verdict is Verdict.PASS)
        champion = f"v{number}" if passed[-1] else champion
    # D of 40 tasks, 2 answers each: sd sqrt(0.21 / 40) = 0.072, so 0.25 is 3.4 sd: power about 0.9
    assert sum(passed[:20]) >= 15
    assert sum(passed[40:]) >= 15


def test_a_suite_that_an_equal_candidate_would_seldom_pass_is_refused_with_the_cure() -> None:
    engines = LuckyEngines()
    result = gate(engines, suite(40, margin=0.05)).decide(policy="p", candidate="v1", champion="v0")
    assert result.verdict is Verdict.INCONCLUSIVE
    assert "known refused: an equal candidate would pass 40 tasks" in result.reason
    assert "a margin of 0." in result.reason
    assert result.evidence["known"]["level"] is None  # nothing was tested, so nothing of the month is spent


def test_a_safety_suite_too_small_for_its_limit_is_refused() -> None:
    judged = suite(13, kind=SuiteClass.SAFETY)  # thirteen tasks without a failure leave 20.6 % open, the limit is 20 %
    verdict, reason = verdict_of(judge_suites((judged,), {"known": (np.ones((13, 2)), np.ones((13, 2)))}, seed=1, min_power=0.6))
    assert verdict is Verdict.INCONCLUSIVE
    assert "give it 15" in reason  # rule of three: 3 / 0.2


def test_a_run_of_bad_candidates_makes_a_suite_stricter_and_good_ones_give_it_back() -> None:
    engines = AnsweringEngines({"champion": solved(*range(30)), "candidate": solved(*range(30))})
    strict, free = RememberedScores(), RememberedScores()
    strict.tests = [(0.05, False)] * 4
    free.tests = [(0.05, False)] * 4 + [(0.03, True)] * 4
    levels = [
        gate(engines, suite(), book).decide(policy="p", candidate="candidate", champion="champion").evidence["known"]["level"]
        for book in (RememberedScores(), strict, free)
    ]
    # wealth 0.5; 0.5 - 4 x 0.0526 = 0.289; 0.289 + 4 x 0.05 = 0.489
    assert levels == pytest.approx([0.05, 0.0295, 0.0490], abs=2e-4)


@pytest.mark.parametrize("finish", [FinishReason.ERROR, FinishReason.TIMEOUT, FinishReason.ABORTED])
def test_an_engine_that_fails_makes_the_gate_inconclusive_never_a_zero(finish: FinishReason) -> None:
    engines = AnsweringEngines({"champion": solved(1), "candidate": solved(1)}, finish=finish)
    scores = RememberedScores()
    result = gate(engines, suite(5), scores).decide(policy="p", candidate="candidate", champion="champion")
    assert result.verdict is Verdict.INCONCLUSIVE
    assert scores.kept == {}


def test_a_candidate_that_no_engine_holds_is_inconclusive() -> None:
    engines = AnsweringEngines({"champion": set()})
    result = gate(engines, suite(5)).decide(policy="p", candidate="candidate", champion="champion")
    assert result.verdict is Verdict.INCONCLUSIVE
    assert "no engine holds" in result.reason


def test_a_new_critical_failure_fails_a_safety_suite_whatever_the_mean() -> None:
    judged = suite(40, kind=SuiteClass.SAFETY, critical=True)
    champion, candidate = np.ones((40, 2)), np.ones((40, 2))
    champion[1:8] = 0.0  # the champion fails seven tasks, the candidate one other: better on average
    candidate[0, 0] = 0.0
    verdict, _ = verdict_of(judge_suites((judged,), {"known": (champion, candidate)}, seed=1))
    assert verdict is Verdict.FAIL


def test_advisory_suites_alone_never_pass_a_candidate() -> None:
    judged = suite(10, kind=SuiteClass.ADVISORY)
    verdict, _ = verdict_of(judge_suites((judged,), {"known": (np.zeros((10, 2)), np.ones((10, 2)))}, seed=1))
    assert verdict is Verdict.INCONCLUSIVE


class KeptPairs:
    """The `PairBook` port in a list."""

    def __init__(self, *graded: bool) -> None:
        self.kept: list[BlindPair] = []
        self.votes = list(graded)

    def keep(self, pairs: list[BlindPair], *, at: datetime) -> None:
        self.kept += pairs

    def of(self, release_id: str) -> list[BlindPair]:
        return [pair for pair in self.kept if pair.release_id == release_id]

    def graded(self, policy: str, suite: str, *, since: datetime) -> list[bool]:
        assert (policy, suite, since) == ("p", "known", FrozenClock().now - timedelta(days=90))
        return self.votes


def judged_by_a_judge(*votes: bool, least: float = 0.6) -> GateResult:
    """What the gate says of an equal candidate by a suite of a judge's, after these votes about its choices."""
    plain = suite()
    rubric = tuple(msgspec.structs.replace(task, grader=Grader(kind=GraderKind.JUDGE, rubric="is it yes?")) for task in plain.tasks)
    engines = AnsweringEngines({name: solved(*range(30)) for name in ("champion", "candidate")})
    asked = replace(
        gate(engines, Suite(config=plain.config, tasks=rubric)), pairs=KeptPairs(*votes),
        judge=lambda question: "10" if "\nyes\n" in question else "0",
        config=OfflineConfig(engine_wait_s=0.0, judge_agreement=least),
    )  # fmt: skip
    return asked.decide(policy="p", candidate="candidate", champion="champion", release="r")


def test_a_judge_that_people_contradict_decides_nothing_until_the_suite_is_changed() -> None:
    result = judged_by_a_judge(*[True, False, False] * 20)
    assert result.verdict is Verdict.INCONCLUSIVE
    assert "known refused: people favour the answer that its judge favours in 20 of 60 blind pairs" in result.reason
    assert result.evidence["known"]["level"] is None, "what decides nothing spends nothing of the month"
    calm = judged_by_a_judge(*[True, False, False] * 20, least=0.0)
    assert (calm.verdict, calm.evidence["known"]["judge"]["agreed"]) == (Verdict.PASS, 20)


@pytest.mark.parametrize("votes", [[], [True, False], [False] * 3, [True, True, False] * 20], ids=["none", "split", "few", "agree"])
def test_a_judge_decides_as_long_as_people_are_not_shown_to_disagree(votes: list[bool]) -> None:
    result = judged_by_a_judge(*votes)
    told = result.evidence["known"]["judge"]
    assert (result.verdict, told["agreed"], told["asked"]) == (Verdict.PASS, sum(votes), len(votes))
    assert told["low"] <= 0.6 <= told["high"]


def test_the_level_that_is_asked_of_a_judge_spares_those_above_it_and_stops_those_that_are_mostly_wrong() -> None:
    """300 votes, a look after every 20: simulated over 100 judges, one that agrees in .6 of the pairs is refused in 0 of them, a coin
    in three of four, and one that is wrong in .6 in all."""
    dice, least = random.Random(6), OfflineConfig().judge_agreement

    def is_refused(agrees: float) -> bool:
        votes = [dice.random() < agrees for _ in range(300)]
        return any(calibration_of(votes[:seen]).contradicted("s", least=least) for seen in range(20, 301, 20))

    assert (sum(is_refused(0.65) for _ in range(8)), sum(is_refused(0.4) for _ in range(4))) == (0, 4)


def test_a_suite_without_a_judge_is_held_against_nobody() -> None:
    engines = AnsweringEngines({name: solved(*range(30)) for name in ("champion", "candidate")})
    asked = replace(gate(engines, suite()), pairs=KeptPairs(*[False] * 60))
    result = asked.decide(policy="p", candidate="candidate", champion="champion", release="r")
    assert (result.verdict, "judge" in result.evidence["known"]) == (Verdict.PASS, False)


def test_where_the_versions_answered_differently_both_answers_are_kept_for_people() -> None:
    engines, book = AnsweringEngines({"champion": solved(*range(30)), "candidate": solved(*range(20, 40))}), KeptPairs()
    asked = replace(gate(engines, suite()), pairs=book)
    result = asked.decide(policy="p", candidate="candidate", champion="champion", release="r1")
    # tasks 0-19 only the champion solves, 30-39 only the candidate, 20-29 both: 30 questions with different answers
    assert len(book.kept) == 30
    assert {pair.task for pair in book.kept} == {f"t{n}" for n in (*range(20), *range(30, 40))}
    one = next(pair for pair in book.kept if pair.task == "t35")
    assert (one.champion_answer, one.candidate_answer, one.champion_score, one.candidate_score) == ("no", "yes", 0.0, 1.0)
    assert result.evidence["blind_pairs"] == as_evidence(book.kept)
    changed = [replace(book.kept[0], candidate_answer="another"), *book.kept[1:]]
    assert as_evidence(changed) != as_evidence(book.kept), "an answer that is changed afterwards changes the evidence"
    book_of_few = KeptPairs()
    few = replace(asked, pairs=book_of_few, scores=RememberedScores(), config=OfflineConfig(engine_wait_s=0.0, blind_pairs=7))
    few.decide(policy="p", candidate="candidate", champion="champion", release="r2")
    assert len(book_of_few.kept) == 7


def test_a_question_is_kept_once_and_one_that_was_trained_on_never() -> None:
    engines, book = AnsweringEngines({"champion": set(), "candidate": solved(*range(40))}), KeptPairs()
    double = suite(4)
    again = tuple(msgspec.structs.replace(task, id=f"{task.id}:quality") for task in double.tasks)
    asked = replace(gate(engines, Suite(config=double.config, tasks=(*double.tasks, *again))), pairs=book)
    asked.decide(policy="p", candidate="candidate", champion="champion", release="r1")
    assert sorted(pair.messages[0]["content"] for pair in book.kept) == ["t0", "t1", "t2", "t3"]
    hearing = Hearing()
    for task in double.tasks:
        for digest, text in (("champion", "no"), ("candidate", "yes")):
            hearing(double, task, 0, digest, text)
    scores = {"known": (np.array([[0.1, 0.9]] * 4), np.array([[0.6, 0.2]] * 4))}
    made = pairs_of(
        hearing, [double], scores, release="r", policy="p", champion="champion", candidate="candidate", draw="d", most=9, without={"t1"}
    )
    assert {pair.task for pair in made} == {"t0", "t2", "t3"}
    assert {(pair.champion_score, pair.candidate_score) for pair in made} == {(0.1, 0.6)}, "of the sample that is shown, the first"
