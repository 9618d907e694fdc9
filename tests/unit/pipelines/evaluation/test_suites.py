"""Which tasks a suite asks: sealed for good, rotated by the week, and clean of what was learned; and what a product suite is cut from."""

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from app.domain.errors import BadConfig
from app.domain.release.gates import GateName, Verdict
from pipelines.evaluation.suites.contamination import contaminated
from pipelines.evaluation.suites.offline_config import SuiteClass, SuiteConfig
from pipelines.evaluation.suites.product_suite import SourceTurn, cut_product_suite
from pipelines.evaluation.suites.suites import Grader, GraderKind, Suite, Task, load_suite
from tests.unit.pipelines.evaluation.test_offline import AnsweringEngines, gate, suite, tasks

SOLUTION = "sort the orders by date then keep the first of each customer and return their totals as a list"
ASKED = ({"role": "user", "content": "Complete it."},)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "suite.jsonl").write_bytes(b"\n".join(msgspec.json.encode(task) for task in tasks(200)))
    return tmp_path


def _ids(config: SuiteConfig, folder: Path, **how: object) -> set[str]:
    return {task.id for task in load_suite(config, folder=folder, **how).tasks}  # type: ignore[arg-type] - by name


def test_the_sealed_split_is_never_open_and_stays_the_same_when_tasks_are_added(folder: Path) -> None:
    config = SuiteConfig(name="s", source="suite.jsonl", sealed_share=0.3)
    opened, closed = _ids(config, folder), _ids(config, folder, sealed=True)
    assert opened.isdisjoint(closed)
    assert len(opened | closed) == 200
    assert 40 <= len(closed) <= 80  # 60 expected
    (folder / "suite.jsonl").write_bytes(b"\n".join(msgspec.json.encode(task) for task in tasks(250)))
    assert {i for i in _ids(config, folder, sealed=True) if int(i[1:]) < 200} == closed


def test_a_tenth_of_the_tasks_is_exchanged_every_week_and_all_of_them_come(folder: Path) -> None:
    config = SuiteConfig(name="s", source="suite.jsonl", tasks=50, sealed_share=0.2)
    weeks = [_ids(config, folder, week=week) for week in range(10)]
    total = len(_ids(msgspec.structs.replace(config, tasks=None), folder))
    for before, after in pairwise(weeks):
        assert len(after - before) == round(0.1 * total)
    assert len(set().union(*weeks)) >= total - math.ceil(0.1 * total)
    assert all(week.isdisjoint(_ids(config, folder, sealed=True)) for week in weeks)
    assert weeks[3] == _ids(config, folder, week=3)


def test_a_whole_suite_has_nothing_to_rotate_and_keeps_its_hash(folder: Path) -> None:
    config = SuiteConfig(name="s", source="suite.jsonl")
    assert load_suite(config, folder=folder, week=1).hash == load_suite(config, folder=folder, week=2).hash


def test_only_tasks_that_are_short_enough_are_asked(folder: Path) -> None:
    short, long = ({"role": "user", "content": "x" * length} for length in (400, 401))
    written = [msgspec.structs.replace(task, messages=[short if i % 4 else long]) for i, task in enumerate(tasks(8))]
    (folder / "suite.jsonl").write_bytes(b"\n".join(msgspec.json.encode(task) for task in written))
    assert _ids(SuiteConfig(name="s", source="suite.jsonl", longest=400), folder) == {t.id for i, t in enumerate(written) if i % 4}
    with pytest.raises(BadConfig, match="has no open tasks"):
        load_suite(SuiteConfig(name="s", source="suite.jsonl", longest=10), folder=folder)


def test_a_suite_without_a_sealed_split_says_so(folder: Path) -> None:
    with pytest.raises(BadConfig, match=r"no sealed tasks.*sealed_share 0"):
        load_suite(SuiteConfig(name="s", source="suite.jsonl"), folder=folder, sealed=True)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, r"cannot read the suite .*suite\.jsonl: No such file"),
        (b'{"id": "a"}\n', r"suite .*suite\.jsonl, line 1: .*messages"),
        (b"\n\n{", r"suite\.jsonl, line 3: "),
        (b'{"id": "a", "messages": [], "grader": {"kind": "exact", "expected": "caf\xe9"}}', r"suite\.jsonl, line 1: "),
        (
            b'{"id": "a", "messages": [], "grader": {"kind": "regex", "pattern": "("}}',
            r"line 1: the pattern '\(' is no regular expression: ",
        ),
        (
            b'{"id": "a", "messages": [], "grader": {"kind": "json_schema", "schema": {"type": "objekt"}}}',
            r"line 1: the schema is no JSON schema: 'objekt'",
        ),
        (
            b'{"id": "a", "messages": [], "grader": {"kind": "json_schema", "schema": {"$ref": "#/nowhere"}}}',
            "line 1: the schema does not work: ",
        ),
    ],
)
def test_a_suite_that_cannot_be_read_is_named_with_its_line(folder: Path, text: bytes | None, said: str) -> None:
    (folder / "suite.jsonl").unlink()
    if text is not None:
        (folder / "suite.jsonl").write_bytes(text)
    with pytest.raises(BadConfig, match=said):
        load_suite(SuiteConfig(name="s", source="suite.jsonl"), folder=folder)


def test_a_text_with_what_else_ends_a_line_is_one_task(folder: Path) -> None:
    task = msgspec.structs.replace(tasks(1)[0], messages=[{"role": "user", "content": "one\u2028two\u0085three\x0bfour"}])
    (folder / "suite.jsonl").write_bytes(msgspec.json.encode(task) + b"\r\n\n")
    assert load_suite(SuiteConfig(name="s", source="suite.jsonl"), folder=folder).tasks == (task,)


def test_a_task_that_is_there_twice_is_refused(folder: Path) -> None:
    (folder / "suite.jsonl").write_bytes(b"\n".join(msgspec.json.encode(task) for task in [*tasks(3), *tasks(2)]))
    with pytest.raises(BadConfig, match="has task ids twice: t0, t1; ids must be unique"):
        load_suite(SuiteConfig(name="s", source="suite.jsonl"), folder=folder)


def _task(name: str, *, expected: str = "", tests: str = "", asked: str = "?") -> Task:
    return Task(
        id=name, messages=[{"role": "user", "content": asked}], grader=Grader(kind=GraderKind.SIMILAR, expected=expected, tests=tests)
    )


def test_every_task_with_a_solution_that_was_learned_is_found_and_not_the_last_alone() -> None:
    tasks = [_task(name, expected=SOLUTION) for name in ("first", "second")]
    assert contaminated(tasks, [SOLUTION]).keys() == {"first", "second"}


def test_a_solution_that_was_learned_is_found_in_other_case_and_punctuation() -> None:
    found = contaminated([_task("known", expected=SOLUTION), _task("new", expected="x" * 200)], [f"Well: {SOLUTION.upper()}!"])
    assert set(found) == {"known"}
    assert found["known"] in SOLUTION


def test_thirteen_words_in_a_row_are_contamination_and_twelve_are_not() -> None:
    words = SOLUTION.split()
    for place in (slice(13), slice(2, 15), slice(-13, None)):
        assert contaminated([_task("known", expected=SOLUTION)], [" ".join(words[place])]) == {"known": " ".join(words[place])}
    for place in (slice(12), slice(2, 14), slice(-12, None)):
        assert contaminated([_task("known", expected=SOLUTION)], [" ".join(words[place])]) == {}


def test_questions_short_solutions_and_boilerplate_are_no_contamination() -> None:
    tasks = [_task("asked", asked=SOLUTION), _task("short", expected="return a b c"), *(_task(f"b{n}", tests=SOLUTION) for n in range(3))]
    assert contaminated(tasks, [SOLUTION, "return a b c"]) == {}


def test_a_learned_task_counts_for_neither_version_in_the_gate() -> None:
    judged = suite(40)
    known = msgspec.structs.replace(judged.tasks[0], grader=Grader(kind=GraderKind.EXACT, expected="yes", tests=SOLUTION))
    judged = msgspec.structs.replace(judged, tasks=(known, *judged.tasks[1:]))
    right = {f"t{n}" for n in range(1, 30)}
    engines = AnsweringEngines({"v1": right, "v2": {*right, "t0"}})
    clean = gate(engines, judged).decide(policy="p", candidate="v2", champion="v1")
    probed = gate(engines, judged).decide(policy="p", candidate="v2", champion="v1", learned=[SOLUTION])
    assert clean.evidence["known"]["difference"] == pytest.approx(1 / 40)
    assert (probed.evidence["known"]["difference"], list(probed.evidence["contaminated"])) == (0.0, ["t0"])


def test_a_suite_that_is_all_learned_decides_nothing() -> None:
    judged = suite(2)
    known = tuple(msgspec.structs.replace(t, grader=Grader(kind=GraderKind.EXACT, expected="yes", tests=SOLUTION)) for t in judged.tasks)
    result = gate(AnsweringEngines({"v1": {"t0"}, "v2": {"t0"}}), msgspec.structs.replace(judged, tasks=known)).decide(
        policy="p", candidate="v2", champion="v1", learned=[SOLUTION]
    )
    assert (result.gate, result.verdict) == (GateName.OFFLINE, Verdict.INCONCLUSIVE)


@pytest.mark.parametrize(
    ("kind", "verdict"),
    [(SuiteClass.SAFETY, Verdict.INCONCLUSIVE), (SuiteClass.CORE, Verdict.INCONCLUSIVE), (SuiteClass.ADVISORY, Verdict.PASS)],
)
def test_a_suite_that_is_all_learned_keeps_the_gate_open_whatever_others_say(kind: SuiteClass, verdict: Verdict) -> None:
    """It was left out, and the other suites passed a candidate that nothing had asked about safety."""
    asked, lost = suite(40), suite(1, kind=kind)
    learned = msgspec.structs.replace(lost.tasks[0], id="secret", grader=Grader(kind=GraderKind.EXACT, expected="yes", tests=SOLUTION))
    lost = Suite(config=msgspec.structs.replace(lost.config, name="lost"), tasks=(learned,))
    right = {f"t{n}" for n in range(30)}
    both = replace(gate(AnsweringEngines({"v1": right, "v2": right}), asked), suites=(asked, lost))
    result = both.decide(policy="p", candidate="v2", champion="v1", learned=[SOLUTION])
    assert result.verdict is verdict
    assert list(result.evidence["contaminated"]) == ["secret"]
    if verdict is Verdict.INCONCLUSIVE:
        assert result.reason.startswith("the candidate learned from the solution of every task of lost: give it others")


def _turn(number: int, kept: str, *, person: str = "p1") -> SourceTurn:
    return SourceTurn(inference_id=f"t{number}", person=person, messages=ASKED, ended_up_with=kept)


CODE = "def f(x):\n    return x + 1\n"


def test_a_turn_that_ended_well_becomes_one_task_per_dimension_of_one_cluster() -> None:
    made = cut_product_suite([_turn(1, CODE)], most=10)
    assert [task.dimension for task in made] == ["correctness", "quality", "efficiency", "interaction"]
    assert {task.cluster for task in made} == {"p1"}
    assert [task.grader.kind for task in made] == ["similar", "parses", "short", "answers"]
    assert made[0].messages == list(ASKED)


def test_prose_has_no_program_to_be_whole_unless_a_judge_looks() -> None:
    prose = "Please merge the two branches, and tell Ada."
    assert [task.dimension for task in cut_product_suite([_turn(1, prose)], most=10)] == ["correctness", "efficiency", "interaction"]
    judged = cut_product_suite([_turn(1, prose)], most=10, judged=True)[1]
    assert (judged.dimension, judged.grader.kind) == ("quality", GraderKind.JUDGE)
    assert prose in judged.grader.rubric


def test_nobody_counts_for_more_than_three_turns_and_nothing_is_made_of_nothing() -> None:
    turns = [_turn(n, CODE) for n in range(5)] + [_turn(9, "  ", person="p2"), _turn(10, CODE, person="p3")]
    made = cut_product_suite(turns, most=100)
    assert {task.cluster: sum(t.cluster == task.cluster for t in made) for task in made} == {"p1": 12, "p3": 4}
    assert len(cut_product_suite(turns, most=5)) == 5
