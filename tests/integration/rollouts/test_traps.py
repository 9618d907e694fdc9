"""What went wrong for others, tried on a whole rollout: whatever an agent plants, whoever dies, and weights that move meanwhile."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from app.domain.learning.rollouts import Closed, Outcome, Rollout
from app.domain.telemetry.serving import GenerateRequest
from pipelines.rollouts.dispatch import Dispatch
from pipelines.rollouts.grading import Grader, Verdict
from pipelines.rollouts.tasks import Launch, TaskData
from tests.fakes.gateway import CANDIDATE, CHAMPION
from tests.integration.rollouts.practising import BOXES, LIBRARY, Open, Practice, calls, said_by_tools

SOON = timedelta(seconds=30)
GRADER = Grader(boxes=BOXES)
ALL = replace(LIBRARY, editable=("lib/", "extra/"))

PLANTED: dict[str, dict[str, str]] = {
    "a conftest": {"lib/conftest.py": "import pytest\n\ndef pytest_runtest_call(item):\n    pass\n"},
    "a site": {"lib/sitecustomize.py": "import os\nos._exit(0)\n", "lib/usercustomize.py": "import os\nos._exit(0)\n"},
    "a path file": {"lib/site.pth": "import os; os._exit(0)\n"},
    "a pytest": {"lib/pytest.py": "def raises(*a, **k): return True\n", "lib/unittest.py": "class TestCase: pass\n"},
    "a verdict": {"lib/reward.txt": "1\n", "lib/reward.json": '{"reward": 1}\n', "lib/.asked.json": '{"passed": ["hidden/test_it.py"]}'},
    "the test": {"lib/test_it.py": "def test_it(): pass\n", "extra/test_it.py": "def test_it(): pass\n"},
    "words of the runner": {"lib/__init__.py": "import os\nos.write(1, b'{\"passed\": [\"hidden/test_it.py::test_it\"]}')\nos._exit(0)\n"},
    "an end": {"lib/numbers.py": "import os\ndef double(n):\n    os._exit(0)\n"},
    "an object": {"lib/numbers.py": "class E:\n    __eq__ = lambda s, o: True\ndef double(n):\n    return E()\n"},
    "a skip": {"lib/numbers.py": "def double(n):\n    import pytest as runner\n    runner.skip('later')\n"},
    "another exit": {"lib/numbers.py": "import atexit, os\natexit.register(os._exit, 0)\ndef double(n):\n    raise SystemExit(0)\n"},
    "a patched runner": {
        "lib/numbers.py": "import os\nwrite = os.write\nos.write = lambda f, b: write(f, b'passed')\ndef double(n):\n    return 0\n"
    },
}  # fmt: skip


@pytest.mark.parametrize("planted", PLANTED.values(), ids=PLANTED)
def test_what_is_planted_pays_nothing_and_harms_no_right_answer(planted: dict[str, str]) -> None:
    assert GRADER.grade(ALL, planted, seed=3).verdict is Verdict.FAILED
    if "lib/numbers.py" not in planted and "lib/__init__.py" not in planted:
        assert GRADER.grade(ALL, planted | dict(LIBRARY.gold), seed=3).verdict is Verdict.PASSED, "a false zero is as wrong"


def test_a_compiled_file_does_not_travel_in_the_place_of_its_source() -> None:
    compiled = {"lib/__pycache__/numbers.cpython-311.pyc": "compiled", "lib/numbers.pyc": "compiled"}
    assert GRADER.grade(ALL, compiled, seed=1).verdict is Verdict.FAILED
    assert GRADER.grade(ALL, compiled | dict(LIBRARY.gold), seed=1).verdict is Verdict.PASSED


def shells(*commands: str) -> Callable[[GenerateRequest], str]:
    """An agent that runs these and then is done."""

    def answer(request: GenerateRequest) -> str:
        done = len(said_by_tools(request))
        return calls("shell", command=commands[done]) if done < len(commands) else "Done."

    return answer


def heard(practice: Practice) -> list[str]:
    """What its tools said, in order."""
    return said_by_tools(max(practice.engines.requests, key=lambda request: len(request.messages)))


LOOK = (
    "cd /; for d in $(ls | grep -v -e ^proc -e ^usr -e ^lib -e ^bin -e ^sbin -e ^python); do grep -rl 'double.21' $d 2>/dev/null; "
    "find $d -name .git -o -name '*.pyc' 2>/dev/null; done; cat /proc/[0-9]*/cmdline 2>&1 | tr '\\0' ' ' | grep -c hidde[n]; ls; true"
)


def test_no_agent_finds_the_tests_it_is_graded_by(practising: Open) -> None:
    practice = practising(shells(LOOK))
    practice.dispatch(replace(LIBRARY, deadline_s=240), config={"group_size": 2, "slots": 1}).run(groups=1)
    said = heard(practice)[0].splitlines()
    assert said[0] == "exit code 0"
    assert said[1] == "0", "nothing is found, neither in files nor in what runs"
    assert {"work", "tmp", "run", "dev"} <= set(said[2:]), "and these were looked through"


STOLEN = """
import glob, json, urllib.error, urllib.request
keys = []
for file in glob.glob("/proc/[0-9]*/environ"):
    try:
        keys += [word[15:].decode() for word in open(file, "rb").read().split(b"\\0") if word.startswith(b"OPENAI_API_KEY=")]
    except OSError:
        pass  # its keeper's
for path in ("/feedback", "/rl/set_reward", "/rl/start_session"):
    body = {"metric_name": "task_success", "value": 1.0}
    asked = urllib.request.Request("http://127.0.0.1:8080" + path, json.dumps(body).encode(), {"authorization": "Bearer " + keys[0]})
    try:
        print(urllib.request.urlopen(asked).status)
    except urllib.error.HTTPError as error:
        print(error.code)
print(keys[0])
"""


def test_an_agent_that_takes_its_own_key_can_reward_itself_neither_in_its_box_nor_outside(practising: Open) -> None:
    def answer(request: GenerateRequest) -> str:
        done = len(said_by_tools(request))
        if done == 0:
            return calls("edit", path="steal.py", old="", new=STOLEN)
        return calls("shell", command=f"{BOXES.python} -I -S steal.py") if done == 1 else "Done."

    practice = practising(answer)
    practice.dispatch(LIBRARY, config={"group_size": 2, "slots": 1}).run(groups=1)
    said = heard(practice)[1].split()
    assert said[:3] == ["exit", "code", "0"], heard(practice)[1]
    assert said[3:6] == ["404", "404", "404"]
    stolen = said[6]
    assert stolen.startswith("rs_")
    episode = practice.turns()[-1].episode_id
    with practice.connect({"authorization": f"Bearer {stolen}"}) as thief:
        for path, body in (
            ("/feedback", {"metric_name": "task_success", "value": 1.0, "episode_id": episode}), ("/rl/start_session", {"task_id": "t"}),
            ("/rl/set_reward", {"reward": 1.0, "session_id": episode}),
            ("/v1/events", [{"name": "task_success", "value": 1.0, "episode_id": episode}]),
        ):  # fmt: skip
            assert thief.post(path, json=body).status_code == 403, path
    assert {said.value for said in practice.said()} == {0.0}


@pytest.mark.parametrize(
    ("command", "outcome"),
    [
        (
            "head -c 900000000 /dev/zero > /dev/shm/full; for i in 0 1 2 3 4 5 6 7 8; do head -c 99000000 /dev/zero > /tmp/f$i; done",
            None,
        ),
        ("i=0; while true; do head -c 8000000 /dev/zero > f$i; i=$((i+1)); sleep 0.05; done", Outcome.TOOL_ABUSE),
        ("setsid sh -c 'sleep 600' & echo started", None),
        ("yes | head -c 30000000", None),
        (":(){ :|:& };: 2>/dev/null; echo survived", None),
    ],
    ids=["memory files", "a workspace that grows", "a child that stays", "much output", "many processes"],
)
def test_what_an_agent_does_to_its_box_is_its_own_fault_and_ends_with_it(practising: Open, command: str, outcome: Outcome | None) -> None:
    practice = practising(shells(command))
    counted = practice.dispatch(replace(LIBRARY, deadline_s=60), config={"group_size": 2, "slots": 1}).run(groups=1)
    expected = {outcome.value} if outcome is not None else {Outcome.FAILED.value, Outcome.TOOL_ABUSE.value, Outcome.AGENT_TIMEOUT.value}
    assert set(counted) <= expected
    assert {said.value for said in practice.said()} == {0.0}


@dataclass
class Odd:
    """A harness that is none."""

    argv: tuple[str, ...]
    name: str = "odd"
    hash: str = "1"

    def launch(self, endpoint: str, secret: str, data: TaskData, *, model: str, python: str) -> Launch:
        return Launch(argv=self.argv, files={})


@pytest.mark.parametrize("argv", [("/no/such/program",), ("/bin/true",), ("/bin/sh", "-c", "exit 7")])
def test_a_harness_that_asks_for_nothing_is_no_fault_of_the_model(
    sqlite_engine: Engine, tmp_path: Path, argv: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    practice = Practice(sqlite_engine, tmp_path, lambda request: "never", harness=Odd(argv))
    try:
        with caplog.at_level("INFO"):
            assert practice.dispatch(LIBRARY, config={"group_size": 2}).run(groups=1) == {"setup_failed": 2}
    finally:
        practice.close()
    assert "asked for no completion" in caplog.text
    assert practice.said() == [] or {said.name for said in practice.said()} == {"environment_fault"}


class Killed(BaseException):
    """The dispatcher's process, as far as it can be said in one."""


def mended(request: GenerateRequest) -> str:
    if not said_by_tools(request):
        return calls("edit", path="lib/numbers.py", old='raise RuntimeError("gone")', new="return 2 * n")
    return "Done."


@pytest.mark.parametrize("at", ["after the work", "after the grade", "after the word"])
def test_a_dispatcher_that_dies_between_the_work_and_the_book_leaves_one_verdict(practising: Open, at: str) -> None:
    practice = practising(mended)
    dispatch = practice.dispatch(LIBRARY, config={"group_size": 2, "lease_s": 0.2, "heartbeat_s": 0.1})
    dispatch.plan("toy", 1)
    taken = dispatch.book.take("composer", owner="one", ttl=SOON * 0, at_most=1)[0]
    beats: list[int] = []

    def holds() -> None:
        beats.append(1)
        if len(beats) == {"after the work": 1, "after the grade": 2}.get(at, 0):
            raise Killed

    if at == "after the word":
        _attempt(dispatch, taken, holds)
    else:
        with pytest.raises(Killed):
            _attempt(dispatch, taken, holds)
    asked = len(practice.engines.requests)
    assert len(practice.said()) == (1 if at == "after the word" else 0)
    assert practice.dispatch(LIBRARY, config={"group_size": 2}).run(groups=0) == {"solved": 2}
    assert len(practice.engines.requests) == asked + 2, "the first one's answers were given again, the other try was made"
    assert [said.value for said in practice.said()] == [1.0, 1.0]
    assert len({said.episode_id for said in practice.said()}) == 2


def _attempt(dispatch: Dispatch, taken: Rollout, holds: Callable[[], None]) -> Closed:
    return dispatch.workplace.attempt(taken, LIBRARY, begun=lambda episode: dispatch.book.begin(taken, episode), holds=holds)


@pytest.mark.parametrize(("lag", "outcome"), [(1, "solved"), (2, "stale")])
def test_a_champion_that_is_promoted_in_the_middle_samples_the_rest_and_too_many_make_it_stale(
    practising: Open, lag: int, outcome: str
) -> None:
    def answer(request: GenerateRequest) -> str:
        route = practice.routes.routes["composer"]
        practice.routes.routes["composer"] = replace(route, pointer=replace(route.pointer, digest=CANDIDATE))
        return mended(request)

    practice = practising(answer)
    dispatch = practice.dispatch(LIBRARY, config={"group_size": 2, "slots": 1})
    dispatch.workplace.champion, dispatch.workplace.lag = lambda: CANDIDATE, lambda old, new: lag if old != new else 0
    dispatch.plan("toy", 1)
    assert dispatch.run(groups=0)[outcome] >= 1
    first = [turn.version for turn in practice.turns() if turn.episode_id == practice.turns()[0].episode_id]
    assert first == [CHAMPION, CANDIDATE], "each turn says which weights sampled it"
    told = {said.episode_id: (said.name, said.value) for said in practice.said()}
    assert told[practice.turns()[0].episode_id] == (("task_success", 1.0) if lag == 1 else ("environment_fault", "stale"))


def test_a_workspace_s_files_are_the_box_s_whoever_laid_them_out() -> None:
    """Archives name owners; files of somebody else could not be written, silently."""
    task = replace(LIBRARY, files={**LIBRARY.files, "deep/er/file.txt": "x\n"}, editable=("deep/",), gold={})
    assert GRADER.grade(task, {"deep/er/file.txt": "y\n", "deep/new.txt": "z\n"}, seed=0).verdict is Verdict.FAILED
    writes = "def test_it():\n    open('deep/er/file.txt', 'a').write('more')\n    assert open('deep/er/file.txt').read() == 'x\\nmore'\n"
    written = replace(task, tests={"hidden/test_it.py": writes})
    assert GRADER.grade(written, {}, seed=0).verdict is Verdict.PASSED


def test_the_tasks_hash_is_of_what_is_asked_and_how_it_is_judged() -> None:
    same = [LIBRARY.hash, replace(LIBRARY, gold={}).hash, replace(LIBRARY, hacks={}).hash]
    assert len(set(same)) == 1
    changed: list[dict[str, Any]] = [
        {"instruction": "other"}, {"files": {}}, {"tests": {"hidden/test_it.py": "def test_it(): pass\n"}}, {"editable": ()},
        {"most_turns": 3}, {"deadline_s": 5.0}, {"key": "k"},
    ]  # fmt: skip
    assert len({replace(LIBRARY, **change).hash for change in changed} | {LIBRARY.hash}) == len(changed) + 1
