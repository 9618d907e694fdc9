"""What workers that share a model send each other: bfloat16, while weights, masters, gradients and sums stay fp32.

weights     The model holds bfloat16 values in fp32 (`pipelines.training.numerics.rounding`): sent as bfloat16 they lose nothing, so
            every worker computes with the very weights that one worker alone would.
gradients   Each worker rounds its own to the nearest bfloat16, sends every other its rows of it, and adds up in fp32 what it is sent. So
            each of the N addends is rounded once, by at most 2⁻⁸ of itself (8 significant bits), and nothing else is:

                |g − Σᵢ gᵢ| ≤ 2⁻⁸ · Σᵢ |gᵢ|

            A reduction that adds in bfloat16, as FSDP2's `reduce_dtype` does, rounds up to N − 1 partial sums as well.

Half the bytes of fp32. Sent in runs of a few megabytes, so that nothing of the size of a layer is held next to FSDP2's own buffers.
"""

# torch.distributed leaves parts of its types open.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

RUN = 1 << 20
"""Elements sent to, or by, one worker at a time: 2 MB."""


class Bfloat16Gather:
    """FSDP2's all-gather of fp32 shards that hold bfloat16 values (`FSDPModule.set_custom_all_gather`)."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A buffer as FSDP2 asks for."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False) -> None:
        """Fill `output_tensor` [N · M] with everybody's `input_tensor` [M], which may be a view of it."""
        assert not async_op, "the buffers here are gone once the call returns"
        if input_tensor.dtype != torch.float32:  # bytes of weights of two dtypes, such as the base of adapters and the norms beside it
            dist.all_gather_single(output_tensor, input_tensor, group=group)
            return
        whole_NM = output_tensor.view(group.size(), -1)
        for some in _runs(len(input_tensor)):
            mine_R = input_tensor[some].bfloat16()
            sent_NR = mine_R.new_empty(group.size(), len(mine_R))
            dist.all_gather_single(sent_NR.view(-1), mine_R, group=group)
            whole_NM[:, some] = sent_NR


class Bfloat16ReduceScatter:
    """FSDP2's reduce-scatter of fp32 gradients (`FSDPModule.set_custom_reduce_scatter`); sums alone."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A buffer as FSDP2 asks for."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, op: object, async_op: bool = False
    ) -> None:
        """Fill `output_tensor` [M] with the sum over workers of this one's row of their `input_tensor` [N · M]."""
        assert op == dist.ReduceOp.SUM, "the loss's constant normaliser already divides"
        assert not async_op, "the buffers here are gone once the call returns"
        own_NM = input_tensor.view(group.size(), -1)
        for some in _runs(len(output_tensor)):
            mine_NR = own_NM[:, some].bfloat16()
            sent_NR = torch.empty_like(mine_NR)
            dist.all_to_all_single(sent_NR, mine_NR, group=group)
            torch.sum(sent_NR, dim=0, dtype=torch.float32, out=output_tensor[some])


def _runs(count: int) -> Iterator[slice]:
    return (slice(at, min(at + RUN, count)) for at in range(0, count, RUN))
