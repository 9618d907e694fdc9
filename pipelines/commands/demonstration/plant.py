"""Plants a harmful candidate: the champion with its last normalisation zeroed, put into the canary's queue past the offline gates.

A process of its own (`python -m pipelines.commands.demonstration.plant POLICY`), so that the demo itself never loads torch. Prints
the release's id.
"""

import sys
from dataclasses import replace

import click

from app import wiring
from app.domain.ids import utc_now
from app.domain.release.versions import Version, VersionKind
from app.policy.damage import write_damaged
from app.settings import from_environment, owner_of, read_toml
from pipelines.config import loop_config
from pipelines.evaluation.config import terms_of

WHY = "the demo plants a version that is known to be bad"


def main(policy: str) -> str:
    """Make the damaged version, register it, and force its release into the queue; returns the release's id."""
    settings = from_environment()
    weights, versions = wiring.open_weights(settings), wiring.version_book(settings)
    desk = wiring.release_desk(settings, terms=terms_of(loop_config(read_toml(settings.config)).gates, owner=owner_of(settings.config)))
    champion = versions.find(policy, desk.pointer(policy).digest)
    folder = settings.data / "planted"
    write_damaged(folder, like=weights.path(champion.digest))
    digest = weights.publish(folder)
    version = _version(champion, digest)
    versions.add(version)
    return desk.plant(version, actor="user:demo-saboteur", reason=WHY).id


def _version(champion: Version, digest: str) -> Version:
    return replace(
        champion, digest=digest, name=f"{champion.name}-planted", kind=VersionKind.PLANTED, parent=champion.digest, step=champion.step + 1,
        run_id=None, created_at=utc_now(), optimizer_uri=None, tags={"planted": WHY},
    )  # fmt: skip


if __name__ == "__main__":
    click.echo(main(sys.argv[1]))
