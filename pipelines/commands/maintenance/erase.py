"""`ratchet erase --actor`: forget a person, everywhere."""

import getpass

import click
import msgspec

from app import wiring
from app.domain.errors import BadInput
from app.domain.ids import hash_actor, uuid7
from app.domain.telemetry.events import CloudEvent, Erasure, EventType
from app.domain.telemetry.streams import ErasureReport
from app.settings import Settings, from_environment


@click.command()
@click.option("--actor", help="The person's id as the product sends it (`user` or `safety_identifier`).")
@click.option("--pseudonym", help="Instead of --actor: the 32 hex digits under which the person is stored.")
@click.option("--verify", is_flag=True, help="Erase nothing: look into every place and tell what is left (exit code 1 where anything is).")
@click.option(
    "--sweep", is_flag=True, help="Of no person: remove segment files that no row knows, left by kills before segments were announced."
)
def erase(actor: str | None, pseudonym: str | None, verify: bool, sweep: bool) -> None:
    """Remove a person's turns, tokens, observations, labels and exposures, and say which versions were trained on them.

    May be repeated: what came since is removed as well. Events of this person that are still under way are forgotten when they arrive.
    """
    settings = from_environment()
    if sweep:
        click.echo(f"removed {wiring.sweep_segments(settings)} segments that no row knew")
        return
    if (actor is None) == (pseudonym is None):
        raise BadInput("name the person with --actor, or with --pseudonym")
    hashed = pseudonym if pseudonym is not None else hash_actor(actor or "", salt=wiring.actor_salt(settings))
    if verify:
        _verify(settings, hashed)
        return
    now = wiring.clock(settings)()
    erasure = Erasure(id=uuid7(), actor=hashed, requested_by=f"user:{getpass.getuser()}", occurred_at=now)
    eraser = wiring.eraser(settings)
    _record(settings, erasure)
    click.echo(describe(eraser.erase(erasure, now=now)))


def _verify(settings: Settings, hashed: str) -> None:
    """A line for each place; whoever asks for a proof gets every place that was looked into, not only those where something was."""
    found = wiring.traces(settings).find(hashed)
    for trace in found:
        click.echo(f"{trace.found:>8}  {trace.place}{f' ({trace.cure})' if trace.found and trace.cure else ''}")
    left = sum(trace.found for trace in found)
    click.echo(f"{hashed}: {'nothing is left' if not left else f'{left} traces are left'} in {len(found)} places")
    if left:
        raise click.exceptions.Exit(1)


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
