"""What several servers said, as one answer, whichever kind of server they are."""

from collections.abc import Sequence

import httpx

from app.domain.errors import BadRequest, Overloaded, RatchetError, Unavailable

HEALTH_TIMEOUT_S = 2.0
DRAINING = 421
"""Misdirected: the engine finishes what it has and takes nothing new. Of the same status, with the code below: it is not called so."""
NOT_CALLED_SO = "host"


class Leaving(Unavailable):
    """The engine goes away, and says so."""


def worst(refusals: Sequence[RatchetError], *, otherwise: str) -> RatchetError:
    """What to tell the caller: their own mistake first, then that all who could are full, then `otherwise` with what each one said."""
    for kind in (BadRequest, Overloaded):
        for refusal in refusals:
            if isinstance(refusal, kind):
                return refusal
    said = "; ".join(dict.fromkeys(map(str, refusals))) or "none is configured: set RATCHET_ENGINES"
    return Unavailable(f"{otherwise} ({said})")


async def require_one_healthy(client: httpx.AsyncClient, urls: Sequence[str], *, kind: str, cure: str) -> None:
    """Return as soon as one server says that it is well. Raises `Unavailable` with the cure when none of this kind does."""
    for url in urls:
        try:
            if (await client.get(f"{url}/health", timeout=HEALTH_TIMEOUT_S)).status_code == 200:
                return
        except httpx.HTTPError:
            continue
    raise Unavailable(f"no {kind} answers at {', '.join(urls) or 'any address'}: {cure}")
