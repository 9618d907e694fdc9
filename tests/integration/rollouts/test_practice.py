"""Rollouts from the plan to the label's raw material: a real gateway, real boxes, scripted answers."""

import shlex
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import httpx
import pytest

from app.domain.errors import LeaseLost
from app.domain.learning.rollouts import Outcome
from app.domain.telemetry.serving import GenerateRequest
from pipelines.rollouts.harness import CodingAgent
from pipelines.rollouts.interception import FileJournal
from pipelines.rollouts.service import Service
from pipelines.rollouts.tasksets.small_functions import HACKS, SmallFunctions
from tests.integration.rollouts.practising import LIBRARY, Open, calls, said_by_tools

SOON = timedelta(seconds=30)
SMALL = {task.key: task for task in SmallFunctions().load()}
DEEP = "import os\nfor _ in range(1200): os.mkdir('d'); os.chdir('d')"
LONG = "import os\nfor _ in range(20): os.mkdir('d' * 240); os.chdir('d' * 240)\nopen('f.py', 'w').write('x')"


def test_a_group_of_tries_is_paid_for_what_each_did(practising: Open, tmp_path: Path) -> None:
    task = SMALL["add"]
    answers = [
        "Here:\n```python\ndef add(a, b):\n    return a + b\n```", f"```python\n{HACKS['leaves when called'].format(name='add')}\n```",
        "```python\ndef add(a, b):\n    return a - b\n```", f"```python\n{HACKS['always equal'].format(name='add')}\n```",
    ]  # fmt: skip
    practice = practising(lambda request: answers.pop(0))
    counted = practice.dispatch(task, config={"slots": 1}).run(groups=1)
    assert counted == {"solved": 1, "failed": 3}
    turns = practice.turns()
    assert {turn.source for turn in turns} == {"rollout:small-functions"}
    assert {(turn.segment["task"], turn.tags["attempt"]) for turn in turns} == {("add", str(n)) for n in range(4)}
    assert len({turn.tags["group"] for turn in turns}) == 1
    assert practice.exposed() == []
    paid = Counter((said.name, said.value) for said in practice.said())
    assert paid == {("task_success", 1.0): 1, ("task_success", 0.0): 3}
    assert {said.episode_id for said in practice.said()} == {turn.episode_id for turn in turns}
    flags = {row.task for row in practice.book.history("composer", "small-functions") if row.outcome is Outcome.SOLVED}
    assert flags == {"add"}
    assert not [file for file in tmp_path.iterdir() if not file.name.startswith("ratchet.db")], "nothing is kept of what is over"


def scripted(request: GenerateRequest) -> str:
    """Reads, mends, tests, and says so."""
    done = said_by_tools(request)
    steps = [
        calls("search", pattern="def double"), calls("read", path="lib/numbers.py"),
        calls("edit", path="lib/numbers.py", old='raise RuntimeError("gone")', new="return 2 * n"), calls("test"),
        calls("shell", command="git log; ls -a; env | grep -c KEY; echo $((6*7))"),
    ]  # fmt: skip
    return steps[len(done)] if len(done) < len(steps) else "Done."


def test_the_agent_s_tools_work_in_its_box_and_its_patch_is_graded_in_another(practising: Open, tmp_path: Path) -> None:
    practice = practising(scripted)
    assert practice.dispatch(LIBRARY, config={"group_size": 2}).run(groups=1) == {"solved": 2}
    heard = said_by_tools(max(practice.engines.requests, key=lambda request: len(request.messages)))
    assert heard[0] == "lib/numbers.py:1: def double(n):"
    assert 'raise RuntimeError("gone")' in heard[1]
    assert heard[2:3] == ["replaced"]
    assert "1 passed, 0 failed" in heard[3]
    assert "\n0\n42" in heard[4], "no tool sees the key"
    assert {".git", "__pycache__"}.isdisjoint(heard[4].split())
    assert {turn.kind for turn in practice.turns()} == {"answer"}
    assert len(practice.turns()) == 12


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (calls("shell", command="echo on"), Outcome.TURN_LIMIT),
        (calls("shell", command="kill -9 -1"), Outcome.FAILED),
        (calls("shell", command="ln -s /etc/passwd lib/numbers2.py"), Outcome.TOOL_ABUSE),
        (calls("shell", command=f"python3 -c {shlex.quote(DEEP)}"), Outcome.TOOL_ABUSE),
        (calls("shell", command=f"python3 -c {shlex.quote(LONG)}"), Outcome.TOOL_ABUSE),
        (calls("shell", command="echo x > conftest.py; echo x > sitecustomize.py; echo 1 > reward.txt"), Outcome.TURN_LIMIT),
        ("I give up.", Outcome.FAILED),
    ],
)
def test_what_the_model_does_wrong_is_its_own_fault(practising: Open, tmp_path: Path, answer: str, outcome: Outcome) -> None:
    practice = practising(lambda request: answer)
    task = replace(LIBRARY, most_turns=2)
    assert practice.dispatch(task, config={"group_size": 2}).run(groups=1) == {outcome.value: 2}
    assert {said.value for said in practice.said()} == {0.0}


def test_a_package_that_became_a_module_is_graded_like_any_work(practising: Open) -> None:
    task = replace(LIBRARY, files={**LIBRARY.files, "lib/twice/__init__.py": "", "lib/twice/more.py": "TWO = 2\n"})
    mend = "rm -r lib/twice && echo 'def double(n): return 2 * n' > lib/numbers.py && echo 'TWO = 2' > lib/twice"
    practice = practising(lambda request: "Done." if said_by_tools(request) else calls("shell", command=mend))
    assert practice.dispatch(task, config={"group_size": 2}).run(groups=1) == {"solved": 2}


def test_what_breaks_in_a_try_closes_it_as_a_fault_of_ours_and_the_dispatcher_goes_on(practising: Open) -> None:
    class Broken(CodingAgent):
        def launch(self, *given: object, **named: object) -> NoReturn:
            raise RecursionError("a bug")

    practice = practising(lambda request: "Done.")
    dispatch = practice.dispatch(LIBRARY, config={"group_size": 2})
    dispatch.workplace.harness = Broken()
    assert dispatch.run(groups=1) == {"setup_failed": 2}
    assert [(said.name, said.value) for said in practice.said()] == [("environment_fault", "setup_failed")] * 2


def test_what_hangs_ends_at_its_deadline_and_is_graded_on_what_is_there(practising: Open, tmp_path: Path) -> None:
    def answer(request: GenerateRequest) -> str:
        if not said_by_tools(request):
            return calls("edit", path="lib/numbers.py", old='raise RuntimeError("gone")', new="return 2 * n")
        return calls("shell", command="sleep 600")

    practice = practising(answer)
    assert practice.dispatch(replace(LIBRARY, deadline_s=3.0), config={"group_size": 2}).run(groups=1) == {"solved": 2}


def test_a_gateway_that_is_away_is_nobody_s_fault(practising: Open, tmp_path: Path) -> None:
    practice = practising(scripted)
    dispatch = practice.dispatch(LIBRARY, config={"group_size": 2})

    def refused(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("away")

    dispatch.workplace.service = Service(
        lambda headers: httpx.Client(transport=httpx.MockTransport(refused), base_url="http://x"), "composer"
    )
    assert dispatch.run(groups=1) == {"gateway_failed": 2}
    assert practice.said() == []


class Killed(BaseException):
    """The dispatcher's process, as far as it can be said in one."""


def test_a_rollout_goes_on_where_its_dispatcher_died(practising: Open, tmp_path: Path) -> None:
    practice = practising(scripted)
    dispatch = practice.dispatch(LIBRARY, config={"group_size": 2, "lease_s": 0.2, "heartbeat_s": 0.1})
    planned = dispatch.plan("toy", 1)[0]
    taken = dispatch.book.take("composer", owner="one", ttl=SOON * 0, at_most=1)[0]
    assert taken.id == planned.id

    def dies() -> None:
        raise Killed

    with pytest.raises(Killed):
        dispatch.workplace.attempt(taken, LIBRARY, begun=lambda episode: dispatch.book.begin(taken, episode), holds=dies)
    asked, episode = len(practice.engines.requests), practice.turns()[0].episode_id
    assert asked == 6
    assert practice.said() == []
    journal = FileJournal(tmp_path / f"{taken.id}.jsonl")
    lines = journal.path.read_bytes().splitlines(keepends=True)
    journal.path.write_bytes(b"".join(lines[:4]) + lines[4][:20])  # it died while the fifth was written
    assert practice.dispatch(LIBRARY, config={"group_size": 2}).run(groups=0) == {"solved": 2}
    assert len(practice.engines.requests) == asked + 2 + 6, "four answers were given again, and the other try was made"
    rows = practice.book.history("composer", "toy")
    assert rows[0].episode == episode
    assert len(practice.said()) == 2


def test_a_box_that_does_not_do_again_what_it_did_is_lost(practising: Open, tmp_path: Path) -> None:
    def answer(request: GenerateRequest) -> str:
        return calls("shell", command="cat /proc/sys/kernel/random/uuid") if len(said_by_tools(request)) < 2 else "done"

    practice = practising(answer)
    dispatch = practice.dispatch(LIBRARY, config={"group_size": 2})
    dispatch.plan("toy", 1)
    taken = dispatch.book.take("composer", owner="one", ttl=SOON, at_most=1)[0]

    def dies() -> None:
        raise Killed

    with pytest.raises(Killed):
        dispatch.workplace.attempt(taken, LIBRARY, begun=lambda episode: None, holds=dies)
    again = dispatch.workplace.attempt(taken, LIBRARY, begun=lambda episode: None, holds=lambda: None)
    assert (again.outcome, again.reward) == (Outcome.BOX_LOST, None)
    assert [(said.name, said.value) for said in practice.said()] == [("environment_fault", "box_lost")]


def test_whoever_lost_its_lease_says_and_writes_nothing(practising: Open, tmp_path: Path) -> None:
    practice = practising(scripted)
    dispatch = practice.dispatch(LIBRARY, config={"group_size": 2})
    dispatch.plan("toy", 1)
    first = dispatch.book.take("composer", owner="one", ttl=SOON * 0, at_most=1)[0]
    second = dispatch.book.take("composer", owner="two", ttl=SOON, at_most=1)[0]
    assert (first.id, first.token + 1) == (second.id, second.token)
    with pytest.raises(LeaseLost):
        dispatch.workplace.attempt(
            first, LIBRARY, begun=lambda episode: dispatch.book.begin(first, episode), holds=lambda: dispatch.book.renew(first, ttl=SOON)
        )
    assert practice.said() == []
    assert practice.turns() == []
