"""`ratchet db`: the schema."""

import click

from app import wiring
from app.secret_files import private_folder
from app.settings import from_environment


@click.group()
def db() -> None:
    """Create, upgrade or check the database schema (RATCHET_DATABASE_URL, RATCHET_INBOX_URL)."""


@db.command()
def upgrade() -> None:
    """Create the databases, or bring them to the revision of this version of Ratchet."""
    settings = from_environment()
    private_folder(settings.data)
    wiring.upgrade_schema(settings)
    click.echo(f"schema is at {wiring.schema_revision(settings)}")


@db.command()
def check() -> None:
    """Say which revision the database is at; exit code 2 when it is not the one needed."""
    settings = from_environment()
    wiring.open_state(settings).dispose()
    wiring.open_inbox(settings).dispose()
    click.echo(f"schema is at {wiring.schema_revision(settings)}, as needed")


@db.command()
def recount() -> None:
    """Add labels up anew for the console, after an older labeller wrote beside this version; labelling waits meanwhile."""
    click.echo(f"{wiring.recount_labels(from_environment())} rows")
