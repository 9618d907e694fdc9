"""Self-summarisation: an episode that outgrows its policy's trigger is continued from a summary the model wrote itself.

    messages  =  system + body                    what the client sends, all of it, every time
    fed       =  system (+ summary) + body[n:]    what the engine is fed: the newest summary stands for body[:n]

A summary is a turn of its own (kind `summary`, same arm, no exposure: nobody was served by it). Its tags `summary_messages` (n) and
`summary_of` (hash of body[:n]) say what it stands for, so that any gateway finds it again, and a client that rewrites history is not
answered from a summary of something else.

Before a gateway writes one it asks what others have written: replicas share an episode, and practice, which is no exposure, is found by
its turns alone. In practice the trigger is drawn anew for each summary, from the episode's id, so that every replica draws the same.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from app.domain.policies import PolicyConfig, SummaryConfig
from app.domain.ports import EpisodeSummary
from app.domain.release.assignment import unit_interval
from app.domain.release.gates import content_hash

Message = dict[str, Any]
Count = Callable[[list[Message]], Awaitable[int]]
"""Tokens of these messages as the engine would feed them."""
Write = Callable[[list[Message], dict[str, str]], Awaitable[str]]
"""Ask the model these messages and record its answer as a summary turn with these tags."""
Trigger = Callable[[int], int]
"""From how many tokens on a context is summarised of which so many messages are covered by a summary already; 0 never."""
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
    """The conversation with the summary that stands for most of its beginning; of several of the same, the newest."""
    first = next((index for index, message in enumerate(messages) if message["role"] != "system"), len(messages))
    system, body = list(messages[:first]), list(messages[first:])
    found = Context(system=system, body=body)
    for summary in reversed(summaries):
        covered = int(summary.tags.get("summary_messages", "0"))
        stands_for_more = found.covered < covered < len(body) and summary.text.strip()
        if stands_for_more and summary.tags.get("summary_of") == content_hash(body[:covered]):
            found = Context(system=system, body=body, summary=summary.text.strip(), covered=covered)
    return found


def trigger_of(config: SummaryConfig, episode_id: str, *, practised: bool) -> Trigger:
    """When an episode is summarised: people's at the configured length, practice at one drawn for each of its summaries."""

    def trigger(covered: int) -> int:
        if not practised or not config.trigger_tokens:
            return config.trigger_tokens
        shorter = config.spread * unit_interval("summary", episode_id, str(covered))
        return max(1, round(config.trigger_tokens * (1.0 - shorter)))

    return trigger


async def shortened(
    context: Context, config: PolicyConfig, *, trigger: Trigger, count: Count, write: Write, recall: Callable[[], Awaitable[Context]]
) -> Context:
    """Summarise until the prompt is below the trigger, or nothing is left that could be summarised.

    `recall` is asked once, before the first summary is written: the context with what other gateways have written meanwhile.
    """
    has_asked = False
    for _ in range(MAX_ROUNDS if trigger(context.covered) else 0):
        most = trigger(context.covered)
        if _surely_below(context.fed(), most) or await count(context.fed()) < most:
            return context
        if not has_asked:
            has_asked, recalled = True, await recall()
            if recalled.covered > context.covered:
                context = recalled
                continue
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
