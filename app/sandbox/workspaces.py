"""Workspaces: a folder that many boxes start from, each with changes of its own, and those changes as a patch.

    /tmp/ratchet-boxes-0/work-<process>-<birth>-<n>/base-<folder>-<user>/   the folder as the box's user may change it
                                                   box-<n>/upper/           what one box changed: an overlay's upper layer is the patch
                                                   box-<n>/work/            the overlay's own

A user namespace holds one user, and an overlay copies a file up only where its owner is somebody in there, so each user of the pool has a
copy of the folder that belongs to them: made once, used by every box of theirs. Where no overlay can be mounted each box has a copy of
the whole folder (`copies`), and the patch is found by comparing.
"""

import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from app.domain.errors import BadInput, Overloaded
from app.domain.learning.boxes import MOST_PATCH_BYTES, MOST_PATCH_FILES, Patch, checked_patch, travels
from app.sandbox.control_groups import born, owner_lives

NAME = "work"
MOST_BASES = 64
MOST_DEPTH, MOST_PATH_BYTES = 100, 1024
"""Of what is read of a workspace. A box nests as many folders as it likes, and neither recursion nor the kernel's paths follow it down."""
TOO_MUCH = 1 << 62
ENTRY_BYTES = 4096
"""What a file or a folder weighs beside what it holds: a disk runs out of places for empty ones too."""
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
POOL = range(128, 256)
"""Which of a process's 256 users have workspaces; the first half is for boxes without one, which take turns."""
_taken: set[int] = set()
"""Places of this process's living boxes, whichever keeper opened them: two boxes of one user could see into each other."""
_taking = threading.Lock()
_keepers = count()


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """Where one box keeps its changes."""

    base: Path
    upper: Path
    scratch: Path
    copies: bool

    def arguments(self, at: str) -> list[str]:
        """How bwrap mounts it."""
        if self.copies:
            return ["--bind", str(self.upper), at]
        return ["--overlay-src", str(self.base), "--overlay", str(self.upper), str(self.scratch), at]

    def added_bytes(self) -> int:
        """What the changes weigh, with `ENTRY_BYTES` for each file and folder; a file that is being written or taken away counts as what it
        was. What cannot be read is too much. Not counted: files that have no name any more and are still open."""
        total = 0
        try:
            for _, entry, _ in _entries(self.upper):
                total += ENTRY_BYTES
                with suppress(OSError):
                    total += 0 if entry.is_dir(follow_symlinks=False) else entry.stat(follow_symlinks=False).st_size
        except BadInput:
            return TOO_MUCH
        return total

    def patch(self) -> Patch:
        """The changes. Raises `BadInput`."""
        if self.copies:
            return changes_between(self.base, self.upper)
        there, kept = _differing(_files(self.upper), lambda path: _read(self.base / path))
        hidden = {p for path in (*there, *_opaque(self.upper)) for p in _below(self.base, path) if not there.get(p)}
        return checked_patch(dict.fromkeys(hidden) | kept)

    def remove(self) -> None:
        """Forget the changes."""
        remove(self.upper.parent)


@dataclass
class Workspaces:
    """The workspaces of this process: users, folders, and what was left by others."""

    shared: Path
    copies: bool
    root: Path = field(init=False)
    _making: threading.Lock = field(default_factory=threading.Lock)
    _bases: dict[Path, int] = field(default_factory=dict[Path, int])
    """Copies and whose they are, the one that was used last at the end."""
    _numbers: "count[int]" = field(default_factory=count)

    def __post_init__(self) -> None:
        self.root = self.shared / f"{NAME}-{os.getpid()}-{born(os.getpid())}-{next(_keepers)}"

    def take(self) -> int:
        """A place in the pool of users that no living box has. Raises `Overloaded`."""
        with _taking:
            place = next((place for place in POOL if place not in _taken), None)
            if place is None:
                raise Overloaded(f"{len(POOL)} boxes with workspaces are open in this process: stop one first", retry_after_s=1.0)
            _taken.add(place)
            return place

    def give_back(self, place: int) -> None:
        """The box of this place is gone."""
        with _taking:
            _taken.discard(place)

    def make(self, folder: Path, user: int | None) -> Workspace:
        """A fresh workspace over a folder. Raises `BadInput` where it is none."""
        if not folder.is_dir():
            raise BadInput(f"{folder} is no folder: a workspace begins with one")
        self.root.mkdir(mode=0o755, exist_ok=True)
        base = self._base(folder, user)
        own = self.root / f"box-{next(self._numbers)}"
        own.mkdir(mode=0o755)
        upper, scratch = own / "upper", own / "work"
        if self.copies:
            shutil.copytree(base, upper, symlinks=True)
        else:
            upper.mkdir()
        scratch.mkdir()
        if user is not None:
            for made in (upper, scratch) if not self.copies else (scratch,):
                os.chown(made, user, user)
            if self.copies:
                _give(upper, user)
        return Workspace(base=base, upper=upper, scratch=scratch, copies=self.copies)

    def _base(self, folder: Path, user: int | None) -> Path:
        """The folder as this user owns it; ours where boxes are ours."""
        if user is None:
            return folder
        stated = folder.stat()
        known_by = f"{stated.st_dev:x}-{stated.st_ino:x}-{stated.st_ctime_ns:x}"  # a number alone is given to the next folder again
        base = self.root / f"base-{known_by}-{user}"
        with self._making:
            if not base.exists():
                fresh = base.with_suffix(".new")
                remove(fresh)
                shutil.copytree(folder, fresh, symlinks=True)
                _give(fresh, user)
                fresh.rename(base)
            self._bases.pop(base, None)
            self._bases[base] = user
            self._forget(but=user)
        return base

    def _forget(self, *, but: int) -> None:
        """Remove the copies that were not used for longest, of users who have no box now."""
        with _taking:
            idle = {user for user in self._bases.values() if user != but and user % 256 not in _taken}
        for base in [base for base, user in self._bases.items() if user in idle][: max(0, len(self._bases) - MOST_BASES)]:
            del self._bases[base]
            remove(base)

    def sweep(self) -> int:
        """Remove what dead processes left; returns how many workspaces that were."""
        left = [folder for folder in self.shared.glob(f"{NAME}-*") if not owner_lives(folder.name)]
        found = sum(len(list(folder.glob("box-*"))) for folder in left)
        for folder in left:
            remove(folder)
        return found


def changes_between(before: Path, after: Path) -> Patch:
    """What became of a folder, by comparing all of it. Raises `BadInput`."""
    return changes_of(read_folder(before), _files(after))


def changes_of(before: Mapping[str, bytes], after: Iterable[tuple[str, bytes | None]]) -> Patch:
    """The same, of files by path. Raises `BadInput`."""
    there, kept = _differing(after, before.get)
    gone = before.keys() - {path for path, is_there in there.items() if is_there}
    return checked_patch(dict.fromkeys(gone) | kept)


def _differing(
    files: Iterable[tuple[str, bytes | None]], before: Callable[[str], bytes | None]
) -> tuple[dict[str, bool], dict[str, bytes | None]]:
    """By path, whether a file is there or was removed; and the contents that are others than before, of which never more than may travel
    are held: empty files that say that they are long weigh nothing until they are read. Raises `BadInput`."""
    there, kept, weight = dict[str, bool](), dict[str, bytes | None](), 0
    for path, content in files:
        there[path] = content is not None
        if content is None or not travels(path) or before(path) == content:
            continue
        kept[path] = content
        weight += len(content)
        if weight > MOST_PATCH_BYTES or len(kept) > MOST_PATCH_FILES:
            checked_patch(kept)
    return there, kept


def read_folder(folder: Path) -> dict[str, bytes]:
    """The files of a folder as texts by path. Raises `BadInput` for links and devices."""
    return {path: content for path, content in _files(folder) if content is not None}


def _give(folder: Path, user: int) -> None:
    os.chown(folder, user, user)
    for path in folder.rglob("*"):
        os.chown(path, user, user, follow_symlinks=False)


def _files(folder: Path) -> Iterator[tuple[str, bytes | None]]:
    """Every file below, by path, as nobody's link leads; None for an overlay's mark that it was removed. Raises `BadInput`."""
    for path, entry, at in _entries(folder):
        found = entry.stat(follow_symlinks=False)
        if stat.S_ISCHR(found.st_mode) and found.st_rdev == 0:
            yield _spelled(path), None
        elif stat.S_ISREG(found.st_mode):
            yield _spelled(path), _content(entry.name, at)
        elif not stat.S_ISDIR(found.st_mode):
            raise BadInput(f"{path!r} is a link or a device: only files travel")


def _entries(folder: Path) -> Iterator[tuple[str, "os.DirEntry[str]", int]]:
    """Everything below by its path, beside the descriptor of the folder that it is in. Raises `BadInput` for what cannot be read."""
    at = os.open(folder, FOLDER)
    try:
        yield from _entries_of(at, "", 0)
    finally:
        os.close(at)


def _entries_of(at: int, inside: str, depth: int) -> Iterator[tuple[str, "os.DirEntry[str]", int]]:
    with os.scandir(at) as listed:
        entries = list(listed)
    for entry in entries:
        path = inside + entry.name
        if depth > MOST_DEPTH or len(os.fsencode(path)) > MOST_PATH_BYTES:
            raise BadInput(f"{path[:100]!r}… lies below more than a hundred folders or 1,024 bytes of a path: lay it less deep")
        yield path, entry, at
        if entry.is_dir(follow_symlinks=False):
            try:
                below = os.open(entry.name, FOLDER, dir_fd=at)
            except (FileNotFoundError, NotADirectoryError):
                continue  # it was one a moment ago: programs may be at work in there
            except PermissionError:
                raise BadInput(f"{path!r} is a folder that cannot be read: let its owner enter it") from None
            try:
                yield from _entries_of(below, f"{path}/", depth + 1)
            finally:
                os.close(below)


def _content(file: str, at: int) -> bytes:
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=at)
    with os.fdopen(descriptor, "rb") as opened:
        return opened.read(MOST_PATCH_BYTES + 1)


def _spelled(path: str) -> str:
    try:
        path.encode()
    except UnicodeEncodeError:
        raise BadInput(f"{path!r} has a name that is no UTF-8: only sources travel") from None
    return path


def _opaque(upper: Path) -> Iterator[str]:
    """Folders that were removed and made again: nothing of the ones before is seen through them."""
    for folder, _, _ in os.walk(upper):
        with suppress(OSError):
            if folder != str(upper) and os.getxattr(folder, "user.overlay.opaque", follow_symlinks=False) == b"y":
                yield os.path.relpath(folder, upper)


def _below(base: Path, path: str) -> list[str]:
    """The files that a path stood for."""
    found = base / path
    if found.is_dir() and not found.is_symlink():
        return [str(file.relative_to(base)) for file in found.rglob("*") if file.is_file()]
    return [path]


def _read(file: Path) -> bytes | None:
    return file.read_bytes() if file.is_file() and not file.is_symlink() else None


def remove(folder: Path) -> None:
    """Remove a folder with everything below, however deep: what is in its folders is moved up into it before they are emptied. An overlay
    leaves folders that even their owner may not enter. What cannot be removed is left."""
    numbers, waiting = count(), [str(folder)]
    while waiting:
        emptied = waiting.pop()
        for entry in _listed(emptied):
            with suppress(OSError):
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.path)
                    continue
                os.chmod(entry.path, 0o700)
                up = f"{folder}/.removed-{next(numbers)}"
                os.rename(entry.path, up)
                waiting.append(up)
        with suppress(OSError):
            os.rmdir(emptied)
    with suppress(OSError):
        os.rmdir(folder)


def _listed(folder: str) -> list["os.DirEntry[str]"]:
    with suppress(OSError):
        os.chmod(folder, 0o700)
        with os.scandir(folder) as entries:
            return list(entries)
    return []
