"""Asking the suites: the same tasks with the same seeds, of every version compared, in one batch through the engines.

Both versions meet the same load, the same minute and the same engines, so neither answers under better conditions, and a comparison costs
one run through the engines, not two. Its seeds are its own: two comparisons with one champion share no draw of it.
"""

import asyncio
import hashlib
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from app.domain.errors import Unavailable
from app.domain.ports import Engines, ProgressLog
from app.domain.telemetry.serving import GenerateRequest
from app.domain.telemetry.turns import FinishReason, SamplingParams
from pipelines.evaluation.suites.execution import Examination
from pipelines.evaluation.suites.graders import JudgeModel, grade
from pipelines.evaluation.suites.offline_config import OfflineConfig
from pipelines.evaluation.suites.suites import Suite, Task

log = logging.getLogger(__name__)

Scores: TypeAlias = NDArray[np.float64]
"""[M, k]: M tasks, k answers each, in [0, 1]."""
RETRY_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Asking:
    """Everything that is needed to have answers given and graded."""

    config: OfflineConfig
    connect: Callable[[], AbstractAsyncContextManager[Engines]]
    """Connections belong to the event loop of one run, so they are opened for it."""
    progress: ProgressLog
    judge: JudgeModel | None
    examination: Examination
    task: str = "evaluation"
    """What its progress is called."""
    heard: Callable[[Suite, Task, int, str, str], None] = lambda suite, task, sample, digest, text: None
    """Hears every answer as it comes: the suite, the task, which sample, of which version, the text."""

    async def ask(self, policy: str, suites: tuple[Suite, ...], versions: tuple[str, ...], *, draw: str) -> dict[str, tuple[Scores, ...]]:
        """Scores by suite, one array per version in their order. `draw` names the comparison and decides every seed.

        Raises `Unavailable` (inside an exception group) where an engine or grader fails: no answer ever scores zero by accident.
        """
        places = asyncio.Semaphore(self.config.concurrency)
        total, done = sum(len(suite.tasks) * suite.config.samples for suite in suites) * len(versions), 0
        detail: dict[str, Any] = {"suites": [suite.config.name for suite in suites], "digests": list(versions)}
        self.progress.report(policy, self.task, 0, total, detail)
        began: list[float] = []

        async def one(suite: Suite, task: Task, sample: int, digest: str) -> float:
            nonlocal done
            async with places:
                text, asked_at = await self._answer(engines, request_of(policy, digest, suite, task, sample, draw))
                self.heard(suite, task, sample, digest, text)
                score = await asyncio.to_thread(grade, task.grader, text, examination=self.examination, judge=self.judge)
            began.append(asked_at)
            done += 1
            self.progress.report(policy, self.task, done, total, detail)
            return score

        async with self.connect() as engines, asyncio.TaskGroup() as group:
            # The versions of one answer are asked beside each other: places are given in this order.
            asked = {
                suite.config.name: [
                    [[group.create_task(one(suite, task, i, digest)) for digest in versions] for i in range(suite.config.samples)]
                    for task in suite.tasks
                ]
                for suite in suites
            }
        if began:  # what came before the first answer was asked for is waiting for an engine, and no answering
            log.info("event=suites_answered versions=%s answers=%d seconds=%.3f", ",".join(versions), done, _now() - min(began))
        scored = {name: np.array([[[job.result() for job in pair] for pair in row] for row in rows]) for name, rows in asked.items()}
        return {name: tuple(scores_MKV[:, :, v] for v in range(len(versions))) for name, scores_MKV in scored.items()}

    async def _answer(self, engines: Engines, request: GenerateRequest) -> tuple[str, float]:
        """One answer and when it was asked for; waits up to `engine_wait_s` for an engine that holds the version. Raises `Unavailable`."""
        deadline = _now() + self.config.engine_wait_s
        while True:
            asked_at = _now()
            try:
                async with asyncio.timeout(self.config.engine_timeout_s):
                    return await _collect(engines, request), asked_at
            except TimeoutError as error:
                raise Unavailable(f"an answer took longer than {self.config.engine_timeout_s:g} s") from error
            except Unavailable:
                if _now() > deadline:
                    raise
                await asyncio.sleep(RETRY_S)


def _now() -> float:
    return asyncio.get_running_loop().time()


async def _collect(engines: Engines, request: GenerateRequest) -> str:
    text, finish = "", None
    async for chunk in engines.generate(request):
        text += chunk.text
        finish = chunk.finish_reason or finish
    if finish not in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.TOOL_CALLS):
        raise Unavailable(f"the engine ended an answer with {finish}")
    return text


def request_of(policy: str, digest: str, suite: Suite, task: Task, sample: int, draw: str) -> GenerateRequest:
    """What is asked of the engines: the seed is that of the draw, the task and the sample, whatever the version."""
    drawn = hashlib.sha256(f"{draw}\x1f{suite.config.name}\x1f{task.id}\x1f{sample}".encode()).digest()
    sampling = SamplingParams(
        temperature=suite.config.temperature, max_tokens=task.max_tokens or suite.config.max_tokens, seed=int.from_bytes(drawn[:4], "big")
    )
    return GenerateRequest(policy=policy, digest=digest, messages=task.messages, sampling=sampling, stream=False)
