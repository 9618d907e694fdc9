"""What the tests of the small functions let through, run here without a box."""

import sys
from types import ModuleType
from typing import Any

import pytest

from pipelines.rollouts.tasksets.small_functions import FUNCTIONS, TESTS, SmallFunctions

TASKS = {task.key: task for task in SmallFunctions().load()}
SIGNATURES = {small.name: small.signature for small in FUNCTIONS}


def failures(name: str, returned: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many tests a function fails that returns this."""
    solution, tests = ModuleType("solution"), dict[str, Any]()
    exec(f"def {name}({SIGNATURES[name]}):\n    return {returned}\n", vars(solution))
    monkeypatch.setitem(sys.modules, "solution", solution)
    exec(TASKS[name].tests[TESTS], tests)
    return sum(fails(tests[test.partition("::")[2]]) for test in TASKS[name].expected)


def fails(test: Any) -> bool:
    try:
        test()
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize(
    ("name", "right", "otherwise"),
    [
        ("double", "n + n", "1"), ("square", "n * n", "1"), ("count", "len(xs)", "1"), ("total", "sum(xs)", "1"),
        ("shout", "text.upper()", "None"), ("backwards", "text[::-1]", "None"), ("in_order", "sorted(xs)", "None"),
        ("unique", "set(xs)", "None"), ("pairs", "list(zip(a, b))", "None"),
    ],
)  # fmt: skip
def test_a_function_that_is_wrong_of_zero_or_of_nothing_alone_fails_one_test(
    name: str, right: str, otherwise: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert failures(name, right, monkeypatch) == 0
    assert failures(name, f"({right}) or {otherwise}", monkeypatch) == 1
