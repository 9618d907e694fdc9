"""`ratchet erase --actor`: forget a person, everywhere. Over HTTP, as whoever is asked to answer for it."""

from typing import Any

import click
import msgspec

from app import wiring
from app.domain.errors import BadInput
from app.domain.ids import checked_pseudonym
from app.settings import Settings, from_environment
from pipelines.commands.operating import Remote, acting
from pipelines.commands.operating import break_glass as _break_glass

Person = dict[str, str | None]
"""`actor` or `pseudonym`."""
PATIENCE_S = 1800.0
"""It costs what the person has; the proof reads everything."""


@click.command()
@click.option("--actor", help="The person's id as the product sends it (`user` or `safety_identifier`).")
@click.option("--pseudonym", help="Instead of --actor: the 32 hex digits under which the person is stored.")
@click.option("--verify", is_flag=True, help="Erase nothing: look into every place and tell what is left (exit code 1 where anything is).")
@click.option(
    "--sweep", is_flag=True, help="Of no person: remove segment files that no row knows, left by kills before segments were announced."
)
@acting
def erase(actor: str | None, pseudonym: str | None, verify: bool, sweep: bool, url: str | None, break_glass: bool) -> None:
    """Remove a person's turns, tokens, observations, labels and exposures, and say which versions were trained on them.

    May be repeated: what came since is removed as well. Events of this person that are still under way are forgotten when they arrive.
    """
    settings = from_environment()
    place = Here(settings) if break_glass else There(Remote.of(settings, url))
    if sweep:
        click.echo(f"removed {place.sweep()} segments that no row knew")
        return
    if (actor is None) == (pseudonym is None):
        raise BadInput("name the person with --actor, or with --pseudonym")
    person: Person = {"actor": actor} if pseudonym is None else {"pseudonym": checked_pseudonym(pseudonym)}
    if verify:
        _tell(place.verify(person))
    else:
        click.echo(describe(place.erase(person)))


class There:
    """Over HTTP."""

    def __init__(self, service: Remote) -> None:
        self._service = service

    def erase(self, person: Person) -> dict[str, Any]:
        """The report."""
        return self._service.send("POST", "/v1/erasures", person, patience_s=PATIENCE_S)

    def verify(self, person: Person) -> dict[str, Any]:
        """Every place, and what is left there."""
        return self._service.send("POST", "/v1/erasures/verify", person, patience_s=PATIENCE_S)

    def sweep(self) -> int:
        """How many segments went."""
        return self._service.send("POST", "/v1/erasures/sweep", patience_s=PATIENCE_S)["removed"]


class Here:
    """On the database and the files themselves."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def erase(self, person: Person) -> dict[str, Any]:
        """The report."""
        pseudonym = wiring.pseudonym_of(self._settings, **person)
        return vars(wiring.forget(self._settings, pseudonym, by=_break_glass(self._settings, act="erase", subject=pseudonym)))

    def verify(self, person: Person) -> dict[str, Any]:
        """Every place, and what is left there."""
        pseudonym = wiring.pseudonym_of(self._settings, **person)
        places = [{"place": t.place, "found": t.found, "cure": t.cure} for t in wiring.traces(self._settings).find(pseudonym)]
        return msgspec.to_builtins({"pseudonym": pseudonym, "places": places})

    def sweep(self) -> int:
        """How many segments went."""
        _break_glass(self._settings, act="erase sweep", subject="segments")
        return wiring.sweep_segments(self._settings)


def _tell(found: dict[str, Any]) -> None:
    """A line for each place; whoever asks for a proof gets every place that was looked into, not only those where something was."""
    for place in found["places"]:
        cure = f" ({place['cure']})" if place["found"] and place["cure"] else ""
        click.echo(f"{place['found']:>8}  {place['place']}{cure}")
    left = sum(place["found"] for place in found["places"])
    click.echo(f"{found['pseudonym']}: {'nothing is left' if not left else f'{left} traces are left'} in {len(found['places'])} places")
    if left:
        raise click.exceptions.Exit(1)


def describe(report: dict[str, Any]) -> str:
    """The report as a person reads it."""
    lines = [
        f"{report['actor']}: {'erased before; ' if report['already_erased'] else ''}removed {report['turns']} turns (empty shells stay), "
        f"{report['observations']} observations, {report['labels']} labels, {report['exposures']} exposures, "
        f"{report['inbox_payloads']} inbox payloads, {report['dead_letters']} dead letters; rewrote {report['segments']} segments",
        f"versions trained on them: {', '.join(report['trained_versions']) or 'none'}",
    ]
    return "\n".join(lines)
