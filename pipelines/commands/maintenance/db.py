"""`ratchet db`: the schema."""

import click

from app import wiring
from app.secret_files import data_folder
from app.settings import from_environment

PROGRESS_ROWS = 100_000


@click.group()
def db() -> None:
    """Create, upgrade or check the database schema (RATCHET_DATABASE_URL, RATCHET_INBOX_URL)."""


@db.command()
def upgrade() -> None:
    """Create the databases, or bring them to the revision of this version of Ratchet."""
    settings = from_environment()
    data_folder(settings.data)
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
def contract() -> None:
    """End what the schema keeps for the version before, once no process of it runs any more: none can start on it afterwards.

    Answers and tool calls move out of the turns' rows, some thousand at a time, beside the traffic. Killed on the way, run it again.
    """
    told = -PROGRESS_ROWS

    def say(total: int) -> None:
        nonlocal told
        if total >= told + PROGRESS_ROWS:
            told = total
            click.echo(f"the words of {total} turns moved", err=True)

    older = wiring.contract_schema(from_environment(), moved=say)
    click.echo(f"code of these revisions can run here no longer: {', '.join(older)}" if older else "nothing was kept for older versions")


@db.command()
def recount() -> None:
    """Add labels up anew for the console, after an older labeller wrote beside this version; labelling waits meanwhile."""
    click.echo(f"{wiring.recount_labels(from_environment())} rows")
