"""The wire format of deltas byte by byte, and where the codec turns from one way of writing to another; worked out by hand."""

import struct
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import zstandard

from app.domain.errors import Refused
from app.policy.storage.delta import Mode, apply_delta, encode_delta, most_whole
from app.policy.storage.delta_classes import bin_shift, bins_of, chosen, class_table, magnitudes
from app.policy.storage.delta_sections import Changes, Listing, Part
from app.policy.storage.delta_streams import (
    compressed,
    escaped,
    from_image,
    from_planes,
    gaps_of,
    image,
    moves_of,
    opened,
    read_sizes,
    running_sums,
    stepped,
    steps,
    width_of,
    written_sizes,
)  # fmt: skip
from app.policy.storage.weights import digest_of
from tests.unit.app.policy.test_delta import state


def bytes_of(*numbers: int) -> Any:
    return np.array(numbers, dtype="<u1")


def pairs_of(*numbers: int) -> Any:
    return np.array(numbers, dtype="<u2")


def long(*numbers: int) -> Any:
    return np.array(numbers, dtype=np.int64)


# --- places ----------------------------------------------------------------------------------------------------------------------------


def test_ranks_become_gaps_and_gaps_become_bytes_with_255_for_each_full_255() -> None:
    assert gaps_of(long(0, 2, 5)).tolist() == [0, 1, 2]
    assert gaps_of(long(3)).tolist() == [3]
    assert escaped(long(0, 254, 3)).tolist() == [0, 254, 3]
    assert escaped(long(254, 255, 256, 510, 511, 0)).tolist() == [254, 255, 0, 255, 1, 255, 255, 0, 255, 255, 1, 0]


def test_the_sums_of_what_was_written_are_read_again_with_the_lower_bytes_where_they_lie_apart() -> None:
    assert running_sums(bytes_of(1, 255, 0, 255, 255, 3)).tolist() == [1, 256, 769]
    assert running_sums(bytes_of(0, 1, 2), bytes_of(7, 8, 255)).tolist() == [7, 256 + 15, 3 * 256 + 270]
    with pytest.raises(ValueError, match="places"):
        running_sums(bytes_of(0, 1, 2), bytes_of(7, 8))


# --- steps ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "kind", "ordered"),
    [
        ("BF16", "<u2", [(0xFFFF, 0), (0xBF80, 0x407F), (0x8001, 0x7FFE), (0x8000, 0x7FFF), (0, 0x8000), (1, 0x8001), (0x3F80, 0xBF80)]),
        ("F8_E4M3", "<u1", [(0xFF, 0), (0x81, 0x7E), (0x80, 0x7F), (0, 0x80), (0x7F, 0xFF)]),
        ("F32", "<u4", [(0xBF800000, 0x407FFFFF), (0x80000000, 0x7FFFFFFF), (0, 0x80000000), (0x3F800000, 0xBF800000)]),
        ("I8", "<u1", [(0, 0), (0x7F, 0x7F), (0x80, 0x80), (0xFF, 0xFF)]),
        ("F8_E8M0", "<u1", [(0, 0), (0x7F, 0x7F), (0xFF, 0xFF)]),
    ],
)  # fmt: skip
def test_images_are_ordered_as_the_values_are_and_lead_back(dtype: str, kind: str, ordered: list[tuple[int, int]]) -> None:
    bits, images = (np.array([pair[side] for pair in ordered], dtype=kind) for side in (0, 1))
    assert image(bits, dtype).tolist() == images.tolist()
    assert from_image(images, dtype).tolist() == bits.tolist()


def test_a_step_says_whether_it_goes_down_and_how_many_places_beyond_the_first() -> None:
    old = pairs_of(0x3F80, 0x3F80, 0x3F80, 0x8000, 0x0000, 0x8001, 0x3F80)
    new = pairs_of(0x3F81, 0x3F7F, 0x3F90, 0x0000, 0x8000, 0x0001, 0x3E80)
    is_down, sizes = steps(old, new, "BF16")
    assert is_down.tolist() == [False, True, False, False, True, False, True]
    assert sizes.tolist() == [0, 0, 15, 0, 0, 2, 255]
    moves = moves_of(is_down, sizes)
    assert moves.tolist() == [1, 0xFFFF, 16, 1, 0xFFFF, 3, 0xFF00]
    assert stepped(old, moves, "BF16").tolist() == new.tolist()


def test_sizes_are_a_byte_or_255_and_two_planes_of_escapes() -> None:
    written, escapes = written_sizes(pairs_of(0, 254, 255, 256, 0x1234))
    assert written.tolist() == [0, 254, 255, 255, 255]
    assert escapes.tolist() == [255, 0, 0x34, 0, 1, 0x12]
    assert read_sizes(written, from_planes(escapes, 2), 2).tolist() == [0, 254, 255, 256, 0x1234]
    for wrong in (pairs_of(255, 256), pairs_of(255, 256, 257, 258)):
        with pytest.raises(ValueError, match="escapes"):
            read_sizes(written, wrong, 2)


def test_sizes_of_other_widths_are_one_byte_or_four_planes() -> None:
    assert [part.tolist() for part in written_sizes(bytes_of(0, 255))] == [[0, 255], []]
    assert read_sizes(bytes_of(0, 255), pairs_of(), 1).tolist() == [0, 255]
    written, escapes = written_sizes(np.array([1, 0x04030201], dtype="<u4"))
    assert (written.tolist(), escapes.tolist()) == ([1, 1, 0, 2, 0, 3, 0, 4], [])
    assert read_sizes(written, pairs_of(), 4).tolist() == [1, 0x04030201]


def test_a_frame_is_opened_where_it_holds_what_it_may() -> None:
    frame = memoryview(compressed(b"12345"))
    assert bytes(opened(frame, [5])) == bytes(opened(frame, range(3, 6))) == b"12345"
    for sizes in ([4], [6], range(5), range(6, 9)):
        with pytest.raises(ValueError, match="another size"):
            opened(frame, sizes)


# --- classes ----------------------------------------------------------------------------------------------------------------------------


def test_magnitudes_leave_out_the_sign_and_bins_are_their_highest_eight_bits() -> None:
    assert [bin_shift(width) for width in (1, 2, 4)] == [0, 7, 23]
    assert [width_of(dtype) for dtype in ("I8", "BF16", "F32")] == [1, 2, 4]
    assert magnitudes(pairs_of(0xBF80, 0x3F80, 0xFFFF), "BF16").tolist() == [0x3F80, 0x3F80, 0x7FFF]
    assert magnitudes(bytes_of(0x81, 1), "F8_E4M3").tolist() == [1, 1]
    assert magnitudes(bytes_of(0x81, 1), "I8").tolist() == [0x81, 1]
    assert bins_of(pairs_of(0x3F80, 0x3FFF, 0x7FFF, 127)).tolist() == [127, 127, 255, 0]
    assert bins_of(np.array([0x3F800000], dtype="<u4")).tolist() == [127]
    assert bins_of(bytes_of(0x7F)).tolist() == [0x7F]


def test_the_class_of_a_bin_is_how_many_bounds_lie_above_it() -> None:
    table = class_table((110, 101))
    assert [int(table[at]) for at in (255, 110, 109, 101, 100, 0)] == [0, 0, 1, 1, 2, 2]
    assert (len(table), class_table(()).sum()) == (256, 0)


def parted(*bins: tuple[int, float, float, int]) -> tuple[int, ...]:
    """What is chosen for (bin, elements, changed, places they went)."""
    sizes, moved = np.zeros(256), np.zeros((256, 64))
    for at, count, changed, far in bins:
        sizes[at], moved[at, far] = count, changed
    return chosen(sizes, moved)


@pytest.mark.parametrize(
    ("small", "changed", "bounds"),
    [(1_000, 174, ()), (1_000, 175, (101,)), (20_000, 620, ()), (20_000, 640, (101,))],
)
def test_a_class_has_to_save_a_thousand_bits_and_a_twentieth_for_each_element(small: int, changed: int, bounds: tuple[int, ...]) -> None:
    """Beside a million of which a thousand changed. Of 20,000 elements listing costs 1,000 bits more; were it or the class twice as dear,
    640 would not be enough (850 would)."""
    assert parted((100, small, changed, 0), (120, 1e6, 1_000, 0)) == bounds


def test_there_are_eight_classes_at_most() -> None:
    found = parted(*((20 * number, 1e6, 2e5, 5 * number) for number in range(1, 12)))
    assert len(found) == 7
    assert list(found) == sorted(found, reverse=True)


# --- sections ----------------------------------------------------------------------------------------------------------------------------


def said(base: Sequence[int], new: Sequence[int], mode: Mode = Mode.ULP) -> Changes:
    """The header of the one section."""
    delta = encode_delta(state(*base), state(*new), mode=mode)
    assert apply_delta(state(*base), delta)["w"].view(torch.uint16).int().tolist() == list(new)
    [section] = header_of(delta)["sections"]
    return msgspec.convert(section, Changes)


def header_of(delta: bytes) -> dict[str, Any]:
    assert delta[:10] == b"RATCHETD3\n"
    (length,) = struct.unpack_from("<I", delta, 10)
    return msgspec.json.decode(zstandard.ZstdDecompressor().decompress(delta[14 : 14 + length]))


@pytest.mark.parametrize(
    ("size", "changed", "listing", "listed"),
    [
        (10, 5, Listing.NEAR, []), (10, 6, Listing.REST, [4]), (10, 10, Listing.REST, [0]),
        (513, 2, Listing.FAR, []), (512, 2, Listing.NEAR, []), (257, 1, Listing.FAR, []), (256, 1, Listing.NEAR, []),
    ],
)  # fmt: skip
def test_the_changed_are_listed_or_the_others_where_those_are_fewer_and_few_ones_in_two_bytes(
    size: int, changed: int, listing: Listing, listed: list[int]
) -> None:
    found = said([7] * size, [7] * (size - changed) + [8] * changed, Mode.OVERWRITE)
    assert (found.listings, found.below, found.least) == ([listing], [], [0])
    assert found.parts == [Part("w", 0, size, [changed], listed)]
    assert found.parts[0].all_listed == (listed or [changed])


def test_a_stream_of_zeros_is_left_out() -> None:
    up = said([0x3F80] * 9, [0x3F81] + [0x3F80] * 8)
    assert up.frames == [0] * 5, "the first element, one place up"
    down = said([0x3F80] * 9, [0x3F80, 0x3F7F] + [0x3F80] * 7)
    assert [bool(frame) for frame in down.frames] == [True, False, True, False, False]
    written = said([1] * 9, [1, 2] + [1] * 7, Mode.OVERWRITE)
    assert [bool(frame) for frame in written.frames] == [True, False, False, True, False]


@pytest.mark.parametrize(("places", "least"), [(1, 0), (128, 0), (129, 1), (301, 173), (1001, 873)])
def test_sizes_are_counted_from_what_most_of_them_have_less_half_of_a_byte(places: int, least: int) -> None:
    found = said([0x3000] * 70, [0x3000 + places] * 69 + [0x3000])
    assert found.least == [least]
    assert found.frames[4] == 0, "so none of them needs an escape"


def test_a_part_has_four_million_elements_and_a_section_thirty_two_megabytes() -> None:
    sixteen = torch.zeros(16 << 20, dtype=torch.int8)
    base = dict.fromkeys("abc", sixteen)
    new = {name: sixteen.clone() for name in "abc"}
    for name in "abc":
        new[name][[0, 1 << 22, (1 << 22) + 1]] = 1
    delta = encode_delta(base, new, digests=("b" * 64, "d" * 64))
    sections = header_of(delta)["sections"]
    assert [[part[:3] for part in section["parts"]] for section in sections] == [
        [["a", 0, 1 << 22], ["a", 1 << 22, 1 << 22], ["b", 0, 1 << 22], ["b", 1 << 22, 1 << 22]],
        [["c", 0, 1 << 22], ["c", 1 << 22, 1 << 22]],
    ]
    assert [part[3] for section in sections for part in section["parts"]] == [[1], [2]] * 3
    assert (header_of(delta)["base"], header_of(delta)["digest"]) == ("b" * 64, "d" * 64)


def test_a_megabyte_more_than_the_base_may_be_new() -> None:
    assert most_whole(8) == 8 + 1_048_576
    base = {"w": torch.zeros(8, dtype=torch.uint8)}
    fits = {**base, "n": torch.zeros(8 + (1 << 20), dtype=torch.uint8)}
    assert digest_of(apply_delta(base, encode_delta(base, fits))) == digest_of(fits)
    with pytest.raises(Refused, match="send a snapshot"):
        encode_delta(base, {**base, "n": torch.zeros(9 + (1 << 20), dtype=torch.uint8)})


SOUND: dict[str, Any] = {
    "dtype": "BF16", "parts": [Part("w", 0, 10, [3, 2], [])], "below": [100], "listings": [Listing.NEAR, Listing.REST],
    "least": [0, 0xFFFF], "frames": [0] * 10,
}  # fmt: skip


def checked(*, relative: bool = True, **changes: Any) -> None:
    Changes(**SOUND | changes).check(relative=relative)


def test_a_header_at_its_very_bounds_is_taken() -> None:
    checked()
    checked(below=[255])
    checked(below=[1])
    rest = [Listing.REST, Listing.REST]
    checked(listings=rest, parts=[Part("w", 0, 5, [3, 2], [0, 5])])
    checked(listings=rest, parts=[Part("w", 0, 10, [1, 0], [0, 0])])
    seven = {"below": [8, 7, 6, 5, 4, 3, 2], "listings": [Listing.NEAR] * 8, "least": [0] * 8, "frames": [0] * 40}
    checked(**seven, parts=[Part("w", 0, 10, [1] * 8, [])])
    plain = {"below": [], "listings": [Listing.NEAR], "least": [0], "frames": [0] * 5, "parts": [Part("w", 0, 10, [3], [])]}
    checked(**plain, relative=False)
    checked(**plain | {"dtype": "I8", "least": [255]})


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"below": [256]}, "classes"), ({"below": [0]}, "classes"), ({"relative": False}, "classes"), ({"dtype": "I8"}, "classes"),
        (
            {"below": [9, 8, 7, 6, 5, 4, 3, 2], "listings": [Listing.NEAR] * 9, "least": [0] * 9, "frames": [0] * 45,
             "parts": [Part("w", 0, 10, [1] * 9, [])]},
            "classes",
        ),
        ({"below": [100, 100], "listings": [Listing.NEAR] * 3, "least": [0] * 3, "frames": [0] * 15}, "classes"),
        ({"least": [0]}, "least steps"), ({"least": [0, -1]}, "least steps"), ({"least": [0, 0x10000]}, "least steps"),
        ({"listings": [Listing.NEAR]}, "frames"), ({"frames": [0] * 9}, "frames"), ({"frames": [0] * 9 + [-1]}, "frames"),
        ({"parts": [Part("w", 0, 10, [3], [])]}, "counts of w"), ({"parts": [Part("w", 0, 10, [3, -1], [])]}, "counts of w"),
        ({"parts": [Part("w", 0, 10, [3, 2], [3])]}, "counts of w"), ({"parts": [Part("w", 0, 10, [3, 2], [3, -1])]}, "counts of w"),
        ({"parts": [Part("w", -1, 10, [3, 2], [])]}, "size of w"), ({"parts": [Part("w", 0, 10, [0, 0], [])]}, "size of w"),
        ({"parts": [Part("w", 0, 4, [3, 2], [])]}, "size of w"), ({"parts": [Part("w", 0, 5, [3, 2], [3, 3])]}, "size of w"),
        ({"listings": [Listing.REST, Listing.NEAR], "parts": [Part("w", 0, 9, [3, 2], [0, 3])]}, "listed elements of w"),
        ({"listings": [Listing.FAR, Listing.REST], "parts": [Part("w", 0, 9, [3, 2], [2, 2])]}, "listed elements of w"),
    ],
)  # fmt: skip
def test_a_header_one_beyond_its_bounds_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=f"^{why}$"):
        checked(**changes)
