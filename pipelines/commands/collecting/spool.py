"""Registered edits: one file each in a folder, gone when the last horizon was reported, so that a restart goes on."""

import hashlib
import logging
import os
from pathlib import Path
from typing import Any

import msgspec

from app.domain.ids import uuid7
from app.domain.telemetry.signals import RawEdit
from pipelines.commands.collecting.tree import Tree
from pipelines.labelling.regions import region_now

log = logging.getLogger(__name__)
GRACE_S = 30.0
"""How late a horizon may still be measured and called by its name; at least a tenth of the horizon."""
ENDED = ".ended"
"""Suffix of the mark beside an edit whose observation is over."""


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

    @property
    def replaced_text(self) -> str:
        """What stood there."""
        return self.before[self.start : self.start + self.replaced]

    @property
    def edited(self) -> str:
        """The whole file after the edit."""
        return self.before[: self.start] + self.inserted + self.before[self.start + self.replaced :]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One horizon of one edit, ready to send."""

    file: Path
    horizon_s: float
    event: dict[str, Any]


class Spool:
    """The edits that are followed."""

    def __init__(self, folder: Path, tree: Path, horizons_s: tuple[float, ...]) -> None:
        self._folder, self._tree, self._horizons_s = folder, Tree(tree), tuple(sorted(horizons_s))
        self._reported: dict[Path, set[float]] = {}
        self._branches: dict[Path, str | None] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def register(self, edit: Edit) -> str:
        """Take an edit up; returns its name. Raises ValueError where its path leaves the folder."""
        self._check(edit)
        name = uuid7()
        partial = self._folder / f"{name}.partial"
        partial.write_bytes(msgspec.json.encode(edit))
        os.replace(partial, self._folder / f"{name}.json")
        return name

    def end(self, name: str) -> bool:
        """Nobody will look at this edit from now on (file closed, session over); whether there is such an edit."""
        file = self._folder / f"{Path(name).name}.json"
        if file.exists():
            file.with_suffix(ENDED).touch()
        return file.exists()

    def due(self, now: float) -> list[Report]:
        """What to report at `now` (Unix seconds)."""
        files = sorted(self._folder.glob("*.json"))
        branch = self._tree.branch() if files else None
        return [report for file in files for report in self._due(file, now, branch)]

    def done(self, report: Report) -> None:
        """This report was accepted by the service."""
        reported = self._reported[report.file]
        reported.add(report.horizon_s)
        if reported.issuperset(self._horizons_s) or report.event["value"]["ended"]:
            self._forget(report.file)

    def _due(self, file: Path, now: float, branch: str | None) -> list[Report]:
        age = max(0.0, now - file.stat().st_mtime)
        if file not in self._reported:
            self._reported[file], self._branches[file] = self._missed(file, age), branch
        reported = self._reported[file]
        ended = file.with_suffix(ENDED).exists()
        passed = [horizon for horizon in self._horizons_s if horizon <= age and horizon not in reported]
        if reported.issuperset(self._horizons_s):
            self._forget(file)
            return []
        if not (passed or ended) or (edit := self._read(file)) is None:
            return []
        if branch != self._branches[file]:
            log.info("the branch was changed, observation ends file=%s", file.name)
            self._forget(file)
            return []
        moments = [round(age, 1)] if ended else passed
        return [Report(file=file, horizon_s=moment, event=self._event(edit, moment, ended=ended)) for moment in moments]

    def _missed(self, file: Path, age: float) -> set[float]:
        """Horizons that passed before this process saw the edit."""
        missed = {horizon for horizon in self._horizons_s if age > horizon + max(GRACE_S, horizon / 10)}
        if missed:
            log.warning("horizons passed unwatched file=%s horizons=%s", file.name, ",".join(f"{h:g}" for h in sorted(missed)))
        return missed

    def _forget(self, file: Path) -> None:
        self._reported.pop(file, None)
        self._branches.pop(file, None)
        file.unlink(missing_ok=True)
        file.with_suffix(ENDED).unlink(missing_ok=True)

    def _read(self, file: Path) -> Edit | None:
        """The edit; a file that is none is set aside, so that it is complained about once."""
        try:
            edit = msgspec.json.decode(file.read_bytes(), type=Edit)
            self._check(edit)
        except ValueError as error:  # msgspec's errors are ValueErrors
            log.warning("not an edit, set aside file=%s reason=%s", file.name, error)
            file.rename(file.with_suffix(".rejected"))
            self._forget(file)
            return None
        return edit

    def _check(self, edit: Edit) -> None:
        if not self._tree.holds(edit.path):
            raise ValueError(f"path {edit.path!r} leaves the watched folder")

    def _event(self, edit: Edit, horizon: float, *, ended: bool) -> dict[str, Any]:
        place = hashlib.sha256(f"{edit.path}\x1f{edit.start}\x1f{edit.inserted}".encode()).hexdigest()[:16]
        value = measure(edit, self._tree, horizon, name=place, ended=ended)
        return {
            "id": f"{edit.inference_id}-{place}-{horizon:g}", "inference_id": edit.inference_id, "name": "edit_persistence",
            "value": msgspec.to_builtins(value), "source": "collector",
        }  # fmt: skip


def measure(edit: Edit, tree: Tree, horizon: float, *, name: str, ended: bool) -> RawEdit:
    """What became of the edit in its file as it is now; a file that is gone took the edit with it."""
    now = tree.text(edit.path, like=edit.edited)
    region = region_now(before=edit.before, start=edit.start, replaced=edit.replaced, inserted=edit.inserted, after=now)
    return RawEdit(horizon_s=horizon, before=edit.replaced_text, inserted=edit.inserted, after=region, edit=name, ended=ended)
