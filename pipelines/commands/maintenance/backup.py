"""`ratchet backup`: what backups of a deployment were made and proved, for alarms and for whoever asks."""

import click

from app import wiring
from app.settings import from_environment


@click.group()
def backup() -> None:
    """Write down that a backup was made, or restored and found whole; docs/backup.md says how."""


@backup.command()
@click.option("--drill", is_flag=True, help="Not made: restored somewhere, and found whole.")
@click.option("--detail", default="", help="Where it lies, how large it is: one line for whoever needs it at night.")
def note(drill: bool, detail: str) -> None:
    """Write down that a backup was made just now: `ratchet_backup_age_seconds` and `ratchet doctor` count from it."""
    name = "drill" if drill else "backup"
    wiring.deployment_state(from_environment()).note(name, {"detail": detail})
    click.echo(f"noted: {name}")
