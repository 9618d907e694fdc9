"""`ratchet audit`: show and verify the audit chain."""

import json
from pathlib import Path

import click

from app import wiring
from app.domain.errors import BadInput
from app.settings import from_environment


@click.group()
def audit() -> None:
    """Show and verify the audit chain."""


@audit.command()
@click.option("--subject", help="Only entries about this release, policy or version.")
@click.option("--limit", default=20, show_default=True, help="How many, newest first.")
def show(subject: str | None, limit: int) -> None:
    """Show the newest entries, one line each."""
    for entry in wiring.release_views(from_environment()).audit(subject=subject, newest=limit):
        detail = json.dumps(entry.detail, default=str, ensure_ascii=False)
        click.echo(f"{entry.seq} {entry.occurred_at.isoformat()} {entry.actor} {entry.action} {entry.subject} {detail}")


@audit.command()
@click.argument("file", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--seen", help="SEQ:HASH noted outside the database (every release event carries them): must still be in the chain.")
def verify(file: Path | None, seen: str | None) -> None:
    """Recompute the chain; exit code 1 where anything was edited, deleted, reordered or cut off.

    With FILE the one that was exported (/console/audit), without any deployment: whether its end was cut off, only --seen tells.
    """
    if file is None:
        found = wiring.release_views(from_environment()).verify(seen=_seen(seen))
    else:
        found = wiring.verify_exported(file, seen=_seen(seen))
    if found.problem is not None:
        click.echo(f"broken: {found.problem}", err=True)
        raise click.exceptions.Exit(1)
    click.echo(f"intact: {found.entries} entries, head {found.head}")


def _seen(text: str | None) -> tuple[int, str] | None:
    if text is None:
        return None
    seq, _, digest = text.partition(":")
    if not seq.isdigit() or len(digest) != 64:
        raise BadInput(f"--seen is {text!r}: give SEQ:HASH as a release event names them, such as 12:0a1b…")
    return int(seq), digest
