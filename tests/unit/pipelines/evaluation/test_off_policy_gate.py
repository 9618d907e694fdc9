"""G2: a veto or a hint, never a pass."""

from datetime import UTC, datetime

import numpy as np

from app.domain.release.gates import Verdict
from pipelines.evaluation.config import GatesConfig
from pipelines.evaluation.off_policy import LoggedTurns, judge_off_policy

NOW = datetime(2026, 11, 21, tzinfo=UTC)
N = 6000
"""Responses of one token over two answers: `good` earns 1, `bad` earns -1."""


def _turns(*, logger: float, candidate: float, replayed: bool = True, truncated: bool = False, n: int = N) -> LoggedTurns:
    """The logger says `good` with probability `logger`, the candidate would with probability `candidate`."""
    good = np.random.default_rng(1).random(n) < logger
    logged = [np.log([logger if g else 1 - logger]) for g in good]
    return LoggedTurns(
        candidate_logprobs=[np.log([candidate if g else 1 - candidate]) for g in good], logged_logprobs=logged,
        rewards=np.where(good, 1.0, -1.0), truncated=truncated, replayed_logprobs=logged if replayed else (),
    )  # fmt: skip


def _judge(turns: LoggedTurns) -> tuple[Verdict, str]:
    result = judge_off_policy(turns, candidate="v2", config=GatesConfig(), now=NOW)
    return result.verdict, str(result.evidence["hint"])


def test_a_candidate_that_would_earn_much_less_is_vetoed() -> None:
    assert _judge(_turns(logger=0.6, candidate=0.3)) == (Verdict.FAIL, "veto")


def test_a_better_candidate_only_speeds_the_ramp_up() -> None:
    assert _judge(_turns(logger=0.4, candidate=0.6)) == (Verdict.INCONCLUSIVE, "fast")


def test_log_probabilities_that_were_never_replayed_mean_nothing() -> None:
    assert _judge(_turns(logger=0.6, candidate=0.3, replayed=False)) == (Verdict.INCONCLUSIVE, "none")


def test_a_truncated_support_means_nothing() -> None:
    assert _judge(_turns(logger=0.6, candidate=0.3, truncated=True)) == (Verdict.INCONCLUSIVE, "none")


def test_few_turns_are_uninformative() -> None:
    assert _judge(_turns(logger=0.6, candidate=0.3, n=200)) == (Verdict.INCONCLUSIVE, "none")


def test_no_turns_at_all_are_unsupported() -> None:
    result = judge_off_policy(_turns(logger=0.6, candidate=0.3, n=0), candidate="v2", config=GatesConfig(), now=NOW)
    assert (result.verdict, result.evidence["status"]) == (Verdict.INCONCLUSIVE, "unsupported")
