"""The compiled loops of the codec: where elements stand in their classes, and back."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType] - its PathLike has no parameter

from app.policy.storage.delta import Mode, apply_delta, encode_delta
from app.policy.storage.delta_classes import bin_shift, class_table
from app.policy.storage.delta_loops import BLOCK, differing, located, prepare, ranked
from app.policy.storage.delta_streams import WIDTHS
from app.policy.storage.weights import digest_of

BELOW = (110, 101)
BINS = st.sampled_from([0, 100, 101, 109, 110, 120, 255])


def elements(bins: Sequence[int], width: int) -> NDArray[Any]:
    """Negative floats of these bins."""
    shift = bin_shift(width)
    return (np.array(bins, dtype=np.int64) << shift | (1 << (8 * width - 1) if width > 1 else 0)).astype(f"<u{width}")


def ranked_of(bits: NDArray[Any], places: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
    shift = bin_shift(bits.itemsize)
    found = ranked(bits, np.array(places, dtype=np.int64), class_table(BELOW), len(BELOW) + 1, BELOW[0] << shift, shift)
    kinds, ranks, sizes = (numbers.tolist() for numbers in found)
    return kinds, ranks, sizes


def located_of(
    bits: NDArray[Any], listed: Sequence[Sequence[int]], is_rest: Sequence[bool], changed: Sequence[int]
) -> tuple[list[int], bool]:
    ends, shift = np.cumsum([len(ranks) for ranks in listed]), bin_shift(bits.itemsize)
    places, fits = located(
        bits, np.array([rank for ranks in listed for rank in ranks], dtype=np.int64), np.concatenate([[0], ends[:-1]]), ends,
        np.array(is_rest), np.array(changed, dtype=np.int64), class_table(BELOW), BELOW[0] << shift, shift,
    )  # fmt: skip
    return places.tolist(), fits


@pytest.mark.parametrize("width", [1, 2, 4])
def test_ranks_are_counted_within_the_class_and_of_the_first_class_among_all(width: int) -> None:
    bits = elements([120, 100, 110, 120, 100, 109, 100, 0] if width > 1 else [120, 100, 110, 120, 100, 109, 100, 1], width)
    assert ranked_of(bits, [0, 1, 3, 5, 6]) == ([0, 2, 0, 1, 2], [0, 0, 3, 0, 2], [8, 1, 4])
    assert ranked_of(bits, []) == ([], [], [8, 1, 4])
    assert ranked_of(bits[:0], []) == ([], [], [0, 0, 0])


@pytest.mark.parametrize("width", [1, 2, 4])
def test_listed_elements_are_found_again_or_all_but_those(width: int) -> None:
    bits = elements([120, 100, 110, 120, 100, 109, 100, 0], width)
    assert located_of(bits, [[0, 3], [0], [0, 2]], [False, False, False], [2, 1, 2]) == ([5, 1, 6], True)
    assert located_of(bits, [[0, 3], [0], [0, 2]], [False, False, True], [2, 1, 2]) == ([5, 4, 7], True)
    assert located_of(bits, [[0, 3], [], []], [False, True, True], [2, 1, 4]) == ([5, 1, 4, 6, 7], True)


@pytest.mark.parametrize(
    ("listed", "is_rest", "changed"),
    [
        ([[], [1], []], [False, False, False], [0, 1, 0]),  # the class has one element
        ([[], [], [0, 4]], [False, False, False], [0, 0, 2]),  # four
        ([[], [], [0, 0]], [False, False, False], [0, 0, 2]),  # one of them twice
        ([[], [], [2, 1]], [False, False, False], [0, 0, 2]),  # not in order
        ([[], [], [0]], [False, False, True], [0, 0, 2]),  # three are left
        ([[], [], [0]], [False, False, True], [0, 0, 4]),
        ([[], [], [0]], [False, False, False], [0, 0, 0]),
    ],
)
def test_what_does_not_fit_is_said_and_nothing_is_written_beyond_what_was_said(
    listed: list[list[int]], is_rest: list[bool], changed: list[int]
) -> None:
    bits = elements([120, 100, 110, 120, 100, 109, 100, 0], 2)
    places, fits = located_of(bits, listed, is_rest, changed)
    assert not fits
    assert len(places) == sum(changed[1:])


@settings(max_examples=60, deadline=None)
@given(data=st.data(), repeated=st.sampled_from([1, BLOCK - 1, BLOCK, 2 * BLOCK + 3]), rest=st.tuples(st.booleans(), st.booleans()))
def test_what_was_ranked_is_located_again_over_many_blocks(data: st.DataObject, repeated: int, rest: tuple[bool, bool]) -> None:
    some = data.draw(st.lists(BINS, min_size=1, max_size=9))
    bits = elements((some * (1 + repeated // len(some)))[:repeated], 2)
    places = sorted(data.draw(st.sets(st.integers(0, len(bits) - 1), max_size=40)))
    kinds, ranks, sizes = ranked_of(bits, places)
    mine = [[rank for kind, rank in zip(kinds, ranks, strict=True) if kind == wanted] for wanted in range(3)]
    is_rest = (False, *rest)
    listed = [
        sorted(set(range(size)) - set(changed)) if left else changed for left, changed, size in zip(is_rest, mine, sizes, strict=True)
    ]
    expected = [place for wanted in (1, 2) for kind, place in zip(kinds, places, strict=True) if kind == wanted]
    assert located_of(bits, listed, is_rest, [len(ranks) for ranks in mine]) == (expected, True)
    assert mine[0] == [place for kind, place in zip(kinds, places, strict=True) if kind == 0]


def test_arrays_that_differ_at_block_borders_and_behind_the_last_eight() -> None:
    old = np.arange(2 * BLOCK + 5, dtype=np.uint32)
    places = [0, 7, 8, BLOCK - 1, BLOCK, 2 * BLOCK, 2 * BLOCK + 4]
    new = old.copy()
    new[places] += 1 << 31
    assert differing(old, new).tolist() == places
    assert differing(old[: BLOCK + 1], new[: BLOCK + 1]).tolist() == places[:5]
    assert differing(old, old).tolist() == differing(old[:0], new[:0]).tolist() == []


def test_nothing_is_compiled_beyond_what_is_prepared(tmp_path: Path) -> None:
    """Whatever is encoded and applied, from files as well: what is compiled while an engine samples holds its threads up for seconds."""
    prepare()
    random = torch.Generator().manual_seed(3)
    kinds = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8)
    base = {str(kind): (1e-2 * torch.randn(20_000, generator=random)).to(kind) for kind in kinds}
    save_file(base, tmp_path / "base.safetensors")
    read = load_file(tmp_path / "base.safetensors")
    for mode in Mode:
        new = {name: (1.1 * tensor.float()).to(tensor.dtype) for name, tensor in read.items()}
        delta = encode_delta(read, new, mode=mode)
        assert digest_of(apply_delta(read, delta)) == digest_of(new)
    for loop in (differing, ranked, located):
        assert len(loop.dispatcher.signatures) == len(WIDTHS)
