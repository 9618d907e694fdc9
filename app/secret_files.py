"""Secrets that a deployment makes for itself: one file each, readable by its owner alone, in a folder beside the data.

A file holds one secret a line, the newest first: what is made is made with the newest, what is checked may carry any of them.
So a secret is rotated with an overlap, and rotated twice its oldest value is worth nothing.
"""

import os
import secrets
import tempfile
from pathlib import Path

from app.domain.errors import BadConfig

SECRET_BYTES = 32
OURS = ("ratchet.", "inbox.", "supervisor.lock", "secrets", ".probe")
"""How the names begin of what lies in a data folder before it is closed."""
KEPT = 2
"""The newest and the one before it."""


def keep_to_owner() -> None:
    """From now on, what this process and its children make is readable by their user alone."""
    os.umask(0o077)


def private_folder(folder: Path) -> Path:
    """The folder, made where it is missing, with mode 0700."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    return folder


def data_folder(folder: Path) -> Path:
    """The folder of a deployment's data: closed to others where it is made here, or holds nothing of anybody else's.

    Somebody's folder with other things in it keeps its mode, for they may be others' to read; what we put there is closed by itself.
    """
    if folder.is_dir() and any(not path.name.startswith(OURS) for path in folder.iterdir()):
        return folder
    return private_folder(folder)


def secret_file(folder: Path, name: str) -> Path:
    """The file of that secret, with a fresh random one where there is none; whoever comes second uses what the first one made."""
    path = private_folder(folder) / name
    if not path.exists():
        fresh = written(folder, [secrets.token_hex(SECRET_BYTES)])
        try:
            os.link(fresh, path)  # as a whole or not at all, and never over another process's
        except FileExistsError:
            pass
        finally:
            fresh.unlink()
    return path


def read_secrets(path: Path) -> tuple[str, ...]:
    """The secrets of a file, newest first. Raises `BadConfig` for a file that holds none."""
    found = tuple(path.read_text().split())
    if not found:
        raise BadConfig(f"{path} is empty: put the secret back from the backup, or remove the file and a fresh one is made")
    return found


class SecretReader:
    """The secrets of a file as they are now: read again when it changed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read: tuple[tuple[int, int], tuple[str, ...]] | None = None

    def __call__(self) -> tuple[str, ...]:
        """Newest first."""
        found = self._path.stat()
        version = (found.st_ino, found.st_mtime_ns)
        if self._read is None or self._read[0] != version:
            self._read = (version, read_secrets(self._path))
        return self._read[1]


def rotate(folder: Path, name: str) -> Path:
    """Put a fresh secret in front; the one before it is still honoured, older ones are not."""
    path = secret_file(folder, name)
    written(folder, [secrets.token_hex(SECRET_BYTES), *read_secrets(path)[: KEPT - 1]]).replace(path)
    return path


def written(folder: Path, lines: list[str]) -> Path:
    """A new file of mode 0600, on the disk, under a name of its own."""
    descriptor, name = tempfile.mkstemp(dir=folder)
    with os.fdopen(descriptor, "w") as file:
        file.write("".join(f"{line}\n" for line in lines))
        file.flush()
        os.fsync(file.fileno())
    return Path(name)
