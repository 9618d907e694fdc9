"""Sections that were run, kept in a file: a run that was broken off goes on, and the last one prints them all."""

from __future__ import annotations

import json
import subprocess
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.bench.common.sections import Section


@dataclass(frozen=True, kw_only=True)
class Run:
    """One section as it came out, and how it was run."""

    section: Section
    cpu_s: float
    """Of its process."""
    scale: float
    seed: int
    commit: str
    """What was checked out; ends in `-dirty` where files had been changed since."""

    def text(self) -> str:
        return f"{self.section.text()} ({self.cpu_s:.0f} s of CPU, scale {self.scale:g}, seed {self.seed}, {self.commit})"


@dataclass(kw_only=True)
class Kept:
    """Runs by the names of their sections. Written after each one; without a path it lasts as long as the process."""

    path: Path | None = None
    _runs: dict[str, Run] = field(default_factory=dict[str, Run])

    def __post_init__(self) -> None:
        if self.path is not None and self.path.exists():
            self._runs = {name: _run(**fields) for name, fields in json.loads(self.path.read_text()).items()}

    def find(self, name: str, *, scale: float, seed: int) -> Run | None:
        """The section's run with this seed, at this scale or a larger one."""
        run = self._runs.get(name)
        return run if run is not None and run.seed == seed and run.scale >= scale else None

    def add(self, name: str, run: Run) -> None:
        """Instead of what was kept under this name before."""
        self._runs[name] = run
        if self.path is not None:
            new = self.path.with_suffix(".new")
            new.write_text(json.dumps({name: asdict(run) for name, run in self._runs.items()}, indent=1))
            new.replace(self.path)


def commit() -> str:
    """What is checked out here."""
    found = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "no commit"


def _run(*, section: dict[str, Any], **fields: Any) -> Run:
    return Run(section=Section(**section), **fields)
