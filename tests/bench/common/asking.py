"""Streams of answers while versions come and go, and what became of them."""

import asyncio
import random
import time
from dataclasses import dataclass, field

from app.domain.errors import RatchetError
from app.domain.ports import Engines
from app.domain.telemetry.serving import GenerateRequest, GenerationChunk
from app.domain.telemetry.turns import FinishReason, SamplingParams

PROMPTS = (
    "Write a function that sorts a list.",
    "Why does it rain?",
    "def median(values):",
    "Name three rivers.",
    "Fix: for i in range(10) print(i)",
)


@dataclass
class Load:
    """Streams of answers, and what became of them."""

    engines: Engines
    current: str
    """Whose answers are asked for from now on."""
    tokens: int
    """Of an answer at most."""
    reading_s: float = 0.0
    phase: str = "calm"
    seconds: dict[str, list[float]] = field(default_factory=lambda: {"calm": [], "swapping": []})
    answers: list[tuple[str, list[GenerationChunk]]] = field(default_factory=list[tuple[str, list[GenerationChunk]]])
    errors: list[str] = field(default_factory=list[str])

    async def stream(self, index: int, stop: asyncio.Event) -> None:
        """Ask again and again."""
        chosen = random.Random(index)
        while not stop.is_set():
            if self.reading_s:
                await asyncio.sleep(chosen.expovariate(1 / self.reading_s))
            digest, phase, started = self.current, self.phase, time.monotonic()
            params = SamplingParams(max_tokens=self.tokens, seed=chosen.randrange(1 << 30))
            message = {"role": "user", "content": chosen.choice(PROMPTS)}
            asked = GenerateRequest(policy="composer", digest=digest, messages=[message], sampling=params)
            try:
                chunks = [chunk async for chunk in self.engines.generate(asked)]
            except RatchetError as error:
                self.errors.append(str(error))
                continue
            if chunks[-1].finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
                self.errors.append(str(chunks[-1].message))
            self.seconds[phase].append(time.monotonic() - started)
            self.answers.append((digest, chunks))
