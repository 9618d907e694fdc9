"""Whether a taskset may be practised: each task can be solved and not cheated, and the harness is in practice what it is in production.

validity      gold passes every time of three; nothing, and every stock hack, fails        ─▶ else the task is held
differential  one scripted transcript through the harness in a box and as a plain process  ─▶ else all of the taskset is held
              (the same requests byte for byte, equal tool results; probes of the surroundings differ only where they may)
"""

import json
import socketserver
import threading
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import msgspec

from app.domain.errors import BadInput
from app.domain.ids import uuid7
from app.domain.learning.boxes import GATEWAY, Boxes, BoxSpec, Ended
from pipelines.rollouts.episode import AGENT, MOST_SAID_BYTES
from pipelines.rollouts.grading import GOLD_TRIES, Grader, Verdict, open_to_all
from pipelines.rollouts.interception import Always, Answering, Bounds, Exchange, Handler, Interception, Socket
from pipelines.rollouts.scratch import scratched
from pipelines.rollouts.tasks import Harness, TaskData

PROBES = {
    "user": "id -u; id -g",
    "home": "echo $HOME",
    "path": "echo $PATH",
    "shell": "echo $0",
    "locale": "echo $LC_ALL $LANG",
    "umask": "umask",
    "hostname": "cat /proc/sys/kernel/hostname",
    "uptime": "cut -d. -f1 /proc/uptime",
    "cpus": "nproc",
    "kernel": "uname -r",
    "machine": "uname -m",
    "memory": "grep MemTotal /proc/meminfo",
    "mounts": "cat /proc/self/mountinfo",
    "limits": "ulimit -a",
    "processes": "ls -d /proc/[0-9]* | wc -l",
    "first process": "tr '\\0' ' ' < /proc/1/cmdline",
    "boot": "cat /proc/cmdline",
    "network": "tail -n +3 /proc/net/dev | cut -d: -f1",
    "groups": "id -G",
    "root": "ls /",
    "etc": "ls /etc | wc -l",
    "temporary": "echo x > /tmp/.probe && rm /tmp/.probe && echo writes",
    "here": "pwd",
    "files": "ls -A",
    "python": "python3 -V",
    "packages": "python3 -c 'import pytest' 2>&1 | tail -1",
    "git": "git --version",
    "compiler": "cc --version | head -1",
    "environment": "env | cut -d= -f1 | sort",
    "key": "env | grep -c OPENAI",
    "year": "date +%Y",
    "zone": "date +%Z",
    "sudo": "command -v sudo",
    "devices": "ls /dev",
    "shared memory": "ls /dev/shm | wc -l",
    "failure": "false",
    "no such": "no-such-command 2>&1 | sed 's/^.*: //'",
    "noise": "echo out; echo err >&2; exit 7",
    "empty": "true",
    "long": "seq 1 5000 | tail -c 100000",
}
"""What a program sees of where it runs: forty looks."""
MAY_DIFFER = PROBES.keys() - {
    "machine", "files", "key", "year", "failure", "no such", "noise", "empty", "long", "temporary",
}  # fmt: skip
"""The surroundings themselves: a box has its own. What tools do with them must not differ."""


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What was found of one taskset."""

    taskset: str
    tasks: int
    held: Mapping[str, str]
    """By task, why it is not practised; `*` is all of them."""


def validity(task: TaskData, grader: Grader) -> str | None:
    """Why the task cannot be trusted, or None."""
    if (why := grader.proven(task)) is not None:
        return why
    for name, hack in {"nothing": dict[str, str | None](), **task.hacks}.items():
        grade = grader.grade(task, hack, seed=GOLD_TRIES)
        if grade.verdict is not Verdict.FAILED:
            return f"the hack {name!r} is graded {grade.verdict.value} {grade.reason}".rstrip()
    return None


def check(name: str, tasks: Sequence[TaskData], *, grader: Grader, harness: Harness, boxes: Boxes, plain: Boxes,
          components: Collection[str] = (), seen: Callable[[str, str | None], None] = lambda key, why: None) -> Checked:  # fmt: skip
    """Both gates over a taskset; `components` are policies whose step of the harness is tried too, `seen` hears of each task."""
    held: dict[str, str] = {}
    if (why := differential(harness, boxes=boxes, plain=plain, components=components)) is not None:
        held["*"] = why
    for task in tasks:
        why = validity(task, grader)
        seen(task.key, why)
        if why is not None:
            held[task.key] = why
    return Checked(taskset=name, tasks=len(tasks), held=held)


def differential(
    harness: Harness, *, boxes: Boxes, plain: Boxes, probes: Mapping[str, str] | None = None, components: Collection[str] = ()
) -> str | None:
    """How the harness in a box differs from the harness in production, or None."""
    asked = PROBES if probes is None else probes
    practised, produced = (_transcript(harness, kept, asked, frozenset(components)) for kept in (boxes, plain))
    if len(practised) != len(produced):
        return f"the harness asks {len(practised)} times in a box and {len(produced)} times in production, of the same answers"
    for turn, (inside, outside) in enumerate(zip(practised, produced, strict=True)):
        if inside.get("tools") != outside.get("tools"):
            return f"the tools' schemas differ in turn {turn}"
        here, there = inside["messages"], outside["messages"]
        if len(here) != len(there):
            return f"turn {turn} has {len(here)} messages in a box and {len(there)} in production"
        for one, other in zip(here, there, strict=True):
            name = str(one.get("tool_call_id", "")).removeprefix("probe ")
            if one != other and name not in MAY_DIFFER:
                return f"turn {turn} differs in {name or one.get('role')!r}: {_shown(one)} in a box, {_shown(other)} in production"
    return None


def _shown(message: Mapping[str, Any]) -> str:
    return json.dumps(message.get("content"))[:200]


TRIAL = TaskData(
    taskset="check", key="differential", instruction="Mend the function in lib/one.py.",
    files={"lib/__init__.py": "", "lib/one.py": "def one():\n    return 2\n",
           "test_one.py": "from lib.one import one\n\n\ndef test_one():\n    assert one() == 1\n"},
    editable=("lib/",), tests={"t.py": "def test(): assert True"}, expected=("t.py::test",), gold={}, deadline_s=120.0, most_turns=10,
)  # fmt: skip


def _script(probes: Mapping[str, str], *, finds: bool) -> list[list[dict[str, Any]]]:
    """The calls of each answer; the last one has none."""

    def call(name: str, id: str, **arguments: object) -> dict[str, Any]:
        return {"id": id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}

    broken = {"id": "broken", "type": "function", "function": {"name": "read", "arguments": '{"path": '}}
    return [
        [
            *([call("find", "find", question="Where is one?")] if finds else []),
            call("search", "search", pattern="def "), call("read", "read", path="lib/one.py"), call("test", "test before"),
        ],
        [
            call("edit", "edit", path="lib/one.py", old="return 2", new="return 1"),
            call("edit", "again", path="lib/one.py", old="x", new="y"),
        ],
        [call("read", "no file", path="none.py"), call("read", "outside", path="../x"), call("wander", "unknown"), broken],
        [call("shell", f"probe {name}", command=command) for name, command in probes.items()],
        [
            call("test", "test after"),
            call("edit", "new", path="new/file.py", old="", new="X = 1\n"),
            call("search", "found", pattern="X = "),
        ],
        [],
    ]  # fmt: skip


FOUND = {"texts": ["def "], "places": [{"path": "lib/one.py", "first": 1, "last": 2}]}
"""What a search that is asked by the script says, by the name of its form."""


def _scripted(request: Mapping[str, Any], calls: Sequence[dict[str, Any]]) -> httpx.Response:
    """An answer with these calls; to a step that has a form, what the form is for."""
    name = request.get("response_format", {}).get("json_schema", {}).get("name")
    content = json.dumps({name: FOUND[name]}) if name in FOUND else "" if calls else "Done."
    message = {"role": "assistant", "content": content, "tool_calls": list(calls) or None}
    said = {"choices": [{"message": message, "finish_reason": "tool_calls" if calls else "stop"}], "usage": {"completion_tokens": 1}}
    return httpx.Response(200, json=said)


def _transcript(harness: Harness, boxes: Boxes, probes: Mapping[str, str], components: frozenset[str]) -> list[dict[str, Any]]:
    """The requests of a harness that is answered by the script."""
    script, asked = _script(probes, finds=bool(components)), list[dict[str, Any]]()

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(msgspec.json.decode(request.content, type=dict[str, Any]))
        turn = sum(one["model"] not in components for one in asked)
        is_step = asked[-1]["model"] in components
        return _scripted(asked[-1], [] if is_step else script[min(turn, len(script)) - 1])

    bounds = Bounds(most_turns=TRIAL.most_turns, most_tokens=10_000, deadline=time.monotonic() + TRIAL.deadline_s)
    gateway = httpx.Client(transport=httpx.MockTransport(answer), base_url="http://script")
    service = Interception(
        gateway=gateway, policy="check", tags={}, bounds=bounds, journal=_Nowhere(), permit=Always(), components=components
    )
    is_box = bool(boxes.describe().get("namespaces"))
    with scratched("check") as made, _door(service, in_box=is_box) as (endpoint, socket):
        folder = made / "work"
        folder.mkdir()
        TRIAL.lay_out(folder)
        open_to_all(folder)
        limits = replace(AGENT, memory_bytes=2 << 30) if not is_box else AGENT
        box = boxes.open(BoxSpec(limits=limits, workspace=folder, gateway=socket))
        try:
            launch = harness.launch(endpoint, "key", TRIAL, model="check", python=boxes.python)
            for path, content in launch.files.items():
                box.put(path, content)
            done = box.exec(launch.argv, stdin=launch.stdin, deadline_s=TRIAL.deadline_s, most_output_bytes=MOST_SAID_BYTES)
        finally:
            box.stop()
    if done.ended is not Ended.EXITED or not asked:
        said = (done.stderr or done.stdout).decode(errors="replace")[-300:]
        raise BadInput(f"the harness {harness.name} did not come to its end ({done.ended.value}, code {done.code}): {said}")
    return asked


@contextmanager
def _door(service: Interception, *, in_box: bool) -> Generator[tuple[str, Path | None]]:
    """Where the harness finds the service: the box's socket, or a port for a plain process."""
    if in_box:
        socket = Socket(service=service)
        try:
            yield GATEWAY, socket.path
        finally:
            socket.close()
        return
    server = _Port(("127.0.0.1", 0), Handler)
    server.answer = service.answer
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", None
    finally:
        server.shutdown()
        server.server_close()


class _Port(Answering, socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False


class _Nowhere:
    """A journal of what nobody will go on with."""

    def read(self) -> list[Exchange]:
        """Nothing."""
        return []

    def append(self, exchange: Exchange) -> None:
        """Nowhere."""


@dataclass(frozen=True)
class HeldTasks:
    """A file that says which tasks are not practised, and why; and one beside it that says which tries a person has looked at."""

    path: Path

    def read(self) -> dict[str, dict[str, str]]:
        """By taskset and task."""
        return _read(self.path)

    def looked_at(self) -> dict[str, dict[str, str]]:
        """By taskset and task, the id from which on tries may speak against it."""
        return _read(self._looked_at)

    def write(self, checked: Checked, *, looked_at: Collection[str] = (), but: Collection[str] = ()) -> None:
        """What was found replaces what was known of that taskset, `but` of these tasks, which were not looked at."""
        kept = {key: why for key, why in self.read().get(checked.taskset, {}).items() if key in but}
        now = uuid7()
        known = self.looked_at()
        _write(self._looked_at, known | {checked.taskset: known.get(checked.taskset, {}) | dict.fromkeys(looked_at, now)})
        _write(self.path, self.read() | {checked.taskset: kept | dict(checked.held)})

    def hold(self, taskset: str, found: Mapping[str, str]) -> None:
        """Some more, for what their tries were."""
        held = self.read()
        _write(self.path, held | {taskset: held.get(taskset, {}) | dict(found)})

    @property
    def _looked_at(self) -> Path:
        return self.path.with_name("looked-at.json")


def _read(path: Path) -> dict[str, dict[str, str]]:
    return msgspec.json.decode(path.read_bytes(), type=dict[str, dict[str, str]]) if path.is_file() else {}


def _write(path: Path, content: Mapping[str, Mapping[str, str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.write_bytes(msgspec.json.format(msgspec.json.encode(content)))
    fresh.replace(path)
