"""The projection of what is live into MLflow: aliases written from SQL every minute, and repaired where somebody moved them.

Never the other way round: an alias that was set by hand is a drift to be logged and undone, and a registry that does not answer delays
nothing but this file.
"""

import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

from app.domain.errors import RatchetError
from app.domain.ports import RunStore, VersionBook, VersionRegistry, WeightStore
from app.domain.release.gates import content_hash
from app.domain.release.releases import Pointer, Release, ReleaseState
from app.domain.release.versions import TrainingRun, Version

log = logging.getLogger("ratchet.projection")
S = ReleaseState
CANDIDATES = (S.QUEUED, S.READY, S.APPROVED, S.PROMOTING)


class Releases(Protocol):
    """What is live and on its way."""

    def pointer(self, policy: str) -> Pointer: ...
    def list(self, *, policy: str | None = None, states: Collection[ReleaseState] = (), limit: int = 100) -> list[Release]: ...


def aliases_of(policy: str, releases: Releases) -> dict[str, str]:
    """Alias → digest, as SQL says it now."""
    pointer = releases.pointer(policy)
    wanted = {"champion": pointer.digest, "anchor": pointer.anchor}
    if pointer.previous is not None:
        wanted["previous"] = pointer.previous
    for alias, states in (("canary", (S.CANARY,)), ("candidate", CANDIDATES)):
        newest = next(iter(releases.list(policy=policy, states=states, limit=1)), None)
        if newest is not None:
            wanted[alias] = newest.digest
    return wanted


@dataclass(frozen=True, kw_only=True)
class Projection:
    """What is projected from where."""

    releases: Releases
    versions: VersionBook
    weights: WeightStore
    runs: RunStore
    registry: VersionRegistry

    def aliases(self, policy: str) -> dict[str, str]:
        """Alias → digest, with every version behind one registered: also a base, one made while MLflow was down, one deleted there. One
        that is not taken waits for the next round, and the others' aliases do not wait with it."""
        wanted = aliases_of(policy, self.releases)
        for digest in sorted(set(wanted.values())):
            try:
                self.register(self.versions.find(policy, digest))
            except RatchetError as error:
                log.warning("projection waits policy=%s version=%s: %s", policy, digest[:12], error)
        return wanted

    def register(self, version: Version) -> None:
        """Register a version with its run. Idempotent. Raises `Unavailable`."""
        run = self.runs.get(version.run_id) if version.run_id else None
        self.registry.register(version, folder=self.weights.path(version.digest), run=run, card=model_card(version, run))


def model_card(version: Version, run: TrainingRun | None) -> str:
    """The description MLflow shows: the base and its licence, and everything that this version was made of and with."""
    facts = {
        "digest": version.digest, "kind": version.kind.value, "base model": version.base_model, "licence of the base": version.licence,
        "parent": version.parent, **{key: value for key, value in version.tags.items() if key != "batch"},
    }  # fmt: skip
    if run is not None:
        facts |= {"training run": run.id, "batch" if "corpus" not in version.tags else "corpus, as read": run.batch_id}
        facts |= {"reward rule set": run.metrics.get("rule_set"), "turns": run.metrics.get("turns"), "config": content_hash(run.config)}
    rows = [f"| {name} | {value} |" for name, value in facts.items() if value not in (None, "")]
    return "\n".join(
        [f"# {version.name}", "", "| | |", "|---|---|", *rows, "", f"Ask `ratchet lineage {version.name}` for the whole chain."]
    )


def project_once(policies: Iterable[str], projection: Projection) -> None:
    """Write the aliases of every policy; one that cannot be written waits for the next round."""
    for policy in policies:
        try:
            for repair in projection.registry.reconcile(policy, projection.aliases(policy)):
                log.info("projected policy=%s %s", policy, repair)
        except RatchetError as error:
            log.warning("projection waits policy=%s: %s", policy, error)
