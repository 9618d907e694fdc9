"""The product's side of the public API: the real `openai` client for answers, plain HTTP for what people did with them."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, cast

import httpx
import openai
from openai.types.chat import ChatCompletion

log = logging.getLogger("simulation")
GIVE_UP_AFTER_S = 60.0
"""A product keeps its telemetry for a while when the service is away; a minute covers any restart the supervisor makes."""
ANSWER_TIMEOUT_S = 600.0
"""People on a slow machine wait long and do not go away: whoever did would only make the machine answer for nobody."""
LINGER_S = 0.1
BATCH_EVENTS = 200


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One answer as the product got it."""

    inference_id: str
    episode_id: str
    text: str
    version: str | None
    received_at: datetime


class Service:
    """A connection to the service under test, as any client has one."""

    def __init__(self, base_url: str, *, api_key: str, policy: str, max_tokens: int) -> None:
        self._policy = policy
        self._max_tokens = max_tokens
        headers = {"Authorization": f"Bearer {api_key}"}
        self._openai = openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key=api_key, max_retries=0, timeout=ANSWER_TIMEOUT_S)
        self._http = httpx.AsyncClient(base_url=base_url, headers=headers, timeout=30.0)
        self._waiting: list[tuple[dict[str, Any], asyncio.Future[bool]]] = []
        self._something = asyncio.Event()

    async def complete(self, messages: list[dict[str, Any]], *, user: str, metadata: dict[str, str], consent: bool) -> Answer:
        """One answer. Raises `openai.APIError` when the service refuses or is away."""
        reply = await self._openai.chat.completions.create(
            model=self._policy, messages=cast(Any, messages), user=user, metadata=metadata, store=consent,
            max_tokens=self._max_tokens, temperature=1.0,
        )  # fmt: skip
        return _answer(reply)

    async def report(self, events: Sequence[dict[str, Any]]) -> list[str]:
        """Send observations, together with what others have to send; returns the ids that were accepted."""
        answered: list[asyncio.Future[bool]] = [asyncio.get_running_loop().create_future() for _ in events]
        for event, future in zip(events, answered, strict=True):
            self._waiting.append((event, future))
        self._something.set()
        return [event["id"] for event, accepted in zip(events, await asyncio.gather(*answered), strict=True) if accepted]

    async def send(self) -> None:
        """Send what waits, batch by batch, until cancelled: the telemetry of a product goes through one door, in order."""
        while True:
            await self._something.wait()
            await asyncio.sleep(LINGER_S)
            self._something.clear()
            while self._waiting:
                batch, self._waiting = self._waiting[:BATCH_EVENTS], self._waiting[BATCH_EVENTS:]
                accepted = await self._post([event for event, _ in batch])
                for event, future in batch:
                    if not future.done():
                        future.set_result(event["id"] in accepted)

    async def _post(self, events: list[dict[str, Any]]) -> set[str]:
        """Post one batch until the service has it. Repeats are harmless: the ids are ours."""
        deadline = asyncio.get_running_loop().time() + GIVE_UP_AFTER_S
        while True:
            try:
                response = await self._http.post("/v1/events", json=events)
                if response.status_code in (202, 422):
                    return _accepted(response.json()["results"])
                pause, why = float(response.headers.get("Retry-After", "0.5")), f"{response.status_code} {response.text[:200]}"
            except httpx.TransportError as error:
                pause, why = 0.5, repr(error)
            if asyncio.get_running_loop().time() + pause > deadline:
                log.warning("gave up on %d events: %s", len(events), why)
                return set()
            await asyncio.sleep(pause)

    async def close(self) -> None:
        """Close the connections."""
        await self._openai.close()
        await self._http.aclose()


def observation(answer: Answer, name: str, value: object, *, person: str, suffix: str = "") -> dict[str, Any]:
    """One event in the shape of `POST /v1/events`; its id is a function of the turn, so that a repeat is a duplicate."""
    return {
        "id": f"{answer.inference_id}-{name}{suffix}",
        "inference_id": answer.inference_id,
        "name": name,
        "value": value,
        "occurred_at": datetime.now(UTC).isoformat(),
        "actor": person,
    }


def _accepted(results: list[dict[str, Any]]) -> set[str]:
    """Ids of the events that are in the service's inbox now, or were already."""
    for result in results:
        if result["status"] not in ("accepted", "duplicate"):
            log.warning("the service refused an event: %s", result)
    return {result["id"] for result in results if result["status"] in ("accepted", "duplicate")}


def _answer(reply: ChatCompletion) -> Answer:
    extra = reply.model_extra or {}
    return Answer(
        inference_id=reply.id, episode_id=str(extra.get("episode_id", "")), text=(reply.choices[0].message.content or "").replace("\0", ""),
        version=reply.system_fingerprint, received_at=datetime.now(UTC),
    )  # fmt: skip
