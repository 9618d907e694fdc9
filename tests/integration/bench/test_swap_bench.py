"""What `make bench-swap` takes for an answer of mixed weights, and what for the blur of bfloat16."""

import pytest
import torch

from tests.bench.swap import is_mixed

FAR = [1.8, 2.5, 0.9, 3.1, 1.2, 2.2, 1.6, 2.8]
"""From the nearest other version, of an answer that is of its own."""


@pytest.mark.parametrize(
    ("own", "others", "found"),
    [
        ([0.05] * 8, FAR, False),
        ([0.4, 0.1, 0.9, 0.3, 0.5, 0.2, 0.6, 0.3], FAR, False),  # .41 on average: norms 1.25 times as large in bfloat16
        (FAR, [0.05] * 8, True),  # another version's, whole
        ([0.05] * 5 + [1.9, 2.4, 1.1], [1.8, 2.5, 0.9, 3.1, 1.2] + [0.05] * 3, True),  # its end is another's
        ([0.05] * 6 + [1.9, 2.4], [1.8, 2.5, 0.9, 3.1, 1.2, 2.2] + [0.05] * 2, True),  # two tokens are half of its distance
        (FAR, FAR, True),  # of neither
        ([0.3] * 8, [float("inf")] * 8, False),  # there was no other version yet
    ],
)
def test_an_answer_is_mixed_where_it_is_nearer_to_another_version_than_blur_makes_it(
    own: list[float], others: list[float], found: bool
) -> None:
    assert is_mixed(torch.tensor(own), torch.tensor(others)) is found
