"""Releases as images: built as `infra/Dockerfile` of their own tree says, run as production runs them, on this machine's own addresses."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from pipelines.commands.running.deployment import QUIET
from tests.real.containers.podman import LOCKED, podman, tools

USER = 10_001
"""Of the image: it has to own the folder that it writes to."""
TOLD = (*QUIET, "OMP_NUM_THREADS", "RUST_LOG")
"""Variables of a process besides ours (RATCHET_*); the rest is the machine's, and not the image's."""


@dataclass(frozen=True, kw_only=True)
class Images:
    """Which image a tree's code runs from, and the folder that all containers share."""

    of: Mapping[Path, str]
    folder: Path

    def give(self) -> None:
        """Make the folder the image's user's, to write to."""
        for path in (self.folder, *self.folder.rglob("*")):
            os.chown(path, USER, USER)

    def command(self, tree: Path, name: str, words: Sequence[str], variables: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
        """What runs `ratchet` with these words in a container of that name, and the variables that podman needs for it."""
        told = [key for key in variables if key.startswith("RATCHET_") or key in TOLD]
        options = [
            f"--name={name}", "--replace", "--rm", "--network=host", "--shm-size=512m", f"--volume={self.folder}:{self.folder}",
            *(f"--env={key}" for key in told),
        ]  # fmt: skip
        return ["podman", "run", *LOCKED, *options, self.of[tree], *words], {**tools(), **{key: variables[key] for key in told}}

    def hasten(self, name: str) -> None:
        """What runs in there gets its share of the cores, after a meek start."""
        inside = psutil.Process(int(podman("inspect", "--format={{.State.Pid}}", name).stdout))
        for group in {os.getpgid(process.pid) for process in (inside, *inside.children(recursive=True))}:
            with suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PGRP, group, os.getpriority(os.PRIO_PROCESS, 0))

    def remove(self, names: Sequence[str]) -> None:
        """At the end: kill what is left."""
        subprocess.run(["podman", "rm", "--force", "--time=0", "--ignore", *names], env=tools(), capture_output=True, check=False)
