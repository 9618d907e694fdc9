"""One completion to score on its way through the sampling thread."""

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial

from app.domain.errors import NotFound, RatchetError, Unavailable
from app.domain.telemetry.serving import ScoreRequest
from app.policy.decoding.sampling import Decoder

log = logging.getLogger(__name__)


def scored(request: ScoreRequest, answer: "Future[list[float]]", decoder_of: Callable[[str], Decoder | None]) -> Iterator[None]:
    """Answer it, pausing after each piece. It costs nobody else anything when it breaks, and is given up when nobody waits for it."""
    found: list[float] = []
    if answer.cancelled():
        return
    try:
        if (decoder := decoder_of(request.digest)) is None:
            raise NotFound(f"this engine does not hold the weights {request.digest[:12]} any more")
        for piece in decoder.scored(
            request.prompt_tokens, request.completion_tokens, temperature=request.temperature, top_p=request.top_p, top_k=request.top_k
        ):
            found += piece
            yield
            if answer.cancelled():
                return
        settle = partial(answer.set_result, found)
    except RatchetError as error:
        settle = partial(answer.set_exception, error)
    except Exception as error:
        log.exception("scoring failed digest=%s", request.digest)
        settle = partial(answer.set_exception, Unavailable(f"scoring failed: {error}"))
    if answer.set_running_or_notify_cancel():  # whoever waits may leave at any moment
        settle()
