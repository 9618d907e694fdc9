"""Self-distillation: the head learns the version's own distribution over what comes next, at places of its own answers.

Loss: cross-entropy to the target's own distribution at the place that is drafted, renormalised over the tokens the head may draft
(distillation on what was sampled, with the whole distribution as the label: DistillSpec, arXiv 2310.08461); over two drafts ahead the mean
(DeepSeek-V3, arXiv 2412.19437, section 2.2), each fed with the token that was drawn before it.

Shapes: N places, D hidden size, R tokens that may be drafted.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from app.domain.errors import BadInput
from app.policy.decoding.draft_head import DraftHead, embedding_of, output_rows
from app.policy.model import Policy
from pipelines.training.drafting.answers import ReadAnswer
from pipelines.training.drafting.config import DraftingConfig

DEPTHS = 2
WARM_UP = 20
"""Optimizer steps until the learning rate is whole."""
FALLS = 1 / 3


@dataclass(frozen=True, kw_only=True)
class Lessons:
    """The answers to learn from, end to end; `starts_N` are the places from which two tokens of the same answer follow."""

    states_TD: Tensor
    tokens_T: Tensor
    teacher_TD: Tensor
    """States whose distribution is to be learned: of place t what token t was drawn from."""
    starts_N: Tensor


def lessons_of(answers: Sequence[ReadAnswer]) -> Lessons:
    """Raises `BadInput` where nothing was read."""
    if not answers:
        raise BadInput("no answer was read in the time that was given: give it more with --seconds")
    states = torch.cat([answer.states_TD for answer in answers])
    starts, at = list[Tensor](), 0
    for answer in answers:
        starts.append(torch.arange(at, at + len(answer.tokens_T) - DEPTHS))
        at += len(answer.tokens_T)
    return Lessons(
        states_TD=states, tokens_T=torch.cat([a.tokens_T for a in answers]), teacher_TD=states, starts_N=torch.cat(starts)
    )  # fmt: skip


def distil(
    policy: Policy, lessons: Lessons, vocabulary: Sequence[int], config: DraftingConfig, *, left: Callable[[int, float], float]
) -> tuple[DraftHead, list[float]]:
    """Train a head until its steps are done or no time is `left`: a share, told the step and its loss. Returns it with its losses.

    The learning rate falls in the last third of the steps, or of the time where that is shorter: only then do seconds change the result.
    """
    rows_RD = output_rows(policy, torch.tensor(vocabulary)).detach().to("cpu", torch.float32, copy=True)
    hidden = rows_RD.shape[1]
    head = DraftHead(hidden=hidden, inner=round(config.inner * hidden), vocabulary=vocabulary)
    head.begin(lessons.states_TD.float().pow(2).mean(0).sqrt(), seed=config.seed)
    optimizer = torch.optim.AdamW(head.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    random, losses, share = torch.Generator().manual_seed(config.seed), list[float](), 1.0
    for step in range(config.steps):
        remaining = min(share, 1 - step / config.steps)
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * min(1.0, (step + 1) / WARM_UP, remaining / FALLS)
        at_N = lessons.starts_N[torch.randint(len(lessons.starts_N), (config.positions,), generator=random)]
        loss = _loss(head, lessons, at_N, policy, rows_RD)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # pyright: ignore[reportUnknownMemberType] - torch
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()  # pyright: ignore[reportUnknownMemberType] - torch
        losses.append(float(loss.detach()))
        if (share := left(step + 1, losses[-1])) <= 0:
            break
    return head.eval().requires_grad_(False), losses


def _loss(head: DraftHead, lessons: Lessons, at_N: Tensor, policy: Policy, rows_RD: Tensor) -> Tensor:
    state_ND, total = lessons.states_TD[at_N].float(), torch.zeros(())
    for depth in range(DEPTHS):
        with torch.no_grad():
            embedded_ND = embedding_of(policy)(lessons.tokens_T[at_N + depth].to(policy.model.device)).to("cpu", torch.float32)
            wanted_NR = torch.softmax(lessons.teacher_TD[at_N + depth + 1].float() @ rows_RD.T, -1)
        state_ND = head(state_ND, embedded_ND)
        total = total - (wanted_NR * functional.log_softmax(state_ND @ rows_RD.T, -1)).sum(-1).mean()
    return total / DEPTHS
