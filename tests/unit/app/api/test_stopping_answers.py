"""A stop of the service: answers under way may end, those that take too long are ended and recorded, and shadows end with them."""

import asyncio
import time

import pytest

from app.api.chat.route import ChatRoute
from app.main import create_app
from tests.fakes.gateway import collaborators


async def answer(did: list[str], *, takes_s: float, records_s: float = 0.0) -> None:
    """An answer that takes its time, and to be recorded when it is ended."""
    try:
        await asyncio.sleep(takes_s)
        did.append("whole")
    except asyncio.CancelledError:
        await asyncio.sleep(records_s)
        did.append("recorded")


def stopped(*, drain_s: float, grace_s: float, takes_s: float = 30.0, records_s: float = 0.0) -> list[str]:
    """What an answer had come to when the stop returned."""

    async def scene() -> list[str]:
        route: ChatRoute = create_app(collaborators()).chat
        did = list[str]()
        running = route._started(answer(did, takes_s=takes_s, records_s=records_s))  # pyright: ignore[reportPrivateUsage]
        await asyncio.sleep(0)
        await route.finish(drain_s=drain_s, grace_s=grace_s)
        found = list(did)
        await asyncio.wait({running})
        return found

    return asyncio.run(scene())


@pytest.mark.parametrize(
    ("drain_s", "grace_s", "takes_s", "records_s", "came_to"),
    [
        (10.0, 10.0, 0.05, 0.0, ["whole"]), (0.0, 10.0, 30.0, 0.05, ["recorded"]), (0.0, 0.0, 30.0, 0.05, []),
    ],
    ids=["ends within the drain", "is recorded within the grace", "is not waited for beyond the grace"],
)  # fmt: skip
def test_an_answer_is_waited_for_as_long_as_was_said_and_then_ended(
    drain_s: float, grace_s: float, takes_s: float, records_s: float, came_to: list[str]
) -> None:
    began = time.monotonic()
    assert stopped(drain_s=drain_s, grace_s=grace_s, takes_s=takes_s, records_s=records_s) == came_to
    assert time.monotonic() - began < 9.0


def test_a_stop_without_answers_ends_at_once_and_takes_the_shadows_along() -> None:
    async def scene() -> tuple[bool, float]:
        route = create_app(collaborators()).chat
        shadow = asyncio.ensure_future(asyncio.sleep(30))
        route.gateway.shadows._under_way.add(shadow)  # pyright: ignore[reportPrivateUsage]
        began = time.monotonic()
        await route.finish(drain_s=30, grace_s=30)
        return shadow.cancelled(), time.monotonic() - began

    ended, took_s = asyncio.run(scene())
    assert ended
    assert took_s < 9.0
