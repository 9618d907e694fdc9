"""What Ray's server may answer that the real one seldom does: refusals, boxes that fail or are gone, words without end."""

import base64
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.domain.errors import BadInput, NotFound, RatchetError, Refused, Unavailable
from app.domain.learning.boxes import Box, BoxSpec, Ended, Limits
from app.sandbox.ray_rest import LABEL, RayBoxes, owner

LIMITS = Limits(cpu_s=1, memory_bytes=1 << 28, file_bytes=1 << 20)
Answer = Callable[[httpx.Request], Any]
DONE = {"status": "completed", "exit_code": 0, "stdout": "", "stderr": None, "stdout_truncated": False, "stderr_truncated": False}


class Server:
    """Answers each kind of request with what it was told to; a number is a refusal of that kind."""

    def __init__(self, **answers: Any) -> None:
        self.answers = {"made": {"sandbox_id": "b1"}, "state": {"status": "running"}, "begun": {"exec_id": "e1"}, "said": DONE, "gone": {},
                        "file": {}, "all": {"sandboxes": []}} | answers  # fmt: skip
        self.seen: list[tuple[str, str]] = []
        self.bodies: list[Any] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path.removeprefix("/api/v1")
        self.seen.append((request.method, path))
        self.bodies.append(json.loads(request.content) if request.method == "POST" else request.content)
        kinds = {("POST", 1): "made", ("GET", 2): "state", ("POST", 3): "begun", ("GET", 4): "said", ("DELETE", 2): "gone",
                 ("PUT", 3): "file", ("GET", 1): "all"}  # fmt: skip
        said = self.answers[kinds[request.method, path.count("/")]]
        if isinstance(said, int):
            return httpx.Response(said, json={"error": {"message": "the server's words"}})
        return said if isinstance(said, httpx.Response) else httpx.Response(200, json=said)


def boxes(server: Server) -> RayBoxes:
    return RayBoxes("http://ray", "python:3.11", token="secret", transport=httpx.MockTransport(server))


def opened(server: Server, **spec: Any) -> Box:
    return boxes(server).open(BoxSpec(limits=LIMITS, **spec))


def run(box: Box, *, most: int = 100) -> Any:
    return box.exec(["true"], deadline_s=-100.0, most_output_bytes=most)


def test_a_box_is_asked_for_without_network_and_rights_and_bears_the_name_of_this_process() -> None:
    server = Server()
    opened(server, lifetime_s=0.4)
    asked = server.bodies[0]
    assert (asked["network"], asked["capabilities"], asked["readonly"]) == ("none", [], True)
    assert (asked["ttl_seconds"], asked["resources"], asked["labels"]) == (1, {"memory_limit_mb": 256}, {LABEL: owner()})
    assert boxes(server).describe()["image"] == "python:3.11"


@pytest.mark.parametrize("status", ["error", "terminated"])
def test_a_box_that_does_not_come_up_is_refused_with_the_clusters_words_and_not_left_there(status: str) -> None:
    server = Server(state={"status": status, "image": "python:9", "error": "no such image"})
    with pytest.raises(Refused, match="made no box of 'python:9': no such image"):
        opened(server)
    assert server.seen[-1] == ("DELETE", "/sandboxes/b1")


def test_a_workspace_that_cannot_be_laid_out_is_refused_and_one_with_a_link_too(tmp_path: Path) -> None:
    server = Server(said=DONE | {"exit_code": 2, "stderr": "tar: no space"})
    with pytest.raises(Refused, match="laid out in the box: tar: no space"):
        opened(server, workspace=tmp_path)
    (tmp_path / "link").symlink_to("/etc")
    with pytest.raises(BadInput, match="is a link or a device"):
        opened(server, workspace=tmp_path)
    assert server.seen.count(("DELETE", "/sandboxes/b1")) == 2


@pytest.mark.parametrize(
    ("said", "ended"),
    [
        (DONE, Ended.EXITED), (DONE | {"status": "timeout"}, Ended.TIMEOUT), (DONE | {"status": "cancelled"}, Ended.BOX_LOST),
        (DONE | {"stdout": "x" * 99, "stderr": "yy"}, Ended.OUTPUT_LIMIT), (DONE | {"stderr_truncated": True}, Ended.OUTPUT_LIMIT),
        (404, Ended.BOX_LOST), (503, Ended.BOX_LOST), (500, Ended.BOX_LOST), ({"status": "running"}, Ended.BOX_LOST),
    ],
)  # fmt: skip
def test_how_a_program_ended_and_that_a_server_which_does_not_know_lost_the_box(said: Any, ended: Ended) -> None:
    done = run(opened(Server(said=said)))
    assert (done.ended, done.code) == (ended, 0 if ended is Ended.EXITED else None)
    assert len(done.stdout) <= 100


def test_what_the_interface_has_no_way_for_is_refused_with_another_one() -> None:
    box = opened(Server())
    with pytest.raises(Refused, match="put a file and read that"):
        box.exec(["cat"], stdin=b"x", deadline_s=1, most_output_bytes=1)
    with pytest.raises(Refused, match="keep boxes that are spoken to with bubblewrap"):
        box.talk(["cat"])
    for act in (lambda: box.put("a", b""), box.patch):
        with pytest.raises(Refused, match="this box has no workspace: ask for one"):
            act()


def packed(*entries: tarfile.TarInfo) -> dict[str, Any]:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for entry in entries:
            tar.addfile(entry, io.BytesIO(b"x" * entry.size))
    return DONE | {"stdout": base64.b64encode(archive.getvalue()).decode()}


def entry(name: str, kind: bytes = tarfile.REGTYPE) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.size = kind, int(kind == tarfile.REGTYPE)
    return made


def test_a_patch_is_what_differs_from_the_beginning_and_no_link_travels(tmp_path: Path) -> None:
    (tmp_path / "gone").write_text("1")
    (tmp_path / "same").write_text("x")
    server = Server()
    box = opened(server, workspace=tmp_path)
    server.answers["said"] = packed(entry("./", tarfile.DIRTYPE), entry("./same"), entry("./new"))
    assert box.patch().files == {"new": b"x", "gone": None}
    server.answers["said"] = packed(entry("./out", tarfile.SYMTYPE))
    with pytest.raises(BadInput, match="'out' is a link or a device"):
        box.patch()
    server.answers["said"] = DONE | {"exit_code": 1}
    with pytest.raises(BadInput, match=r"cannot be read back \(exited\)"):
        box.patch()


@pytest.mark.parametrize("answer", [404, {"status": "terminated"}, 503], ids=str)
def test_a_box_that_is_gone_is_not_alive_and_stopping_it_is_no_error(answer: Any) -> None:
    server = Server()
    box = opened(server)
    assert box.alive()
    server.answers["state"] = answer
    assert not box.alive()
    server.answers["gone"] = 404
    box.stop()
    box.stop()
    assert server.seen.count(("DELETE", "/sandboxes/b1")) == 1
    assert not box.alive()


def test_what_a_dead_process_left_is_swept_though_some_of_it_ended_meanwhile() -> None:
    host, _, here = owner().partition("/")
    labels = [f"{host}/dispatcher-999999-1-0", f"{host}/dispatcher-999998-1-0", f"{host}/{here}", "elsewhere/dispatcher-999999-1-0"]
    found = [{"sandbox_id": f"b{n}", "labels": {LABEL: label}} for n, label in enumerate(labels)]
    server = Server(all={"sandboxes": [*found, {"sandbox_id": "b9", "labels": {}}]}, gone=404)
    assert boxes(server).sweep() == 2
    assert [path for method, path in server.seen if method == "DELETE"] == ["/sandboxes/b0", "/sandboxes/b1"]


@pytest.mark.parametrize(
    ("answer", "kind", "said"),
    [
        (httpx.Response(404, json={"error": {"message": "none"}}), NotFound, "with 404: none"),
        (httpx.Response(503, text="busy"), Unavailable, "with 503: busy"),
        (httpx.Response(401, json=["no"]), Refused, r'refused POST /sandboxes with 401: \["no"\]'),
    ],
)
def test_a_refusal_bears_the_servers_words(answer: httpx.Response, kind: type[RatchetError], said: str) -> None:
    with pytest.raises(kind, match=said):
        opened(Server(made=answer))


class Heard(Server):
    """Keeps who asked how as well."""

    def __init__(self, **answers: Any) -> None:
        super().__init__(**answers)
        self.requests: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        return super().__call__(request)


@pytest.mark.parametrize(("lifetime_s", "asked"), [(None, 86_400), (1.9, 1), (2.0, 2), (0.0, 1)])
def test_a_box_lives_for_whole_seconds_one_at_least_and_a_day_where_nothing_is_said(lifetime_s: float | None, asked: int) -> None:
    server = Heard()
    opened(server, lifetime_s=lifetime_s)
    assert server.bodies[0]["ttl_seconds"] == asked


def test_everything_that_a_box_is_asked_with() -> None:
    server = Heard()
    one = boxes(server).open(BoxSpec(limits=Limits(cpu_s=1, memory_bytes=1, file_bytes=2, processes=3)))
    opened(server)
    first, second = (body for body, (method, path) in zip(server.bodies, server.seen, strict=True) if path == "/sandboxes")
    assert first | {"client_token": "", "labels": {}} == {
        "image": "python:3.11", "workdir": "/work", "network": "none", "capabilities": [], "ttl_seconds": 86_400, "readonly": True,
        "resources": {"memory_limit_mb": 1}, "labels": {}, "client_token": "",
    }  # fmt: skip
    assert len({first["client_token"], second["client_token"]}) == 2
    assert {request.headers["authorization"] for request in server.requests} == {"Bearer secret"}
    assert {request.extensions["timeout"]["read"] for request in server.requests} == {60.0}
    assert [request.url.params["wait_seconds"] for request in server.requests if request.url.path.endswith("/b1")] == ["20.0"] * 2
    run(one)
    assert server.bodies[-2] == {
        "command": ["prlimit", "--cpu=1:1", "--as=1:1", "--fsize=2:2", "--nproc=3:3", "--nofile=64:64", "--core=0:0", "--", "true"],
        "cwd": "/work", "timeout_seconds": -100.0,
    }  # fmt: skip
    open_ = RayBoxes("http://ray", "i", transport=httpx.MockTransport(server))
    open_.sweep()
    assert "authorization" not in server.requests[-1].headers
    assert (open_.python, open_.describe()["user_per_box"], open_.describe()["network"]) == ("python3", True, False)


def test_a_box_that_is_not_there_yet_is_waited_for() -> None:
    states = [{"status": "pending"}, {"status": "starting"}, {"status": "running"}]

    class Slow(Server):
        def __call__(self, request: httpx.Request) -> httpx.Response:
            self.answers["state"] = states.pop(0) if states and request.method == "GET" else {"status": "running"}
            return super().__call__(request)

    server = Slow()
    opened(server)
    assert [method for method, _ in server.seen] == ["POST", "GET", "GET", "GET"]


def test_files_are_packed_in_order_readable_and_nobody_s_of_ours(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name, text in (("b", "22"), ("a", "1"), ("sub/c", "333")):
        (tmp_path / name).write_text(text)
    server = Heard()
    box = opened(server, workspace=tmp_path)
    [sent] = [request for request in server.requests if request.method == "PUT"]
    assert sent.url.params["path"] == "/tmp/.workspace.tar"
    with tarfile.open(fileobj=io.BytesIO(sent.content)) as tar:
        entries = [(entry.name, entry.size, entry.mode, entry.uid, entry.gid) for entry in tar]
    assert entries == [("a", 1, 0o644, 0, 0), ("b", 2, 0o644, 0, 0), ("sub/c", 3, 0o644, 0, 0)]
    laid = next(body for body, (method, path) in zip(server.bodies, server.seen, strict=True) if path.endswith("/execs"))
    assert (laid["command"][-5:], laid["timeout_seconds"]) == (["tar", "-xf", "/tmp/.workspace.tar", "-C", "/work"], 60)
    box.put("sub/x", b"data")
    assert (server.requests[-1].url.params["path"], server.requests[-1].content) == ("/work/sub/x", b"data")
    with pytest.raises(BadInput):
        box.put("../x", b"data")


@pytest.mark.parametrize(("out", "err", "ended"), [(60, 40, Ended.EXITED), (60, 41, Ended.OUTPUT_LIMIT), (101, 0, Ended.OUTPUT_LIMIT)])
def test_what_is_said_is_counted_together_and_cut_apart(out: int, err: int, ended: Ended) -> None:
    done = run(opened(Server(said=DONE | {"stdout": "x" * out, "stderr": "y" * err, "exit_code": 3})))
    assert (done.ended, done.code) == (ended, 3 if ended is Ended.EXITED else None)
    assert (len(done.stdout), len(done.stderr)) == (min(out, 100), err)
    assert run(opened(Server(said=DONE | {"stdout_truncated": True}))).ended is Ended.OUTPUT_LIMIT


def test_a_refusal_without_words_is_told_with_the_first_three_hundred_characters() -> None:
    with pytest.raises(Refused) as refused:
        opened(Server(made=httpx.Response(400, text="x" * 301)))
    assert str(refused.value).endswith(f"with 400: {'x' * 300}")
    assert opened(Server(made=httpx.Response(399, json={"sandbox_id": "b2"}))) is not None
