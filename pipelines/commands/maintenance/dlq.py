"""`ratchet dlq`: look at dead letters, and apply them after all once their cause is mended."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import click

from app import wiring
from app.domain.errors import BadRequest, NotFound
from app.domain.ids import utc_now
from app.domain.telemetry.events import CloudEvent
from app.domain.telemetry.streams import Delivery, EffectBatch, EffectStore, StoredDeadLetter
from app.settings import from_environment, read_toml
from pipelines.ingestion.config import streaming_config
from pipelines.ingestion.decode import understand


@click.group()
def dlq() -> None:
    """Records that made no sense, with where they lay and why."""


@dlq.command(name="list")
@click.option("--reason", help="Only those whose reason holds these words.")
@click.option("--all", "everything", is_flag=True, help="Replayed ones too.")
@click.option("--limit", type=click.IntRange(1), default=100, show_default=True)
def list_(reason: str | None, everything: bool, limit: int) -> None:
    """List dead letters, oldest first."""
    found = wiring.dead_letters(from_environment()).find(reason=reason, pending=not everything, limit=limit)
    for stored in found:
        place = f"{stored.letter.topic}:{stored.letter.partition}:{stored.letter.offset}"
        state = "replayed" if stored.replayed_at else f"tried {stored.attempts}×"
        click.echo(f"{stored.id}\t{stored.first_seen_at:%Y-%m-%dT%H:%M:%SZ}\t{place}\t{state}\t{stored.letter.reason}")
    click.echo(f"{len(found)} dead letters", err=True)


@dlq.command()
@click.argument("id_", metavar="ID", type=int)
def show(id_: int) -> None:
    """Show one dead letter whole, as JSON."""
    found = wiring.dead_letters(from_environment()).find(ids=[id_], pending=False)
    if not found:
        raise NotFound(f"there is no dead letter {id_}; `ratchet dlq list --all` shows those there are")
    stored = found[0]
    answer = {
        "id": stored.id, "topic": stored.letter.topic, "partition": stored.letter.partition, "offset": stored.letter.offset,
        "reason": stored.letter.reason, "attempts": stored.attempts, "first_seen_at": stored.first_seen_at.isoformat(),
        "last_seen_at": stored.last_seen_at.isoformat(), "replayed_at": stored.replayed_at and stored.replayed_at.isoformat(),
        "headers": dict(stored.letter.headers), "payload": stored.letter.payload.decode(errors="backslashreplace"),
    }  # fmt: skip
    click.echo(json.dumps(answer, indent=2, ensure_ascii=False))


@dlq.command()
@click.argument("ids", metavar="[ID]...", type=int, nargs=-1)
@click.option("--reason", help="Those whose reason holds these words, instead of ids.")
def replay(ids: Sequence[int], reason: str | None) -> None:
    """Apply dead letters (by id, by reason, or all that wait); what was applied meanwhile is not applied twice."""
    settings = from_environment()
    config, _ = streaming_config(read_toml(settings.config))
    rules = config.join_rules(wiring.load_policies(settings))
    letters, store = wiring.dead_letters(settings), wiring.effect_store(settings, rules=rules)
    applied, again = 0, 0
    for stored in letters.find(ids=ids, reason=reason, pending=not ids):
        try:
            replay_one(stored, store)
            applied += 1
        except (ValueError, BadRequest) as error:
            again += 1
            letters.failed_again(stored.id, str(error), now=utc_now())
            click.echo(f"{stored.id}: still {error}", err=True)
    click.echo(f"{applied} replayed, {again} still make no sense")


def replay_one(stored: StoredDeadLetter, store: EffectStore) -> None:
    """Apply one dead letter through the same deduplication as everything else. Raises ValueError or `BadRequest`."""
    event = understand(_delivery(stored))
    store.apply(EffectBatch(events=(event,), replayed_dead_letters=(stored.id,)), now=utc_now())


def _delivery(stored: StoredDeadLetter) -> Delivery:
    """The record again, from its headers; without an identity of its own it gets one from where it lay."""
    letter, headers = stored.letter, stored.letter.headers
    event = CloudEvent(
        id=headers.get("ce_id") or f"{letter.topic}:{letter.partition}:{letter.offset}", source=headers.get("ce_source") or "dlq",
        type=headers.get("ce_type") or "", time=stored.first_seen_at, key="", data=letter.payload,
    )  # fmt: skip
    return Delivery(
        topic=f"replay-{stored.id}-{letter.topic}", partition=letter.partition, offset=letter.offset, headers=headers,
        value=letter.payload, event=event, received_at=_received_at(stored),
    )  # fmt: skip


def _received_at(stored: StoredDeadLetter) -> datetime:
    """When the inbox committed it, as the header says; an outside producer's record counts from when it was buried."""
    micros = stored.letter.headers.get("ce_ratchetreceived", "")
    if not (micros.isdecimal() and len(micros) <= 17):
        return stored.first_seen_at
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=int(micros))


@dlq.command()
@click.option("--days", type=click.FloatRange(0), default=30.0, show_default=True, help="Age since their replay.")
def purge(days: float) -> None:
    """Delete dead letters that were replayed long ago."""
    deleted = wiring.dead_letters(from_environment()).purge(before=utc_now() - timedelta(days=days))
    click.echo(f"{deleted} deleted")
