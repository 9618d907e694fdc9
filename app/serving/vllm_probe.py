"""Whether a vLLM server's log-probabilities are those of what it samples: asked at start and after every swap, of the server alone.

    processed?   at top_p → 0 one token is left, so its log-probability is 0; at temperature ½ the two most probable tokens are twice as
                 far apart as at 1. Raw log-probabilities (vLLM's default) do neither.
    its own?     short answers sampled at temperature 1 are scored again in one pass: KL per token as `app.serving.probe` bounds it

A server that fails serves on; its turns are marked and never trained on.
"""

from app.domain.turns import SamplingParams
from app.policy.fixed_probe import divergence
from app.serving.probe import MAX_GAP, MAX_KL, PROMPTS, TOKENS
from app.serving.vllm_control import VllmControl

NARROW = 1e-4
"""A top-p that keeps one token."""
NEAR = 0.05
"""How far arithmetic on two bfloat16 answers may be off, as a share."""


def doubt(control: VllmControl, model: str) -> str | None:
    """None where what is said of the samples is true; else one sentence with the cure. Raises as the server's answers do."""
    prompts = [control.tokenize(model, text) for text in PROMPTS]
    if not _processed(control, model, prompts):
        return "its log-probabilities are not those of the sampled distribution: start vLLM with --logprobs-mode processed_logprobs"
    sampled: list[float] = []
    scored: list[float] = []
    for prompt in prompts:
        drawn = control.sample(model, prompt, SamplingParams(temperature=1.0, max_tokens=TOKENS, seed=0))
        sampled += [float(token["logprob"]) for token in drawn]
        scored += control.score(model, [*prompt, *(int(token["token_id"]) for token in drawn)])[len(prompt) - 1 :]
    kl, gap = divergence(sampled, scored)
    if kl <= MAX_KL and gap <= MAX_GAP:  # NaN is not
        return None
    far = f"KL {kl:.3g} nats per token, largest gap {gap:.2g}"
    return f"it scores what it sampled otherwise than it sampled it ({far}): its turns are not trained on"


def _processed(control: VllmControl, model: str, prompts: list[list[int]]) -> bool:
    narrow = SamplingParams(temperature=1.0, top_p=NARROW, max_tokens=4, seed=0)
    if any(float(token["logprob"]) < -NEAR for prompt in prompts for token in control.sample(model, prompt, narrow)):
        return False
    apart = [[_apart(control, model, prompt, temperature) for prompt in prompts] for temperature in (1.0, 0.5)]
    return sum(apart[1]) > 1.5 * sum(apart[0])


def _apart(control: VllmControl, model: str, prompt: list[int], temperature: float) -> float:
    """Distance of the two most probable first tokens, nats."""
    (token,) = control.sample(model, prompt, SamplingParams(temperature=temperature, max_tokens=1, seed=0), top=2)
    best = sorted((float(other["logprob"]) for other in token["top_logprobs"]), reverse=True)
    return best[0] - best[1]
