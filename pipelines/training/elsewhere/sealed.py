"""A folder in object storage with a manifest: what was written there, by name and digest. Both sides of the wire know it."""

import json
from collections.abc import Collection
from pathlib import Path

from app.policy.storage.remote_files import RemoteFiles
from pipelines.training.numerics.state_files import MANIFEST, digest_of

SETTING = "RATCHET_STATES"


def read_manifest(files: RemoteFiles, folder: str) -> dict[str, str]:
    """Digests by name; where it cannot be read, that of itself, which no file has. Raises `FileNotFoundError`."""
    try:
        return json.loads(files.read(folder, MANIFEST))
    except ValueError:
        return {MANIFEST: "", f"{MANIFEST} cannot be read": ""}


def download(files: RemoteFiles, folder: str, names: Collection[str], to: Path) -> list[str]:
    """Fetch files of a sealed folder; returns those that are missing or not what the manifest says."""
    try:
        digests = read_manifest(files, folder)
    except FileNotFoundError:
        return [MANIFEST]
    wrong: list[str] = []
    for name in names:
        try:
            files.fetch(folder, name, to / name)
        except FileNotFoundError:
            wrong.append(name)
            continue
        if digest_of(to / name) != digests.get(name):
            wrong.append(name)
    return wrong
