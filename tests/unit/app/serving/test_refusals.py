"""Whether any of several servers is well."""

import asyncio

import httpx
import pytest

from app.domain.errors import Unavailable
from app.serving.refusals import require_one_healthy

URLS = ("http://gone", "http://ill", "http://well")


def asked(*urls: str) -> list[str]:
    """Which addresses are asked, in order. Of `gone` nobody answers, `ill` answers 503."""
    found: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        found.append(str(request.url))
        if request.url.host == "gone":
            raise httpx.ConnectError("refused", request=request)
        return httpx.Response(200 if request.url.host == "well" else 503)

    async def ask() -> None:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
            await require_one_healthy(client, urls, kind="engine", cure="start one")

    asyncio.run(ask())
    return found


def test_one_that_is_well_is_enough_wherever_it_stands() -> None:
    assert asked(*URLS) == [f"{url}/health" for url in URLS]
    assert asked(*reversed(URLS)) == ["http://well/health"]


@pytest.mark.parametrize(("urls", "said"), [(URLS[:2], "http://gone, http://ill"), ((), "any address")])
def test_where_none_is_well_the_cure_is_said(urls: tuple[str, ...], said: str) -> None:
    with pytest.raises(Unavailable, match=f"^no engine answers at {said}: start one$"):
        asked(*urls)
