"""People using the product, many at a time: ask, edit, react, come back later.

```
 worker × concurrency:  next person ─▶ ask ─▶ answer ─┬▶ (next person)
                                                      └▶ afterwards: edits at the horizons, follow-up, undo, regenerate, success
```

Everybody comes at most once per round of the population, in an order drawn from the seed, so that nearly every answer is a person
of its own: a canary counts people.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import openai

from pipelines.simulation.client import Answer, Service, observation
from pipelines.simulation.diary import Diary
from pipelines.simulation.people import Person, person
from pipelines.simulation.product import Editor, Reaction


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """How people come."""

    seed: int
    people: int
    """Size of the population."""
    held_out: bool
    """Whether these are the panel: held-out people, held-out problems, no consent to training."""
    concurrency: int
    turns: int | None
    """Stop after this many answers; None goes on until cancelled."""
    horizons_s: tuple[float, ...]
    """When people's edits are looked at, seconds after the answer."""
    ledger: Path | None = None
    """Where the id of every event the service acknowledged is written, for tests that look for losses."""
    diary: Diary | None = None
    """Where the product notes every answer."""


@dataclass
class Tally:
    """What happened so far, as the product sees it."""

    counts: Counter[str] = field(default_factory=Counter[str])

    def line(self) -> str:
        """One line for the log."""
        return " ".join(f"{name}={self.counts[name]}" for name in sorted(self.counts))


async def drive(service: Service, product: Editor, traffic: Traffic, tally: Tally) -> None:
    """Let people use the product until `traffic.turns` answers were given (their aftermath included) or the task is cancelled."""
    visitors = enumerate(_visitors(traffic))
    aftermath: set[asyncio.Task[None]] = set()

    async def worker() -> None:
        for number, visitor in visitors:
            if traffic.turns is not None and tally.counts["answers"] >= traffic.turns:
                return
            task = await _visit(service, product, traffic, visitor, number=number, tally=tally)
            if task is not None:
                aftermath.add(task)
                task.add_done_callback(aftermath.discard)

    async with asyncio.TaskGroup() as workers:
        for _ in range(traffic.concurrency):
            workers.create_task(worker())
    await asyncio.gather(*aftermath)


def _visitors(traffic: Traffic) -> Iterator[Person]:
    round_ = 0
    while True:
        order = list(range(traffic.people))
        random.Random(f"{traffic.seed}/order/{round_}").shuffle(order)
        for index in order:
            yield person(traffic.seed, index, held_out=traffic.held_out)
        round_ += 1


async def _visit(
    service: Service, product: Editor, traffic: Traffic, visitor: Person, *, number: int, tally: Tally
) -> asyncio.Task[None] | None:
    """One question and its answer; what the person does with it goes on in a task of its own. None where no answer came."""
    draw = random.Random(f"{traffic.seed}/visit/{number}/{visitor.name}")
    ask = product.ask(visitor, draw)
    metadata = {"task": ask.task, "language": ask.language, "tier": visitor.tier}
    asked = time.monotonic()
    try:
        answer = await service.complete(ask.messages, user=visitor.name, metadata=metadata, consent=not visitor.held_out)
    except openai.APIError as error:
        tally.counts[f"refused_{getattr(error, 'status_code', 'unreachable')}"] += 1
        await asyncio.sleep(draw.uniform(0.3, 1.0))
        return None
    tally.counts["answers"] += 1
    reaction = product.react(visitor, ask, answer.text, draw)
    if traffic.diary is not None:
        traffic.diary.note(visitor, ask, answer, reaction, number=number, waited_s=time.monotonic() - asked)
    return asyncio.create_task(_afterwards(service, traffic, visitor, answer, reaction, tally))


async def _afterwards(service: Service, traffic: Traffic, visitor: Person, answer: Answer, reaction: Reaction, tally: Tally) -> None:
    """Report the edits as they age, and what the person says and does, the last of it with the last horizon."""
    before = 0.0
    for number, (horizon_s, text) in enumerate(zip(traffic.horizons_s, reaction.edits, strict=True)):
        await asyncio.sleep(max(0.0, horizon_s - before))
        before = horizon_s
        edit = {"horizon_s": horizon_s, "before": "", "inserted": answer.text, "after": text}
        events = [observation(answer, "edit_persistence", edit, person=visitor.name, suffix=f"-{horizon_s:g}")]
        if number == len(traffic.horizons_s) - 1:
            events += _last_words(answer, reaction, visitor)
        await _send(service, traffic, events, tally)


def _last_words(answer: Answer, reaction: Reaction, visitor: Person) -> list[dict[str, object]]:
    said: dict[str, object] = {"task_success": reaction.success}
    if reaction.follow_up is not None:
        said["follow_up"] = reaction.follow_up
    if reaction.undo:
        said["undo"] = True
    if reaction.regenerate:
        said["regenerate"] = True
    return [observation(answer, name, value, person=visitor.name) for name, value in said.items()]


async def _send(service: Service, traffic: Traffic, events: list[dict[str, object]], tally: Tally) -> None:
    accepted = await service.report(events)
    tally.counts["events"] += len(accepted)
    tally.counts["events_given_up"] += len(events) - len(accepted)
    if traffic.ledger is not None and accepted:
        with traffic.ledger.open("a") as ledger:
            ledger.writelines(f"{event_id}\n" for event_id in accepted)
