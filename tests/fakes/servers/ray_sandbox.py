"""Ray's sandbox server: its own REST application, with hosts that run commands as plain processes of a folder in the place of gVisor's."""

import asyncio
import shutil
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import anyio.from_thread
import httpx

import tests.ray_manners  # noqa: F401  # isort: skip - before Ray
from ray.experimental.sandbox.http.app import create_app
from ray.experimental.sandbox.http.schemas import SandboxAPISettings

from app.domain.learning.boxes import WORKSPACE, Ended, Limits
from app.sandbox.processes import BoxSpec, ProcessBox

ROOMY = Limits(cpu_s=60, memory_bytes=1 << 32, file_bytes=1 << 28)
STATUS = {Ended.EXITED: "completed", Ended.TIMEOUT: "timeout", Ended.OUTPUT_LIMIT: "completed"}


class Remote:
    """A method as an actor has it."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method

    def remote(self, *args: Any, **named: Any) -> Awaitable[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        future.set_result(self._method(*args, **named))
        return future


class Host:
    """What Ray runs as an actor beside each sandbox."""

    def __init__(self, name: str, spec: dict[str, Any], most: int) -> None:
        self.name, self.spec, self.most, self.status = name, spec, most, "pending"
        self.box = ProcessBox(BoxSpec(limits=ROOMY))
        self.root, self.born, self.done = self.box.folder, time.monotonic(), dict[str, dict[str, Any]]()
        for method in ("boot", "describe", "start_exec", "get_exec", "write_file", "read_file", "terminate"):
            setattr(self, method, Remote(getattr(self, f"do_{method}")))

    def do_boot(self) -> None:
        self.status = "running"

    def do_describe(self, wait_seconds: float = 0.0) -> dict[str, Any]:
        if time.monotonic() - self.born > self.spec["ttl_seconds"]:
            self.do_terminate()
        return {
            "sandbox_id": self.name, "status": self.status, "image": self.spec["image"], "created_at": datetime.now(UTC).isoformat(),
            "network": self.spec["network"], "labels": self.spec["labels"],
        }  # fmt: skip

    def do_start_exec(self, command: list[str], cwd: str, env: dict[str, str], timeout_seconds: float, **_: Any) -> dict[str, Any]:
        if self.do_describe()["status"] != "running":
            return {"error_code": "conflict", "message": "the sandbox is not running"}
        inside = [sys.executable if word == "python3" else self._inside(word) for word in command]
        # what limits it are the command's own words; the path of prlimit is the machine's
        done = self.box.exec(["/usr/bin/env", *inside], deadline_s=timeout_seconds, most_output_bytes=self.most)
        number = f"exec-{len(self.done)}"
        self.done[number] = {
            "exec_id": number, "status": STATUS[done.ended], "exit_code": done.code, "stdout": done.stdout.decode(errors="replace"),
            "stderr": done.stderr.decode(errors="replace"), "stdout_truncated": done.ended is Ended.OUTPUT_LIMIT, "duration_seconds": 0.0,
        }  # fmt: skip
        return {"exec_id": number, "status": "running"}

    def do_get_exec(self, exec_id: str, wait_seconds: float = 0.0) -> dict[str, Any]:
        return self.done.get(exec_id, {"error_code": "exec_not_found", "message": exec_id})

    def _inside(self, word: str) -> str:
        """What the box calls a path, as this machine does."""
        if word.startswith("/tmp/."):
            return f"{self.root.parent}/.{self.name}{word.removeprefix('/tmp/')}"
        return str(self.root) + word.removeprefix(WORKSPACE) if word == WORKSPACE or word.startswith(f"{WORKSPACE}/") else word

    def _path(self, path: str) -> Path:
        return Path(self._inside(path))

    def do_write_file(self, path: str, body: bytes, append: bool = False) -> dict[str, Any]:
        self._path(path).parent.mkdir(parents=True, exist_ok=True)
        self._path(path).write_bytes(body)
        return {}

    def do_read_file(self, path: str) -> dict[str, Any]:
        return {"content": self._path(path).read_bytes()}

    def do_terminate(self) -> None:
        self.status = "terminated"
        self.box.stop()
        for left in Path(tempfile.gettempdir()).glob(f".{self.name}*"):
            left.unlink()


class Resolver:
    """Where the application finds its hosts."""

    def __init__(self) -> None:
        self.hosts: dict[str, Host] = {}

    def create(self, name: str, options: dict[str, Any], made: dict[str, Any], get_if_exists: bool = True) -> Host:
        return self.hosts.setdefault(name, Host(name, made["spec"], made["settings"]["max_output_bytes"]))

    def get(self, name: str) -> Host | None:
        return self.hosts.get(name)

    def forget(self, name: str) -> None:
        self.hosts.pop(name, None)

    def list_names(self) -> list[str]:
        return list(self.hosts)

    def kill(self, host: Host) -> None:
        shutil.rmtree(host.root, ignore_errors=True)


class RayTransport(httpx.BaseTransport):
    """Hands requests to the application in a loop of its own, as over a network."""

    def __init__(self, resolver: Resolver, most_output_bytes: int = 10 << 20) -> None:
        settings = SandboxAPISettings(max_output_bytes=most_output_bytes)
        self.resolver, self.inner = resolver, httpx.ASGITransport(create_app(settings, handle_resolver=resolver))

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        async def handled() -> httpx.Response:
            body = request.read()
            asked = httpx.Request(request.method, request.url, headers=request.headers, content=body)
            answered = await self.inner.handle_async_request(asked)
            return httpx.Response(answered.status_code, headers=answered.headers, content=await answered.aread())

        with anyio.from_thread.start_blocking_portal() as portal:
            return portal.call(handled)
