"""Files of versions on any storage that fsspec knows, and what a storage promises about writing a name once."""

import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from fsspec.config import conf as fsspec_config
from fsspec.core import url_to_fs

from app.domain.errors import BadConfig, Unavailable

PROBES = ".probe-"
CLIENTS = frozenset({"botocore", "aiobotocore", "aiohttp"})
"""What storage is spoken to with: their errors are nobody else's kind, and end a thread that does not know them."""
S3_PATIENCE = {"connect_timeout": 5, "read_timeout": 30, "retries": {"max_attempts": 1}}
"""Of botocore, whose own is a minute each, five times; s3fs asks five times anyway: who is cut off knows it after half a minute."""
P = ParamSpec("P")
T = TypeVar("T")


def is_url(location: str) -> bool:
    """Whether a place is in object storage, and no folder: `file://…` is one."""
    return "://" in location and not location.startswith("file://")


def folder_at(location: str) -> Path:
    """The folder that a place which is no URL names."""
    return Path(location.removeprefix("file://"))


def patient(url: str) -> dict[str, Any]:
    """Options for whoever speaks to a place: on S3 our patience, where FSSPEC_S3_CONFIG_KWARGS says no other."""
    if not url.startswith("s3://"):
        return {}
    return {"config_kwargs": {**S3_PATIENCE, **fsspec_config.get("s3", {}).get("config_kwargs", {})}}


def answered(act: "Callable[Concatenate[RemoteFiles, P], T]") -> "Callable[Concatenate[RemoteFiles, P], T]":
    """A storage that does not answer is `Unavailable`, whatever it is spoken to with."""

    @wraps(act)
    def asked(self: "RemoteFiles", *arguments: P.args, **named: P.kwargs) -> T:
        try:
            return act(self, *arguments, **named)
        except Exception as error:
            silent = isinstance(error, ConnectionError | TimeoutError) or type(error).__module__.partition(".")[0] in CLIENTS
            if not silent:
                raise
            said = f"{self.url} does not answer ({type(error).__name__}: {error}): check its server and the network to it"
            raise Unavailable(said) from error

    return asked


class RemoteFiles:
    """`<root>/<digest>/<name>`. Reading raises `Unavailable` where the storage does not answer."""

    def __init__(self, url: str, *, wrap: Callable[[Any], Any] = lambda files: files, setting: str = "RATCHET_WEIGHTS") -> None:
        """`wrap` may put something between us and the storage: benches break it. Raises `BadConfig` for a protocol nobody speaks here."""
        try:
            found, self.root = url_to_fs(url, **patient(url))
        except (ImportError, ValueError) as error:
            protocol = url.split("://")[0]
            package = "s3fs" if protocol == "s3" else f"fsspec's package for {protocol}"
            raise BadConfig(f"{setting} is {url!r} and this installation cannot speak {protocol}: pip install {package}") from error
        self.fs = wrap(found)
        self.url = url
        self._once: bool | None = None

    @answered
    def exists(self, digest: str, name: str) -> bool:
        """Whether it is there now."""
        # what another process added must be seen: fsspec caches listings
        self.fs.invalidate_cache()
        return bool(digest) and bool(self.fs.exists(self._at(digest, name)))

    @answered
    def names(self, digest: str) -> list[str]:
        """The files of a version."""
        self.fs.invalidate_cache()
        return [str(place).rsplit("/", 1)[-1] for place in self.fs.ls(f"{self.root}/{digest}", detail=False)]

    @answered
    def read(self, digest: str, name: str) -> bytes:
        """A small file's content."""
        return cast("bytes", self.fs.cat_file(self._at(digest, name)))

    def write(self, digest: str, name: str, content: bytes) -> None:
        """A small file; what was there is replaced."""
        self.fs.makedirs(f"{self.root}/{digest}", exist_ok=True)
        self.fs.pipe_file(self._at(digest, name), content)

    def folders(self, below: str) -> list[str]:
        """Names of the folders right below one, sorted; none where it is not there."""
        self.fs.invalidate_cache()
        try:
            found = self.fs.ls(f"{self.root}/{below}", detail=True)
        except FileNotFoundError:
            return []
        return sorted(str(one["name"]).rstrip("/").rsplit("/", 1)[-1] for one in found if one["type"] == "directory")

    def age_s(self, digest: str, name: str) -> float:
        """Seconds since a file was written; what the storage does not date is new. Raises `FileNotFoundError`."""
        dated = self.fs.info(self._at(digest, name))
        made = dated.get("LastModified") or dated.get("created") or dated.get("mtime")
        seconds = made.timestamp() if isinstance(made, datetime) else made
        return max(0.0, time.time() - float(seconds)) if seconds is not None else 0.0

    @answered
    def part(self, digest: str, name: str, start: int, stop: int) -> bytes:
        """Some bytes of a file."""
        return cast("bytes", self.fs.cat_file(self._at(digest, name), start=start, end=stop))

    @answered
    def fetch(self, digest: str, name: str, target: Path) -> None:
        """Download."""
        self.fs.get_file(self._at(digest, name), str(target))

    def put(self, digest: str, source: Path) -> None:
        """Upload under the file's own name; what was there is replaced."""
        self.fs.makedirs(f"{self.root}/{digest}", exist_ok=True)
        self.fs.put_file(str(source), self._at(digest, source.name))

    def claim(self, digest: str, name: str, content: bytes) -> bytes:
        """Write a name once: returns what stands there, which is another's where that came first.

        One request where the storage keeps a promise like `If-None-Match: *`; else a look before the write, between which somebody else
        may write: then the last one stands, and readers find out by the digests.
        """
        self.fs.makedirs(f"{self.root}/{digest}", exist_ok=True)
        if not self.writes_once and self.exists(digest, name):
            return self.read(digest, name)
        try:
            self.fs.pipe_file(self._at(digest, name), content, **({"mode": "create"} if self.writes_once else {}))
        except FileExistsError:
            return self.read(digest, name)
        return content

    @property
    def writes_once(self) -> bool:
        """Whether this storage refuses to create what is there already; tried out once."""
        if self._once is None:
            probe = f"{self.root}/{PROBES}{uuid.uuid4().hex}"
            self.fs.makedirs(self.root, exist_ok=True)
            try:
                self.fs.pipe_file(probe, b"1", mode="create")
                self.fs.pipe_file(probe, b"2", mode="create")
            except FileExistsError:
                self._once = True
            except (TypeError, ValueError):  # an fsspec that does not know the word
                self._once = False
            else:
                self._once = False
            if self.fs.exists(probe):
                self.fs.rm_file(probe)
        return self._once

    def remove(self, digest: str, name: str) -> None:
        """Take a file away; harmless when it is gone."""
        try:
            self.fs.rm_file(self._at(digest, name))
        except FileNotFoundError:
            return

    def texts_with(self, words: bytes) -> int:
        """How many JSON files below the root hold these words; tensors name nobody. Raises `Unavailable`."""
        self.fs.invalidate_cache()
        try:
            texts = [path for path in self.fs.find(self.root) if str(path).endswith(".json")]
            return sum(words in cast("bytes", self.fs.cat_file(path)) for path in texts)
        except OSError as error:
            raise Unavailable(f"{self.url} cannot be looked into ({error}): try again when it answers") from error

    def clear(self, folder: str) -> None:
        """Take a folder away with all below it; harmless when it is gone."""
        self.fs.invalidate_cache()
        with suppress(FileNotFoundError):
            self.fs.rm(f"{self.root}/{folder}", recursive=True)

    def _at(self, digest: str, name: str) -> str:
        return f"{self.root}/{digest}/{name}"
