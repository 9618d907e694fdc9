"""Tasks that come over a bridge: laid out, practised and graded in our boxes, by what a bridge orders."""

import base64
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import Engine

from app.domain.errors import BadInput, Unavailable
from pipelines.rollouts.bridged import Bridge, BridgedTaskset, Graders, paid
from pipelines.rollouts.check import validity
from pipelines.rollouts.grading import Verdict
from pipelines.rollouts.interception import Exchange
from pipelines.rollouts.tasks import TaskData
from tests.fakes.servers.bridge import Act, Order, ScriptedBridge
from tests.integration.rollouts.practising import BOXES, Practice, calls, said_by_tools

URL = "http://bridge"


def run(*argv: str, **env: str) -> Order:
    return {"run": {"argv": [*argv], "env": env}}


def write(path: str, text: str) -> Order:
    return {"write": {"path": path, "data": base64.b64encode(text.encode()).decode()}}


def laid_out(body: dict[str, Any]) -> Act:
    """What the agent begins with: a file, and a folder that was made by a program."""
    yield write("start.txt", "begin\n")
    done = yield run("sh", "-c", 'mkdir -p sub && printf %s "$WORD" > sub/made.txt', WORD="made here")
    assert done["code"] == 0, done
    return {}


def scored(body: dict[str, Any]) -> Act:
    """As Harbor grades: tests and a verdict where no workspace is, and the transcript beside it."""
    yield from laid_out(body)
    yield {"apply": {}}
    script = "grep -q done start.txt && test ! -e sub/made.txt && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt"
    yield write("/tests/test.sh", script)
    yield run("sh", "-c", "mkdir -p /logs/verifier && rm -f /logs/verifier/reward.txt")
    assert (yield {"read": {"path": "/logs/verifier/reward.txt", "most": 9}}).keys() == {"missing"}
    ended = yield run("sh", "/tests/test.sh")
    assert ended["code"] == 0, ended
    read = yield {"read": {"path": "/logs/verifier/reward.txt", "most": 9}}
    spoke = [one["answer"]["choices"][0]["message"]["content"] for one in body["exchanges"]]
    half = 0.5 if any("please" in (text or "") for text in spoke) else 0.0
    return {"reward": max(half, float(base64.b64decode(read["data"]))), "rewards": {"solved": half}}


def valid(body: dict[str, Any]) -> Act:
    yield from laid_out(body)
    return {"valid": True}


def says(reward: Any) -> Any:
    def act(body: dict[str, Any]) -> Act:
        yield {"apply": {}}
        return {"reward": reward}

    return act


def orders(*given: Order) -> Any:
    """An act that gives these, whatever comes of them, and then has nothing to say."""

    def act(body: dict[str, Any]) -> Act:
        for order in given:  # noqa: UP028 - `yield from` would hand what came of them to the tuple
            yield order
        return {}

    return act


def offered(key: str, **more: Any) -> dict[str, Any]:
    return {"key": key, "hash": f"hash of {key}", "prompt": "Write done into start.txt.", "has_setup": False, **more}


@pytest.fixture
def bridge() -> ScriptedBridge:
    return ScriptedBridge(
        {"one/setup": laid_out, "one/score": scored, "one/validate": valid},
        {"taskset": "harbor-tasks", "tasks": [offered("one", has_setup=True, scoring_s=20.0)]},
    )


def loaded(bridge: ScriptedBridge) -> list[TaskData]:
    return list(BridgedTaskset(bridge=Bridge(URL, bridge), boxes=BOXES).load())


def graders(bridge: ScriptedBridge) -> Graders:
    return Graders(boxes=BOXES, transport=bridge)


def spoken(text: str) -> Exchange:
    return Exchange(asked="", request={"messages": []}, answer={"choices": [{"message": {"content": text}}]}, version="v")


def test_what_a_set_up_lays_out_is_what_the_agent_begins_with(bridge: ScriptedBridge) -> None:
    (task,) = loaded(bridge)
    assert dict(task.files) == {"start.txt": "begin\n", "sub/made.txt": "made here"}
    assert (task.taskset, task.key, task.graded_by, task.grading_s) == ("harbor-tasks", "one", URL, 20.0)
    assert task.may_change("any/file.txt")
    bridge.listed["tasks"][0]["hash"] = "graded otherwise"
    assert loaded(bridge)[0].hash != task.hash


def test_a_grade_is_what_the_bridge_says_of_a_fresh_box_and_of_what_was_said(bridge: ScriptedBridge) -> None:
    (task,) = loaded(bridge)
    grade = graders(bridge).grade
    solved = grade(task, {"start.txt": "done\n", "sub/made.txt": None}, seed=0)
    assert (solved.verdict, solved.reward) == (Verdict.PASSED, 1.0)
    assert grade(task, {"start.txt": "done\n"}, seed=0).reward == 0.0, "the file is still there"
    replaced = grade(task, {"sub": "a file in its folder's place\n", "sub/made.txt": None, "start.txt": "done\n"}, seed=0)
    assert (replaced.verdict, replaced.reward) == (Verdict.PASSED, 1.0), replaced.reason
    polite = grade(task, {}, seed=0, exchanges=[spoken("please")])
    assert (polite.verdict, polite.reward) == (Verdict.FAILED, 0.5)
    assert validity(task, graders(bridge)) is None


@pytest.fixture
def bare() -> ScriptedBridge:
    """A task without a set-up, which is paid nothing."""
    return ScriptedBridge(
        {"one/score": says(0.0), "one/validate": says(0.0)}, {"taskset": "bare", "tasks": [offered("one", scoring_s=5.0)]}
    )


@pytest.mark.parametrize(
    ("act", "does", "sentence"),
    [
        ("validate", says(0), "its own check could not be made: the bridge orders 'apply'"),
        ("validate", lambda body: invalid(), "its solution does not hold"),
        ("score", says(1.0), "the hack 'nothing' is graded passed"),
        ("score", says(1e9), "from 0 to 1 together"),
        ("score", orders(), "reward is None"),
    ],
)
def test_a_bridged_task_that_cannot_be_trusted_is_held(bare: ScriptedBridge, act: str, does: Any, sentence: str) -> None:
    bare.acts = {"one/score": says(0.0), "one/validate": orders(), f"one/{act}": does}
    (task,) = loaded(bare)
    assert sentence in (validity(task, graders(bare)) or "")


def test_a_bridged_task_without_a_check_of_its_own_is_held_by_nothing_but_its_grader(bare: ScriptedBridge) -> None:
    bare.acts = {"one/score": says(0.25), "one/validate": orders()}
    (task,) = loaded(bare)
    assert validity(task, graders(bare)) is None


def invalid() -> Act:
    done = yield run("false")
    return {"valid": done["code"] == 0}


def broken(body: dict[str, Any]) -> Act:
    yield {"apply": {}}
    raise ZeroDivisionError("the taskset's own")


@pytest.mark.parametrize(
    ("does", "sentence"),
    [
        (broken, "ZeroDivisionError: the taskset's own"),
        (orders(write("start.txt", "otherwise\n"), {"apply": {}}), "does not lay out the same twice"),
        (orders({"fly": {}}), "orders 'fly'"),
        (orders(write("/etc/passwd", "x")), "only /tests, /logs and /tmp can"),
        (orders(write("../x", "x")), "no path within a workspace"),
        (orders(run("sleep", "60"), run("true")), "the time for it is over"),
        (orders({"read": {"path": "none", "most": 1}}), "reward is None"),
    ],
)
def test_what_fails_in_a_grade_is_an_error_and_never_a_zero(bare: ScriptedBridge, does: Any, sentence: str) -> None:
    bare.acts = {"one/score": does}
    (task,) = loaded(bare)
    found = graders(bare).grade(task, {}, seed=0)
    assert (found.verdict, found.reward) == (Verdict.ERROR, None)
    assert sentence in found.reason


def test_a_hostile_box_reaches_neither_network_nor_host_from_a_grade(bridge: ScriptedBridge, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s")
    said: list[dict[str, Any]] = []

    def looks(body: dict[str, Any]) -> Act:
        yield {"apply": {}}
        said.append((yield run("sh", "-c", f"cat {secret}; cat /proc/net/dev | tail -n +3 | cut -d: -f1; env")))
        said.append((yield {"read": {"path": str(secret), "most": 9}}))
        return {"reward": 0.0}

    bridge.listed["tasks"][0]["has_setup"] = False
    (task,) = loaded(bridge)
    bridge.acts = {"one/score": looks}
    assert graders(bridge).grade(task, {}, seed=0).verdict is Verdict.FAILED
    assert said[0]["stdout"].split()[0] == "lo"
    assert "RATCHET" not in said[0]["stdout"]
    assert "missing" in said[1]


def test_an_agent_s_try_at_a_bridged_task_is_paid_what_the_bridge_says(
    bridge: ScriptedBridge, sqlite_engine: Engine, tmp_path: Path
) -> None:
    def scripted(request: Any) -> str:
        steps = [calls("edit", path="start.txt", old="begin", new="done"), calls("shell", command="rm sub/made.txt"), "please"]
        return steps[len(said_by_tools(request))]

    (task,) = loaded(bridge)
    practice = Practice(sqlite_engine, tmp_path, scripted)
    try:
        dispatch = practice.dispatch(task, config={"group_size": 2})
        dispatch.workplace.grader = graders(bridge)
        assert dispatch.run(groups=1) == {"solved": 2}
        bridge.acts = {**bridge.acts, "one/score": broken}
        assert dispatch_again(practice, task, bridge) == {"grader_failed": 2}
    finally:
        practice.close()
    assert [(said.name, said.value) for said in practice.said()][2:] == [("environment_fault", "grader_failed")] * 2


def dispatch_again(practice: Practice, task: TaskData, bridge: ScriptedBridge) -> dict[str, int]:
    dispatch = practice.dispatch(task, config={"group_size": 2})
    dispatch.workplace.grader = graders(bridge)
    return dispatch.run(groups=1)


@pytest.mark.parametrize("reward", [None, "1", 1.5, -0.1, float("nan")])
def test_a_reward_that_is_none_is_an_error(reward: Any) -> None:
    assert paid({"reward": reward}).verdict is Verdict.ERROR


def test_a_bridge_that_is_away_or_none_is_named() -> None:
    def away(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with pytest.raises(Unavailable, match="the bridge at http://bridge does not answer"):
        Bridge(URL, httpx.MockTransport(away)).listing()
    with pytest.raises(BadInput, match="is no bridge"):
        Bridge(URL, httpx.MockTransport(lambda request: httpx.Response(200, text="hello"))).listing()
    twice = ScriptedBridge({}, {"taskset": "t", "tasks": [offered("a"), offered("a")]})
    with pytest.raises(BadInput, match="another task has this key"):
        loaded(twice)
    binary = ScriptedBridge(
        {"a/setup": orders({"write": {"path": "x", "data": base64.b64encode(b"\xff\xfe").decode()}})},
        {"taskset": "t", "tasks": [offered("a", has_setup=True)]},
    )
    with pytest.raises(BadInput, match="set-up of task a cannot be done in a box: x in the patch is no UTF-8"):
        loaded(binary)


def test_what_is_asked_of_a_bridge_is_json_that_it_can_read(bridge: ScriptedBridge) -> None:
    heard: list[Any] = []

    def listens(body: dict[str, Any]) -> Act:
        heard.append(body)
        yield {"apply": {}}
        return {"reward": 0.0}

    bridge.listed["tasks"][0]["has_setup"] = False
    (task,) = loaded(bridge)
    bridge.acts = {"one/score": listens}
    graders(bridge).grade(task, {}, seed=0, exchanges=[spoken("hi")])
    assert json.dumps(heard[0]["exchanges"]) == json.dumps(
        [{"request": {"messages": []}, "answer": {"choices": [{"message": {"content": "hi"}}]}}]
    )
