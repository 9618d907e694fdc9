"""What a bridge is asked and what its answers mean; and what is done in a box when it orders."""

import base64
import json
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import httpx
import pytest

from app.domain.errors import BadInput, NotFound, RatchetError, Refused, Unavailable
from app.domain.learning.boxes import Box, Ended, Executed
from pipelines.rollouts.bridged import Bridge, BridgedTaskset, Hands, Order

Answer = Callable[[httpx.Request], httpx.Response]


def bridge(answer: Answer) -> Bridge:
    return Bridge("http://bridge", transport=httpx.MockTransport(answer))


@pytest.mark.parametrize(
    ("status", "kind"), [(404, NotFound), (400, Unavailable), (409, Unavailable), (500, Unavailable), (503, Unavailable)]
)
def test_a_task_that_there_is_not_is_told_apart_from_a_bridge_that_cannot_now(status: int, kind: type[RatchetError]) -> None:
    with pytest.raises(kind) as raised:
        bridge(lambda request: httpx.Response(status, text="x" * 400)).listing()
    assert type(raised.value) is kind
    assert str(raised.value) == f"the bridge refused /tasks with {status}: {'x' * 300}"


def test_a_bridge_that_is_away_or_is_none_is_told_with_the_cure() -> None:
    def away(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with pytest.raises(Unavailable, match=r"the bridge at http://bridge does not answer .*start it, or take its taskset out"):
        bridge(away).listing()
    with pytest.raises(BadInput, match="what answers at http://bridge is no bridge"):
        bridge(lambda request: httpx.Response(399, text="<html>")).listing()


def test_a_conversation_goes_on_until_it_is_done_and_every_answer_is_to_the_order_before() -> None:
    said = [{"id": 7, "do": {"run": {"n": 1}}}, {"id": 8, "do": {"run": {"n": 2}}}, {"id": 9, "done": {"reward": 0.5}}]
    asked: list[tuple[str, str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append((request.method, request.url.path, json.loads(request.content)))
        assert request.extensions["timeout"]["read"] == 60.0
        return httpx.Response(200, json=said.pop(0))

    orders: list[Order] = []

    def do(order: Order) -> dict[str, Any]:
        orders.append(order)
        return {"code": len(orders)}

    assert bridge(answer).converse("grade", "k", {"seed": 1}, do=do) == {"reward": 0.5}
    assert orders == [{"run": {"n": 1}}, {"run": {"n": 2}}]
    assert asked == [
        ("POST", "/tasks/k/grade", {"seed": 1}), ("POST", "/conversations/7", {"code": 1}), ("POST", "/conversations/8", {"code": 2})
    ]  # fmt: skip


@pytest.mark.parametrize(("said", "done"), [({"id": 1}, {}), ({"id": 1, "done": None}, {}), ({"id": 1, "done": {"a": 1}}, {"a": 1})])
def test_a_conversation_may_end_without_a_word(said: dict[str, Any], done: dict[str, Any]) -> None:
    assert bridge(lambda request: httpx.Response(200, json=said)).converse("setup", "k", {}, do=lambda order: {}) == done


def test_a_task_that_fails_is_told_in_its_own_words() -> None:
    with pytest.raises(Refused, match=r"^k: grade: no module"):
        bridge(lambda request: httpx.Response(200, json={"id": 1, "error": "no module"})).converse("grade", "k", {}, do=lambda order: {})


def test_tasks_are_read_as_they_are_listed_with_the_times_of_who_says_nothing() -> None:
    listing = {
        "taskset": "theirs",
        "tasks": [
            {"key": "a", "hash": "h1", "prompt": "Do it.", "has_setup": False, "agent_s": 9.0, "scoring_s": 8.0},
            {"key": "b", "hash": "h2", "prompt": "Do that.", "has_setup": False},
        ],
    }
    taskset = BridgedTaskset(bridge=bridge(lambda request: httpx.Response(200, json=listing)), boxes=cast(Any, None))
    first, second = taskset.load()
    assert taskset.name == first.taskset == "theirs"
    assert (first.deadline_s, first.grading_s, first.instruction, first.judge_hash) == (9.0, 8.0, "Do it.", "h1")
    assert (second.deadline_s, second.grading_s, second.graded_by, dict(second.files)) == (300.0, 120.0, "http://bridge", {})


class Ran:
    """A box that writes down what is run in it and says what it was told to."""

    def __init__(self, *ends: Executed) -> None:
        self.ends, self.ran, self.put_there = [*ends], list[tuple[list[str], bytes, float, int]](), dict[str, bytes]()

    def exec(self, argv: Sequence[str], *, stdin: bytes = b"", deadline_s: float, most_output_bytes: int) -> Executed:
        self.ran.append(([*argv], stdin, deadline_s, most_output_bytes))
        return self.ends.pop(0)

    def put(self, path: str, data: bytes) -> None:
        self.put_there[path] = data


def end(code: int | None = 0, out: bytes = b"", err: bytes = b"", ended: Ended = Ended.EXITED) -> Executed:
    return Executed(ended=ended, code=code, stdout=out, stderr=err)


def hands(box: Ran, *, left_s: float = 100.0, apply: Callable[[Box], None] | None = None) -> Hands:
    return Hands(cast(Box, box), time.monotonic() + left_s, apply)


@pytest.mark.parametrize(
    ("ended", "code"),
    [(end(3, b"o\xff", b"e"), 3), (end(None, b"o\xff", b"e", Ended.TIMEOUT), 124), (end(None, b"o\xff", b"e", Ended.OUTPUT_LIMIT), 125),
     (end(None, b"o\xff", b"e", Ended.OOM), 137)],
)  # fmt: skip
def test_a_program_is_run_with_its_environment_and_its_end_is_told_as_a_shell_would(ended: Executed, code: int) -> None:
    box = Ran(ended)
    found = hands(box).do({"run": {"argv": ["ls", "-l"], "env": {"A": "1"}}})
    assert found == {"code": code, "stdout": "o\ufffd", "stderr": "e"}
    ((argv, stdin, deadline_s, most),) = box.ran
    assert (argv, stdin, most) == (["/usr/bin/env", "A=1", "ls", "-l"], b"", 1 << 20)
    assert 90.0 < deadline_s <= 100.0


def test_a_file_is_read_up_to_so_much_of_it_and_one_that_is_missing_is_told() -> None:
    box = Ran(end(0, b"data"), end(0, b""), end(1, b"", b"y" * 400))
    assert hands(box).do({"read": {"path": "/tests/x", "most": 5}}) == {"data": base64.b64encode(b"data").decode()}
    assert hands(box).do({"read": {"path": "/tests/x", "most": 5 << 20}}) == {"data": ""}
    assert hands(box).do({"read": {"path": "/tests/x"}}) == {"missing": "y" * 300}
    assert [argv[-2:] for argv, *_ in box.ran] == [["5", "/tests/x"], ["1048576", "/tests/x"], ["1048576", "/tests/x"]]


def test_what_is_written_in_the_workspace_is_put_there_and_elsewhere_by_a_program() -> None:
    box = Ran(end(0), end(1, b"", b"read-only " * 40))
    data = base64.b64encode(b"x").decode()
    for path in ("/work/a/b.py", "c.py"):
        assert hands(box).do({"write": {"path": path, "data": data}}) == {}
    assert box.put_there == {"a/b.py": b"x", "c.py": b"x"}
    assert hands(box).do({"write": {"path": "/tests/t.py", "data": data}}) == {}
    assert (box.ran[0][0][-1], box.ran[0][1]) == ("/tests/t.py", b"x")
    with pytest.raises(Refused, match=r"/etc/t cannot be written in a box \(.{199,200}\): only /tests, /logs and /tmp can"):
        hands(box).do({"write": {"path": "/etc/t", "data": data}})
    with pytest.raises(BadInput):
        hands(box).do({"write": {"path": "/work/../x", "data": data}})


def test_changes_are_laid_in_when_the_bridge_says_so_and_unknown_orders_are_refused() -> None:
    applied: list[Box] = []
    box = Ran()
    assert hands(box, apply=applied.append).do({"apply": {}}) == {}
    assert applied == [box]
    for order in ({"apply": {}}, {"dance": {}}):
        with pytest.raises(Refused, match="which is not to be done here"):
            hands(box).do(order)


def test_a_lost_box_and_time_that_is_over_are_no_word_about_the_answer() -> None:
    with pytest.raises(Unavailable, match="the box was lost"):
        hands(Ran(end(None, ended=Ended.BOX_LOST))).do({"run": {"argv": ["ls"]}})
    box = Ran()
    with pytest.raises(Unavailable, match="the time for it is over"):
        hands(box, left_s=0.0).do({"run": {"argv": ["ls"]}})
    assert box.ran == []
