"""What is trusted runs without a box: what that cannot give is refused in words, and what is over is said to be over."""

import sys
import time
from pathlib import Path

import pytest

from app.domain.errors import BadInput, Overloaded, Refused, Unavailable
from app.domain.learning.boxes import BoxSpec, Ended, Limits
from app.sandbox.bubblewrap import FEW_PROCESSES, BubblewrapBox, BubblewrapBoxes, _held
from app.sandbox.child import Child
from app.sandbox.control_groups import ControlGroups
from app.sandbox.limits import as_user, limited
from app.sandbox.processes import ProcessBox, ProcessBoxes
from app.sandbox.runtime import Runtime
from app.sandbox.workspaces import POOL, Workspaces

LIMITS = Limits(cpu_s=3, memory_bytes=1 << 28, file_bytes=1 << 20, processes=16)


def test_a_program_becomes_what_it_is_under_its_limits() -> None:
    said = limited(["/bin/sh", "-c", "ulimit -t"], LIMITS)
    assert Path(said[0]).name == "prlimit"
    assert said[1:] == ["--cpu=3:3", "--as=268435456:268435456", "--fsize=1048576:1048576", "--nproc=16:16", "--nofile=64:64", "--core=0:0",
                        "--", "/bin/sh", "-c", "ulimit -t"]  # fmt: skip


def test_a_program_becomes_another_users_without_a_fork_of_this_process() -> None:
    said = as_user(["/bin/true", "-x"], 4711)
    assert Path(said[0]).name == "setpriv"
    assert said[1:] == ["--reuid=4711", "--regid=4711", "--clear-groups", "--", "/bin/true", "-x"]
    assert as_user(["/bin/true"], None) == ["/bin/true"]


def test_without_control_groups_a_box_has_few_processes_because_each_may_use_all_of_the_memory(tmp_path: Path) -> None:
    spec = BoxSpec(limits=LIMITS)
    assert _held(spec, None).limits.processes == FEW_PROCESSES
    assert _held(spec, ControlGroups((tmp_path,), 2)) == spec
    assert _held(BoxSpec(limits=Limits(cpu_s=1, memory_bytes=1, file_bytes=1, processes=2)), None).limits.processes == 2


def test_a_plain_process_has_no_gateway_and_a_plain_box_without_a_workspace_takes_no_files() -> None:
    with pytest.raises(Refused, match="no gateway of their own"):
        ProcessBoxes().open(BoxSpec(limits=LIMITS, gateway=Path("/x")))
    assert (ProcessBoxes().sweep(), ProcessBoxes().describe()["network"]) == (0, True)
    box = ProcessBoxes().open(BoxSpec(limits=LIMITS))
    for act in (lambda: box.put("a", b""), box.patch):
        with pytest.raises(Refused, match="this box has no workspace: ask for one"):
            act()
    box.stop()


def test_a_plain_box_whose_time_is_over_runs_nothing_and_takes_nothing(tmp_path: Path) -> None:
    box = ProcessBoxes().open(BoxSpec(limits=LIMITS, workspace=tmp_path, lifetime_s=0.0))
    assert not box.alive()
    assert box.exec(["/bin/true"], deadline_s=20, most_output_bytes=1000).ended is Ended.BOX_LOST
    with pytest.raises(Refused, match="the box is gone: open another"):
        box.put("a.txt", b"x")
    box.stop()


def test_no_link_in_a_plain_box_leads_a_file_out_of_it(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out"
    inside.mkdir()
    outside.mkdir()
    (inside / "link").symlink_to(outside)
    box = ProcessBoxes().open(BoxSpec(limits=LIMITS, workspace=inside))
    with pytest.raises(BadInput, match="link on the way"):
        box.put("link/x", b"x")
    with pytest.raises(Refused, match="open one without to speak to a program"):
        box.talk(["/bin/cat"])
    box.stop()
    assert list(outside.iterdir()) == []


def test_a_box_that_does_not_stay_takes_no_gateway_no_lifetime_and_no_files() -> None:
    boxes = BubblewrapBoxes(bwrap=Path("/bin/true"))
    for spec in (BoxSpec(limits=LIMITS, gateway=Path("/x")), BoxSpec(limits=LIMITS, lifetime_s=1.0)):
        with pytest.raises(BadInput, match="are for boxes that stay: ask for a workspace too"):
            boxes.open(spec)
    box = boxes.open(BoxSpec(limits=LIMITS))
    for act in (lambda: box.put("a", b""), box.patch):
        with pytest.raises(Refused, match="this box has no workspace: ask for one"):
            act()
    assert box.alive()


def bwrap(folder: Path, script: str) -> Path:
    """A program in the place of bwrap, which anybody may run."""
    program = folder / "bwrap"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return program


def box_of(program: Path) -> BubblewrapBox:
    return BubblewrapBox(BoxSpec(limits=LIMITS), Runtime(bwrap=program, prefix=Path("/usr")), None, user=None)


REPORTS = """
while [ $# -gt 0 ]; do [ "$1" = --args ] && args=$2; shift; done
status=$(tr '\\0' '\\n' < /proc/self/fd/$args | grep -A1 json-status-fd | tail -1)
echo "{\\"child-pid\\": $$}" > /proc/self/fd/$status
"""


def test_a_machine_that_cannot_start_bwrap_or_make_the_box_says_so_with_the_cure(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"bwrap cannot be started .*set TMPDIR to a folder whose programs may run"):
        box_of(tmp_path / "absent").exec(["/bin/true"], deadline_s=20, most_output_bytes=1000)
    said = bwrap(tmp_path, "echo 'bwrap: No permissions to create new namespace' >&2; exit 1")
    with pytest.raises(Refused, match=r"No permissions to create new namespace\).*user\.max_user_namespaces"):
        box_of(said).exec(["/bin/true"], deadline_s=20, most_output_bytes=1000)


def test_a_box_that_ends_before_its_program_began_is_no_exit_of_the_programs(tmp_path: Path) -> None:
    broken = bwrap(tmp_path, REPORTS + "echo 'bwrap: cannot mount proc' >&2; exit 0")
    with pytest.raises(Unavailable, match="the box could not be made: bwrap: cannot mount proc"):
        box_of(broken).exec(["/bin/true"], deadline_s=20, most_output_bytes=1000)


def test_a_keeper_that_does_not_begin_is_refused_with_its_last_words(tmp_path: Path) -> None:
    broken = bwrap(tmp_path, REPORTS + "echo 'python: no such file' >&2; exit 0")
    with pytest.raises(Refused, match=r"keeper did not begin .*python: no such file"):
        box_of(broken).keep()


def test_a_workspace_begins_with_a_folder(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="is no folder: a workspace begins with one"):
        Workspaces(tmp_path, copies=True).make(tmp_path / "absent", None)


def test_places_run_out_with_a_sentence_and_come_back(tmp_path: Path) -> None:
    workspaces = Workspaces(tmp_path, copies=True)
    places = [workspaces.take() for _ in POOL]
    assert len(set(places)) == len(POOL)
    with pytest.raises(Overloaded, match="stop one first"):
        workspaces.take()
    workspaces.give_back(places[5])
    assert workspaces.take() == places[5]
    for place in places:
        workspaces.give_back(place)


def test_what_a_boxs_own_user_changed_is_a_patch_and_names_that_cannot_travel_are_none(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "a").write_text("1")
    workspace = Workspaces(tmp_path, copies=True).make(base, None)
    (workspace.upper / "a").write_text("2")
    assert (workspace.patch().files, workspace.added_bytes()) == ({"a": b"2"}, 1 + 4096)
    (workspace.upper / "b\udc80").write_text("x")
    with pytest.raises(BadInput, match="name that is no UTF-8"):
        workspace.patch()
    workspace.remove()
    assert not workspace.upper.exists()


def test_a_plain_box_runs_programs_in_a_copy_of_its_folder_that_goes_with_it(tmp_path: Path) -> None:
    inside = tmp_path / "in"
    (inside / "pkg").mkdir(parents=True)
    (inside / "pkg" / "one.py").write_text("ONE = 1\n")
    boxes = ProcessBoxes()
    box = boxes.open(BoxSpec(limits=LIMITS, workspace=inside))
    assert isinstance(box, ProcessBox)
    command = "cat pkg/one.py -; pwd; echo $HOME; echo bad >&2; exit 7"
    said = box.exec(["/bin/sh", "-c", command], stdin=b"in\n", deadline_s=20, most_output_bytes=1000)
    assert (said.ended, said.code, said.stderr) == (Ended.EXITED, 7, b"bad\n")
    assert said.stdout.decode().splitlines() == ["ONE = 1", "in", str(box.folder), str(box.folder)]
    assert box.exec(["/bin/sh", "-c", "head -c 1001 /dev/zero"], deadline_s=20, most_output_bytes=1000).ended is Ended.OUTPUT_LIMIT
    assert box.exec(["/bin/sleep", "20"], deadline_s=0.1, most_output_bytes=1000).ended is Ended.TIMEOUT
    box.put("deep/er/two.py", b"TWO = 2\n")
    assert dict(box.patch().files) == {"deep/er/two.py": b"TWO = 2\n"}
    assert (inside / "pkg" / "one.py").read_text() == "ONE = 1\n"
    box.stop()
    assert not box.folder.exists()
    assert not box.alive()
    assert box.exec(["/bin/true"], deadline_s=20, most_output_bytes=10).ended is Ended.BOX_LOST
    assert boxes.python == sys.executable
    with pytest.raises(Refused, match="have none of their own"):
        boxes.open(BoxSpec(limits=LIMITS, scratch=("/tests",)))


def test_a_link_in_the_folder_of_a_plain_box_is_copied_as_one(tmp_path: Path) -> None:
    inside = tmp_path / "in"
    inside.mkdir()
    (inside / "link").symlink_to("/etc/hostname")
    box = ProcessBoxes().open(BoxSpec(limits=LIMITS, workspace=inside))
    assert isinstance(box, ProcessBox)
    assert (box.folder / "link").is_symlink()
    box.stop()


def test_a_program_that_is_spoken_to_in_a_plain_box_ends_with_it() -> None:
    box = ProcessBoxes().open(BoxSpec(limits=LIMITS))
    talk = box.talk(["/bin/cat"])
    assert isinstance(talk, Child)
    talk.send(b"hello", deadline=time.monotonic() + 20)
    assert talk.receive(deadline=time.monotonic() + 20, most_bytes=100) == b"hello"
    assert talk.process.poll() is None
    box.stop()
    assert talk.process.poll() is not None


@pytest.mark.parametrize(("lifetime_s", "alive"), [(None, True), (600.0, True), (0.0, False)])
def test_a_plain_box_lives_as_long_as_it_was_given(lifetime_s: float | None, alive: bool) -> None:
    box = ProcessBoxes().open(BoxSpec(limits=LIMITS, lifetime_s=lifetime_s))
    assert box.alive() is alive
    box.stop()
