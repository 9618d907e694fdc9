"""How a try ends: what its program, its service and its grader said of it, what is reported, and what is kept for going on with it."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from app.domain.errors import LeaseLost, Unavailable
from app.domain.learning.boxes import Boxes, Ended, Executed
from app.domain.learning.rollouts import Closed, Outcome, Rollout
from app.sandbox.processes import ProcessBoxes
from pipelines.rollouts.episode import AGENT, Gateway, Worked, Workplace, forget, outcome_of
from pipelines.rollouts.grading import Grade, Grader, Verdict
from pipelines.rollouts.harness import RUNNER, CodingAgent
from pipelines.rollouts.interception import Exchange, Interception
from pipelines.rollouts.searching import Search
from pipelines.rollouts.service import Session
from pipelines.rollouts.tasks import Harness, TaskData

TASK = TaskData(
    taskset="t", key="k", instruction="Mend it.", files={"a.py": "one\n"}, editable=("a.py",), tests={"h.py": ""}, expected=("h.py::t",),
    gold={}, most_turns=3,
)  # fmt: skip
ROLLOUT = Rollout(id="abc-0000-0000001f", policy="p", taskset="t", task="k", task_hash="h", group="g", attempt=0, harness_hash="x")


def done(ended: Ended = Ended.EXITED, code: int | None = 0, out: bytes = b"", err: bytes = b"") -> Executed:
    return Executed(ended=ended, code=code, stdout=out, stderr=err)


@pytest.mark.parametrize(
    ("program", "service", "turns", "outcome", "why"),
    [
        (done(), None, 2, None, ""), (done(code=1), None, 2, None, ""), (done(code=3), None, 3, Outcome.TURN_LIMIT, ""),
        (done(code=3), None, 2, None, ""), (done(code=0), None, 3, None, ""), (done(code=3), None, 4, Outcome.TURN_LIMIT, ""),
        (done(Ended.TIMEOUT, None), None, 1, Outcome.AGENT_TIMEOUT, "timeout"), (done(Ended.OOM, 137), None, 0, Outcome.TOOL_ABUSE, "oom"),
        (done(Ended.OUTPUT_LIMIT, None), None, 1, Outcome.TOOL_ABUSE, "output_limit"),
        (done(Ended.BOX_LOST, None), Outcome.TOKEN_LIMIT, 1, Outcome.BOX_LOST, "the box was lost"),
        (done(Ended.BOX_LOST, None), Outcome.GATEWAY_FAILED, 1, Outcome.GATEWAY_FAILED, "the service of the episode gave up"),
        (done(code=4), Outcome.TOKEN_LIMIT, 1, Outcome.TOKEN_LIMIT, ""), (done(code=4), Outcome.TURN_LIMIT, 3, Outcome.TURN_LIMIT, ""),
        (done(code=2, out=b"out", err=b" x" + b"y" * 300), None, 0, Outcome.SETUP_FAILED,
         "the harness ended with code 2 and asked for no completion: " + "y" * 300),
        (done(code=1, out=b"only this\n"), None, 0, Outcome.SETUP_FAILED,
         "the harness ended with code 1 and asked for no completion: only this"),
    ],
)  # fmt: skip
def test_whose_doing_an_end_was(program: Executed, service: Outcome | None, turns: int, outcome: Outcome | None, why: str) -> None:
    seen = cast(Interception, SimpleNamespace(ended=service, turns=[None] * turns))
    assert outcome_of(program, seen, TASK) == (outcome, why)


@dataclass
class FakeGateway:
    """Writes down what it is told."""

    policy: str = "p"
    error: Exception | None = None
    told: list[Any] = field(default_factory=list[Any])

    def begin(self, rollout: Rollout) -> Session:
        if self.error is not None:
            raise self.error
        return Session(episode="new", key="k")

    def report(self, rollout: Rollout, episode: str, closed: Closed) -> None:
        self.told.append((episode, closed.outcome, closed.reward))

    def report_component(self, rollout: Rollout, episode: str, policy: str, reward: float) -> None:
        self.told.append((episode, policy, reward))


@dataclass
class FakeGrader:
    """Grades as it is told to, and remembers what it was asked."""

    answer: Grade | Exception
    asked: list[tuple[int, Mapping[str, str | None], int]] = field(default_factory=list[tuple[int, Mapping[str, str | None], int]])

    def grade(self, task: TaskData, files: Mapping[str, str | None], *, seed: int, exchanges: Sequence[Exchange] = ()) -> Grade:
        self.asked.append((seed, files, len(exchanges)))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@dataclass(kw_only=True)
class Bench(Workplace):
    """A workplace at which the work is done already."""

    worked: Worked

    def _work(self, rollout: Rollout, task: TaskData, session: Session) -> Worked:
        return replace(self.worked)


def exchange(version: str = "v1", policy: str = "") -> Exchange:
    return Exchange(asked="", request={}, answer={"choices": []}, version=version, policy=policy)


class Tried:
    """One try, with what it left behind."""

    def __init__(
        self, outcome: Outcome | None = None, *, grade: Grade | Exception | None = None, exchanges: Sequence[Exchange] = (exchange(),),
        known: bool = False, begun: Callable[[str], None] | None = None, error: Exception | None = None, **more: Any,
    ) -> None:  # fmt: skip
        self.gateway, self.grader = FakeGateway(error=error), FakeGrader(grade or Grade(verdict=Verdict.PASSED))
        self.kept, self.episodes, self.held = list[Session](), list[str](), list[int]()
        bench = Bench(
            boxes=cast(Boxes, None), grader=cast(Grader, self.grader), service=cast(Gateway, self.gateway),
            harness=cast(Harness, CodingAgent()), journal_of=lambda rollout: cast(Any, None),
            session_of=lambda rollout: Session(episode="old", key="o") if known else None,
            keep_session=lambda rollout, session: self.kept.append(session),
            worked=Worked(outcome, {"a.py": "mended"}, [*exchanges]), **more,
        )  # fmt: skip
        self.closed = bench.attempt(
            ROLLOUT, TASK, begun=begun or self.episodes.append, holds=lambda: self.held.append(len(self.gateway.told))
        )


def test_a_try_is_begun_graded_and_reported_once_it_is_sure_to_be_ours() -> None:
    tried = Tried()
    assert (tried.closed.outcome, tried.closed.reward, tried.closed.turns, tried.closed.flags) == (Outcome.SOLVED, 1.0, 1, ())
    assert 0.0 <= tried.closed.duration_s < 60.0
    assert (tried.kept, tried.episodes) == ([Session(episode="new", key="k")], ["new"])
    assert tried.held == [0, 0], "asked before it is graded, and before it is reported"
    assert tried.gateway.told == [("new", Outcome.SOLVED, 1.0)]
    assert tried.grader.asked == [(0x1F, {"a.py": "mended"}, 1)], "the seed is the end of its id"


def test_a_session_that_was_begun_before_is_gone_on_with() -> None:
    tried = Tried(known=True)
    assert (tried.kept, tried.episodes, tried.gateway.told[0][0]) == ([], ["old"], "old")


def test_a_gateway_that_begins_nothing_pays_nothing_and_a_lost_lease_is_told() -> None:
    tried = Tried(error=Unavailable("away"))
    assert (tried.closed.outcome, tried.closed.reward, tried.closed.turns) == (Outcome.GATEWAY_FAILED, None, 0)
    assert 0.0 <= tried.closed.duration_s < 60.0
    assert (tried.gateway.told, tried.held) == ([], [])

    def lost(episode: str) -> None:
        raise LeaseLost("another has it")

    with pytest.raises(LeaseLost):
        Tried(begun=lost)


@pytest.mark.parametrize(
    ("outcome", "grade", "ended", "reward"),
    [
        (None, Grade(verdict=Verdict.PASSED), Outcome.SOLVED, 1.0), (None, Grade(verdict=Verdict.FAILED), Outcome.FAILED, 0.0),
        (Outcome.TURN_LIMIT, Grade(verdict=Verdict.PASSED), Outcome.SOLVED, 1.0),
        (Outcome.TURN_LIMIT, Grade(verdict=Verdict.FAILED), Outcome.TURN_LIMIT, 0.0),
        (None, Grade(verdict=Verdict.FAILED, reward=0.25), Outcome.FAILED, 0.25),
        (None, Grade(verdict=Verdict.ERROR, reward=0.25), Outcome.GRADER_FAILED, None),
    ],
)  # fmt: skip
def test_what_was_solved_is_solved_however_the_harness_ended(
    outcome: Outcome | None, grade: Grade, ended: Outcome, reward: float | None
) -> None:
    closed = Tried(outcome, grade=grade).closed
    assert (closed.outcome, closed.reward) == (ended, reward)


def test_a_grade_that_breaks_closes_its_try_as_a_fault_of_ours(caplog: pytest.LogCaptureFixture) -> None:
    """Its journal would bring the next dispatcher to the same place."""
    tried = Tried(grade=OSError("File name too long"))
    assert (tried.closed.outcome, tried.closed.reward) == (Outcome.GRADER_FAILED, None)
    assert tried.gateway.told == [("new", Outcome.GRADER_FAILED, None)]
    assert "File name too long" in caplog.text


@pytest.mark.parametrize(("outcome", "reward"), [(Outcome.TOOL_ABUSE, 0.0), (Outcome.BOX_LOST, None), (Outcome.SETUP_FAILED, None)])
def test_abuse_is_paid_nothing_and_a_fault_of_ours_is_not_paid_and_neither_is_graded(outcome: Outcome, reward: float | None) -> None:
    tried = Tried(outcome)
    assert (tried.closed.outcome, tried.closed.reward, tried.grader.asked) == (outcome, reward, [])


@pytest.mark.parametrize(
    ("promotions", "exchanges", "champion", "outcome"),
    [
        (1, (exchange("v1"), exchange("v2")), "", Outcome.SOLVED), (2, (exchange("v1"), exchange("v3")), "", Outcome.STALE),
        (2, (exchange("v1"),), "v3", Outcome.STALE), (2, (), "v3", Outcome.SOLVED), (2, (exchange(""),), "v3", Outcome.SOLVED),
        (2, (exchange("v1", "scout"),), "v3", Outcome.SOLVED), (2, (exchange("v1", "p"),), "v3", Outcome.STALE),
    ],
    ids=["one behind", "two behind", "behind the champion", "no turn", "no version", "another's turn", "its own turn"],
)  # fmt: skip
def test_what_is_too_old_to_learn_from_is_stale(promotions: int, exchanges: tuple[Exchange, ...], champion: str, outcome: Outcome) -> None:
    asked: list[tuple[str, str]] = []

    def lag(old: str, new: str) -> int:
        asked.append((old, new))
        return promotions

    assert Tried(exchanges=exchanges, champion=lambda: champion, lag=lag).closed.outcome is outcome
    assert all(pair == ("v1", champion or exchanges[-1].version) for pair in asked)


def test_a_search_is_paid_where_there_was_one_and_the_machinery_did_not_fail() -> None:
    scout = Search(policy="scout", budget_s=10.0, weight=0.4)
    assert [told[1] for told in Tried(exchanges=(exchange("v1"), exchange("s1", "scout")), search=scout).gateway.told] == [
        Outcome.SOLVED, "scout"
    ]  # fmt: skip
    assert len(Tried(exchanges=(exchange("v1"),), search=scout).gateway.told) == 1
    assert len(Tried(Outcome.BOX_LOST, exchanges=(exchange("s1", "scout"),), search=scout).gateway.told) == 1


def test_a_workplace_of_which_nothing_is_said_takes_nothing_for_stale_and_opens_one_box_ahead() -> None:
    bench = Bench(
        boxes=ProcessBoxes(), grader=cast(Grader, None), service=cast(Gateway, FakeGateway()), harness=cast(Harness, CodingAgent()),
        journal_of=lambda rollout: cast(Any, None), session_of=lambda rollout: None, keep_session=lambda rollout, session: None,
        worked=Worked(None, {}, []),
    )  # fmt: skip
    assert (bench.champion(), bench.lag("a", "b"), bench.staleness, bench.ahead, bench.search) == ("", 0, 1, 1, None)
    assert bench.seats is bench.seats, "one for all of its tries"
    mib = 1 << 20
    assert bench.limits is AGENT
    assert (AGENT.cpu_s, AGENT.memory_bytes // mib, AGENT.file_bytes // mib, AGENT.processes, AGENT.workspace_bytes // mib) == (
        600, 512, 8, 32, 64
    )  # fmt: skip
    assert (AGENT.memory_bytes % mib, AGENT.file_bytes % mib, AGENT.workspace_bytes % mib) == (0, 0, 0)
    bench.close()


def test_what_was_kept_of_a_try_is_forgotten_and_what_was_not_is_fine(tmp_path: Path) -> None:
    for name in (f"{ROLLOUT.id}.jsonl", f"{ROLLOUT.id}.key", "other.key"):
        (tmp_path / name).write_text("")
    forget(tmp_path, ROLLOUT)
    forget(tmp_path, ROLLOUT)
    assert [file.name for file in tmp_path.iterdir()] == ["other.key"]


def test_the_harness_is_another_one_with_another_program_or_with_a_search_model(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("pass")
    made = [CodingAgent(), CodingAgent(search_model="scout"), CodingAgent(program=mine), CodingAgent(program=mine, search_model="scout")]
    known = {one.hash for one in made}
    assert len(known) == 4
    assert CodingAgent(search_model="other").hash == made[1].hash
    mine.write_text("pass  # otherwise")
    assert CodingAgent(program=mine).hash not in known
    step = hashlib.sha256(made[0].program.read_bytes() + RUNNER.read_bytes() + b"search").hexdigest()
    assert made[1].hash == step, "journals of tries that are under way name it"
    launch = made[1].launch("http://g", "k1", replace(TASK, most_tokens=5000), model="coder", python="/py")
    assert launch.argv == (
        "/usr/bin/env", "OPENAI_BASE_URL=http://g/v1", "OPENAI_API_KEY=k1", "OPENAI_MODEL=coder", "OPENAI_SEARCH_MODEL=scout", "/py", "-I",
        "-S", "-B", ".harness/agent.py", ".harness/task.json",
    )  # fmt: skip
    assert b'"max_tokens":1024' in launch.files[".harness/task.json"]
    plain = made[0].launch("http://g", "k1", replace(TASK, most_tokens=500), model="coder", python="/py")
    assert b'"max_tokens":500' in plain.files[".harness/task.json"]
    assert len(plain.argv) == 10
    assert plain.stdin == b""
