"""`ratchet collect`: watches a working tree and reports how the model's edits persist in it.

An editor registers an edit by dropping a JSON file into the spool folder (write it elsewhere, then move it there):

    {"inference_id": "…", "path": "src/a.py", "before": "the whole file before", "start": 120, "replaced": 0, "inserted": "the new text"}

At each horizon after that, the region of the edit is carried through whatever happened to the file since, and what stands there now goes
to `POST /v1/events` as a `RawEdit`; the rest of the file never leaves the machine. A registered edit stays in the spool until its last
horizon, so a restart goes on; a horizon that passed while nobody watched is left out, because nobody knows.
"""

import hashlib
import logging
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import httpx
import msgspec

from app.domain.signals import RawEdit
from app.logging import configure
from pipelines.labelling.regions import region_now

log = logging.getLogger(__name__)
GRACE_S = 30.0
"""How late a horizon may still be measured and called by its name; at least a tenth of the horizon."""


class Edit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An edit as an editor registers it."""

    inference_id: str
    path: str
    """Of the file, relative to the watched folder."""
    before: str
    """The whole file before the edit."""
    inserted: str
    start: int = 0
    """Character offset of the edit in `before`."""
    replaced: int = 0
    """How many characters of `before` it replaced."""


class Spool:
    """The registered edits: one file each, gone when its last horizon was reported."""

    def __init__(self, folder: Path, tree: Path, horizons_s: tuple[float, ...]) -> None:
        self._folder, self._tree, self._horizons_s = folder, tree.resolve(), tuple(sorted(horizons_s))
        self._reported: dict[Path, set[float]] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def due(self, now: float) -> list[tuple[Path, float, dict[str, Any]]]:
        """Horizons to report at `now` (Unix seconds), each with its event."""
        found: list[tuple[Path, float, dict[str, Any]]] = []
        for file in sorted(self._folder.glob("*.json")):
            age = now - file.stat().st_mtime
            reported = self._reported.setdefault(file, self._missed(file, age))
            passed = [horizon for horizon in self._horizons_s if horizon <= age and horizon not in reported]
            if passed and (edit := self._read(file)) is not None:
                found += [(file, horizon, self._event(edit, horizon)) for horizon in passed]
            elif reported.issuperset(self._horizons_s):
                self._forget(file)
        return found

    def done(self, file: Path, horizon: float) -> None:
        """This horizon was accepted by the service."""
        self._reported[file].add(horizon)
        if self._reported[file].issuperset(self._horizons_s):
            self._forget(file)

    def _missed(self, file: Path, age: float) -> set[float]:
        """Horizons that passed before this process saw the edit."""
        missed = {horizon for horizon in self._horizons_s if age > horizon + max(GRACE_S, horizon / 10)}
        if missed:
            log.warning("horizons passed unwatched file=%s horizons=%s", file.name, ",".join(f"{h:g}" for h in sorted(missed)))
        return missed

    def _forget(self, file: Path) -> None:
        self._reported.pop(file, None)
        file.unlink(missing_ok=True)

    def _read(self, file: Path) -> Edit | None:
        """The edit; a file that is none is set aside, so that it is complained about once."""
        try:
            edit = msgspec.json.decode(file.read_bytes(), type=Edit)
            if not (self._tree / edit.path).resolve().is_relative_to(self._tree):
                raise msgspec.ValidationError(f"path {edit.path!r} leaves the watched folder")
        except msgspec.MsgspecError as error:
            log.warning("not an edit, set aside file=%s reason=%s", file.name, error)
            file.rename(file.with_suffix(".rejected"))
            return None
        return edit

    def _event(self, edit: Edit, horizon: float) -> dict[str, Any]:
        value = measure(edit, self._tree / edit.path, horizon)
        place = hashlib.sha256(f"{edit.path}\x1f{edit.start}\x1f{edit.inserted}".encode()).hexdigest()[:16]
        return {
            "id": f"{edit.inference_id}-{place}-{horizon:g}", "inference_id": edit.inference_id, "name": "edit_persistence",
            "value": msgspec.to_builtins(value), "source": "collector",
        }  # fmt: skip


def measure(edit: Edit, file: Path, horizon: float) -> RawEdit:
    """What became of the edit in the file as it is now; a file that is gone took the edit with it."""
    now = file.read_bytes().decode(errors="replace") if file.is_file() else ""
    region = region_now(before=edit.before, start=edit.start, replaced=edit.replaced, inserted=edit.inserted, after=now)
    replaced = edit.before[edit.start : edit.start + edit.replaced]
    return RawEdit(horizon_s=horizon, before=replaced, inserted=edit.inserted, after=region)


def watch(spool: Spool, client: httpx.Client, stop: threading.Event, *, poll_s: float, clock: Callable[[], float] = time.time) -> None:
    """Report what is due until told to stop; what the service did not take is tried again, what it refuses is logged."""
    while not stop.is_set():
        for file, horizon, event in spool.due(clock()):
            try:
                response = client.post("/v1/events", json=event)
            except httpx.TransportError as error:
                log.warning("service away, trying again error=%s", error)
                break
            if response.status_code in (429, 500, 502, 503):
                log.warning("service busy, trying again status=%d", response.status_code)
                break
            if response.status_code >= 400:
                log.error("refused file=%s status=%d answer=%s", file.name, response.status_code, response.text[:300])
            else:
                log.info("reported turn=%s horizon_s=%g", event["inference_id"], horizon)
            spool.done(file, horizon)
        stop.wait(poll_s)


@click.command()
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--url", default="http://127.0.0.1:8400", show_default=True, help="The service.")
@click.option("--key", envvar="RATCHET_API_KEY", required=True, help="API key that may ingest; better in RATCHET_API_KEY.")
@click.option("--spool", type=click.Path(file_okay=False, path_type=Path), help="Where edits are dropped; DIRECTORY/.ratchet/edits.")
@click.option("--horizon", "horizons", type=click.FloatRange(min=0), multiple=True, default=(30, 120, 300, 600), show_default=True)
@click.option("--poll", "poll_s", type=click.FloatRange(min=0.05), default=1.0, show_default=True, help="Seconds between two looks.")
def collect(directory: Path, url: str, key: str, spool: Path | None, horizons: tuple[float, ...], poll_s: float) -> None:
    """Watch DIRECTORY (a git tree or any folder) and report how registered edits persist in it, at each horizon (seconds)."""
    configure("collect", "INFO")
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda _number, _frame: stop.set())
    edits = Spool(spool or directory / ".ratchet" / "edits", directory, horizons)
    log.info("collect ready directory=%s", directory)
    with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=10.0) as client:
        watch(edits, client, stop, poll_s=poll_s)
