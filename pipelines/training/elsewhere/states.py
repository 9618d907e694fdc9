"""Checkpoints and states in object storage: each file from the worker that has it, and a manifest last.

    <root>/runs/RUN/checkpoint-NNNNN-<8 hex>/      weights-00001-of-00002.safetensors …  optimizer-…  progress.json  MANIFEST
    <root>/optimizer/POLICY/DIGEST-<8 hex>/        the same with state.json
    <root>/handed/<32 hex>/                        a candidate on its way from the worker that wrote it to whoever publishes it

There is no renaming in object storage: what has no MANIFEST was not finished, and every attempt writes under a name of its own, so that one
that should be dead cannot write into what another one has sealed. Digests are found by whoever writes and compared by whoever reads.
"""

import json
import logging
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from app.domain.ports import Trainer
from app.domain.release.versions import Version
from app.policy.storage.remote_files import RemoteFiles, folder_at, is_url
from pipelines.training.checkpoint import KEPT as KEPT_CHECKPOINTS
from pipelines.training.checkpoint import PROGRESS, Restored
from pipelines.training.elsewhere.sealed import SETTING, read_manifest
from pipelines.training.numerics.state_files import MANIFEST
from pipelines.training.states import KEPT, RUNS, STATE, Inheritance, Inherited, LocalStates, inherited

log = logging.getLogger(__name__)

ASIDE = "DAMAGED"
"""Instead of the manifest: a worker read something else than was written."""
HANDED = "handed"
ABANDONED_S = 86_400.0
"""From when on what nobody finished, or nobody fetched, goes."""


class RemoteStates:
    """The port `pipelines.training.ports.States` on a URL (`s3://bucket/prefix`, `memory://…`)."""

    def __init__(self, url: str, *, wrap: Callable[[Any], Any] = lambda files: files) -> None:
        """`wrap` may put something between us and the storage. Raises `BadConfig` for a protocol nobody speaks here."""
        self.url = url.rstrip("/")
        self._files = RemoteFiles(self.url, wrap=wrap, setting=SETTING)

    # --- checkpoints ----------------------------------------------------------------------------------------------------------------

    def write_checkpoint(self, run_id: str, trainer: Trainer, progress: dict[str, Any], *, step: int) -> None:
        """Seen when, and only when, all of it is there; then older ones beyond the last two go, with what was never finished."""
        self._save(f"{_run(run_id)}/checkpoint-{step:05d}-{_name()}", trainer, {PROGRESS: msgspec.json.encode(progress)})
        folders = self._checkpoints(run_id)
        whole = [folder for folder in folders if self._files.exists(folder, MANIFEST)]
        for folder in set(folders) - set(whole[-KEPT_CHECKPOINTS:]):
            self._files.clear(folder)

    def newest_checkpoint(self, run_id: str) -> Restored:
        """The newest with all files of its manifest; their content is compared by the workers, which read it."""
        damaged: list[str] = []
        for folder in reversed(self._checkpoints(run_id)):
            names = set(self._files.names(folder))
            if ASIDE in names:
                damaged.append(self._place(folder, ASIDE))
            if MANIFEST not in names:
                continue
            digests = self._manifest(folder)
            progress = self._files.read(folder, PROGRESS) if PROGRESS in names else b""
            lost = [name for name in digests if name not in names]
            if not lost and _digest(progress) == digests.get(PROGRESS):
                return Restored(folder=self._place(folder), progress=msgspec.json.decode(progress), damaged=tuple(damaged))
            log.error("checkpoint damaged place=%s; falling back to the one before it", self._place(folder))
            damaged += [self._place(folder, name) for name in lost or [PROGRESS]]
        return Restored(folder=None, progress=None, damaged=tuple(damaged))

    def begun(self) -> list[str]:
        """Whatever lies there of a run."""
        return self._files.folders(RUNS)

    def end_run(self, run_id: str) -> None:
        """All of it, finished or not."""
        self._files.clear(_run(run_id))

    # --- states of versions ---------------------------------------------------------------------------------------------------------

    def keep(self, trainer: Trainer, *, policy: str, digest: str, shape: dict[str, object], base: str | None) -> str:
        """The URL of the state."""
        folder = f"optimizer/{policy}/{digest}-{_name()}"
        self._save(folder, trainer, {STATE: json.dumps({"shape": shape, "base": base}).encode()})
        return self._place(folder)

    def inherited(self, parent: Version, *, shape: dict[str, object]) -> Inherited:
        """One that lies in a folder of this machine, from before there was object storage, is brought there first."""
        place = parent.optimizer_uri or ""
        if not is_url(place):
            found = inherited(parent, shape=shape)
            return found if found.start is None else replace(found, folder=self._brought(Path(found.start), parent))
        folder = place.removeprefix(f"{self.url}/")
        names = self._names(folder) if folder != place else set[str]()
        if not names:
            return Inherited(kind=Inheritance.MISSING, folder=place)
        digests = self._manifest(folder) if MANIFEST in names else {MANIFEST: ""}
        if lost := [name for name in digests if name not in names]:
            return Inherited(kind=Inheritance.DAMAGED, folder=place, damaged=tuple(self._place(folder, name) for name in lost))
        state: dict[str, Any] = json.loads(self._files.read(folder, STATE))
        if state["shape"] != shape:
            return Inherited(kind=Inheritance.OTHER, folder=place)
        return Inherited(kind=Inheritance.INHERITED, folder=place, base=state["base"])

    def forget(self, policy: str, *, keep: Collection[str]) -> None:
        """As the port says; and whatever nobody finished or fetched within a day."""
        ages: dict[str, float] = {}
        for name in self._files.folders(f"optimizer/{policy}"):
            folder = f"optimizer/{policy}/{name}"
            if name.rpartition("-")[0] in keep:
                continue
            if self._files.exists(folder, MANIFEST):
                ages[folder] = self._files.age_s(folder, MANIFEST)
            else:
                self._clear_abandoned(folder)
        for folder in sorted(ages, key=lambda folder: -ages[folder])[:-KEPT]:
            self._files.clear(folder)
        for name in self._files.folders(HANDED):
            self._clear_abandoned(f"{HANDED}/{name}")

    def set_aside(self, place: str) -> None:
        """Its manifest goes, and a mark says why."""
        folder = place.removeprefix(f"{self.url}/")
        self._files.write(folder, ASIDE, b"a worker read something else than its manifest says\n")
        self._files.remove(folder, MANIFEST)

    # --- what both are made of ------------------------------------------------------------------------------------------------------

    def _save(self, folder: str, trainer: Trainer, more: Mapping[str, bytes]) -> None:
        digests = dict(trainer.save_state(self._place(folder)))
        for name, content in more.items():
            self._files.write(folder, name, content)
            digests[name] = _digest(content)
        self._files.write(folder, MANIFEST, json.dumps(digests).encode())

    def _brought(self, source: Path, parent: Version) -> str:
        folder = f"optimizer/{parent.policy}/{parent.digest}-{_name()}"
        for file in sorted(source.iterdir()):
            if file.name != MANIFEST:
                self._files.put(folder, file)
        self._files.put(folder, source / MANIFEST)
        log.info("state brought to object storage from=%s to=%s", source, self._place(folder))
        return self._place(folder)

    def _clear_abandoned(self, folder: str) -> None:
        if all(self._files.age_s(folder, name) > ABANDONED_S for name in self._names(folder)):
            self._files.clear(folder)

    def _checkpoints(self, run_id: str) -> list[str]:
        return [f"{_run(run_id)}/{name}" for name in self._files.folders(_run(run_id))]

    def _names(self, folder: str) -> set[str]:
        try:
            return set(self._files.names(folder))
        except FileNotFoundError:
            return set()

    def _manifest(self, folder: str) -> dict[str, str]:
        return read_manifest(self._files, folder)

    def _place(self, *parts: str) -> str:
        return "/".join((self.url, *parts))


def open_states(location: str) -> LocalStates | RemoteStates:
    """Where checkpoints and states lie: a folder, or a URL."""
    return RemoteStates(location) if is_url(location) else LocalStates(folder_at(location))


def _run(run_id: str) -> str:
    return f"{RUNS}/{run_id}"


def _name() -> str:
    """Of this attempt alone."""
    return uuid.uuid4().hex[:8]


def _digest(content: bytes) -> str:
    return xxhash.xxh3_128(content).hexdigest()
