"""A draft head: one small layer that guesses what comes after the token just drawn, from what the target computed to draw it.

The target's last hidden state of a position and the embedding of the token drawn there are normalised, joined and go through one block, as
in the multi-token prediction of DeepSeek-V3 (arXiv 2412.19437, section 2.2); embedding and output rows are the target's own. Two things
differ: the block has no attention, so that it has no cache to keep, copy and take back (the hidden state has seen the whole context), and
one layer is applied to its own state for longer drafts, as in EAGLE (arXiv 2401.15077). Nothing depends on a head being right: the sampler
is replayed over whatever it drafts.

Shapes: N rows, D hidden size, F inner size, R tokens that it may draft (the most frequent of the deployment's answers), K drafted tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from app.domain.errors import BadInput
from app.domain.telemetry.turns import SamplingParams
from app.policy.decoding.drawing import alike, cut
from app.policy.decoding.guessing import guessed
from app.policy.model import Policy
from app.policy.packing.linear import PackedLinear, pack
from app.policy.packing.products import can_pack

EPSILON = 1e-5
VOCABULARY = "vocabulary"
CURE = "train it again with `ratchet model draft`"


class DraftHead(nn.Module):
    """The layer itself: what is trained and stored."""

    vocabulary: Tensor
    """[R] ids of the tokens that it may draft."""

    def __init__(self, *, hidden: int, inner: int, vocabulary: Sequence[int] | Tensor) -> None:
        super().__init__()
        self.join = nn.Linear(2 * hidden, hidden, bias=False)
        self.gate_up = nn.Linear(hidden, 2 * inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)
        for name in ("before_state", "before_token", "before_block", "after"):
            self.register_parameter(name, nn.Parameter(torch.ones(hidden)))
        self.register_buffer(VOCABULARY, torch.as_tensor(vocabulary, dtype=torch.int64))

    def begin(self, scale_D: Tensor, *, seed: int) -> None:
        """Small random weights, of `seed`; states begin as copies of the target's, whose size by component is `scale_D`."""
        random = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for linear, size in ((self.join, 0.1), (self.gate_up, 1.0), (self.down, 0.0)):
                linear.weight.copy_(torch.randn(linear.weight.shape, generator=random) * linear.in_features**-0.5 * size)
            self.join.weight[:, : len(scale_D)] += torch.eye(len(scale_D))
            self.get_parameter("after").copy_(scale_D)

    def forward(self, state_ND: Tensor, embedded_ND: Tensor) -> Tensor:
        """States [N, D] of the next positions, in the space of the target's own."""
        both = torch.cat((self._normed(state_ND, "before_state"), self._normed(embedded_ND, "before_token")), dim=-1)
        joined = self.join(both)
        gate, up = self.gate_up(self._normed(joined, "before_block")).chunk(2, dim=-1)
        return self._normed(joined + self.down(functional.silu(gate) * up), "after")

    def _normed(self, states: Tensor, name: str) -> Tensor:
        wide = states.float()
        return self.get_parameter(name) * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPSILON)).to(
            self.get_parameter(name).dtype
        )

    def tensors(self) -> dict[str, Tensor]:
        """What is stored: bfloat16, and the vocabulary."""
        kept = {name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in self.named_parameters()}
        return {**kept, VOCABULARY: self.vocabulary.to("cpu", torch.int32)}


def head_of(tensors: Mapping[str, Tensor]) -> DraftHead:
    """The head of stored tensors, in float32. Raises `BadInput` for what is no head."""
    try:
        down, vocabulary = tensors["down.weight"], tensors[VOCABULARY]
        head = DraftHead(hidden=down.shape[0], inner=down.shape[1], vocabulary=vocabulary.long())
        head.load_state_dict({name: tensor.long() if name == VOCABULARY else tensor.float() for name, tensor in tensors.items()})
    except (KeyError, IndexError, RuntimeError) as error:
        raise BadInput(f"this is no draft head ({str(error).splitlines()[0][:120]}): {CURE}") from error
    return head.eval().requires_grad_(False)


def check_head(head: DraftHead, policy: Policy) -> None:
    """Raises `BadInput` for a head that cannot draft for this policy: of another model, or with numbers that are none."""
    hidden, vocabulary = int(policy.model.config.get_text_config().hidden_size), head.vocabulary
    if head.down.out_features != hidden:
        raise BadInput(
            f"the draft head is of states of {head.down.out_features} numbers, the model's have {hidden}: {CURE} for this policy"
        )
    if not len(vocabulary) or int(vocabulary.min()) < 0 or int(vocabulary.max()) >= policy.vocabulary:
        raise BadInput(f"the draft head drafts tokens outside of the model's vocabulary of {policy.vocabulary}: {CURE} for this policy")
    if not all(bool(torch.isfinite(parameter).all()) for parameter in head.parameters()):
        raise BadInput(f"the draft head holds numbers that are not finite: {CURE}")


def embedding_of(policy: Policy) -> Callable[[Tensor], Tensor]:
    """The target's embedding [N, D] of tokens [N] on its device."""
    return cast("Any", policy.model.get_input_embeddings())


def output_rows(policy: Policy, vocabulary_R: Tensor) -> Tensor:
    """Rows [R, D] of the target's output embedding."""
    output = cast("Any", policy.model.get_output_embeddings())
    if isinstance(output, PackedLinear):
        return output.weights_of(vocabulary_R)
    return output.weight[vocabulary_R.to(output.weight.device)]


class HeadDrafter:
    """A head over one version: drafts what is likeliest to be drawn (`app.policy.decoding.guessing`). For one thread, like the model."""

    def __init__(self, head: DraftHead, policy: Policy) -> None:
        """Copies the head and the rows of the output that it needs. Raises `BadInput` where they do not fit."""
        check_head(head, policy)
        model = policy.model
        copy = DraftHead(hidden=head.down.out_features, inner=head.down.in_features, vocabulary=head.vocabulary)
        copy.load_state_dict(head.state_dict())
        rows = nn.Linear(head.down.out_features, len(head.vocabulary), bias=False)
        rows.weight = nn.Parameter(output_rows(policy, head.vocabulary).detach().clone(), requires_grad=False)
        self._parts = nn.ModuleDict({"head": copy, "rows": rows}).to(model.device, model.dtype).eval().requires_grad_(False)
        self._vocabulary = head.vocabulary.to(model.device)
        self._embedded = embedding_of(policy)
        self._place = torch.empty(0, device=model.device, dtype=model.dtype)
        if can_pack(model.dtype) and model.device.type == "cpu":
            pack(self._parts)

    def draft(
        self, states_ND: Tensor, tokens: Sequence[int], uniforms: Sequence[Sequence[float]], sampling: Sequence[SamplingParams]
    ) -> list[list[int]]:
        """See `app.policy.decoding.drafting.Head`."""
        return self.draft_all(states_ND, torch.tensor(tokens), torch.tensor(uniforms), sampling).tolist()

    @torch.inference_mode()
    def draft_all(self, states_ND: Tensor, tokens_N: Tensor, uniforms_NK: Tensor, sampling: Sequence[SamplingParams]) -> Tensor:
        """The same as a tensor [N, K] on the CPU, of states on any device and of any float dtype."""
        drafted: list[Tensor] = []
        states_ND, tokens_N = states_ND.to(self._place.device, self._place.dtype), tokens_N.to(self._vocabulary.device)
        for uniform_N in uniforms_NK.to(self._place.device).unbind(1):
            states_ND = self._parts["head"](states_ND, self._embedded(tokens_N))
            logits_NR, tokens_N = self._parts["rows"](states_ND), torch.empty_like(tokens_N)
            for params, members in alike(sampling):
                tokens_N[members] = self._vocabulary[guessed(cut(logits_NR[members], params), uniform_N[members])]
            drafted.append(tokens_N)
        return torch.stack(drafted, dim=1).cpu()
