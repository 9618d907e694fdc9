"""AdamW's step beside torch's own, with the defaults that pre-training trusts."""

import torch

from app.domain.learning.training import AdamParams
from pipelines.training.numerics.adam import AdamState, adam_step
from pipelines.training.numerics.tensor_file import TensorFile


def test_three_steps_with_the_defaults_are_those_of_torch_with_the_same() -> None:
    start = torch.tensor([1.0, -2.0, 0.5])
    gradients = [torch.tensor([0.1, -0.3, 0.0]), torch.tensor([-0.2, 0.1, 0.4]), torch.tensor([0.3, 0.3, -0.1])]
    masters, theirs = TensorFile({"w": start}, file=None), start.clone().requires_grad_()
    masters.tensors["w"].copy_(start)
    state = AdamState({"w": start}, file=None)
    optimizer = torch.optim.AdamW([theirs], lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    for gradient in gradients:
        adam_step(masters, iter([("w", gradient)]), state, AdamParams(learning_rate=0.01))
        theirs.grad = gradient.clone()
        optimizer.step()
    assert torch.allclose(masters.tensors["w"], theirs.detach(), rtol=1e-6)
