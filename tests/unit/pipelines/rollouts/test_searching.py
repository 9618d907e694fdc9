"""What a search is paid, worked out by hand."""

import json
from typing import Any

import pytest

from pipelines.rollouts.interception import Exchange
from pipelines.rollouts.searching import Search, f_measure, named, touched
from pipelines.rollouts.tasks import TaskData

FILES = {"a.py": "one\ntwo\nthree\nfour\n", "b.py": "x\ny\n", "README": "r\n"}
TASK = TaskData(
    taskset="t", key="k", instruction="", files=FILES, editable=("a.py",), tests={"t.py": ""}, expected=("t.py::t",),
    gold={"a.py": "one\n2\n3\nfour\n"},
)  # fmt: skip
SCOUT = Search(policy="scout", budget_s=10.0, weight=0.4)


def found(*places: tuple[str, int, int], policy: str = "scout", took_s: float = 0.0) -> Exchange:
    """An answer that names places."""
    said = json.dumps({"places": [{"path": path, "first": first, "last": last} for path, first, last in places]})
    return answered(said, policy=policy, took_s=took_s)


def answered(text: str | None, *, policy: str = "scout", took_s: float = 0.0) -> Exchange:
    answer: dict[str, Any] = {"choices": [{"message": {"content": text}}]}
    return Exchange(asked="", request={}, answer=answer, version="v", policy=policy, took_s=took_s)


@pytest.mark.parametrize(
    ("patch", "lines"),
    [
        ({"a.py": "one\n2\n3\nfour\n"}, {2, 3}),  # replaced
        ({"a.py": "one\nfour\n"}, {2, 3}),  # removed
        ({"a.py": "one\ntwo\nnew\nthree\nfour\n"}, {2, 3}),  # put between two lines
        ({"a.py": "new\none\ntwo\nthree\nfour\n"}, {1}),  # before the first
        ({"a.py": "one\ntwo\nthree\nfour\nnew\n"}, {4}),  # behind the last
        ({"a.py": None}, {1, 2, 3, 4}),
        ({"a.py": FILES["a.py"], "new.py": "n\n"}, set()),  # nothing that was there
    ],
)
def test_the_lines_that_a_patch_touched(patch: dict[str, str | None], lines: set[int]) -> None:
    assert touched(FILES, patch) == {("a.py", line) for line in lines}


def test_the_lines_that_were_named_are_those_that_there_are() -> None:
    said = [found(("a.py", 3, 99), ("gone.py", 1, 2)), found(("b.py", 2, 1)), answered("no JSON"), answered(None)]
    assert named(said, FILES) == {("a.py", 3), ("a.py", 4), ("b.py", 2)}


def test_naming_too_much_costs_more_than_naming_too_little() -> None:
    assert f_measure({"a"}, {"a"}) == 1.0
    assert f_measure({"a"}, {"a", "b"}) == pytest.approx(1.25 * 0.5 / (0.25 + 0.5))  # p = 1, r = 1/2: 0.833
    assert f_measure({"a", "b"}, {"a"}) == pytest.approx(1.25 * 0.5 / (0.125 + 1.0))  # p = 1/2, r = 1: 0.556
    assert f_measure(set[str](), {"a"}) == f_measure({"b"}, {"a"}) == 0.0


def test_what_was_found_is_paid_less_the_longer_it_took() -> None:
    exact, slow = found(("a.py", 2, 3), took_s=0.0), found(("a.py", 2, 3), took_s=5.0)
    assert SCOUT.reward([exact], TASK, {}, solved=False) == pytest.approx(1.0)
    assert SCOUT.reward([slow], TASK, {}, solved=False) == pytest.approx(1.0 - 0.4 * 0.5)
    assert SCOUT.reward([answered("{}", took_s=5.0), slow], TASK, {}, solved=False) == pytest.approx(1.0 - 0.4), "both answers of a search"
    assert SCOUT.reward([slow, slow], TASK, {}, solved=False) == pytest.approx(1.0 - 0.4 * 0.5), "two searches may take twice as long"
    whole = found(("a.py", 1, 4), ("b.py", 1, 2))
    # files: p = 1/2, r = 1; lines: p = 2/6, r = 1
    wanted = (1.25 * 0.5 / (0.125 + 1.0) + 1.25 * (1 / 3) / (0.25 / 3 + 1.0)) / 2
    assert SCOUT.reward([whole], TASK, {}, solved=False) == pytest.approx(wanted)


def test_the_patch_that_solved_says_what_mattered_else_the_task_s_own_does() -> None:
    elsewhere = {"a.py": "1\ntwo\nthree\nfour\n"}
    assert SCOUT.reward([found(("a.py", 1, 1))], TASK, elsewhere, solved=True) == pytest.approx(1.0)
    assert SCOUT.reward([found(("a.py", 1, 1))], TASK, elsewhere, solved=False) == pytest.approx(0.5), "the file alone"


def test_where_nothing_was_searched_or_nobody_knows_what_mattered_nothing_is_paid() -> None:
    assert SCOUT.reward([found(("a.py", 2, 3), policy="composer")], TASK, {}, solved=False) is None
    assert SCOUT.reward([found(("a.py", 2, 3))], TASK, {"new.py": "n"}, solved=True) is None
    assert SCOUT.reward([answered("cut o")], TASK, {}, solved=False) == 0.0, "a search that found nothing is one"


def test_a_search_of_ten_seconds_costs_three_tenths_and_no_search_costs_more() -> None:
    usual = Search(policy="scout")
    for took_s, paid in ((0.0, 1.0), (5.0, 0.85), (10.0, 0.7), (20.0, 0.7)):
        assert usual.reward([found(("a.py", 2, 3), took_s=took_s)], TASK, {}, solved=False) == pytest.approx(paid)
    unmeasured = Exchange(asked="", request={}, answer=found(("a.py", 2, 3)).answer, version="v", policy="scout")
    assert usual.reward([unmeasured], TASK, {}, solved=False) == pytest.approx(1.0)


def test_a_place_that_ends_before_it_begins_is_one_line() -> None:
    assert named([found(("a.py", 2, 1), ("a.py", 5, 5), ("a.py", 4, 4))], FILES) == {("a.py", 2), ("a.py", 4)}


def test_one_line_before_many_alike_is_one_line() -> None:
    before = "    pass\n" * 300
    assert touched({"long.py": before}, {"long.py": f"    changed()\n{before}"}) == {("long.py", 1)}
