"""What the machine leaves: cores of the affinity mask, memory of the tightest control group."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from app.machine import free_memory_bytes, usable_cores

GIB = 1 << 30


def test_a_process_pinned_to_one_core_uses_one() -> None:
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); from app.machine import usable_cores; print(usable_cores())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path.cwd())
    assert found.stdout.strip() == "1"
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)


def group(folder: Path, *, version: int, limit: str, used: int, cache: int) -> None:
    names = ("memory.max", "memory.current", "inactive_file")
    if version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {cache}\n")


@pytest.mark.parametrize(("version", "line", "folder"), [(1, "4:cpu,memory:/a/b", "memory/a/b"), (2, "0::/a/b", "a/b")])
def test_the_limit_of_the_own_group_less_what_is_used_is_what_is_left(tmp_path: Path, version: int, line: str, folder: str) -> None:
    (tmp_path / "groups").write_text(f"7:cpuset:/\n{line}\n")
    # 1 GiB allowed, 700 MiB used of which 200 MiB are page cache that can be dropped: 524 MiB are left
    group(tmp_path / "mount" / folder, version=version, limit=str(GIB), used=700 << 20, cache=200 << 20)
    assert free_memory_bytes(groups=tmp_path / "groups", mount=tmp_path / "mount") == 524 << 20


def test_a_group_further_up_counts_where_it_is_tighter(tmp_path: Path) -> None:
    (tmp_path / "groups").write_text("0::/a/b\n")
    group(tmp_path / "mount/a/b", version=2, limit="max", used=0, cache=0)
    group(tmp_path / "mount/a", version=2, limit=str(64 << 20), used=60 << 20, cache=0)
    assert free_memory_bytes(groups=tmp_path / "groups", mount=tmp_path / "mount") == 4 << 20


def test_without_a_limit_it_is_what_the_machine_has(tmp_path: Path) -> None:
    (tmp_path / "groups").write_text("4:memory:/a\n")
    group(tmp_path / "mount/memory/a", version=1, limit=str(2**63 - 4096), used=5, cache=0)
    found = free_memory_bytes(groups=tmp_path / "groups", mount=tmp_path / "mount")
    assert found == pytest.approx(psutil.virtual_memory().available, rel=0.2)
