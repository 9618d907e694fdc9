"""What passes between an answer's box and its tests': literals, whole and of their own type, and nothing that could stand for another."""

import json
from collections import Counter, OrderedDict, deque
from enum import IntEnum
from itertools import count
from typing import Any

import pytest

from pipelines.evaluation.suites.boxed.grading import MOST_ITEMS, _answered, _offered, _refill, read, written


class Colour(IntEnum):
    RED = 1


class Always:
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = object.__hash__


LITERALS: list[Any] = [
    *(None, ..., True, 0, -7, 1 << 62, -(10**40), 0.1, float("inf"), 1 - 2j, "", "ä\udc80", b"\x00\xff", bytearray(b"x")),
    *([], [1, [2]], (), (1, "a"), {1, 2}, frozenset([(1,)]), {}, {(1, 2): [None], "a": {b"k": {3}}}, range(2, 9, 3)),
]


@pytest.mark.parametrize("value", LITERALS, ids=repr)
def test_a_literal_comes_back_as_it_was_and_of_its_own_type(value: Any) -> None:
    came = read(json.loads(json.dumps(written(value))))
    assert (came, type(came)) == (value, type(value))


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (Colour.RED, 1), (Counter("aab"), {"a": 2, "b": 1}), (OrderedDict(a=1), {"a": 1}), ({"a": 1}.keys(), ["a"]),
        ({"a": 1}.items(), [("a", 1)]),
    ],
)  # fmt: skip
def test_of_a_kind_of_its_own_passes_what_it_stands_for(value: Any, plain: Any) -> None:
    came = read(written(value))
    assert (came, type(came)) == (plain, type(plain))


def test_an_iterator_passes_as_what_it_yields_unless_it_never_ends() -> None:
    assert list(read(written(n * n for n in range(4)))) == [0, 1, 4, 9]
    with pytest.raises(TypeError, match=f"more than {MOST_ITEMS} items"):
        written(count())


@pytest.mark.parametrize("value", [Always(), [Always()], {"k": deque([1])}, len], ids=["equals everything", "inside", "deque", "function"])
def test_an_object_that_could_judge_itself_stays_where_it_was_made(value: Any) -> None:
    with pytest.raises(TypeError, match="is no literal"):
        written(value)
    assert _offered(value) == ({"function": True} if callable(value) else {"opaque": type(value).__name__})


@pytest.mark.parametrize(
    "frame", [1.5, {"a": 1}, ["list", 2.5], ["int", 5], ["range", 1, 2], ["float"], ["import", "os"], ["ellipsis", 1]], ids=repr
)
def test_a_frame_that_nobody_writes_is_read_as_nothing(frame: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        read(frame)


def asked(*args: Any, **kwargs: Any) -> Any:
    return written((args, kwargs))


def test_a_call_is_answered_with_what_it_returned_and_with_what_it_did_to_its_arguments() -> None:
    def tidy(xs: list[int]) -> int:
        xs.sort()
        return len(xs)

    said = _answered(tidy, asked([3, 1]))
    assert (read(said["value"]), read(said["args"])) == (2, (([1, 3],), {}))
    assert _answered(lambda xs: xs[0], asked([3, 1])) == {"value": 3}, "unchanged arguments are not sent back"

    def spoil(xs: list[Any]) -> int:
        xs.append(Always())
        return 1

    assert _answered(spoil, asked([1])) == {"value": 1}, "arguments that cannot travel stay as they were"
    assert _answered(lambda: Always(), asked()) == {"opaque": "an object of type Always is no literal"}


def test_what_a_call_raised_is_told_and_whether_a_test_may_expect_it() -> None:
    def raising(error: BaseException) -> Any:
        def raises() -> None:
            raise error

        return _answered(raises, asked())

    class Silent(Exception):
        def __str__(self) -> str:
            raise KeyboardInterrupt

    assert raising(ValueError("no")) == {"raised": ["ValueError", "ValueError: no", True]}
    assert raising(SystemExit(0)) == {"raised": ["SystemExit", "SystemExit: 0", False]}
    assert raising(Silent()) == {"raised": ["Silent", "Silent", True]}, "its words are the answer's code"


def test_what_a_function_did_to_its_arguments_happens_to_the_tests_own() -> None:
    xs, names, seen, raw, kept = [3, 1], {"a": 1}, {1}, bytearray(b"a"), (1,)
    changed: Any = (([1, 3], {"b": 2}, {2}, bytearray(b"bc"), (2,)), {})
    _refill((xs, names, seen, raw, kept), {}, changed)
    assert (xs, names, seen, raw, kept) == ([1, 3], {"b": 2}, {2}, bytearray(b"bc"), (1,))
    _refill((), {"xs": xs}, ((), {"xs": [9]}))
    assert xs == [9]
    with pytest.raises(ValueError, match="argument"):
        _refill((xs,), {}, ((), {}))
