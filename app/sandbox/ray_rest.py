"""Boxes of a cluster: Ray's sandbox (gVisor) over its REST interface, version 1 of `ray.experimental.sandbox` as in Ray 2.60.

Only HTTP: nothing of Ray is imported, and the server may be anywhere. A box is created under a token of ours, so that a request whose
answer was lost makes no second one; it carries the label of this process, so that `sweep` finds what a killed dispatcher left, and ends by
itself at its time to live. What a box says comes through the server as text: what is no UTF-8 arrives replaced.

Not covered: a way to the gateway (the server's networks are none, or everything), and programs that are spoken to.
"""

import base64
import io
import os
import socket
import ssl
import tarfile
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import httpx

from app.domain.errors import BadInput, NotFound, Refused, Unavailable
from app.domain.learning.boxes import MOST_PATCH_BYTES, WORKSPACE, Box, BoxSpec, Ended, Executed, Patch, Talk, checked_path
from app.sandbox.control_groups import born, owner_lives
from app.sandbox.limits import plain_limits
from app.sandbox.workspaces import changes_of, read_folder

LABEL = "ratchet-owner"
MOST_LIFETIME_S = 86_400
WAIT_S = 20.0
"""How long one request for news waits at the server."""
GRACE_S = 5.0
GONE = frozenset({"error", "terminated"})
PACKED = "/tmp/.workspace.tar"
PACK = (
    "import base64,io,os,sys,tarfile\nb=io.BytesIO()\nt=tarfile.open(fileobj=b,mode='w')\nt.add(sys.argv[1],arcname='.')\nt.close()\n"
    "sys.stdout.write(base64.b64encode(b.getvalue()).decode())"
)


@dataclass(frozen=True)
class RayBoxes:
    """The keeper: a client of the server."""

    url: str
    image: str
    """Container image of every box: a Python 3 with tar, nothing secret in it."""
    token: str | None = None
    python_in_image: str = "python3"
    transport: httpx.BaseTransport | None = None

    @property
    def python(self) -> str:
        return self.python_in_image

    def open(self, spec: BoxSpec) -> Box:
        if spec.gateway is not None:
            raise Refused("Ray's sandbox has no socket to the gateway: run the harness in a bubblewrap box, and its tools here")
        if spec.scratch:
            raise Refused("Ray's sandbox mounts no folders of its own: grade what needs them in bubblewrap boxes")
        lifetime_s = MOST_LIFETIME_S if spec.lifetime_s is None else max(1, int(spec.lifetime_s))
        asked = {
            "image": self.image, "workdir": WORKSPACE, "network": "none", "capabilities": [], "ttl_seconds": lifetime_s,
            "resources": {"memory_limit_mb": max(1, spec.limits.memory_bytes >> 20)}, "labels": {LABEL: owner()}, "readonly": True,
            "client_token": uuid.uuid4().hex,
        }  # fmt: skip
        made = self._client().ask("POST", "/sandboxes", json=asked)
        box = RayBox(self._client(), made["sandbox_id"], spec, self.python)
        try:
            box.begin()
        except BaseException:
            box.stop()
            raise
        return box

    def sweep(self) -> int:
        """Stop the boxes of processes of this machine that are gone."""
        client, left = self._client(), 0
        for box in client.ask("GET", "/sandboxes")["sandboxes"]:
            host, _, name = box["labels"].get(LABEL, "").partition("/")
            if host == socket.gethostname() and not owner_lives(name):
                with suppress(NotFound):  # it ended by itself meanwhile
                    client.ask("DELETE", f"/sandboxes/{box['sandbox_id']}")
                left += 1
        return left

    def describe(self) -> dict[str, object]:
        return {"kept_by": "ray", "network": False, "namespaces": True, "user_per_box": True, "memory_of": "gVisor", "image": self.image}

    def _client(self) -> "_Client":
        return _Client(self.url, self.token, self.transport)


def owner() -> str:
    """This process, as no other is called."""
    return f"{socket.gethostname()}/dispatcher-{os.getpid()}-{born(os.getpid())}-0"


@dataclass
class RayBox:
    """One box; see `RayBoxes`."""

    client: "_Client"
    name: str
    spec: BoxSpec
    python: str
    before: dict[str, bytes] = field(default_factory=dict[str, bytes])
    _stopped: bool = False

    def begin(self) -> None:
        """Wait until it runs, and lay the workspace out."""
        while (state := self.client.ask("GET", f"/sandboxes/{self.name}", params={"wait_seconds": WAIT_S}))["status"] != "running":
            if state["status"] in GONE:
                raise Refused(f"the cluster made no box of {state['image']!r}: {state['error']}")
        if self.spec.workspace is not None:
            self.before = read_folder(self.spec.workspace)
            self._upload(PACKED, _packed(self.before))
            done = self.exec(["tar", "-xf", PACKED, "-C", WORKSPACE], deadline_s=60, most_output_bytes=1 << 12)
            if done.code != 0:
                raise Refused(f"the workspace cannot be laid out in the box: {done.stderr.decode(errors='replace')[:300]}")

    def exec(self, argv: Sequence[str], *, stdin: bytes = b"", deadline_s: float, most_output_bytes: int) -> Executed:
        if stdin:
            raise Refused("Ray's sandbox has no standard input: put a file and read that")
        asked = {"command": plain_limits(argv, self.spec.limits), "cwd": WORKSPACE, "timeout_seconds": deadline_s}
        try:
            begun = self.client.ask("POST", f"/sandboxes/{self.name}/execs", json=asked)
            said = self._await(f"/sandboxes/{self.name}/execs/{begun['exec_id']}", time.monotonic() + deadline_s + GRACE_S)
        except (NotFound, Unavailable, Refused):
            return _ended(Ended.BOX_LOST)
        out, err = ((said[name] or "").encode() for name in ("stdout", "stderr"))
        how = {"completed": Ended.EXITED, "timeout": Ended.TIMEOUT}.get(said["status"], Ended.BOX_LOST)
        if len(out) + len(err) > most_output_bytes or said["stdout_truncated"] or said["stderr_truncated"]:
            how = Ended.OUTPUT_LIMIT
        code = said["exit_code"] if how is Ended.EXITED else None
        return Executed(ended=how, code=code, stdout=out[:most_output_bytes], stderr=err[:most_output_bytes])

    def talk(self, argv: Sequence[str]) -> Talk:
        raise Refused("Ray's sandbox has no standing input: keep boxes that are spoken to with bubblewrap")

    def put(self, path: str, data: bytes) -> None:
        self._need_workspace()
        self._upload(f"{WORKSPACE}/{checked_path(path)}", data)

    def patch(self) -> Patch:
        self._need_workspace()
        packing = [self.python, "-c", PACK, WORKSPACE]
        done = self.exec(packing, deadline_s=60, most_output_bytes=4 * MOST_PATCH_BYTES)
        if done.ended is not Ended.EXITED or done.code != 0:
            raise BadInput(f"the workspace cannot be read back ({done.ended.value}): it is larger than what may travel, or the box is gone")
        return changes_of(self.before, _unpacked(base64.b64decode(done.stdout)).items())

    def alive(self) -> bool:
        try:
            return not self._stopped and self.client.ask("GET", f"/sandboxes/{self.name}")["status"] == "running"
        except (NotFound, Unavailable):
            return False

    def stop(self) -> None:
        if not self._stopped:
            with suppress(NotFound):  # its time to live was over
                self.client.ask("DELETE", f"/sandboxes/{self.name}")
            self._stopped = True

    def _await(self, path: str, until: float) -> dict[str, Any]:
        while (said := self.client.ask("GET", path, params={"wait_seconds": WAIT_S}))["status"] == "running":
            if time.monotonic() > until:
                raise Unavailable("the server does not end what is late")
        return said

    def _upload(self, path: str, data: bytes) -> None:
        self.client.ask("PUT", f"/sandboxes/{self.name}/files", params={"path": path}, content=data)

    def _need_workspace(self) -> None:
        if self.spec.workspace is None:
            raise Refused("this box has no workspace: ask for one")


@cache
def _certificates() -> ssl.SSLContext:
    """Read once: a grade asks some twenty times, and reading them takes 20 ms."""
    return httpx.create_ssl_context()


@dataclass(frozen=True)
class _Client:
    url: str
    token: str | None
    transport: httpx.BaseTransport | None

    def ask(
        self,
        method: str,
        path: str,
        *,
        json: dict[str, Any] | None = None,
        params: dict[str, Any] | None = None,
        content: bytes | None = None,
    ) -> dict[str, Any]:
        """Raises `NotFound`, `Refused` and `Unavailable` with what the server said."""
        headers = {} if self.token is None else {"authorization": f"Bearer {self.token}"}
        try:
            with httpx.Client(
                base_url=self.url, transport=self.transport, timeout=WAIT_S + 40.0, headers=headers, verify=_certificates()
            ) as client:
                answered = client.request(method, f"/api/v1{path}", json=json, params=params, content=content)
        except httpx.HTTPError as error:
            raise Unavailable(f"Ray's sandbox server at {self.url} does not answer ({error}): check that it runs") from error
        if answered.status_code < 400:
            return answered.json() if answered.content else {}
        try:
            said = answered.json()["error"]["message"]
        except (ValueError, KeyError, TypeError):
            said = answered.text[:300]
        kind = {404: NotFound, 503: Unavailable}.get(answered.status_code, Refused)
        raise kind(f"Ray's sandbox server refused {method} {path} with {answered.status_code}: {said}")


def _packed(files: dict[str, bytes]) -> bytes:
    """A tar archive whose files are nobody's but the box's: with owners of ours they could not be changed in there."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for path, content in sorted(files.items()):
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode, entry.uid, entry.gid = len(content), 0o644, 0, 0
            tar.addfile(entry, io.BytesIO(content))
    return archive.getvalue()


def _unpacked(archive: bytes) -> dict[str, bytes]:
    """Files by path. Raises `BadInput` for links and devices."""
    files: dict[str, bytes] = {}
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for entry in tar:
            path = entry.name.removeprefix("./")
            if entry.isfile():
                opened = tar.extractfile(entry)
                files[path] = opened.read() if opened is not None else b""
            elif not entry.isdir():
                raise BadInput(f"{path!r} is a link or a device: only files travel")
    return files


def _ended(how: Ended) -> Executed:
    return Executed(ended=how, code=None, stdout=b"", stderr=b"")
