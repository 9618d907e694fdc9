"""The first version of every policy: base weights into the store, a version row, the first pointer. Idempotent.

A policy that is deployed already is left as it is, even when its configuration names another base model since: a base is changed by a
release, not by a restart.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from app.domain.errors import BadConfig, Unavailable
from app.domain.policies import PolicyConfig
from app.domain.ports import Clock, VersionBook, WeightStore
from app.domain.release.releases import Pointer
from app.domain.release.versions import Version, VersionKind, version_name

log = logging.getLogger(__name__)


class FirstRelease(Protocol):
    """What bootstrap needs of the release room."""

    def pointer(self, policy: str) -> Pointer:
        """Raises `Unavailable` when nothing was deployed yet."""
        ...

    def bootstrap(self, version: Version, *, actor: str) -> Pointer: ...


def check_model(name: str, policy: PolicyConfig) -> Path:
    """The folder of a policy's base model. Raises `BadConfig` with the cure when it is not a finished snapshot."""
    folder = Path(policy.model)
    if not (folder / "READY").exists():
        raise BadConfig(f"policy {name} has no model at {folder}: run `make model`, or correct policies.{name}.model")
    return folder


def bootstrap(
    policies: Mapping[str, PolicyConfig], *, weights: WeightStore, versions: VersionBook, releases: FirstRelease, clock: Clock
) -> list[Version]:
    """Deploy the base of every policy that has no pointer yet; returns the versions that were deployed now."""
    folders = {name: check_model(name, policy) for name, policy in policies.items()}  # all of them first: nothing half-done
    deployed: list[Version] = []
    for name, policy in policies.items():
        if _is_deployed(releases, name):
            continue
        digest = weights.publish(folders[name])
        now = clock()
        version = Version(
            digest=digest, policy=name, name=version_name(base=policy.base_name, kind=VersionKind.BASE, created_at=now, step=0),
            kind=VersionKind.BASE, parent=None, step=0, run_id=None, created_at=now, base_model=policy.base_model, licence=policy.licence,
        )  # fmt: skip
        versions.add(version)
        releases.bootstrap(version, actor="system:bootstrap")
        log.info("policy deployed policy=%s version=%s digest=%s", name, version.name, digest[:12])
        deployed.append(version)
    return deployed


def _is_deployed(releases: FirstRelease, policy: str) -> bool:
    try:
        releases.pointer(policy)
    except Unavailable:
        return False
    return True
