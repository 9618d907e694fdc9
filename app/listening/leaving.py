"""Work for somebody who may leave before it is done."""

import asyncio
from typing import TypeVar

from starlette.types import Receive

T = TypeVar("T")


async def while_connected(receive: Receive, working: "asyncio.Future[T]") -> T | None:
    """What the work comes to; None where the client went away before, which cancels it."""
    leaving = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        leaving.cancel()
        if not working.done():
            working.cancel()
        await asyncio.wait({working, leaving})
    return None if working.cancelled() else working.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
