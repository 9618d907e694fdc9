"""The off-policy gate over engines that know how likely every token is."""

import asyncio
import math
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from app.domain.errors import BadRequest, Unavailable
from app.domain.learning.batches import RewardedTurn, TurnPayload, payload_of
from app.domain.release.gates import GateResult, Verdict
from app.domain.telemetry.serving import ScoreRequest
from app.domain.telemetry.turns import SamplingParams
from pipelines.evaluation.config import GatesConfig
from pipelines.evaluation.off_policy_gate import OffPolicyGate
from tests.fakes.clock import FrozenClock
from tests.fakes.served import turn
from tests.fakes.streaming import MemorySegments

GOOD, BAD = 1, 2


@dataclass(kw_only=True)
class KnowingEngines:
    """Says `good` with the probability of the version, and `bad` otherwise."""

    good: dict[str, float]
    delay_s: float = 0.0
    fails: Exception | None = None
    asked: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])

    async def score(self, request: ScoreRequest) -> list[float]:
        self.asked.append((request.digest, len(request.completion_tokens)))
        await asyncio.sleep(self.delay_s)
        if self.fails is not None:
            raise self.fails
        p = self.good[request.digest]
        return [math.log(p if token == GOOD else 1.0 - p) for token in request.completion_tokens]


def _payload(name: str, *, good: bool, logged: float, **sampling: Any) -> TurnPayload:
    logprob = math.log(logged if good else 1.0 - logged)
    served = turn(name, completion_tokens=[GOOD if good else BAD], logprobs=[logprob], sampling=SamplingParams(**sampling))
    return payload_of(served)


def _gate(payloads: Sequence[TurnPayload], engines: KnowingEngines, **rules: Any) -> OffPolicyGate:
    segments, config = MemorySegments(), GatesConfig()
    segments.write("s", payloads)
    found = [
        RewardedTurn(inference_id=p.inference_id, segment="s", reward=1.0 if p.completion_tokens == (GOOD,) else -1.0) for p in payloads
    ]

    @asynccontextmanager
    async def connected() -> AsyncGenerator[Any]:
        yield engines

    return OffPolicyGate(
        config=msgspec.structs.replace(config, off_policy=msgspec.structs.replace(config.off_policy, **rules)), connect=connected,
        turns=lambda _policy, _version, newest: found[-newest:], trajectories=segments, clock=FrozenClock(),
    )  # fmt: skip


def _decide(gate: OffPolicyGate) -> GateResult:
    return gate.decide(policy="composer", candidate="v2", champion="v1")


def _turns(count: int, *, share_good: float = 0.6, **more: Any) -> list[TurnPayload]:
    return [_payload(f"t{i:04}", good=i % 10 < share_good * 10, logged=share_good, **more) for i in range(count)]


def test_a_candidate_that_would_earn_much_less_is_vetoed_and_the_replay_is_on_record() -> None:
    engines = KnowingEngines(good={"v1": 0.6, "v2": 0.3})
    result = _decide(_gate(_turns(1600), engines, replays=8, concurrency=64))
    assert (result.verdict, result.evidence["status"], result.evidence["hint"]) == (Verdict.FAIL, "informative", "veto")
    assert result.evidence["turns"] == 1600
    assert result.evidence["diagnostics"]["replayed"] == 8
    assert result.evidence["diagnostics"]["engine_gap"] == pytest.approx(0.0, abs=1e-12)
    assert [digest for digest, _ in engines.asked].count("v1") == 8


def test_few_turns_stop_nobody() -> None:
    result = _decide(_gate(_turns(32), KnowingEngines(good={"v1": 0.6, "v2": 0.3})))
    assert (result.verdict, result.evidence["status"]) == (Verdict.INCONCLUSIVE, "uninformative")
    assert result.evidence["diagnostics"]["response_kl"] == pytest.approx(0.6 * math.log(2) + 0.4 * math.log(0.4 / 0.7), abs=0.1)


def test_an_engine_that_disagrees_with_itself_is_asked_for_no_more_than_the_replays() -> None:
    engines = KnowingEngines(good={"v1": 0.5, "v2": 0.3})  # the log says 0.6
    result = _decide(_gate(_turns(100), engines, replays=10))
    assert (result.verdict, result.evidence["status"]) == (Verdict.INCONCLUSIVE, "unsupported")
    assert "engines disagree" in result.reason
    assert len(engines.asked) == 20
    assert result.evidence["left_out"] == {"not_scored": 90}


@pytest.mark.parametrize("error", [Unavailable("no engine holds it"), BadRequest("vLLM scores at temperature 1 only")])
def test_engines_that_cannot_score_leave_a_verdict_that_blocks_nobody(error: Exception) -> None:
    result = _decide(_gate(_turns(10), KnowingEngines(good={}, fails=error)))
    assert (result.verdict, result.evidence["status"]) == (Verdict.INCONCLUSIVE, "unsupported")
    assert str(error) in result.reason


def test_what_is_not_scored_in_time_is_left_out_and_counted() -> None:
    engines = KnowingEngines(good={"v1": 0.6, "v2": 0.6}, delay_s=0.02)
    result = _decide(_gate(_turns(400), engines, replays=1, concurrency=4, budget_s=0.3))
    assert 0 < result.evidence["turns"] < 100
    assert result.evidence["left_out"]["not_scored"] == 400 - result.evidence["turns"]


def test_engines_that_are_too_busy_are_told_from_people_who_are_missing() -> None:
    engines = KnowingEngines(good={"v1": 0.6, "v2": 0.6}, delay_s=5.0)
    result = _decide(_gate(_turns(5), engines, budget_s=0.05))
    assert (result.verdict, result.evidence["status"]) == (Verdict.INCONCLUSIVE, "unsupported")
    assert "none of 5 turns was scored within 0.05 s" in result.reason


def test_turns_whose_support_was_cut_are_counted_and_never_weighed() -> None:
    cut = [_payload("cut", good=True, logged=0.6, top_p=0.9), _payload("greedy", good=True, logged=0.6, temperature=0.0)]
    cut.append(_payload("few", good=True, logged=0.6, top_k=3))
    engines = KnowingEngines(good={"v1": 0.6, "v2": 0.6})
    mixed = _decide(_gate([*_turns(10), *cut], engines))
    assert (mixed.evidence["turns"], mixed.evidence["left_out"]) == (10, {"cut_support": 3})
    alone = _decide(_gate(cut, engines))
    assert (alone.evidence["status"], "cut the support" in alone.reason) == ("unsupported", True)


def test_turns_of_which_nobody_knows_how_likely_they_were_are_counted_and_never_weighed() -> None:
    unknown = payload_of(turn("unknown", completion_tokens=[GOOD], logprobs=None))
    partly = payload_of(turn("partly", completion_tokens=[GOOD, BAD], logprobs=[math.log(0.6)]))
    silent = payload_of(turn("silent", completion_tokens=[], logprobs=[]))
    engines = KnowingEngines(good={"v1": 0.6, "v2": 0.6})
    result = _decide(_gate([unknown, partly, *_turns(10), silent], engines))
    assert (result.evidence["turns"], result.evidence["left_out"]) == (10, {"no_logprobs": 2, "gone": 1})
    assert {length for _, length in engines.asked} == {1}


def test_without_any_turn_nothing_is_asked_and_the_cure_is_named() -> None:
    engines = KnowingEngines(good={})
    result = _decide(_gate([], engines))
    assert (result.verdict, engines.asked) == (Verdict.INCONCLUSIVE, [])
    assert "held_out_share" in result.reason


def test_a_long_prompt_is_left_out_and_a_long_completion_never_is() -> None:
    long_prompt = payload_of(turn("p", prompt_tokens=[5] * 50, completion_tokens=[GOOD], logprobs=[math.log(0.6)]))
    long_answer = payload_of(turn("c", completion_tokens=[GOOD] * 50, logprobs=[math.log(0.6)] * 50))
    engines = KnowingEngines(good={"v1": 0.6, "v2": 0.6})
    result = _decide(_gate([long_prompt, long_answer], engines, prompt_tokens_max=20))
    assert result.evidence["left_out"] == {"long_prompt": 1}
    assert {length for _, length in engines.asked} == {50}
