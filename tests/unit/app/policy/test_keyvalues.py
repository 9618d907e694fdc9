"""The key/value cache by hand: one head, one layer, one number a token; what is reserved, written, read, copied and given up."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from app.policy.decoding.keyvalues import Fed, KeyValues
from app.policy.decoding.lookup import PromptLookup


def fed(cache: KeyValues, rows: Sequence[Sequence[float]]) -> tuple[list[list[float]], list[list[float]]]:
    """Write these keys, and values a hundred above them, as was planned; what attention reads of both, row by row."""
    keys: Tensor = torch.tensor(rows)[:, None, :, None]
    found = cache.update(keys, keys + 100, 0)
    return found[0][:, 0, :, 0].tolist(), found[1][:, 0, :, 0].tolist()


def prefilled(cache: KeyValues, row: int, start: int, *numbers: float) -> tuple[list[list[float]], list[list[float]]]:
    cache.plan(asked(row, [[*range(start, start + len(numbers))]]))
    return fed(cache, [numbers])


def asked(first: int, positions: list[list[int]]) -> Fed:
    positions_nQ = torch.tensor(positions)
    return Fed(first=first, tokens_nQ=positions_nQ, positions_nQ=positions_nQ, width=1 + int(positions_nQ.max()))


def held(cache: KeyValues, row: int, length: int) -> list[float]:
    [(keys, values)] = cache.take(row, length)
    assert torch.equal(values, torch.where(keys == 0, values, keys + 100))
    return keys[0, :, 0].tolist()


def room(cache: KeyValues) -> int:
    """Tokens, rows together: keys and values of four bytes."""
    return cache.nbytes // 8


def test_a_prompt_is_read_up_to_where_it_was_fed() -> None:
    cache = KeyValues(max_rows=4)
    assert prefilled(cache, 0, 0, 1, 2) == ([[1, 2]], [[101, 102]])
    assert prefilled(cache, 0, 2, 3) == ([[1, 2, 3]], [[101, 102, 103]])
    assert prefilled(cache, 1, 0, 9) == ([[9]], [[109]])
    assert held(cache, 0, 3) == [1, 2, 3]


def test_rows_that_decode_are_written_where_each_stands_and_read_alike_wide() -> None:
    cache = KeyValues(max_rows=4)
    prefilled(cache, 0, 0, 1, 2, 3)
    prefilled(cache, 1, 0, 7)
    cache.plan(asked(0, [[3, 4], [1, 2]]))
    keys, values = fed(cache, [[4, 5], [8, 9]])
    assert keys[0] == [1, 2, 3, 4, 5]
    assert keys[1][:3] == [7, 8, 9]
    assert values[0] == [101, 102, 103, 104, 105]
    assert [len(row) for row in keys] == [5, 5]


@pytest.mark.parametrize(("length", "reserved"), [(1, 128), (128, 128), (129, 256), (256, 256), (257, 384)])
def test_room_grows_by_a_hundred_and_twenty_eight_tokens(length: int, reserved: int) -> None:
    cache = KeyValues(max_rows=1)
    prefilled(cache, 0, 0, *[1.0] * length)
    assert room(cache) == reserved


def test_rows_double_up_to_the_most() -> None:
    cache, found = KeyValues(max_rows=6), list[int]()
    for row in range(6):
        prefilled(cache, row, 0, 1.0)
        found.append(room(cache) // 128)
    assert found == [1, 2, 4, 4, 6, 6]
    assert [held(cache, row, 1) for row in range(6)] == [[1.0]] * 6


def test_prompts_beside_each_other_are_written_behind_those_that_decode_and_read_as_wide_as_the_longest() -> None:
    cache = KeyValues(max_rows=4)
    prefilled(cache, 0, 0, 1, 2, 3)
    prefilled(cache, 1, 0, 7)
    cache.plan(asked(1, [[1, 2], [0, 1]]))
    keys, values = fed(cache, [[8, 9], [5, 6]])
    assert keys[0] == [7, 8, 9]
    assert keys[1][:2] == [5, 6]
    assert values[1][:2] == [105, 106]
    assert [held(cache, row, length) for row, length in ((0, 3), (1, 3), (2, 2))] == [[1, 2, 3], [7, 8, 9], [5, 6]]


def test_the_beginning_of_a_row_is_copied_and_no_more() -> None:
    cache = KeyValues(max_rows=3)
    prefilled(cache, 0, 0, 1, 2, 3)
    prefilled(cache, 1, 0, 7, 8, 9)
    cache.copy(0, 1, 2)
    assert [held(cache, row, 3) for row in (0, 1)] == [[1, 2, 3], [1, 2, 9]]
    before = room(cache)
    cache.copy(0, 2, 0)
    assert room(cache) == before, "nothing is copied, nothing reserved"
    cache.copy(0, 2, 3)
    assert held(cache, 2, 3) == [1, 2, 3]


def test_what_was_taken_is_a_copy_and_can_be_put_into_another_row() -> None:
    cache, other = KeyValues(max_rows=2), KeyValues(max_rows=4)
    prefilled(cache, 0, 0, 1.0, 2.0, 3.0)
    taken = cache.take(0, 2)
    prefilled(cache, 0, 0, 5.0)
    prefilled(other, 0, 0, 7.0)
    other.put(2, taken)
    assert (held(other, 2, 3), held(other, 0, 1), room(other) // 128) == ([1, 2, 0], [7], 3)


@pytest.mark.parametrize(
    ("reserved", "length", "left"), [(256, 128, 128), (256, 129, 256), (384, 129, 384), (384, 1, 128), (512, 256, 256)]
)
def test_room_is_given_up_once_half_of_it_is_read_for_nothing(reserved: int, length: int, left: int) -> None:
    cache = KeyValues(max_rows=1)
    prefilled(cache, 0, 0, *[float(number) for number in range(reserved)])
    cache.trim(length)
    assert room(cache) == left
    assert held(cache, 0, 3) == [0, 1, 2]
    prefilled(cache, 0, left, 5.0)
    assert room(cache) == left + 128, "and taken again where it is wanted"


def test_what_is_released_takes_no_room() -> None:
    cache = KeyValues(max_rows=2)
    prefilled(cache, 1, 0, *[1.0] * 200)
    cache.release()
    assert cache.nbytes == 0
    prefilled(cache, 0, 0, 3.0)
    assert room(cache) == 128


def test_where_attention_is_compiled_keys_lie_with_tokens_side_by_side_and_values_have_room() -> None:
    """One memory, whichever way it is looked at; also once it has grown, was copied, and is given up."""
    cache, like = KeyValues(max_rows=3, tiled=32), torch.empty(1, 2, 1, 5)
    cache.reserve(asked(0, [[0, 1, 2]]))
    keys, values = cache.tiled(0, like)
    assert (keys.shape, values.shape) == ((1, 2, 5, 128), (1, 2, 128, 32))
    assert keys.is_contiguous()
    assert values.is_contiguous()
    assert cache.nbytes == 4 * (keys.numel() + values.numel())
    keys[0, :, :, :3], values[0, :, :3, :5] = torch.arange(30).view(2, 5, 3), torch.arange(30).view(2, 3, 5)
    expected = [(torch.arange(30.0).view(2, 5, 3).transpose(1, 2)[:, :2], torch.arange(30.0).view(2, 3, 5)[:, :2])]
    cache.copy(0, 2, 2)
    cache.put(1, cache.take(0, 2))
    cache.reserve(asked(0, [[400]]))
    for length in (512, 128):
        cache.trim(length)
        keys, values = cache.tiled(0, like)
        assert (keys.shape, values.shape) == ((3, 2, 5, length), (3, 2, length, 32))
        assert keys.is_contiguous()
        assert values.is_contiguous()
        for row in range(3):
            [(found_keys, found_values)] = cache.take(row, 2)
            assert torch.equal(found_keys, expected[0][0])
            assert torch.equal(found_values, expected[0][1])
        assert not keys[1:, :, :, 2:].any(), "what nobody wrote is zero"
        assert not values[:, :, :, 5:].any()


# --- drafts ------------------------------------------------------------------------------------------------------------------------------


def test_three_tokens_are_drafted_at_first_and_seven_after_a_draft_that_was_right() -> None:
    lookup = PromptLookup([*range(1, 30), 1, 2, 3])
    assert lookup.draft(99) == [4, 5, 6]
    lookup.emitted([4, 5, 0], drafted=3)
    lookup.emitted([10, 11, 12], drafted=0)
    assert lookup.draft(99) == [13, 14, 15], "half right changes nothing"
    lookup.emitted([13, 14, 15, 16], drafted=3)
    lookup.emitted([20, 21, 22], drafted=0)
    assert lookup.draft(99) == [23, 24, 25, 26, 27, 28, 29]
    assert [len(lookup.draft(most)) for most in (0, 1, 6, 8)] == [0, 1, 6, 7]


def test_after_drafts_that_were_wrong_nothing_is_drafted_for_eight_tokens_and_twice_as_long_each_time() -> None:
    lookup, rested, at = PromptLookup([0, 1, 2] * 4), list[int](), 0
    for _ in range(7):
        lookup.emitted([at % 3], drafted=3)
        at, count = at + 1, 0
        while not lookup.draft(9):
            lookup.emitted([at % 3], drafted=0)
            at, count = at + 1, count + 1
        rested.append(count)
    assert rested == [8, 16, 32, 64, 128, 256, 256]
    lookup.emitted([(at + place) % 3 for place in range(4)], drafted=3)
    at += 4
    lookup.emitted([at % 3], drafted=7)
    assert lookup.draft(9) == []
    lookup.emitted([(at + 1 + place) % 3 for place in range(8)], drafted=0)
    assert len(lookup.draft(9)) == 3, "one that was right begins anew, and one that was wrong is short again"


def test_three_tokens_have_to_have_come_before() -> None:
    assert PromptLookup([7, 7]).draft(9) == PromptLookup([7, 7, 7]).draft(9) == []
    assert PromptLookup([7, 7, 7, 7]).draft(9) == [7]
    assert PromptLookup([1, 2, 9, 4, 1, 2]).draft(9) == []
    assert PromptLookup([1, 2, 3, 4, 0, 1, 2, 3, 5, 0, 1, 2, 3]).draft(1) == [5], "the newest time counts"
