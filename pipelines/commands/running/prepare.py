"""`ratchet prepare`: what `ratchet up` does before it starts anything, for deployments whose processes somebody else starts."""

import click

from app.settings import from_environment
from pipelines.commands.running import deployment


@click.command()
def prepare() -> None:
    """Bring the schema to this version's revision and deploy the base of every policy that has none; a repetition changes nothing."""
    settings = from_environment(deployment.environment())
    deployment.check(settings)
    deployment.prepare(settings)
    click.echo("ready: start the processes")
