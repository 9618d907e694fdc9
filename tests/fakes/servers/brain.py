"""What a fake server of another make computes with: a snapshot that samples and scores."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import torch

from app.domain.telemetry.turns import SamplingParams
from app.policy.decoding.sampling import sample
from app.policy.model import Policy, load_model, load_policy
from app.policy.scoring.forward import token_logprobs

SCRIPT = (("a", 11, -0.5), (" b", 12, -1.5), ("", 2, -0.25))
"""What a server without a snapshot answers to everybody."""
Token = tuple[str, int, float]


class Brain:
    """A snapshot that samples and scores."""

    def __init__(self, folder: Path, *, head_of: "Brain | None" = None) -> None:
        """With `head_of`, its output head is that of other weights: what vLLM's processors serve after an update of a tied embedding."""
        self.folder = folder
        self.policy: Policy = load_policy(folder)
        if head_of is not None:
            model, old = cast("Any", load_model(folder)), cast("Any", load_model(head_of.folder))
            head = old.get_output_embeddings().weight.detach().clone()
            model.get_output_embeddings().weight = torch.nn.Parameter(head, requires_grad=False)
            self.policy = replace(self.policy, model=model.eval())

    def draw(self, prompt: Sequence[int], sampling: SamplingParams, *, raw: bool) -> list[Token]:
        (drawn,) = sample(self.policy, [list(prompt)], sampling)
        logprobs = self.score([*prompt, *drawn.tokens])[len(prompt) - 1 :] if raw else drawn.logprobs
        return [(self.policy.chat.decode([token]), token, logprob) for token, logprob in zip(drawn.tokens, logprobs, strict=True)]

    def score(self, tokens: Sequence[int]) -> list[float]:
        with torch.inference_mode():
            return list(token_logprobs(self.policy.model, tokens[:1], tokens[1:]).tolist())

    def top(self, prompt: Sequence[int], temperature: float, count: int) -> list[tuple[int, float]]:
        with torch.inference_mode():
            logits = self.policy.model(torch.tensor([list(prompt)])).logits[0, -1].float()
        best = torch.log_softmax(logits / temperature, -1).topk(count)
        return list(zip(best.indices.tolist(), best.values.tolist(), strict=True))


def spans(labels: Sequence[str]) -> list[dict[str, Any]]:
    """`[{"version", "start", "end"}]`, contiguous, of the label of each token."""
    found: list[dict[str, Any]] = []
    for label, group in groupby(labels):
        start = found[-1]["end"] if found else 0
        found.append({"version": label, "start": start, "end": start + len(list(group))})
    return found
