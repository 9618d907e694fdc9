"""G2 as the cycle asks it: turns that nobody learned from, scored by the engines, then judged.

turns held out ─▶ the first few replayed by the champion: does the engine agree with itself? ─▶ scored by the candidate ─▶ judge
                                            └─ no: only those few are scored, for the record
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from app.domain.errors import RatchetError
from app.domain.learning.batches import RewardedTurn, TurnPayload
from app.domain.ports import Clock, Engines, TrajectoryStore
from app.domain.release.gates import GateResult
from app.domain.telemetry.serving import ScoreRequest
from pipelines.evaluation.config import GatesConfig
from pipelines.evaluation.off_policy import LoggedTurns, Logprobs, engine_gap, judge_off_policy, unsupported
from pipelines.evaluation.statistics.off_policy import ENGINE_GAP_LIMIT

GREEDY_BELOW = 1e-4
"""Turns sampled at such a temperature had one possible answer: no weight means anything."""


@dataclass(frozen=True, kw_only=True)
class OffPolicyGate:
    """G2 with everything it needs."""

    config: GatesConfig
    connect: Callable[[], AbstractAsyncContextManager[Engines]]
    """Connections belong to the event loop of one run, so they are opened for it."""
    turns: Callable[[str, str, int], list[RewardedTurn]]
    """(policy, version, how many at most) → turns that no update may learn from, oldest first."""
    trajectories: TrajectoryStore
    clock: Clock

    def decide(self, *, policy: str, candidate: str, champion: str) -> GateResult:
        """Judge a candidate (digest) on turns of the champion (digest). Engines that cannot score are a verdict too: unsupported."""
        logged, left_out = self._logged(policy, champion)
        try:
            replayed, scored = asyncio.run(self._score(policy, champion, candidate, logged)) if logged else ([], [])
        except RatchetError as error:
            return unsupported(candidate, f"the engines could not score: {error}", config=self.config, now=self.clock())
        if logged and not scored:
            reason = f"none of {len(logged)} turns was scored within {self.config.off_policy.budget_s:g} s: the engines are busy"
            return unsupported(candidate, reason, config=self.config, now=self.clock())
        if len(scored) < len(logged):
            left_out["not_scored"] = len(logged) - len(scored)
        used = logged[: len(scored)]
        turns = LoggedTurns(
            candidate_logprobs=scored, logged_logprobs=[turn.logprobs for turn in used], replayed_logprobs=replayed[: len(scored)],
            rewards=np.array([turn.reward for turn in used], dtype=np.float64), left_out=dict(left_out),
            truncated=not logged and left_out["cut_support"] > 0,
        )  # fmt: skip
        return judge_off_policy(turns, candidate=candidate, config=self.config, now=self.clock())

    def _logged(self, policy: str, champion: str) -> tuple[list["_Logged"], Counter[str]]:
        """The turns that can be scored, oldest first, and how many cannot be, by reason."""
        found = self.turns(policy, champion, self.config.off_policy.turns)
        payloads = self.trajectories.read([(turn.segment, turn.inference_id) for turn in found])
        usable: list[_Logged] = []
        left_out: Counter[str] = Counter()
        for turn in found:
            payload = payloads.get(turn.inference_id)
            reason = self._unusable(payload)
            if payload is None or reason is not None:
                left_out[reason or "gone"] += 1
            else:
                usable.append(_Logged(payload=payload, logprobs=np.array(payload.logprobs, dtype=np.float64), reward=turn.reward))
        return usable, left_out

    def _unusable(self, payload: TurnPayload | None) -> str | None:
        if payload is None or not payload.completion_tokens:
            return "gone"
        if payload.logprobs is None or len(payload.logprobs) != len(payload.completion_tokens):
            return "no_logprobs"
        if payload.is_cut or payload.temperature < GREEDY_BELOW or payload.shape is not None:
            return "cut_support"
        return "long_prompt" if len(payload.prompt_tokens) > self.config.off_policy.prompt_tokens_max else None

    async def _score(
        self, policy: str, champion: str, candidate: str, logged: Sequence["_Logged"]
    ) -> tuple[list[Logprobs], list[Logprobs]]:
        """Replays by the champion, and the candidate's scores, both of the first turns in order."""
        rules = self.config.off_policy
        deadline = asyncio.get_running_loop().time() + rules.budget_s
        async with self.connect() as engines:
            replayed = await self._scores(engines, policy, champion, logged[: rules.replays], deadline)
            gap = engine_gap(replayed, [turn.logprobs for turn in logged])
            worthwhile = logged if gap <= ENGINE_GAP_LIMIT else logged[: len(replayed)]
            return replayed, await self._scores(engines, policy, candidate, worthwhile, deadline)

    async def _scores(self, engines: Engines, policy: str, digest: str, turns: Sequence["_Logged"], deadline: float) -> list[Logprobs]:
        """Scores in order; those that are not there at the deadline, and all after them, are left out."""
        places = asyncio.Semaphore(self.config.off_policy.concurrency)

        async def one(payload: TurnPayload) -> Logprobs:
            async with places:
                return np.array(await engines.score(_request(policy, digest, payload)), dtype=np.float64)

        asked = [asyncio.create_task(one(turn.payload)) for turn in turns]
        try:
            async with asyncio.timeout_at(deadline):
                await asyncio.gather(*asked)
        except TimeoutError:
            pass
        finally:
            for task in asked:
                task.cancel()
        return [task.result() for task in takewhile(lambda task: task.done() and not task.cancelled(), asked)]


@dataclass(frozen=True, kw_only=True)
class _Logged:
    """A turn that can be scored."""

    payload: TurnPayload
    logprobs: Logprobs
    """[T], as logged."""
    reward: float


def _request(policy: str, digest: str, payload: TurnPayload) -> ScoreRequest:
    return ScoreRequest(
        policy=policy, digest=digest, prompt_tokens=list(payload.prompt_tokens), completion_tokens=list(payload.completion_tokens),
        temperature=payload.temperature, top_p=payload.top_p, top_k=payload.top_k,
    )  # fmt: skip
