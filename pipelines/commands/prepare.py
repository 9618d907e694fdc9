"""`ratchet prepare`: what `ratchet up` does before it starts anything, for deployments whose processes somebody else starts."""

import click

from pipelines.commands import deployment


@click.command()
def prepare() -> None:
    """Bring the schema to this version's revision and deploy the base of every policy that has none; a repetition changes nothing."""
    planned = deployment.plan(data=None, config=None, port=None)
    deployment.check(planned)
    deployment.prepare(planned)
    click.echo("ready: start the processes")
