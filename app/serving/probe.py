"""Whether an engine's log-probabilities are those of what it samples: asked of every version when it is loaded, before it serves.

Short answers are sampled as requests are (cache, batch, temperature), then scored in one plain forward pass. Healthy bfloat16 differs by
0.001 nats per token (KL); log-probabilities of the wrong distribution by forty times that and more (SmolLM2: 0.066 raw instead of at
temperature 0.7). An engine that fails serves on, and what it serves is never trained on: its turns carry no log-probabilities.

That asks whether an engine tells the truth about what it samples. How far a version that is served rounded is from the version as published
is another question (`mismatch`): its turns carry the log-probabilities of the rounded weights, which sampled them, and the update's guard
compares those with the published ones before its first step, and holds where they are too far apart.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from app.domain.telemetry.turns import SamplingParams
from app.policy.decoding.sampling import Generation, sample
from app.policy.model import Policy, model_of
from app.policy.patching import as_published
from app.policy.precision import Precision
from app.policy.scoring.fixed_probe import beginning, divergence, strange, written
from app.policy.scoring.forward import token_logprobs

PROMPTS = ("What is", "def first(items):\n    ", "Write a short answer: why", "1, 2, 3,")
TOKENS = 16
TEMPERATURE = 0.7
MAX_KL = 0.01
"""Mean of r − 1 − log r over the tokens, r = scored / sampled: KL(sampled ‖ scored), nats per token."""
MAX_GAP = 1.0
"""Largest |Δ log π| of a single token among the some sixty."""

Sampler = Callable[[Policy, Sequence[Sequence[int]], SamplingParams], list[Generation]]


def probe(policy: Policy, *, draw: Sampler = sample) -> str | None:
    """None where what is said of the samples is true; else one sentence that says how far off it is."""
    prompts = [policy.chat.encode(text) or [0] for text in PROMPTS]
    sampled: list[float] = []
    scored: list[float] = []
    for generation in draw(policy, prompts, SamplingParams(temperature=TEMPERATURE, top_p=1.0, max_tokens=TOKENS, seed=0)):
        with torch.inference_mode():
            scored += token_logprobs(policy.model, generation.prompt, generation.tokens, temperature=TEMPERATURE).tolist()
        sampled += generation.logprobs
    kl, largest = divergence(sampled, scored)
    if kl <= MAX_KL and largest <= MAX_GAP:  # NaN is not
        return None
    return (
        f"its log-probabilities are not those of what it samples (KL {kl:.3g} nats per token, largest gap {largest:.3g}): its turns are "
        "not trained on; compare dtype, kernels and libraries with an engine where they are"
    )


MISMATCH_TOKENS = 48
"""Of each answer that `mismatch` samples."""


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """How far a version as it is served is from the version as published, over tokens that it sampled at temperature 1."""

    kl: float
    """KL(served ‖ published) in nats per token: the mean of r − 1 − log r, r = published / served. The update's guard calls it mismatch."""
    p99: float
    """Of |log published − log served|."""
    tokens: int


def mismatch(policy: Policy, *, draw: Sampler = sample) -> Mismatch | None:
    """None where nothing was rounded."""
    if policy.precision is Precision.BF16:
        return None
    prompts = [policy.chat.encode(text) or [0] for text in PROMPTS]
    source = f"the version {policy.digest[:12]}"
    whole = model_of(policy.model.config, as_published(policy), dtype=policy.model.dtype, source=source).eval()
    sampled: list[float] = []
    scored: list[float] = []
    for generation in draw(policy, prompts, SamplingParams(max_tokens=MISMATCH_TOKENS, seed=0)):
        with torch.inference_mode():
            scored += token_logprobs(whole, generation.prompt, generation.tokens).tolist()
        sampled += generation.logprobs
    gaps = sorted(abs(one - other) for one, other in zip(sampled, scored, strict=True))
    return Mismatch(kl=divergence(sampled, scored)[0], p99=gaps[min(len(gaps) - 1, int(0.99 * len(gaps)))], tokens=len(gaps))


PATCHED_TOKENS = 64
"""Of the fixed text, asked of a version made from another: its weights were compared bit for bit, and whether they are computed with shows
in the first tokens as in all. It takes the processor from answers that are being written."""


def answers_strangely(policy: Policy, expected: bytes) -> str | None:
    """None where the version says of the beginning of the fixed text what its trainer wrote down; else how far off it is."""
    wanted = beginning(written(expected), PATCHED_TOKENS)
    with torch.inference_mode():
        measured = token_logprobs(policy.model, wanted.tokens[:1], wanted.tokens[1:])
    return strange(measured.tolist(), wanted)
