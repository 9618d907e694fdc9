"""What one box changed of a folder that many share: patches by comparing, their bounds, and copies that are made once."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.domain.errors import BadInput
from app.domain.learning.boxes import MOST_PATCH_BYTES, MOST_PATCH_FILES
from app.sandbox.control_groups import born
from app.sandbox.workspaces import MOST_BASES, POOL, TOO_MUCH, Workspace, Workspaces, changes_between, changes_of, read_folder

ME = os.geteuid()


def laid(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    folder.mkdir(exist_ok=True)
    return folder


def test_what_is_new_other_or_gone_is_a_change_and_what_is_alike_is_none(tmp_path: Path) -> None:
    before = laid(tmp_path / "before", a_txt="a", b_txt="b", pkg__one_py="1", pkg__two_py="2")
    after = laid(tmp_path / "after", a_txt="a", b_txt="other", pkg__one_py="1", new__file_txt="n")
    assert dict(changes_between(before, after).files) == {"b.txt": b"other", "pkg/two.py": None, "new/file.txt": b"n"}
    assert dict(changes_between(before, before).files) == {}
    assert read_folder(before) == {"a.txt": b"a", "b.txt": b"b", "pkg/one.py": b"1", "pkg/two.py": b"2"}


def test_caches_travel_neither_way(tmp_path: Path) -> None:
    before = laid(tmp_path / "before", a_txt="a")
    after = laid(tmp_path / "after", a_txt="a")
    (after / "__pycache__").mkdir()
    (after / "__pycache__" / "a.pyc").write_bytes(b"\xff")
    assert dict(changes_between(before, after).files) == {}


def test_a_removed_file_is_gone_whether_it_is_marked_or_absent() -> None:
    assert dict(changes_of({"a": b"1", "b": b"2"}, [("a", None)]).files) == {"a": None, "b": None}
    assert dict(changes_of({"a": b"1"}, [("a", b"1"), ("c", None)]).files) == {}


@pytest.mark.parametrize(("files", "refused"), [(MOST_PATCH_FILES, False), (MOST_PATCH_FILES + 1, True)])
def test_a_patch_has_two_thousand_files_at_most(files: int, refused: bool) -> None:
    after = [(f"f{number}", b"") for number in range(files)]
    if not refused:
        assert len(changes_of({}, after).files) == 2000
        return
    with pytest.raises(BadInput, match="2001 files and may have 2000"):
        changes_of({}, after)


@pytest.mark.parametrize(("more", "refused"), [(0, False), (1, True)])
def test_a_patch_has_eight_mebibytes_at_most_of_what_was_changed(more: int, refused: bool) -> None:
    half = b"x" * (4 << 20)
    after = [("same", b"y" * (1 << 20)), ("a", half), ("b", half + b"x" * more)]
    if not refused:
        assert sum(len(text or b"") for text in changes_of({"same": b"y" * (1 << 20)}, after).files.values()) == 8 << 20
        return
    with pytest.raises(BadInput, match="of 8 MiB together"):
        changes_of({"same": b"y" * (1 << 20)}, after)


def test_a_patch_that_is_too_large_is_refused_before_all_of_it_was_read() -> None:
    read: list[int] = []

    def files() -> Iterator[tuple[str, bytes | None]]:
        for number in range(100):
            read.append(number)
            yield f"f{number}", b"x" * (4 << 20)

    with pytest.raises(BadInput):
        changes_of({}, files())
    assert len(read) == 3


def test_no_more_of_a_file_is_read_than_shows_that_it_may_not_travel(tmp_path: Path) -> None:
    with (tmp_path / "large").open("wb") as file:
        file.truncate(MOST_PATCH_BYTES + 1000)
    assert len(read_folder(tmp_path)["large"]) == MOST_PATCH_BYTES + 1


@pytest.mark.parametrize("target", ["/etc", "/etc/hostname", "nowhere"])
def test_a_link_does_not_travel_wherever_it_leads(tmp_path: Path, target: str) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "link").symlink_to(target)
    with pytest.raises(BadInput, match="'deep/link' is a link or a device"):
        read_folder(tmp_path)


def test_an_overlay_and_a_copy_are_mounted_each_in_its_own_way(tmp_path: Path) -> None:
    parts = {"base": tmp_path / "b", "upper": tmp_path / "u", "scratch": tmp_path / "s"}
    assert Workspace(**parts, copies=True).arguments("/work") == ["--bind", f"{tmp_path}/u", "/work"]
    assert Workspace(**parts, copies=False).arguments("/work") == [
        "--overlay-src", f"{tmp_path}/b", "--overlay", f"{tmp_path}/u", f"{tmp_path}/s", "/work",
    ]  # fmt: skip


def test_an_overlay_s_upper_layer_is_the_patch_and_a_file_that_was_written_as_it_was_is_no_change(tmp_path: Path) -> None:
    base = laid(tmp_path / "base", a_txt="a", pkg__one_py="1", pkg__two_py="2")
    upper = laid(tmp_path / "box" / "upper", a_txt="a", pkg__one_py="other")
    space = Workspace(base=base, upper=upper, scratch=tmp_path / "box" / "work", copies=False)
    assert dict(space.patch().files) == {"pkg/one.py": b"other"}
    assert space.added_bytes() == 6 + 3 * 4096, "of its files, whatever they were before, and of each file and folder"
    space.remove()
    assert not (tmp_path / "box").exists()


def test_a_folder_that_became_a_file_is_that_file_and_what_was_in_it_is_gone(tmp_path: Path) -> None:
    base = laid(tmp_path / "base", a_txt="a", pkg__one_py="1", pkg__deep__two_py="2", other__three_py="3")
    upper = laid(tmp_path / "box" / "upper", a_txt="a")
    (upper / "pkg").write_text("a file")
    space = Workspace(base=base, upper=upper, scratch=tmp_path / "box" / "work", copies=False)
    assert dict(space.patch().files) == {"pkg": b"a file", "pkg/one.py": None, "pkg/deep/two.py": None}


def descend(folder: Path, *names: str) -> None:
    """Make folders in each other, whose path may be longer than a system call takes."""
    at = os.open(folder, os.O_RDONLY)
    for name in names:
        os.mkdir(name, dir_fd=at)
        inner = os.open(name, os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = inner
    os.close(os.open("last.py", os.O_CREAT | os.O_WRONLY, dir_fd=at))
    os.close(at)


DEEP, LONG = ("d",) * 1200, ("n" * 240,) * 20


@pytest.mark.parametrize("names", [DEEP, LONG, ("d",) * 101, ("n" * 200,) * 6], ids=["deep", "long", "too deep by one", "too long by one"])
@pytest.mark.parametrize("copies", [False, True])
def test_what_lies_too_deep_or_under_too_long_a_path_does_not_travel_and_is_removed(
    tmp_path: Path, copies: bool, names: tuple[str, ...]
) -> None:
    base, upper = laid(tmp_path / "base", a_txt="a"), laid(tmp_path / "box" / "upper", a_txt="a")
    descend(upper, *names)
    space = Workspace(base=base, upper=upper, scratch=tmp_path / "box" / "work", copies=copies)
    with pytest.raises(BadInput, match="a hundred folders or 1,024 bytes"):
        space.patch()
    assert space.added_bytes() == TOO_MUCH
    space.remove()
    assert not (tmp_path / "box").exists()


def test_empty_files_weigh_what_a_file_does_that_says_nothing(tmp_path: Path) -> None:
    upper = laid(tmp_path / "box" / "upper", **{f"f{number}_txt": "" for number in range(100)})
    (upper / "link").symlink_to("/")
    assert 101 * 4096 <= Workspace(base=tmp_path, upper=upper, scratch=tmp_path, copies=False).added_bytes() < 102 * 4096


def test_a_hundred_folders_in_each_other_travel(tmp_path: Path) -> None:
    descend(laid(tmp_path / "after"), *"d" * 100)
    assert list(changes_between(laid(tmp_path / "before"), tmp_path / "after").files) == ["d/" * 100 + "last.py"]


def test_folders_that_nobody_may_enter_are_removed_with_what_is_in_them_and_no_link_is_followed(tmp_path: Path) -> None:
    kept, box = laid(tmp_path / "kept", a_txt="a"), laid(tmp_path / "box" / "upper", one__two__three_py="3", other__four_py="4").parent
    (box / "upper" / "one" / "link").symlink_to(kept)
    for closed in ("upper/one/two", "upper/one", "upper"):
        (box / closed).chmod(0)
    Workspace(base=kept, upper=box / "upper", scratch=box / "work", copies=False).remove()
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert (kept / "a.txt").exists()


def test_a_copy_begins_as_the_folder_and_an_overlay_as_nothing(tmp_path: Path) -> None:
    folder = laid(tmp_path / "folder", a_txt="a")
    (folder / "link").symlink_to("a.txt")
    copied, laid_over = (Workspaces(tmp_path / kind, copies=kind == "copied") for kind in ("copied", "over"))
    for shared in ("copied", "over"):
        (tmp_path / shared).mkdir()
    first, second = copied.make(folder, None), copied.make(folder, None)
    assert first.upper != second.upper
    assert (first.upper / "a.txt").read_text() == "a"
    assert (first.upper / "link").is_symlink()
    assert (first.base, first.copies, first.scratch.is_dir()) == (folder, True, True)
    empty = laid_over.make(folder, None)
    assert (list(empty.upper.iterdir()), empty.scratch.is_dir(), empty.copies) == ([], True, False)


def test_a_user_s_copy_of_a_folder_is_made_once_and_anew_where_the_folder_is_another(tmp_path: Path) -> None:
    folder = laid(tmp_path / "folder", a_txt="a")
    spaces = Workspaces(tmp_path, copies=False)
    first, second = spaces.make(folder, ME), spaces.make(folder, ME)
    assert first.base == second.base != folder
    assert (first.base / "a.txt").read_text() == "a"
    assert (first.base.name.startswith("base-"), first.base.name.endswith(f"-{ME}")) == (True, True)
    laid(folder, new_txt="n")
    third = spaces.make(folder, ME)
    assert third.base != first.base
    assert (third.base / "new.txt").exists()
    assert not (first.base / "new.txt").exists()
    assert {os.stat(made).st_uid for made in (first.upper, first.scratch, first.base / "a.txt")} == {ME}


def test_copies_are_forgotten_from_sixty_four_on_of_idle_users_the_longest_unused_first(tmp_path: Path) -> None:
    spaces = Workspaces(tmp_path, copies=False)
    spaces.root.mkdir()
    for number in range(MOST_BASES + 3):
        (spaces.root / f"base-{number}").mkdir()
        spaces._bases[spaces.root / f"base-{number}"] = 256_000 + number % 100
    place = spaces.take()
    spaces._bases[spaces.root / "base-0"] = 256_000 + place
    spaces._forget(but=256_001)
    left = {int(path.name.removeprefix("base-")) for path in spaces.root.iterdir()}
    spaces.give_back(place)
    assert place == POOL[0]
    assert sorted(set(range(67)) - left) == [2, 3, 4], "0 has a box, 1 is the one that asks"
    assert len(spaces._bases) == MOST_BASES
    spaces._forget(but=256_001)
    assert len(list(spaces.root.iterdir())) == MOST_BASES, "not one fewer"


def test_only_what_the_dead_left_is_swept_and_told_by_the_number_of_boxes(tmp_path: Path) -> None:
    dead, alive = tmp_path / "work-1-0-0", tmp_path / f"work-{os.getpid()}-{born(os.getpid())}-0"
    for folder in (dead / "box-0", dead / "box-1" / "upper", dead / "base-x", alive / "box-0", tmp_path / "other"):
        folder.mkdir(parents=True)
    (dead / "box-1" / "upper").chmod(0)
    assert Workspaces(tmp_path, copies=False).sweep() == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", alive.name]


def test_two_keepers_of_one_process_share_its_places_and_not_its_folders(tmp_path: Path) -> None:
    one, other = Workspaces(tmp_path, copies=False), Workspaces(tmp_path, copies=False)
    assert one.root != other.root
    places = [one.take(), other.take()]
    assert places == [128, 129]
    for place in places:
        other.give_back(place)
    other.give_back(places[0])
