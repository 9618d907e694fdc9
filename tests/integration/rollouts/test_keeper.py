"""The first process of a box, spoken to over its own pipes: in a namespace of processes that is bare, so that only the keeper is tried."""

import base64
import json
import marshal
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.sandbox import keeper

NAMESPACE = ("unshare", "--user", "--map-root-user", "--net", "--pid", "--fork", "--mount-proc", "--kill-child")
SOON_S = 20.0


class Kept:
    """A keeper and its two pipes."""

    def __init__(self, *arguments: str) -> None:
        command = [*NAMESPACE, sys.executable, str(Path(keeper.__file__)), *arguments]
        told = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "RATCHET_SECRET": "ours"}  # as a box is told, and more than that
        told.pop("LD_LIBRARY_PATH", None)
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=told)
        self.ready = self.hear()

    def hear(self) -> dict[str, bytes]:
        assert self.process.stdout is not None
        return {name: base64.b64decode(text) for name, text in json.loads(self.process.stdout.readline()).items()}

    def ask(self, **asked: Any) -> dict[str, bytes]:
        assert self.process.stdin is not None
        self.process.stdin.write(base64.b64encode(marshal.dumps(asked)) + b"\n")
        self.process.stdin.flush()
        return self.hear()

    def run(self, *argv: str, stdin: bytes = b"", deadline_s: float = SOON_S, most: int = 10_000) -> dict[str, bytes]:
        return self.ask(op="exec", argv=list(argv), stdin=stdin, deadline_s=deadline_s, most=most)

    def sh(self, command: str, **more: Any) -> dict[str, bytes]:
        return self.run("/bin/sh", "-c", command, **more)

    def end(self) -> int:
        """Let go of it; its exit code."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        code = self.process.wait(SOON_S)
        self.process.stdout.close()
        return code


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    opened = Kept(str(tmp_path))
    yield opened
    opened.end()


def test_it_is_ready_serves_until_it_is_let_go_and_ends_well(tmp_path: Path) -> None:
    kept = Kept(str(tmp_path))
    assert kept.ready == {}
    assert kept.ask(op="ping") == {}
    assert kept.end() == 0


def test_outside_a_namespace_of_its_own_it_does_nothing(tmp_path: Path) -> None:
    assert keeper.main([str(tmp_path)]) == 3, "it would kill every process of this user"


def test_a_program_is_run_in_the_workspace_and_heard_out(kept: Kept, tmp_path: Path) -> None:
    said = kept.sh("pwd; cat; echo bad >&2; exit 7", stdin=b"x" * 200_000, most=300_000)
    assert said == {"ended": b"exited", "code": b"7", "stdout": f"{tmp_path}\n".encode() + b"x" * 200_000, "stderr": b"bad\n"}
    assert kept.sh("env | cut -d= -f1 | sort | xargs")["stdout"] == b"HOME LC_ALL PATH PWD PYTHONDONTWRITEBYTECODE\n", "nothing of ours"


def test_how_a_program_ended_is_told(kept: Kept) -> None:
    assert kept.sh("kill -9 $$") == {"ended": b"exited", "code": b"137", "stdout": b"", "stderr": b""}
    assert kept.run("/no/such/program")["code"] == b"127"
    assert b"No such file" in kept.run("/no/such/program")["stderr"]
    late = kept.sh("echo on; sleep 600", deadline_s=3.0)
    assert (late["ended"], late["stdout"]) == (b"timeout", b"on\n")
    loud = kept.sh("while true; do echo xxxxxxxxx; done", most=100)
    assert (loud["ended"], len(loud["stdout"])) == (b"output_limit", 100)


def test_a_program_that_does_not_listen_holds_nothing_up(kept: Kept) -> None:
    unread = b"x" * 1_000_000  # more than a pipe takes
    assert kept.sh("exec 0<&-; echo deaf", stdin=unread)["stdout"] == b"deaf\n"
    assert kept.sh("echo slow", stdin=unread) == {"ended": b"exited", "code": b"0", "stdout": b"slow\n", "stderr": b""}


def test_what_a_program_leaves_behind_is_gone_before_the_answer(kept: Kept) -> None:
    kept.sh("sleep 600 & setsid sleep 600 & until [ $(cat /proc/[0-9]*/comm | grep -c sleep) = 2 ]; do :; done")
    assert b"sleep" not in kept.sh("cat /proc/[0-9]*/comm")["stdout"]


def test_files_are_written_with_their_folders_and_through_no_link(kept: Kept, tmp_path: Path) -> None:
    outside = tmp_path.with_name(f"{tmp_path.name}-outside")
    outside.mkdir()
    (tmp_path / "out").symlink_to(outside)
    (tmp_path / "file").symlink_to(outside / "victim")
    assert kept.ask(op="put", path="a/b/c.txt", data=b"one") == {}
    assert kept.ask(op="put", path="a/b/c.txt", data=b"2") == {}, "what was there is replaced"
    assert (tmp_path / "a" / "b" / "c.txt").read_bytes() == b"2"
    assert b"Not a directory" in kept.ask(op="put", path="out/x", data=b"x")["refused"]
    assert b"symbolic links" in kept.ask(op="put", path="file", data=b"x")["refused"]
    assert list(outside.iterdir()) == []
    assert kept.ask(op="ping") == {}, "it serves on"


UP = """
import fcntl, socket, struct
fcntl.ioctl(socket.socket(), 0x8914, struct.pack("16sH14x", b"lo", 1))  # SIOCSIFFLAGS: bwrap does it where there is one
"""
CALL = """
import sys
c = socket.create_connection(("127.0.0.1", 8080), 10)
c.sendall(sys.argv[1].encode()); c.shutdown(socket.SHUT_WR)
print(c.makefile("rb").read())
"""


def gateway(folder: Path) -> tuple[socket.socket, str]:
    """A socket outside that boxes may be given, and its path."""
    path = str(folder / "gateway")
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    listening.listen()
    return listening, path


def test_one_address_leads_to_the_gateway_and_outlives_programs(tmp_path: Path) -> None:
    listening, path = gateway(tmp_path)

    def shout() -> None:
        for _ in range(2):
            with listening.accept()[0] as caller:
                heard = b"".join(iter(lambda: caller.recv(100), b""))
                caller.sendall(heard.upper())

    shouting = threading.Thread(target=shout)
    shouting.start()
    workspace = tmp_path / "work"
    workspace.mkdir()
    kept = Kept(str(workspace), path)
    kept.sh("true")
    said = [kept.run(sys.executable, "-c", UP + CALL, word)["stdout"] for word in ("one", "two")]
    shouting.join(SOON_S)
    listening.close()
    assert said == [b"b'ONE'\n", b"b'TWO'\n"]
    Path(path).unlink()
    assert kept.run(sys.executable, "-c", UP + CALL, "three")["stdout"] in (b"b''\n", b""), "nobody is there: the call ends"
    assert kept.end() == 0


GOES_ON = """
import sys
c = socket.create_connection(("127.0.0.1", 8080), 10)
c.sendall(b"head"); first = c.recv(1); c.sendall(b"body")
print(first + c.makefile("rb").read())
"""


def test_what_was_answered_before_all_was_said_arrives(tmp_path: Path) -> None:
    """A server that refuses by the head of a request hears no more of it; who goes on saying it still has to hear why."""
    listening, path = gateway(tmp_path)

    def refuse() -> None:
        with listening.accept()[0] as caller:
            caller.recv(100)
            caller.shutdown(socket.SHUT_RD)
            caller.sendall(b"4")
            threading.Event().wait(0.3)  # in which the rest comes, and finds nobody
            caller.sendall(b"13")

    refusing = threading.Thread(target=refuse)
    refusing.start()
    workspace = tmp_path / "work"
    workspace.mkdir()
    kept = Kept(str(workspace), path)
    said = kept.run(sys.executable, "-c", UP + GOES_ON)
    refusing.join(SOON_S)
    listening.close()
    assert said["stdout"] == b"b'413'\n", said
    assert kept.end() == 0
