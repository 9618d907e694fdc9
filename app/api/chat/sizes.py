"""How large a request may be, by what its model can take: decided before it is read, decoded or tokenised."""

from collections.abc import Iterable
from typing import Any

from app.api.telemetry.intake import Limits, characters
from app.domain.errors import BadRequest
from app.domain.policies import PolicyConfig

TOKEN_CHARS = 64
"""A token is hardly ever longer: four characters on average, some runs of blanks or dashes more."""
BODY_BYTES_PER_TOKEN, BODY_BYTES = 16, 64 * 1024
"""Of a request's body, which is decoded in one piece: four times what real text has on average, and for everything but text and tools."""
BYTES_PER_WORK = 64
"""A body is decoded and looked over at 64 times the speed of redaction: at once up to 32 KB."""


def largest_body(policies: Iterable[PolicyConfig], limits: Limits) -> int:
    """Bytes of the largest body that some policy could answer: what cannot be is refused by its announced size, and not read."""
    texts = (
        max(config.max_context_tokens * BODY_BYTES_PER_TOKEN, limits.summarised_chars if config.summary.trigger_tokens else 0)
        for config in policies
    )
    return min(limits.chat_bytes, max(texts, default=0) + limits.tool_chars + BODY_BYTES)


def refuse_longer_than_context(messages: list[dict[str, Any]], config: PolicyConfig, limits: Limits, *, sent: int) -> None:
    """What no tokenizer can bring into the context is refused before it is recorded or tokenised. Raises `BadRequest`.

    `sent`: bytes of the body, which has no more characters than that.
    """
    most = config.max_context_tokens * TOKEN_CHARS
    if config.summary.trigger_tokens:
        most = max(most, limits.summarised_chars)
    if config.redact:
        most = min(most, limits.redacted_chars * 4)
    if sent > most and characters(messages, at_most=most) > most:
        raise BadRequest(
            f"this model's maximum context length is {config.max_context_tokens} tokens and the messages have more than {most} characters: "
            "shorten the conversation",
            param="messages", code="context_length_exceeded",
        )  # fmt: skip
