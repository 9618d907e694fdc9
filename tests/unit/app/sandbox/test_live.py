"""A box that stays, seen from outside, when its keeper says what none should, too late, or nothing more."""

import base64
import json
import marshal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.domain.errors import BadInput, Refused
from app.domain.learning.boxes import BoxSpec, Ended, Limits, TalkEnded
from app.sandbox.live import LiveBox
from app.sandbox.workspaces import Workspace

LIMITS = Limits(cpu_s=1, memory_bytes=1 << 28, file_bytes=1 << 20, workspace_bytes=4096 + 1000)
DONE = {"ended": b"exited", "code": b"0", "stdout": b"out", "stderr": b""}
Said = dict[str, bytes] | Ended


class Keeper:
    """Says what it was told to; an end where there is one."""

    def __init__(self, *said: Said, out_of_memory: bool = False) -> None:
        self.said, self.out_of_memory = [*said], out_of_memory
        self.asked: list[dict[str, Any]] = []
        self.waited: Callable[[], object] = lambda: None
        self.acts: list[str] = []

    def send(self, line: bytes, *, deadline: float) -> None:
        self.asked.append(marshal.loads(base64.b64decode(line)))

    def receive(self, *, deadline: float, most_bytes: int) -> bytes:
        self.waited()
        said = self.said.pop(0) if self.said else Ended.TIMEOUT
        if isinstance(said, Ended):
            raise TalkEnded(said, "so it was told")
        return json.dumps({name: base64.b64encode(text).decode() for name, text in said.items()}).encode()

    def ran_out_of_memory(self) -> bool:
        return self.out_of_memory

    def abort(self) -> None:
        self.acts.append("abort")

    def stop(self) -> None:
        self.acts.append("stop")


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    for name in ("base", "box/upper", "box/work"):
        (tmp_path / name).mkdir(parents=True)
    return Workspace(base=tmp_path / "base", upper=tmp_path / "box" / "upper", scratch=tmp_path / "box" / "work", copies=True)


def box(keeper: Keeper, workspace: Workspace, *, lifetime_s: float | None = None, gone: list[str] | None = None) -> LiveBox:
    told = gone if gone is not None else []
    return LiveBox(BoxSpec(limits=LIMITS, lifetime_s=lifetime_s), keeper, workspace, stopped=lambda: told.append("gone"))


def run(live: LiveBox, *, deadline_s: float = 1.0) -> Ended:
    return live.exec(["true"], deadline_s=deadline_s, most_output_bytes=100).ended


@pytest.mark.parametrize(
    ("said", "out_of_memory", "ended"),
    [
        (DONE, False, Ended.EXITED),
        (DONE | {"ended": b"timeout"}, False, Ended.TIMEOUT),
        (DONE | {"ended": b"output_limit"}, False, Ended.OUTPUT_LIMIT),
        (DONE, True, Ended.OOM),
        (Ended.EXITED, False, Ended.BOX_LOST),
        (Ended.OUTPUT_LIMIT, False, Ended.BOX_LOST),
        (Ended.OOM, False, Ended.OOM),
        (Ended.EXITED, True, Ended.OOM),
    ],
)
def test_what_the_keeper_says_and_what_its_end_means(workspace: Workspace, said: Said, out_of_memory: bool, ended: Ended) -> None:
    done = box(Keeper(said, out_of_memory=out_of_memory), workspace).exec(["true"], deadline_s=1.0, most_output_bytes=100)
    assert (done.ended, done.code) == (ended, 0 if ended is Ended.EXITED else None)


def test_a_box_that_was_lost_runs_nothing_more_and_is_not_asked(workspace: Workspace) -> None:
    keeper = Keeper(Ended.EXITED, DONE)
    live = box(keeper, workspace)
    assert [run(live), run(live)] == [Ended.BOX_LOST, Ended.BOX_LOST]
    assert (len(keeper.asked), live.alive()) == (1, False)


def test_a_box_that_ran_out_of_memory_is_ended_and_its_files_stay_until_it_is_stopped(workspace: Workspace) -> None:
    keeper, gone = Keeper(DONE, DONE, out_of_memory=True), list[str]()
    live = box(keeper, workspace, gone=gone)
    (workspace.upper / "new.txt").write_text("x")
    assert (run(live), run(live)) == (Ended.OOM, Ended.BOX_LOST)
    assert live.patch().files == {"new.txt": b"x"}
    live.stop()
    live.stop()
    assert (gone, workspace.upper.exists()) == (["gone"], False), "its user is given back once"


def test_a_box_whose_files_cannot_be_removed_gives_its_user_back(workspace: Workspace) -> None:
    class Stuck(Workspace):
        def remove(self) -> None:
            raise OSError("the disk is gone")

    gone = list[str]()
    live = box(Keeper(), Stuck(base=workspace.base, upper=workspace.upper, scratch=workspace.scratch, copies=True), gone=gone)
    with pytest.raises(OSError, match="the disk is gone"):
        live.stop()
    assert gone == ["gone"]


def test_a_workspace_that_becomes_too_heavy_ends_the_box_while_the_program_runs(workspace: Workspace) -> None:
    keeper = Keeper(Ended.TIMEOUT, DONE)
    keeper.waited = lambda: (workspace.upper / "large").write_bytes(b"x" * 1001)
    assert run(box(keeper, workspace)) is Ended.OUTPUT_LIMIT
    assert (keeper.acts, len(keeper.said)) == (["stop"], 1)


def test_a_keeper_that_does_not_answer_is_killed_after_its_grace(workspace: Workspace) -> None:
    keeper = Keeper()
    began = time.monotonic()
    assert run(box(keeper, workspace), deadline_s=-2.9) is Ended.BOX_LOST
    assert keeper.acts == ["abort"]
    assert time.monotonic() - began < 5


def test_a_box_whose_time_is_over_is_killed_by_the_clock_and_is_not_alive(workspace: Workspace) -> None:
    keeper = Keeper()
    live = box(keeper, workspace, lifetime_s=0.01)
    assert live._timer is not None
    live._timer.join(20)
    assert (keeper.acts, live.alive(), keeper.asked) == (["abort"], False, [])


def test_a_box_is_alive_while_its_keeper_answers(workspace: Workspace) -> None:
    keeper = Keeper({}, Ended.EXITED)
    live = box(keeper, workspace, lifetime_s=600.0)
    assert [live.alive(), live.alive()] == [True, False]
    assert keeper.asked[0] == {"op": "ping"}
    live.stop()
    assert live._timer is not None
    live._timer.join(20)
    assert "abort" not in keeper.acts[1:], "a clock of a box that was stopped kills nobody"


def test_a_file_that_cannot_be_written_and_a_box_that_is_gone_are_told_apart(workspace: Workspace) -> None:
    live = box(Keeper({"refused": b"Is a directory"}, {}, Ended.EXITED), workspace)
    with pytest.raises(BadInput, match="pkg cannot be written in the box: Is a directory"):
        live.put("pkg", b"x")
    live.put("a.txt", b"x")
    with pytest.raises(BadInput, match="no path within a workspace"):
        live.put("../x", b"x")
    with pytest.raises(Refused, match=r"the box is gone \(box_lost\): open another"):
        live.put("a.txt", b"x")
    assert not live.alive()
    with pytest.raises(Refused, match="open one without to speak to a program"):
        live.talk(["cat"])


class Timed(Keeper):
    """Keeps how long each act may take, and how much may be said."""

    def __init__(self, *said: Said) -> None:
        super().__init__(*said)
        self.within_s: list[float] = []
        self.most: list[int] = []
        self.looks: list[float] = []

    def send(self, line: bytes, *, deadline: float) -> None:
        self.within_s.append(round(deadline - time.monotonic(), 1))
        super().send(line, deadline=deadline)

    def receive(self, *, deadline: float, most_bytes: int) -> bytes:
        self.most.append(most_bytes)
        self.looks.append(round(deadline - time.monotonic(), 1))
        return super().receive(deadline=deadline, most_bytes=most_bytes)


def test_a_program_has_its_deadline_and_the_keeper_three_seconds_more_to_say_so(workspace: Workspace) -> None:
    keeper = Timed(DONE, {}, {})
    live = box(keeper, workspace)
    done = live.exec(["true"], stdin=b"in", deadline_s=7.0, most_output_bytes=100)
    assert (done.code, done.stdout, done.stderr) == (0, b"out", b"")
    live.put("a.txt", b"x")
    assert live.alive()
    assert keeper.within_s == [10.0, 30.0, 2.0]
    assert keeper.most == [300 + 65_536, 65_536, 4096], "what is said comes in base64"
    asked = keeper.asked[0]
    assert (asked["op"], asked["stdin"], asked["deadline_s"], asked["most"], asked["argv"][-1]) == ("exec", b"in", 7.0, 100, "true")
    assert keeper.asked[1] == {"op": "put", "path": "a.txt", "data": b"x"}
    live.stop()
    assert keeper.acts == ["stop"]


def test_no_act_outlasts_the_box_by_more_than_the_keeper_s_grace(workspace: Workspace) -> None:
    keeper = Timed(DONE)
    live = box(keeper, workspace, lifetime_s=20.0)
    live.exec(["true"], deadline_s=600.0, most_output_bytes=100)
    assert keeper.within_s == [23.0]
    live.stop()


def test_a_program_that_says_nothing_is_looked_at_a_few_times_a_second_while_its_files_are_light(workspace: Workspace) -> None:
    (workspace.upper / "light").write_bytes(b"x" * 1000)
    keeper = Timed(Ended.TIMEOUT, Ended.TIMEOUT, DONE)
    assert run(box(keeper, workspace)) is Ended.EXITED
    assert all(0.15 <= look_s <= 0.3 for look_s in keeper.looks)
    assert (len(keeper.looks), keeper.acts) == (3, [])


def test_a_program_s_own_code_is_told_only_where_it_ended_by_itself(workspace: Workspace) -> None:
    for said, code in ((DONE | {"code": b"7"}, 7), (DONE | {"ended": b"timeout", "code": b"137"}, None)):
        done = box(Keeper(said), workspace).exec(["true"], deadline_s=1.0, most_output_bytes=100)
        assert done.code == code
