"""Whether a server's log-probabilities are those of what it samples: asked at start and after every swap, of the server alone.

    processed?   at top_p → 0 one token is left, so its log-probability is 0; at temperature ½ two tokens are twice as far apart as at 1.
                 Raw log-probabilities (vLLM's default) do neither.
    its own?     short answers sampled at temperature 1 are scored again in one pass: KL per token as `app.serving.probe` bounds it

A server that fails serves on; its turns are marked and never trained on.
"""

from app.domain.telemetry.turns import SamplingParams
from app.policy.scoring.fixed_probe import divergence
from app.serving.probe import MAX_GAP, MAX_KL, PROMPTS, TOKENS
from app.serving.servers.control import Control
from app.serving.servers.held import Place

NARROW = 1e-4
"""A top-p that keeps one token."""
NEAR = 0.05
"""How far arithmetic on two bfloat16 answers may be off, as a share."""
TOP = 5
"""First tokens that are asked for."""


def doubt(control: Control, place: Place) -> str | None:
    """None where what is said of the samples is true; else one sentence with the cure. Raises as the server's answers do."""
    prompts = [control.tokenize(place, text) for text in PROMPTS]
    if not _processed(control, place, prompts):
        return f"its log-probabilities are not those of the sampled distribution: {control.cure}"
    sampled: list[float] = []
    scored: list[float] = []
    for prompt in prompts:
        drawn = control.sample(place, prompt, SamplingParams(temperature=1.0, max_tokens=TOKENS, seed=0))
        sampled += [float(token["logprob"]) for token in drawn]
        scored += control.score(place, [*prompt, *(int(token["token_id"]) for token in drawn)])[len(prompt) - 1 :]
    kl, gap = divergence(sampled, scored)
    if kl <= MAX_KL and gap <= MAX_GAP:  # NaN is not
        return None
    far = f"KL {kl:.3g} nats per token, largest gap {gap:.2g}"
    return f"it scores what it sampled otherwise than it sampled it ({far}): its turns are not trained on"


def _processed(control: Control, place: Place, prompts: list[list[int]]) -> bool:
    narrow = SamplingParams(temperature=1.0, top_p=NARROW, max_tokens=4, seed=0)
    if any(float(token["logprob"]) < -NEAR for prompt in prompts for token in control.sample(place, prompt, narrow)):
        return False
    ways = [_ways(control, place, prompt) for prompt in prompts]
    return sum(half for _, half in ways) > 1.5 * sum(one for one, _ in ways)


def _ways(control: Control, place: Place, prompt: list[int]) -> tuple[float, float]:
    """How far the most and the least probable of some first tokens are apart, nats, at temperature 1 and at ½: the same two tokens, because
    the sampled one, whichever it is, may stand among those that are named."""
    one, half = (_named(control, place, prompt, temperature) for temperature in (1.0, 0.5))
    both = sorted(one.keys() & half.keys(), key=lambda token: one[token])
    return (one[both[-1]] - one[both[0]], half[both[-1]] - half[both[0]]) if both else (0.0, 0.0)


def _named(control: Control, place: Place, prompt: list[int], temperature: float) -> dict[int, float]:
    """Log-probabilities of the most probable first tokens, by token id."""
    (token,) = control.sample(place, prompt, SamplingParams(temperature=temperature, max_tokens=1, seed=0), top=TOP)
    return {int(other["token_id"]): float(other["logprob"]) for other in token["top_logprobs"]}
