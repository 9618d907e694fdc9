"""`ratchet erase --actor`: forget a person, everywhere."""

import getpass

import click
import msgspec

from app import wiring
from app.domain.errors import BadInput
from app.domain.events import CloudEvent, Erasure, EventType
from app.domain.ids import hash_actor, utc_now, uuid7
from app.domain.streams import ErasureReport
from app.settings import Settings, from_environment


@click.command()
@click.option("--actor", help="The person's id as the product sends it (`user` or `safety_identifier`).")
@click.option("--pseudonym", help="Instead of --actor: the 32 hex digits under which the person is stored.")
def erase(actor: str | None, pseudonym: str | None) -> None:
    """Remove a person's turns, tokens, observations, labels and exposures, and say which versions were trained on them.

    May be repeated: what came since is removed as well. Events of this person that are still under way are forgotten when they arrive.
    """
    if (actor is None) == (pseudonym is None):
        raise BadInput("name the person with --actor, or with --pseudonym")
    settings = from_environment()
    hashed = pseudonym if pseudonym is not None else hash_actor(actor or "", salt=wiring.actor_salt(settings))
    now = utc_now()
    erasure = Erasure(id=uuid7(), actor=hashed, requested_by=f"user:{getpass.getuser()}", occurred_at=now)
    eraser = wiring.eraser(settings)
    _record(settings, erasure)
    click.echo(describe(eraser.erase(erasure, now=now)))


def _record(settings: Settings, erasure: Erasure) -> None:
    """As an event, so that a replay of the events forgets as well."""
    inbox = wiring.inbox_writer(settings)
    try:
        event = CloudEvent(
            id=erasure.id, source="ratchet", type=EventType.ERASURE, time=erasure.occurred_at, key=erasure.actor,
            data=msgspec.json.encode(erasure),
        )  # fmt: skip
        inbox.append_blocking([event])
    finally:
        inbox.close()


def describe(report: ErasureReport) -> str:
    """The report as a person reads it."""
    lines = [
        f"{report.actor}: {'erased before; ' if report.already_erased else ''}removed {report.turns} turns (empty shells stay), "
        f"{report.observations} observations, {report.labels} labels, {report.exposures} exposures, "
        f"{report.inbox_payloads} inbox payloads, {report.dead_letters} dead letters; rewrote {report.segments} segments",
        f"versions trained on them: {', '.join(report.trained_versions) or 'none'}",
    ]
    return "\n".join(lines)
