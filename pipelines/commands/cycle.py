"""`ratchet cycle`: what became of the slots."""

from datetime import UTC, datetime

import click
from rich.console import Console
from rich.table import Table

from app import wiring
from app.settings import from_environment


@click.group()
def cycle() -> None:
    """Inspect cycles: one per slot and policy, with its status, reason and seconds per step."""


@cycle.command("list")
@click.argument("policy")
@click.option("--limit", default=20, show_default=True, help="How many slots, newest first.")
def list_cycles(policy: str, limit: int) -> None:
    """List the newest slots of POLICY."""
    settings = from_environment()
    wiring.require_policy(wiring.load_policies(settings), policy)
    table = Table("slot", "status", "step", "attempt", "seconds", "reason")
    for row in wiring.cycle_book(settings).recent(policy, limit=limit):
        slot = datetime.fromtimestamp(row.slot, UTC).strftime("%Y-%m-%d %H:%M")
        seconds = " ".join(f"{step} {spent:.1f}" for step, spent in row.timings.items())
        table.add_row(slot, row.status.value, row.step, str(row.attempt), seconds, row.reason or "")
    Console().print(table)
