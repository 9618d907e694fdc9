"""What a worker has on the disk of its own machine: snapshots by digest, the state that it reads, and what it is about to send.

    RATCHET_DATA of the machine, else its folder for temporary files
        training-node/weights/<digest>/    kept for the next run
        training-node/worker-<pid>/        scratch of one worker, gone with it

The address of storage comes from the driver, its credentials from the environment of the machine (`AWS_…`): no secret travels over Ray.
"""

import logging
import os
import shutil
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from app.domain.errors import DamagedState, RatchetError, Unavailable
from app.domain.learning.training import Place
from app.policy.storage.remote import open_store
from app.policy.storage.remote_files import RemoteFiles
from app.policy.storage.snapshot import READY
from app.policy.storage.store import LocalWeights
from pipelines.training.elsewhere.sealed import SETTING, download, read_manifest
from pipelines.training.numerics.state_files import digest_of

log = logging.getLogger(__name__)

STALE_S = 86_400.0
"""From when on a snapshot that no run of this machine asked for goes from its cache."""


class NodeFiles:
    """One worker's; folders are taken as they are, URLs fetched."""

    def __init__(self, root: Path | None = None) -> None:
        """`root`: else of the environment."""
        self.root = root or Path(os.environ.get("RATCHET_DATA") or tempfile.gettempdir()) / "training-node"
        self.scratch = self.root / f"worker-{os.getpid()}"
        self._state: tuple[str, Path] | None = None
        for left in self.root.glob("worker-*"):
            if not psutil.pid_exists(int(left.name.partition("-")[2])):
                shutil.rmtree(left, ignore_errors=True)

    def snapshot(self, place: Place) -> Path:
        """The folder of a snapshot, whose URL ends with its digest. Raises `NotFound`, `BadInput` (damaged), `Unavailable`."""
        if not isinstance(place, str):
            return place
        store, _, digest = place.rpartition("/")
        with _reached(place):
            folder = open_store(store, cache=self.root / "weights").path(digest)
        os.utime(folder / READY)
        return folder

    def state(self, place: Place, own: Sequence[str]) -> Path:
        """The folder of a saved state with the files that a worker reads: the one that it wrote itself (`own`, by stem: weights and
        optimizer), or all of them where another number of workers wrote it. Kept until another one is asked for.

        Raises `DamagedState` where a file is not what the manifest says, `Unavailable`.
        """
        if not isinstance(place, str):
            return place
        if self._state is not None and self._state[0] == place:
            return self._state[1]
        self.forget_state()
        folder = self._fresh("state")
        with _reached(place):
            files = RemoteFiles(place.rpartition("/")[0], setting=SETTING)
            name = place.rpartition("/")[2]
            try:
                saved = [file for file in read_manifest(files, name) if file.endswith(".safetensors")]
            except FileNotFoundError:
                saved = []
            wrong = download(files, name, own if set(own) <= set(saved) else saved, folder)
        if wrong or not saved:
            said = ", ".join(wrong) or "its manifest"
            raise DamagedState(f"{place} is damaged ({said}): it is set aside, and the next update goes on without it", place)
        self._state = (place, folder)
        return folder

    def forget_state(self) -> None:
        """Give its disk back."""
        if self._state is not None:
            shutil.rmtree(self._state[1], ignore_errors=True)
            self._state = None

    @contextmanager
    def sending(self, place: str, digests: dict[str, str]) -> Generator[Path]:
        """A folder whose files are sent to `place` when the block ends well; their digests are put into `digests`. Raises `Unavailable`."""
        folder = self._fresh("outgoing")
        try:
            yield folder
            with _reached(place):
                files = RemoteFiles(place.rpartition("/")[0], setting=SETTING)
                for file in sorted(folder.iterdir()):
                    digests.setdefault(file.name, digest_of(file))
                    files.put(place.rpartition("/")[2], file)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Scratch goes, and the snapshots that no run asked for within a day."""
        self._state = None
        shutil.rmtree(self.scratch, ignore_errors=True)
        cache = LocalWeights(self.root / "weights")
        for digest, age_s in cache.ages_s().items():
            if age_s > STALE_S:
                cache.remove(digest)

    def _fresh(self, name: str) -> Path:
        folder = self.scratch / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder


@contextmanager
def _reached(place: str) -> Generator[None]:
    """Whatever a storage's client raises, in a sentence that travels to the driver: its own exceptions do not all unpickle there."""
    try:
        yield
    except RatchetError:
        raise
    except Exception as error:  # noqa: BLE001 - each storage has exceptions of its own
        raise Unavailable(
            f"the machine {os.uname().nodename} does not reach {place} ({type(error).__name__}: {error}): give Ray's nodes the address and "
            "the credentials of the storage (AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, …)"
        ) from None
