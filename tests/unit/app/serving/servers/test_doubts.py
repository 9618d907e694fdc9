"""What a server says of its samples, against what one says that names the sampled token among the most probable ones, as vLLM does."""

import math
from collections.abc import Sequence
from typing import Any, cast

import pytest

from app.domain.telemetry.turns import SamplingParams
from app.serving.servers.control import Control
from app.serving.servers.doubts import doubt
from app.serving.servers.held import Place

LOGITS = {1: 3.0, 2: 1.0, 3: 0.5, 4: 0.0, 5: -0.5, 6: -1.0, 7: -2.0}
"""Of every place, whatever came before."""


class OneDistribution:
    """A server whose every token has the same distribution; at temperature 1 it draws an improbable one."""

    cure = "start it with other log-probabilities"

    def __init__(self, *, raw: bool) -> None:
        self.raw = raw

    def tokenize(self, place: Place, text: str) -> list[int]:
        return [9, 9]

    def sample(self, place: Place, prompt: Sequence[int], sampling: SamplingParams, *, top: int = 0) -> list[dict[str, Any]]:
        said = self._logprobs(1.0 if self.raw else sampling.temperature, 1.0 if self.raw else sampling.top_p)
        drawn = 7 if sampling.temperature == 1.0 and sampling.top_p == 1.0 else 1
        others = sorted((token for token in said if token != drawn), key=lambda token: -said[token])
        named = [{"token_id": token, "logprob": said[token]} for token in [drawn, *others][:top]]
        return [{"token_id": drawn, "logprob": said[drawn], "top_logprobs": named}] * sampling.max_tokens

    def score(self, place: Place, tokens: Sequence[int]) -> list[float]:
        said = self._logprobs(1.0, 1.0)
        return [said.get(token, 0.0) for token in tokens[1:]]

    def _logprobs(self, temperature: float, top_p: float) -> dict[int, float]:
        if top_p < 0.5:
            return {1: 0.0}
        total = math.log(sum(math.exp(logit / temperature) for logit in LOGITS.values()))
        return {token: logit / temperature - total for token, logit in LOGITS.items()}


@pytest.mark.parametrize("raw", [False, True])
def test_an_improbable_draw_is_not_taken_for_raw_log_probabilities(raw: bool) -> None:
    found = doubt(cast("Control", OneDistribution(raw=raw)), Place(url="http://server", model="m", label=None))
    assert (found is not None and OneDistribution.cure in found) if raw else found is None


class Measured:
    """A server that says what it is told to, and keeps what it was asked."""

    cure = "mend it"

    def __init__(self, *, narrow: float = 0.0, one: float = 2.0, half: float = 4.0, off: float = 0.0, lonely: float = 0.0) -> None:
        self.narrow, self.one, self.half, self.off, self.lonely = narrow, one, half, off, lonely
        self.asked: list[tuple[SamplingParams, int]] = []

    def tokenize(self, place: Place, text: str) -> list[int]:
        return [9, 9, 9]

    def sample(self, place: Place, prompt: Sequence[int], sampling: SamplingParams, *, top: int = 0) -> list[dict[str, Any]]:
        self.asked.append((sampling, top))
        if sampling.top_p < 1.0:
            return [{"token_id": 1, "logprob": self.narrow, "top_logprobs": []}] * sampling.max_tokens
        if top:
            apart = self.one if sampling.temperature == 1.0 else self.half
            named = [{"token_id": token, "logprob": -0.5 - token * apart / 4} for token in range(top)]
            return [{"token_id": 0, "logprob": -0.5, "top_logprobs": named}]
        return [{"token_id": 1, "logprob": -3.0, "top_logprobs": []}] * sampling.max_tokens

    def score(self, place: Place, tokens: Sequence[int]) -> list[float]:
        return [0.0, 0.0, -3.0 + self.off + self.lonely, *[-3.0 + self.off] * (len(tokens) - 4)]


def doubted(server: Measured) -> str | None:
    return doubt(cast("Control", server), Place(url="http://server", model="m", label=None))


@pytest.mark.parametrize(
    ("server", "is_doubted"),
    [
        (Measured(narrow=-0.05), False), (Measured(narrow=-0.051), True),
        (Measured(half=3.01), False), (Measured(half=3.0), True),
        (Measured(off=0.138), False), (Measured(off=0.139), True),
        (Measured(lonely=0.36), False), (Measured(lonely=0.6), True),
        (Measured(off=float("nan")), True),
    ],
)  # fmt: skip
def test_the_bounds_of_a_doubt_are_met_from_both_sides(server: Measured, is_doubted: bool) -> None:
    assert (doubted(server) is not None) is is_doubted


def test_a_server_is_asked_for_one_token_wide_four_first_ones_and_sixteen_to_score() -> None:
    server = Measured()
    assert doubted(server) is None
    asked = [(of.temperature, of.top_p, of.max_tokens, of.seed, top) for of, top in server.asked]
    assert set(asked) == {(1.0, 1e-4, 4, 0, 0), (1.0, 1.0, 1, 0, 5), (0.5, 1.0, 1, 0, 5), (1.0, 1.0, 16, 0, 0)}
    assert asked.count((1.0, 1.0, 16, 0, 0)) == 4
