"""Self-summarisation: an episode that outgrows its policy's trigger is continued from a summary the model wrote itself.

    messages  =  system + body                    what the client sends, all of it, every time
    fed       =  system (+ summary) + body[n:]    what the engine is fed: the newest summary stands for body[:n]

A summary is a turn of its own (kind `summary`, same arm, no exposure: nobody was served by it). Its tags `summary_messages` (n) and
`summary_of` (hash of body[:n]) say what it stands for, so that any gateway finds it again, and a client that rewrites history is not
answered from a summary of something else.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from app.domain.policies import PolicyConfig
from app.domain.ports import EpisodeSummary
from app.domain.release.gates import content_hash

Message = dict[str, Any]
Count = Callable[[list[Message]], Awaitable[int]]
"""Tokens of these messages as the engine would feed them."""
Write = Callable[[list[Message], dict[str, str]], Awaitable[str]]
"""Ask the model these messages and record its answer as a summary turn with these tags."""
TEMPLATE_TOKENS = 16
"""At most what a chat template adds per message."""
MAX_ROUNDS = 16
HEADING = "Summary of the conversation so far:\n"


@dataclass(frozen=True, kw_only=True)
class Context:
    """A conversation and how much of it a summary stands for."""

    system: list[Message]
    body: list[Message]
    summary: str | None = None
    covered: int = 0

    def fed(self, upto: int | None = None) -> list[Message]:
        """What the engine is fed, of the body up to `upto`."""
        return [*self._opening(), *self.body[self.covered : upto]]

    def _opening(self) -> list[Message]:
        if self.summary is None:
            return self.system
        text = "\n\n".join([*(str(message["content"]) for message in self.system), HEADING + self.summary])
        return [{"role": "system", "content": text}]


def context_of(messages: Sequence[Message], summaries: Sequence[EpisodeSummary]) -> Context:
    """The conversation with the newest summary that stands for a beginning of it."""
    first = next((index for index, message in enumerate(messages) if message["role"] != "system"), len(messages))
    system, body = list(messages[:first]), list(messages[first:])
    for summary in reversed(summaries):
        covered = int(summary.tags.get("summary_messages", "0"))
        if 0 < covered < len(body) and summary.tags.get("summary_of") == content_hash(body[:covered]):
            return Context(system=system, body=body, summary=summary.text, covered=covered)
    return Context(system=system, body=body)


async def shortened(context: Context, config: PolicyConfig, *, count: Count, write: Write) -> Context:
    """Summarise until the prompt is below the trigger, or nothing is left that could be summarised."""
    trigger = config.summary.trigger_tokens
    for _ in range(MAX_ROUNDS if trigger else 0):
        if _surely_below(context.fed(), trigger) or await count(context.fed()) < trigger:
            return context
        upto = await _cut(context, config, count)
        if upto <= context.covered:
            return context
        tags = {"summary_messages": str(upto), "summary_of": content_hash(context.body[:upto])}
        text = await write(_asking(context, upto, config), tags)
        if not text.strip():
            return context
        context = Context(system=context.system, body=context.body, summary=text.strip(), covered=upto)
    return context


def _surely_below(messages: list[Message], trigger: int) -> bool:
    """A token is at least a byte, so short prompts need no counting."""
    return sum(len(str(message).encode()) + TEMPLATE_TOKENS for message in messages) < trigger


def _asking(context: Context, upto: int, config: PolicyConfig) -> list[Message]:
    return [*context.fed(upto), {"role": "user", "content": config.summary.instruction}]


async def _cut(context: Context, config: PolicyConfig, count: Count) -> int:
    """Where the part to summarise ends: before the last exchange, and as much as the context window can take at once.

    An answer to a tool call stays with the call.
    """
    last = max((index for index, message in enumerate(context.body) if message["role"] != "tool"), default=0)
    room = config.max_context_tokens - config.summary.max_tokens
    if last <= context.covered or await count(_asking(context, last, config)) <= room:
        return last
    low, high = context.covered, last - 1
    while low < high:
        middle = (low + high + 1) // 2
        if await count(_asking(context, middle, config)) <= room:
            low = middle
        else:
            high = middle - 1
    return low
