"""Groups of the kernel's, as far as they can be read without a kernel that has them."""

import os
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from app.domain.learning.boxes import Limits
from app.sandbox.control_groups import ControlGroups, Group, born, find, owner_lives

HERE = f"{os.getpid()}-{born(os.getpid())}"
LIMITS = Limits(cpu_s=1, memory_bytes=1 << 20, file_bytes=1, processes=16)
TWO = "0::/ours\n"
ONE = "9:pids:/ours\n5:cpu,memory:/ours\n1:name=systemd:/\n0::/\n"


def own(tmp_path: Path, said: str) -> Path:
    (tmp_path / "cgroup").write_text(said)
    return tmp_path / "cgroup"


def test_groups_of_the_first_version_lie_below_our_own_of_both_controllers(tmp_path: Path) -> None:
    for name in ("memory", "pids"):
        (tmp_path / name / "ours").mkdir(parents=True)
    assert find(tmp_path, own(tmp_path, ONE)) == ControlGroups((tmp_path / "memory" / "ours", tmp_path / "pids" / "ours"), 1)


def test_where_a_controller_is_not_ours_to_use_there_are_no_groups(tmp_path: Path) -> None:
    (tmp_path / "memory" / "ours").mkdir(parents=True)
    assert find(tmp_path, own(tmp_path, ONE)) is None, "no folder of pids"
    assert find(tmp_path, own(tmp_path, TWO)) is None, "no folder at all"
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "cgroup.subtree_control").mkdir()  # cannot be written
    assert find(tmp_path, own(tmp_path, TWO)) is None, "controllers were not handed down"


@pytest.mark.parametrize(
    ("version", "held"),
    [
        (1, {"pids.max": "17", "memory.limit_in_bytes": "1048576", "memory.memsw.limit_in_bytes": "1048576"}),
        (2, {"pids.max": "17", "memory.max": "1048576", "memory.swap.max": "0", "memory.oom.group": "1"}),
    ],
)
def test_a_group_holds_processes_and_memory_together_with_swap(tmp_path: Path, version: int, held: dict[str, str]) -> None:
    limits = Limits(cpu_s=1, memory_bytes=1 << 20, file_bytes=1, processes=16)
    assert ControlGroups((tmp_path,), version).limits(limits) == held


@pytest.mark.parametrize(
    ("file", "said", "is_out"),
    [
        ("memory.events", "low 0\noom 1\noom_kill 1\n", True),
        ("memory.events", "oom 4\noom_kill 0\n", False),
        ("memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n", True),
        ("memory.oom_control", "oom_kill_disable 0\nunder_oom 0\n", False),
        ("pids.max", "17", False),
    ],
)
def test_a_death_for_want_of_memory_is_read_of_either_version(tmp_path: Path, file: str, said: str, is_out: bool) -> None:
    (tmp_path / file).write_text(said)
    assert Group((tmp_path,)).ran_out_of_memory() is is_out


def test_only_what_dead_processes_left_is_swept(tmp_path: Path) -> None:
    for name in (f"ratchet-box-{HERE}-0", f"ratchet-box-{os.getpid()}-1-0", "ratchet-box-no-names-0", "other"):
        (tmp_path / name).mkdir()
    assert ControlGroups((tmp_path,), 2).sweep() == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", f"ratchet-box-{HERE}-0"]
    assert (owner_lives(f"x-{HERE}-7"), owner_lives(f"x-{os.getpid()}-1-7")) == (True, False), "a number is given again; a birth is not"


def test_a_group_is_made_below_every_parent_with_the_limits_that_have_a_file(tmp_path: Path) -> None:
    parents = (tmp_path / "memory", tmp_path / "pids")
    for parent in parents:
        parent.mkdir()
    groups = ControlGroups(parents, 1)
    first, second = groups.make(LIMITS), groups.make(LIMITS)
    assert {folder.parent for folder in first.folders} == {*parents}
    assert {folder.name for folder in first.folders}.isdisjoint(folder.name for folder in second.folders)
    assert all(owner_lives(folder.name) and folder.name.startswith("ratchet-box-") and folder.is_dir() for folder in first.folders)
    assert list(first.folders[0].iterdir()) == [], "the kernel makes the files: where there is none, none is written"


class Kernel(ControlGroups):
    """Finds a file of every limit in a new group, as the kernel's folders have them."""

    def limits(self, limits: Limits) -> dict[str, str]:
        for folder in (folder for parent in self.parents for folder in parent.iterdir()):
            for name in ("pids.max", "memory.max"):
                (folder / name).write_text("max")
        return super().limits(limits)


def test_limits_are_written_into_the_files_that_are_there(tmp_path: Path) -> None:
    (folder,) = Kernel((tmp_path,), 2).make(LIMITS).folders
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"pids.max": "17", "memory.max": "1048576"}


def test_a_process_is_admitted_to_every_folder_of_its_group(tmp_path: Path) -> None:
    folders = (tmp_path / "memory", tmp_path / "pids")
    for folder in folders:
        folder.mkdir()
    Group(folders).admit(4711)
    assert [(folder / "cgroup.procs").read_text() for folder in folders] == ["4711"] * 2


def test_a_group_is_removed_with_every_process_in_it_and_may_be_gone_already(tmp_path: Path) -> None:
    group = Group((tmp_path / "one", tmp_path / "two"))
    for folder in group.folders:
        folder.mkdir()
    with subprocess.Popen(["/bin/sleep", "60"]) as held:
        (tmp_path / "procs").write_text(f"{held.pid}\n999999999\n")
        (group.folders[0] / "cgroup.procs").symlink_to(tmp_path / "procs")
        thread = threading.Thread(target=group.remove)
        thread.start()
        assert held.wait(20) == -signal.SIGKILL
        (group.folders[0] / "cgroup.procs").unlink()
        thread.join(20)
    assert not any(folder.exists() for folder in group.folders)
    group.remove()
