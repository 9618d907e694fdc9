"""`ratchet upkeep`: what `ratchet loop` does every ten minutes by itself, by hand; and what an officer asks to see."""

import logging
import threading
from datetime import datetime, timedelta
from functools import cache

import click

from app import wiring
from app.domain.errors import Refused
from app.domain.retention import Retention, retention
from app.settings import Settings, from_environment, read_toml
from pipelines.commands.running.processes import owner

log = logging.getLogger(__name__)
CLASSES = {
    "inbox": "dedupe_days", "identities": "dedupe_days", "segments": "segments_days", "turns": "turns_days", "labels": "labels_days",
    "exposures": "exposures_days", "observations": "observations_days", "dead_letters": "dead_letters_days",
}  # fmt: skip
"""Class as the database knows it, and the setting that ends it; on PostgreSQL rows of the inbox go with their bodies."""


@click.group()
def upkeep() -> None:
    """Drop what is old, by [retention] of the configuration, and merge small segments."""


@upkeep.command()
@click.option("--retire/--no-retire", default=True, show_default=True, help="Drop what is older than [retention] says.")
@click.option("--merge/--no-merge", default=True, show_default=True, help="Merge the segments of days that are over.")
def run(retire: bool, merge: bool) -> None:
    """Keep house once, until nothing is old any more; one process at a time does. Killed on the way, the next one goes on."""
    settings = from_environment()
    done = keep_house(settings, retire=retire, merge=merge)
    if done is None:
        raise Refused("another process keeps house at this moment: look again in a few minutes")
    for name, count in done.items():
        click.echo(f"{count:>12}  {name}")
    if not done:
        click.echo("nothing was old")


@upkeep.command()
def show() -> None:
    """Each class with how long it is kept, and how old its oldest row is: above the limit only what is still needed, or not done yet."""
    settings = from_environment()
    now, kept = wiring.clock(settings)(), retention(read_toml(settings.config))
    for name, oldest in wiring.upkeep(settings, owner=owner()).oldest().items():
        ends = "inbox_days" if name == "inbox" and not settings.inbox_url.startswith("sqlite") else CLASSES[name]
        click.echo(f"{name:>12}  kept {_limit(kept, ends):>9}  oldest {_age(oldest, now)}")


def _limit(kept: Retention, setting: str) -> str:
    number = getattr(kept, setting)
    return "for ever" if number is None else f"{number:g} days"


def _age(oldest: datetime | None, now: datetime) -> str:
    return "none" if oldest is None else f"{(now - oldest) / timedelta(days=1):.1f} days"


def keep_house(
    settings: Settings, stop: threading.Event | None = None, *, retire: bool = True, merge: bool = True
) -> dict[str, int] | None:  # fmt: skip
    """One round; None where another process is at it."""
    keeper, stopping = _keeper(settings), (stop or threading.Event()).is_set
    with keeper.office() as lease:
        if lease is None:
            return None
        done = keeper.retire(lease, stopping=stopping) if retire else {}
        merged = keeper.merge(lease, stopping=stopping) if merge else {}
    return done | {f"segments merged: {name}": count for name, count in merged.items()}


@cache
def _keeper(settings: Settings):  # noqa: ANN202 - what `wiring.upkeep` gives; one for the process, which keeps its connections
    return wiring.upkeep(settings, owner=owner())


def keep_house_and_say(settings: Settings, stop: threading.Event) -> None:
    """One round, logged."""
    if done := keep_house(settings, stop):
        log.info("event=kept_house %s", " ".join(f"{name.replace(' ', '_')}={count}" for name, count in done.items()))
