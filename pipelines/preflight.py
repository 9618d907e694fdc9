"""What is checked before anything is started: each finding is one sentence that names the cure, and nothing is left half-started."""

import fcntl
import os
import shutil
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from app.domain.errors import BadConfig
from app.domain.policies import PolicyConfig
from app.secret_files import data_folder

FREE_BYTES_NEEDED = 2 * 2**30
"""A day of the embedded deployment: snapshots of 270 MB, optimizer states of 1 GB, segments and databases."""


def require_policies(declared: Mapping[str, PolicyConfig], *, config: Path | None) -> None:
    """Refuse a configuration without policies, and a policy whose model is not there."""
    if not declared:
        raise BadConfig(f"{config or 'the configuration'} declares no policy: add a table [policies.NAME] with model and base_name")
    for name, policy in declared.items():
        if not (Path(policy.model) / "READY").is_file():
            raise BadConfig(f"policy {name!r} has no model at {policy.model}: run `make model`, or correct policies.{name}.model")


def require_space(folder: Path, *, needed: int = FREE_BYTES_NEEDED) -> None:
    """Refuse a disk that would fill up under the first candidates."""
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise BadConfig(
            f"{existing} has {free / 2**30:.1f} GiB free and {needed / 2**30:.0f} are needed: free some, or name another folder with --data"
        )


def require_writable(folder: Path) -> None:
    """Refuse a data folder that cannot be made or written.

    It is closed to others where it is ours. A mounted volume is somebody else's who let us in (Kubernetes' fsGroup): its mode is theirs.
    """
    probe = folder / ".probe"
    try:
        if not folder.exists() or folder.stat().st_uid == os.geteuid():
            data_folder(folder)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise BadConfig(f"cannot write to {folder}: {error.strerror}; correct its rights, or name another folder with --data") from error


def is_free(host: str, port: int) -> bool:
    """Whether nothing listens there."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError:
            return False
    return True


@dataclass(frozen=True)
class ClaimedPort:
    """A port nothing listens on yet, kept for this process: another deployment that starts in the same second chooses another one."""

    number: int
    claim: IO[str]
    """The lock, held until the file is closed or the process ends."""


def choose_port(host: str, wanted: int, *, insisted: bool) -> ClaimedPort:
    """The wanted port, or a free one when it is taken (or 0); with `insisted` (a person named it) a taken one is refused."""
    if wanted and (chosen := _claimed(host, wanted)):
        return chosen
    if insisted:
        raise BadConfig(f"port {wanted} on {host} is in use: end what listens there, or choose another with --port")
    while True:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
            listener.bind((host, 0))
            free = int(listener.getsockname()[1])
        if chosen := _claimed(host, free):
            return chosen


def _claimed(host: str, port: int) -> ClaimedPort | None:
    """The port, unless something listens there or another deployment of this user has chosen it."""
    claim = (Path(tempfile.gettempdir()) / f"ratchet-{os.getuid()}-port-{port}.lock").open("w")
    try:
        fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        claim.close()
        return None
    if is_free(host, port):
        return ClaimedPort(port, claim)
    claim.close()
    return None
