"""Whether this machine computes the same bits whatever else is in the batch: alone, in company, fed at once, drafted or not.

Asked once when an engine starts (it logs the answer, `/health` keeps it): then a seeded answer is the same text however busy the engine is,
and the log-probabilities that were logged are those that scoring finds again. Depends on the processor, oneDNN and the model; where it does
not hold, answers differ in their last bits, and training corrects for that as it does for any engine.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from app.domain.telemetry.turns import SamplingParams
from app.policy.decoding.sampling import Decoder, Generation
from app.policy.model import Policy

TEXTS = (
    "1, 2, 3, 1, 2, 3, 1, 2,", "def first(items):\n    return", "Write a short answer: why does it rain", "What is", "The capital of",
)  # fmt: skip
"""Of ragged lengths; one repeats itself, so that drafts are made."""


@dataclass(frozen=True, kw_only=True)
class Invariance:
    """What was found."""

    differing_bits: int
    """Log-probabilities that were not bit for bit the same, of `compared`."""
    compared: int
    seeded_equal: float
    """Share of answers whose tokens are the same alone and in company."""

    @property
    def holds(self) -> bool:
        """Whether nothing differed."""
        return self.differing_bits == 0 and self.seeded_equal == 1.0


def invariance(policy: Policy, *, texts: Sequence[str] = TEXTS, tokens: int = 12) -> Invariance:
    """Sample texts alone and in one batch, with and without drafts, and score what was sampled in one pass each."""
    prompts = [policy.chat.encode(text) for text in texts]
    params = [SamplingParams(max_tokens=tokens, seed=index) for index in range(len(prompts))]
    together = _sampled(policy, prompts, params, draft_rows=0)
    differing = compared = equal = 0
    for prompt, sampling, answer in zip(prompts, params, together, strict=True):
        decoder = Decoder(policy, max_rows=1)
        scored = decoder.score(prompt, answer.tokens, temperature=1.0, top_p=1.0)
        decoder.close()
        alone = [_sampled(policy, [prompt], [sampling], draft_rows=rows)[0] for rows in (0, 4)]
        for logprobs in (scored, *(each.logprobs for each in alone)):
            differing += sum(one != other for one, other in zip(answer.logprobs, logprobs, strict=False))
            differing += abs(len(answer.logprobs) - len(logprobs))
            compared += len(answer.logprobs)
        equal += all(each.tokens == answer.tokens for each in alone)
    return Invariance(differing_bits=differing, compared=compared, seeded_equal=equal / len(prompts))


def _sampled(policy: Policy, prompts: list[list[int]], params: list[SamplingParams], *, draft_rows: int) -> list[Generation]:
    decoder = Decoder(policy, max_rows=max(1, len(prompts)), draft_rows=draft_rows)
    try:
        answers = [decoder.submit(prompt, sampling) for prompt, sampling in zip(prompts, params, strict=True)]
        while decoder.busy:
            decoder.step()
        return answers
    finally:
        decoder.close()
