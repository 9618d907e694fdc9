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
