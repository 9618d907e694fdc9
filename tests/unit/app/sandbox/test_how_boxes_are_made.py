"""What bwrap is told for a box, whose it is, how its programs are heard; and what the keeper inside does to files and pipes."""

import base64
import json
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from app.domain.learning.boxes import BoxSpec, Limits
from app.sandbox.bubblewrap import (
    INSIDE_GATEWAY,
    INSIDE_KEEPER,
    USERS_FROM,
    BubblewrapBox,
    _first_line,
    _fresh_user,
    _last_line,
    _memory_file,
    _user,
)
from app.sandbox.keeper import answer, drain, feed, put
from app.sandbox.runtime import Runtime
from app.sandbox.workspaces import POOL, Workspace

LIMITS = Limits(cpu_s=3, memory_bytes=1 << 28, file_bytes=1 << 20)
SYSTEMS = Runtime(bwrap=Path("/bin/bwrap"), prefix=Path("/usr"))


def told(spec: BoxSpec, *, runtime: Runtime = SYSTEMS, workspace: Workspace | None = None) -> str:
    """What bwrap is told, in one line."""
    box = BubblewrapBox(spec, runtime, None, user=None, workspace=workspace)
    return " ".join(box._arguments(7, 8, 9))


def test_a_box_has_namespaces_of_its_own_no_rights_and_nothing_of_ours() -> None:
    said = told(BoxSpec(limits=LIMITS))
    assert said.startswith(
        "--unshare-all --unshare-user --disable-userns --die-with-parent --new-session --cap-drop ALL --clearenv --uid 1000 --gid 1000 "
        "--hostname box --json-status-fd 7 --block-fd 8 --seccomp 9 "
    )
    assert "--proc /proc --dev /dev --size 1048576 --tmpfs /tmp --remount-ro /dev --remount-ro / --chdir /tmp " in said
    assert said.endswith("--setenv PATH /usr/bin:/bin --setenv HOME /tmp --setenv PYTHONDONTWRITEBYTECODE 1")
    assert ("--ro-bind /usr /usr" in said, "--as-pid-1" in said, INSIDE_GATEWAY in said) == (True, False, False)
    for folder in SYSTEMS.hidden():
        assert f"--tmpfs {folder} --remount-ro {folder}" in said


def test_a_folder_of_the_system_that_is_a_link_stays_one() -> None:
    said = told(BoxSpec(limits=LIMITS))
    for folder in ("/lib", "/bin"):
        shown = f"--symlink {os.readlink(folder)} {folder}" if os.path.islink(folder) else f"--ro-bind {folder} {folder}"
        assert f" {shown} " in said
    assert "/lib32" not in said or os.path.isdir("/lib32")


def test_a_python_of_our_own_lies_at_a_place_of_its_own(tmp_path: Path) -> None:
    assert f"--ro-bind {tmp_path} /python" in told(BoxSpec(limits=LIMITS), runtime=replace(SYSTEMS, prefix=tmp_path))
    assert " /python" not in told(BoxSpec(limits=LIMITS))


def test_a_workspace_has_a_keeper_as_its_first_process_and_what_was_asked_for_with_it(tmp_path: Path) -> None:
    space = Workspace(base=tmp_path / "b", upper=tmp_path / "u", scratch=tmp_path / "s", copies=True)
    spec = BoxSpec(limits=LIMITS, workspace=tmp_path, gateway=Path("/run/g.sock"), scratch=("/tests", "/out"))
    said = told(spec, workspace=space)
    assert f"{INSIDE_KEEPER} --bind {tmp_path}/u /work --size 1048576 --tmpfs /tests --size 1048576 --tmpfs /out " in said
    assert f"--bind /run/g.sock {INSIDE_GATEWAY} --remount-ro /dev" in said
    assert "--as-pid-1 --ro-bind " in said


def test_boxes_of_one_process_belong_to_users_that_no_other_process_has() -> None:
    first, second = _fresh_user(), _fresh_user()
    mine = range(USERS_FROM + os.getpid() * 256, USERS_FROM + (os.getpid() + 1) * 256)
    assert first != second
    assert {first, second} <= {*mine[: POOL.start]}, "the second half is for boxes with a workspace"
    assert len({_fresh_user() for _ in range(300)}) == 128
    assert (_user(0), _user(255)) == (mine[0], mine[-1])


@pytest.mark.parametrize(
    ("said", "line"),
    [(b"one\ntwo\n", "two"), (b"one", "one"), (b"", "bwrap said nothing"), (b"\n \n", "bwrap said nothing")],
)
def test_the_last_line_is_what_went_wrong(said: bytes, line: str) -> None:
    assert _last_line(said) == line


@pytest.mark.parametrize(
    ("pieces", "line"), [((b'{"a": 1}\nmore',), b'{"a": 1}'), ((b"one", b"two\n"), b"onetwo"), ((b"cut",), None), ((), None)]
)
def test_the_first_report_is_read_to_its_end_or_is_none(pieces: tuple[bytes, ...], line: bytes | None) -> None:
    status, theirs = os.pipe()

    def write() -> None:
        for piece in pieces:
            os.write(theirs, piece)
        os.close(theirs)

    thread = threading.Thread(target=write)
    thread.start()
    assert _first_line(status) == line
    thread.join()
    os.close(status)


def test_a_file_in_memory_is_read_from_its_beginning() -> None:
    file = _memory_file(b"x" * 100_000)
    assert os.read(file, 200_000) == b"x" * 100_000
    os.close(file)


# --- the keeper -----------------------------------------------------------------------------------------------------------------


def test_an_answer_is_one_line_of_json_with_everything_in_base64() -> None:
    out, into = os.pipe()
    answer(into, {"stdout": b"\x00\xff", "code": b"7"})
    answer(into, {})
    first, second = os.read(out, 1000).splitlines()
    assert {name: base64.b64decode(text) for name, text in json.loads(first).items()} == {"stdout": b"\x00\xff", "code": b"7"}
    assert second == b"{}"
    for pipe in (out, into):
        os.close(pipe)


def test_a_file_is_put_with_its_folders_and_over_what_was_there(tmp_path: Path) -> None:
    assert put(str(tmp_path), "a/b/c.txt", b"one, and more") == {}
    assert put(str(tmp_path), "a/b/c.txt", b"two") == {}
    assert (tmp_path / "a" / "b" / "c.txt").read_bytes() == b"two"
    assert (tmp_path / "a" / "b" / "c.txt").stat().st_mode & 0o777 == 0o644 & ~current_umask()
    assert put(str(tmp_path), "top", b"") == {}
    assert (tmp_path / "top").read_bytes() == b""


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_no_link_on_the_way_is_followed_and_no_folder_is_written_over(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out"
    inside.mkdir()
    outside.mkdir()
    (inside / "link").symlink_to(outside)
    (inside / "file").symlink_to(outside / "x")
    before = len(os.listdir("/proc/self/fd"))
    for path in ("link/x", "file", "link"):
        assert [*put(str(inside), path, b"x")] == ["refused"]
    (inside / "folder").mkdir()
    assert b"directory" in put(str(inside), "folder", b"x")["refused"]
    assert list(outside.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == before, "nothing is left open"


def test_a_pipe_is_drained_to_one_byte_more_than_is_allowed_and_told_when_it_has_ended() -> None:
    out, into = os.pipe()
    os.set_blocking(out, False)
    said = bytearray()
    assert drain(out, said, 10)
    os.write(into, b"x" * 5)
    assert (drain(out, said, 10), len(said)) == (True, 5)
    os.write(into, b"x" * 6)
    os.close(into)
    assert (drain(out, said, 10), len(said)) == (True, 11), "too much already: nothing more is read"
    assert not drain(out, bytearray(), 10)
    os.close(out)


def test_what_goes_in_is_what_the_pipe_takes_and_all_of_it_where_nobody_listens() -> None:
    out, into = os.pipe()
    os.set_blocking(into, False)
    assert (feed(into, memoryview(b"")), feed(into, memoryview(b"abc"))) == (0, 3)
    while feed(into, memoryview(b"x" * 100_000)):
        pass
    assert feed(into, memoryview(b"y")) == 0, "it is full"
    os.close(out)
    assert feed(into, memoryview(b"four")) == 4
    os.close(into)
