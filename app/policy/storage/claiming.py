"""A place for files belongs to one deployment: the first one to use it writes its id there, and another one is refused.

Two deployments on one bucket would sweep each other's segments and prune each other's weights. The place says too whether it keeps what
object storage has to keep for us: what was written is read at once, and what exists is not made a second time (conditional writes).
"""

import uuid
from contextlib import suppress
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs

from app.domain.errors import BadConfig, Unavailable

MARK = "DEPLOYMENT"
"""The file with the id of the deployment that the place belongs to."""


def claim(location: str, identity: str, *, setting: str) -> None:
    """Take the place, or find that it is ours. Raises `BadConfig` where it is another deployment's, `Unavailable` where it is away."""
    files, root = _open(location, setting)
    path = f"{root}/{MARK}"
    try:
        files.invalidate_cache()
        if not files.exists(path):
            files.makedirs(root, exist_ok=True)
            with suppress(FileExistsError):  # another one was faster: its id is read below
                files.pipe_file(path, identity.encode(), mode="create")
        content: Any = files.cat_file(path)  # bytes, of one file
        owner = content.decode().strip()
    except (OSError, ValueError) as error:
        raise Unavailable(f"{location} does not answer ({error}): check {setting} and its credentials") from error
    if owner != identity:
        raise BadConfig(
            f"{location} belongs to another deployment ({owner}), and this is {identity}: name a bucket or prefix of its own in {setting}; "
            f"where this one was restored elsewhere and the other is gone, delete {MARK} there"
        )


def faults(location: str, *, setting: str) -> list[str]:
    """What the place does not keep, a sentence each. Writes and removes one small file."""
    files, root = _open(location, setting)
    path, found = f"{root}/.probe-{uuid.uuid4().hex}", list[str]()
    try:
        files.makedirs(root, exist_ok=True)
        files.pipe_file(path, b"one", mode="create")
        try:
            if files.cat_file(path) != b"one":
                found.append(f"{location} does not read what was just written")
            if not _refuses_a_second(files, path):
                found.append(f"{location} makes a second time what exists (it ignores If-None-Match)")
        finally:
            files.rm_file(path)
    except (OSError, ValueError) as error:
        raise Unavailable(f"{location} does not take files ({error}): check {setting} and its credentials") from error
    return found


def _refuses_a_second(files: AbstractFileSystem, path: str) -> bool:
    try:
        files.pipe_file(path, b"two", mode="create")
    except FileExistsError:
        return True
    return False


def _open(location: str, setting: str) -> tuple[AbstractFileSystem, str]:
    try:
        files, root = url_to_fs(location)
    except (ImportError, ValueError) as error:
        protocol = location.split("://")[0]
        package = "s3fs" if protocol == "s3" else f"fsspec's package for {protocol}"
        raise BadConfig(f"{setting} is {location!r} and this installation cannot look at {protocol}: pip install {package}") from error
    return files, root.rstrip("/")
