"""`ratchet lineage`: what a version was trained on, or which versions saw a person."""

import json

import click

from app import wiring
from app.domain.errors import BadInput
from app.settings import from_environment


@click.command()
@click.argument("version", required=False)
@click.option("--actor", help="A person's id as the product sends it; answers which versions served and learned from them.")
def lineage(version: str | None, actor: str | None) -> None:
    """Say what VERSION (a name or digest) was trained on, or with --actor which versions saw this person. Prints JSON."""
    if (version is None) == (actor is None):
        raise BadInput("name a version, or a person with --actor")
    settings = from_environment()
    answer = wiring.lineage_of(settings, version) if version is not None else wiring.versions_that_saw(settings, actor or "")
    click.echo(json.dumps(answer, indent=2))
