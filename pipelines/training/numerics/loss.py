"""L = −Σ_i Σ_t w_t · A_{i,t} · log π_θ(a_t) / normaliser, with everything but log π_θ detached (DESIGN, section 6).

A turn with a teacher (`pipelines.training.hindsight`) adds pull · clip(log π_T − log π_θ) to the advantage of each token.

The normaliser is a constant chosen before anything is sampled (turns in the step × reference length). Dividing by the sampled number of
tokens instead would favour short good answers and long bad ones (Dr. GRPO, arXiv 2503.20783).

Not covered: where top-p cut the support, π_θ is the whole distribution's and the ratio is corrected by the logged mass that was kept, but
that mass's own gradient (∇ log Z of the nucleus) is left out. It vanishes only where the baseline is the state's mean reward: sample with
top_p = 1.
"""

from dataclasses import dataclass

import torch

from app.domain.learning.training import LossName, LossSpec
from pipelines.training.numerics.corrections import token_weights


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """What a teacher says of the same tokens, and how much each token follows it (0: none)."""

    logprobs_M: torch.Tensor
    pull_M: torch.Tensor


def token_loss(
    spec: LossSpec, logprobs_M: torch.Tensor, behaviour_M: torch.Tensor, advantages_M: torch.Tensor, teacher: Teacher | None = None,
    turns_M: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The scalar to differentiate; with cross-entropy the advantages are plain weights, and neither behaviour nor teacher is looked at.

    `turns_M` numbers the turn of each token; corrections that mask whole turns need it."""
    if spec.name is LossName.CROSS_ENTROPY:
        return -(advantages_M * logprobs_M).sum() / spec.normaliser
    if teacher is not None:
        apart_M = (teacher.logprobs_M - logprobs_M.detach()).clamp(-spec.teacher_clip, spec.teacher_clip)
        advantages_M = advantages_M + teacher.pull_M * apart_M
    weights_M = token_weights(spec, logprobs_M, behaviour_M, advantages=advantages_M, turns=turns_M)
    return -(weights_M * advantages_M * logprobs_M).sum() / spec.normaliser
