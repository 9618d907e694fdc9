"""Offers a taskset that is written for verifiers (version 0.4, its v1 interface), or a folder of Harbor tasks, over HTTP.

    python ratchet_bridge.py MODULE [--config '{"num_tasks": 20}'] [--host 127.0.0.1] [--port 8500] [--leave-out]
    python ratchet_bridge.py harbor:FOLDER

Runs in an environment of its own (`python3 infra/setup.py verifiers`): verifiers brings some hundred packages, and Ratchet none of them.
Everything that a task does to files or runs happens in a box of Ratchet's, never here: whoever asks opens the box and does what it is told.

    GET  /tasks                    → {"taskset": word, "tasks": [{"key", "hash", "prompt", "has_setup", "agent_s", "scoring_s"}]}
    POST /tasks/KEY/setup          {}                            ┐
    POST /tasks/KEY/score          {"exchanges": [...]}          ├─→ {"id": n, "do": ORDER} or {"done": {...}} or {"error": "…"}
    POST /tasks/KEY/validate       {}                            ┘
    POST /conversations/n          what came of the order        ──→ the next of these

    ORDER: {"run": {"argv", "env"}} → {"code", "stdout", "stderr"}     {"read": {"path", "most"}} → {"data": base64} or {"missing": why}
           {"write": {"path", "data": base64}} → {}                    {"apply": {}}: lay the agent's changes into the box → {}

A score is made as verifiers' own rollout makes one: the task's set-up in a fresh box, what the agent changed, the transcript as a trace,
`finalize`, `score`. An error in it is an error, never a reward of 0.

Not offered, each with its reason: tasks whose user opens the conversation, whose prompt is more than text, that bring tool servers or play
a part in the episode themselves (an `Env` of their own), that want an image, a GPU or a working directory of its own.
"""

import argparse
import asyncio
import base64
import itertools
import json
import re
import sys
import tomllib
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from aiohttp import web
from verifiers import __version__
from verifiers.v1 import graph
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.runtimes.subprocess import SubprocessRuntimeInfo
from verifiers.v1.state import state_cls
from verifiers.v1.tasksets.harbor.taskset import HarborConfig, HarborData, HarborTask, make_tar
from verifiers.v1.utils import loaders
from verifiers.v1.utils.decorators import invoke

FORGOTTEN_S = 900.0
"""A conversation that nobody goes on with for so long is over."""
MOST_BODY_BYTES = 64 << 20


class Talk:
    """One conversation: orders go out, what came of them comes in, and in the end something is done."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.orders: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.answers: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    async def ask(self, order: dict[str, Any]) -> dict[str, Any]:
        """Have it done."""
        await self.orders.put({"id": self.number, "do": order})
        return await asyncio.wait_for(self.answers.get(), FORGOTTEN_S)


class BoxRuntime(vf.Runtime):
    """A box of Ratchet's, as a task sees it."""

    def __init__(self, talk: Talk) -> None:
        super().__init__(f"box-{talk.number}")
        self.talk, self.config = talk, vf.SubprocessConfig()
        self.info = SubprocessRuntimeInfo(id=self.name)

    async def start(self) -> None:
        """Whoever asks has started it."""

    async def run(self, argv: list[str], env: dict[str, str]) -> vf.ProgramResult:
        """A program, in its workspace."""
        said = await self.talk.ask({"run": {"argv": argv, "env": self.process_env(env)}})
        return vf.ProgramResult(exit_code=said["code"], stdout=said["stdout"], stderr=said["stderr"])

    async def _read(self, path: str, max_bytes: int | None = None) -> bytes:
        said = await self.talk.ask({"read": {"path": path, "most": max_bytes}})
        if "missing" in said:
            raise vf.SandboxError(f"read {path!r}: {said['missing']}")
        return base64.b64decode(said["data"])

    async def write(self, path: str, data: bytes) -> None:
        """A file, with the folders above it."""
        await self.talk.ask({"write": {"path": path, "data": base64.b64encode(data).decode()}})


def trace_of(task: vf.Task) -> vf.Trace:
    """An empty one."""
    recorded = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
    config = AgentConfig(runtime=vf.SubprocessConfig())
    return vf.Trace(task=recorded, state=state_cls(type(task))(), agent=vf.AgentInfo(config=config))


def say(trace: vf.Trace, exchanges: list[dict[str, Any]]) -> None:
    """Put what was said into a trace, turn after turn, as verifiers' own interception does."""
    for number, exchange in enumerate(exchanges):
        choice = exchange["answer"]["choices"][0]
        prompt = [message_of(one) for one in exchange["request"]["messages"]]
        usage = exchange["answer"].get("usage") or {}
        response = vf.Response(
            id=str(number), created=0, model="policy", message=message_of(choice["message"]), finish_reason=finish_of(choice),
            usage=vf.Usage(prompt_tokens=usage.get("prompt_tokens", 0), completion_tokens=usage.get("completion_tokens", 0)),
        )  # fmt: skip
        node = graph.prepare_turn(trace, prompt).commit(response)
        trace.calls.append(vf.ModelCall(node=node, model="policy", finish_reason=response.finish_reason, usage=response.usage))


def finish_of(choice: dict[str, Any]) -> str:
    """As verifiers calls it."""
    said = choice.get("finish_reason")
    return said if said in ("stop", "length", "tool_calls") else "stop"


def message_of(said: dict[str, Any]) -> vf.Message:
    """OpenAI's message as verifiers'."""
    if said["role"] == "assistant":
        calls = [
            vf.ToolCall(id=call.get("id") or "", name=call["function"]["name"], arguments=call["function"]["arguments"])
            for call in said.get("tool_calls") or []
        ]
        return vf.AssistantMessage(content=said.get("content"), tool_calls=calls or None)
    if said["role"] == "tool":
        return vf.ToolMessage(tool_call_id=said.get("tool_call_id") or "", content=said.get("content") or "")
    kind = vf.SystemMessage if said["role"] == "system" else vf.UserMessage
    return kind(content=said.get("content") or "")


async def set_up(task: vf.Task, given: dict[str, Any], talk: Talk) -> dict[str, Any]:
    """Lay out what the agent begins with."""
    await invoke(task.setup, {"trace": trace_of(task), "runtime": BoxRuntime(talk)})
    return {}


async def score(task: vf.Task, given: dict[str, Any], talk: Talk) -> dict[str, Any]:
    """What an episode is worth."""
    trace, runtime = trace_of(task), BoxRuntime(talk)
    await invoke(task.setup, {"trace": trace, "runtime": runtime})
    await talk.ask({"apply": {}})
    say(trace, given["exchanges"])
    trace.stop("agent_completed")
    await invoke(task.finalize, {"trace": trace, "runtime": runtime})
    await task.score(trace, runtime)
    rewards = {name: None if one is None else one.value for name, one in trace.rewards.items()}
    return {"reward": trace.reward, "rewards": rewards, "metrics": trace.metrics}


async def validate(task: vf.Task, given: dict[str, Any], talk: Talk) -> dict[str, Any]:
    """Whether its own solution holds; None where there is no check without a model."""
    runtime = BoxRuntime(talk)
    await invoke(task.setup, {"trace": trace_of(task), "runtime": runtime})
    return {"valid": await task.validate(runtime)}


ACTS: dict[str, Callable[[vf.Task, dict[str, Any], Talk], Awaitable[dict[str, Any]]]] = {
    "setup": set_up,
    "score": score,
    "validate": validate,
}


class FolderTask(HarborTask):
    """verifiers' own task for Harbor's folders; its solution is tried as the agent's work would be."""

    async def validate(self, runtime: vf.Runtime) -> bool | None:
        """Run `solution/solve.sh`, then the verifier."""
        folder = Path(self.data.task_dir) / "solution"
        if not (folder / "solve.sh").is_file():
            return None
        await runtime.write("/tmp/solution.tgz", make_tar(folder))
        unpack = "mkdir -p /tmp/solution && tar -xzf /tmp/solution.tgz -C /tmp/solution && bash /tmp/solution/solve.sh"
        done = await runtime.run(["sh", "-c", unpack], {})
        if done.exit_code:
            raise vf.TaskError(f"solution/solve.sh ended with code {done.exit_code}: {done.stderr.strip()[-300:]}")
        trace = trace_of(self)
        await self.score(trace, runtime)
        return trace.reward >= 1.0


class Folder(vf.Taskset[FolderTask, HarborConfig]):
    """Harbor's folders (`task.toml`, `instruction.md`, `tests/test.sh`), each a task of one step.

    Read here, because the package `harbor` wants Python 3.12; what of a folder this reading does not understand is refused by name.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(HarborConfig(id="harbor"))
        self.folder = folder

    def load(self) -> Iterator[FolderTask]:
        """In order of their names."""
        found = sorted(self.folder.rglob("task.toml"))
        if not found:
            raise ValueError(f"no task.toml is below {self.folder}")
        for place in found:
            yield FolderTask(self.data_of(place), self.config.task)

    def data_of(self, place: Path) -> HarborData:
        """One folder. Raises `ValueError` for what cannot be done here."""
        said, folder = tomllib.loads(place.read_text()), place.parent
        environment, verifier, agent = (said.get(name) or {} for name in ("environment", "verifier", "agent"))
        if said.get("steps") or said.get("artifacts") or verifier.get("collect") or environment.get("mcp_servers"):
            raise ValueError(f"{folder.name}: steps, artifacts, collect hooks and tool servers are not offered")
        if not (folder / "tests" / "test.sh").is_file():
            raise ValueError(f"{folder.name}: it has no tests/test.sh, so nobody could grade it")
        image = environment.get("docker_image") or ("a Dockerfile" if (folder / "environment" / "Dockerfile").is_file() else None)
        return HarborData(
            name=folder.name, prompt=(folder / "instruction.md").read_text().strip(), task_dir=str(folder), image=image,
            workdir=environment.get("workdir"), upload_environment=image is None and (folder / "environment").is_dir(),
            timeout=vf.TaskTimeout(agent=agent.get("timeout_sec"), scoring=verifier.get("timeout_sec")),
            env=environment.get("env") or {}, verifier_env=verifier.get("env") or {},
        )  # fmt: skip


def why_not(task: vf.Task) -> str | None:
    """What keeps a task from being offered, or None."""
    data = task.data
    if data.prompt is None:
        return "its user opens the conversation"
    if not isinstance(data.prompt, str) and not all(m.role == "user" and isinstance(m.content, str) for m in data.prompt):
        return "its prompt is a conversation, or more than text"
    if task.toolsets(task.config):
        return "it brings tool servers, and the harness has tools of its own"
    if task.NEEDS_CONTAINER or data.image is not None or data.workdir is not None or data.agent_user is not None:
        return f"it wants a machine of its own (image {data.image}, folder {data.workdir}, user {data.agent_user})"
    if data.resources.gpu is not None:
        return "it wants a GPU"
    if getattr(data, "env", None) or getattr(data, "verifier_env", None):
        return "its environment variables may be secrets of this machine"
    return None


class Bridge:
    """The tasks, and the conversations about them."""

    def __init__(self, taskset: vf.Taskset, name: str, *, leave_out: bool) -> None:
        self.name = re.sub(r"[^a-z0-9._-]+", "-", name.lower()).strip("-._")[:60]
        loaded = list(taskset)
        unfit = {key_of(task): why for task in loaded if (why := why_not(task)) is not None}
        if unfit and not leave_out:
            key, why = next(iter(unfit.items()))
            raise ValueError(f"{len(unfit)} of {len(loaded)} tasks cannot be offered; {key}: {why}. --leave-out offers the others")
        self.tasks = {key_of(task): task for task in loaded if key_of(task) not in unfit}
        if len(self.tasks) + len(unfit) != len(loaded):
            raise ValueError("two tasks have one key")
        if not self.tasks:
            raise ValueError(f"no task can be offered: {sorted(set(unfit.values()))}")
        self.left_out = unfit
        self.talks: dict[int, tuple[Talk, asyncio.Task[None]]] = {}
        self.numbers = itertools.count(1)

    def listing(self) -> dict[str, Any]:
        """What is offered."""
        return {
            "taskset": self.name, "verifiers": __version__, "left_out": self.left_out,
            "tasks": [
                {
                    "key": key, "hash": task.hash, "has_setup": type(task).setup is not vf.Task.setup and has_setup(task),
                    "prompt": "\n\n".join(filter(None, [task.data.system_prompt, task.data.prompt_text])),
                    "agent_s": task.data.timeout.agent, "scoring_s": task.data.timeout.scoring,
                }
                for key, task in self.tasks.items()
            ],
        }  # fmt: skip

    def begin(self, act: str, key: str, given: dict[str, Any]) -> Talk:
        """A conversation."""
        talk = Talk(next(self.numbers))
        self.talks[talk.number] = talk, asyncio.create_task(self.converse(ACTS[act], self.tasks[key], given, talk))
        asyncio.get_running_loop().call_later(2 * FORGOTTEN_S, self.talks.pop, talk.number, None)
        return talk

    async def converse(self, act: Callable[..., Awaitable[dict[str, Any]]], task: vf.Task, given: dict[str, Any], talk: Talk) -> None:
        """To its end; what goes wrong is said."""
        try:
            ended: dict[str, Any] = {"done": await act(task, given, talk)}
        except Exception as error:  # noqa: BLE001 - whatever somebody's task raises is what has to be told
            ended = {"error": f"{type(error).__name__}: {error}"[:2000]}
        await talk.orders.put(ended)

    async def next_of(self, number: int) -> dict[str, Any]:
        """The next order, or the end."""
        talk, working = self.talks[number]
        said = await talk.orders.get()
        if "do" not in said:
            await working
            del self.talks[number]
        return said


def key_of(task: vf.Task) -> str:
    """A name where it has one: what people type."""
    return task.data.name or task.data.id or task.key


def has_setup(task: vf.Task) -> bool:
    """Whether set-up lays anything out; Harbor's does where there is an environment to upload."""
    return getattr(task.data, "upload_environment", True)


def service(bridge: Bridge) -> web.Application:
    """The endpoints."""

    async def tasks(request: web.Request) -> web.Response:
        return web.json_response(bridge.listing())

    async def begin(request: web.Request) -> web.Response:
        key, act = request.match_info["key"], request.match_info["act"]
        if key not in bridge.tasks or act not in ACTS:
            return web.json_response({"error": f"there is no task {key!r}, or no act {act!r}: GET /tasks lists them"}, status=404)
        talk = bridge.begin(act, key, json.loads(await request.read() or b"{}"))
        return web.json_response(await bridge.next_of(talk.number))

    async def go_on(request: web.Request) -> web.Response:
        number = int(request.match_info["number"])
        if number not in bridge.talks:
            return web.json_response({"error": "this conversation is over: begin another"}, status=404)
        await bridge.talks[number][0].answers.put(json.loads(await request.read()))
        return web.json_response(await bridge.next_of(number))

    made = web.Application(client_max_size=MOST_BODY_BYTES)
    made.add_routes([web.get("/tasks", tasks), web.post(r"/tasks/{key:.+}/{act}", begin), web.post(r"/conversations/{number:\d+}", go_on)])
    return made


def load(wanted: str, config: str) -> vf.Taskset:
    """A taskset by its module, or a folder. Raises what verifiers raises."""
    if wanted.startswith("harbor:"):
        return Folder(Path(wanted.removeprefix("harbor:")).resolve())
    kind = loaders.taskset_class(wanted)
    if loaders.environment_class(wanted) is not loaders.SingleAgentEnv:
        raise ValueError(f"{wanted} plays a part in its episodes itself (an Env of its own): only tasks are offered here")
    made = kind(loaders.taskset_config_type(wanted).model_validate({**json.loads(config), "id": wanted}))
    if not made.bounded:
        raise ValueError(f"{wanted} has no end: give it one in --config")
    if kind.toolsets(made.config):
        raise ValueError(f"{wanted} brings tool servers, and the harness has tools of its own")
    return made


def main() -> int:
    """Serve."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("taskset", help="a module that exports a verifiers taskset, or harbor:FOLDER")
    parser.add_argument("--config", default="{}", help="JSON of the taskset's own configuration")
    parser.add_argument("--host", default="127.0.0.1", help="keep it on loopback: who can reach it reads the hidden tests")
    parser.add_argument("--port", type=int, default=8500, help="0 takes a free one")
    parser.add_argument("--leave-out", action="store_true", help="offer the rest where some tasks cannot be offered")
    asked = parser.parse_args()
    try:
        bridge = Bridge(
            load(asked.taskset, asked.config), asked.taskset.rpartition("/")[2].replace("harbor:", "harbor-"), leave_out=asked.leave_out
        )
    except Exception as error:  # noqa: BLE001 - whatever somebody's module raises is the sentence that they need
        print(f"ratchet bridge: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    for key, why in bridge.left_out.items():
        print(f"left out: {key}: {why}", file=sys.stderr)

    async def serve() -> None:
        runner = web.AppRunner(service(bridge))
        await runner.setup()
        site = web.TCPSite(runner, asked.host, asked.port)
        await site.start()
        port = runner.addresses[0][1]
        print(f"bridge ready taskset={bridge.name} tasks={len(bridge.tasks)} address=http://{asked.host}:{port}", flush=True)
        await asyncio.Event().wait()

    asyncio.run(serve())
    return 0


if __name__ == "__main__":
    sys.exit(main())
