"""Deltas of strangers and of older versions: what a header says is believed as far as the base allows, and no further."""

import base64
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from app.domain.errors import BadInput, Refused
from app.policy.storage.delta import MAGIC, Mode, Patch, StaleDelta, apply_delta, encode_delta, read_base, read_head
from app.policy.storage.weights import digest_of
from tests.unit.app.policy.test_delta import State, damaged_is_refused_or_harmless, state

FIRST_FORMAT = (
    "UkFUQ0hFVEQxCgYBAAB7ImJhc2UiOiI4NWE4Zjk3ZWVlZDkyNWNiMzliNWY4ZDI1ZTQ1ZjM2MzVjYzEzNDkzZWYxNThmNGNkZGY1YzJjZDNiYWIxNGRiIiwi"
    "ZGlnZXN0IjoiYjM1NjNkY2U4M2FhMWRmOTMyNjFiZmRlM2JhNTUwMzIyM2IyMDdhZWVlNTBlMTJhNmY2NDRiMmZkNGYzYWI4NCIsIm1vZGUiOiJ1bHAiLCJ0"
    "ZW5zb3JzIjpbWyJhIiwyLDIsMF0sWyJiIiwxLDIsMV1dLCJyYXciOltbImMiLCJGMzIiLFszXV1dLCJnb25lIjpbIm9sZCJdLCJmcmFtZXMiOlsxMywxMiwx"
    "MSwyMV19KLUv/SAEIQAAAQH/LCi1L/0gAxkAAAYD/yi1L/0gAhEAAAH+KLUv/SAMYQAAAAAAAAAAgD8AAABA"
)
SECOND_FORMAT = (
    "UkFUQ0hFVEQyCmQBAAB7ImJhc2UiOiI4MjFhODEwZDNkZDVlZTJhZTVkYWMyMzkwZGJlYTM2ZTZkY2MyZTBlMDk1NzlmYmE2MTk1MjI5ODZiMTY4YjgwIiwiZGlnZXN0Ij"
    "oiNzM4MzU1YjY2MzMxZTYzYjRlMWNjNmJmYmI2NmM5NTM2NDdiMzliMmIwYWM1NGI0ZTA4Nzc3ODk4OGNlNjRlZSIsIm1vZGUiOiJ1bHAiLCJnb25lIjpbIm9sZCJdLCJz"
    "ZWN0aW9ucyI6W3sidGVuc29ycyI6W1siYSIsIkJGMTYiLDIsMiwwXSxbImIiLCJCRjE2IiwxLDIsMl0sWyJmIiwiRjMyIiw0LDQsMF0sWyJpIiwiSTgiLDEsMSwwXV0sIm"
    "ZyYW1lcyI6WzE4LDI5LDExXX0seyJ3aG9sZSI6dHJ1ZSwidGVuc29ycyI6W1siYyIsIkYzMiIsWzNdXV0sImZyYW1lcyI6WzIxXX1dfSi1L/0gCUkAAAEB/ywBAAAAAyi1"
    "L/0gFKEAAAYD/wAAAAAAAAAAgICggAAAAAALKLUv/SACEQAAAf4otS/9IAxhAAAAAAAAAACAPwAAAEA="
)


def test_a_delta_of_the_first_format_is_read() -> None:
    base = {"a": state(1, 2, 3, 0x8001)["w"], "b": state(*[0x3F80] * 300)["w"], "old": state(5)["w"]}
    new = {"a": state(1, 5, 3, 0x8003)["w"], "b": state(*[0x3F80] * 299, 0xBF80)["w"], "c": torch.arange(3.0)}
    assert digest_of(apply_delta(base, base64.b64decode(FIRST_FORMAT))) == digest_of(new)


SECOND_BASE: State = {
    "a": state(1, 2, 3, 0x8001)["w"], "b": state(*[0x3F80] * 300)["w"], "f": torch.arange(5.0), "i": torch.arange(6, dtype=torch.int8),
    "old": state(5)["w"],
}  # fmt: skip
SECOND_NEW: State = {
    "a": state(1, 5, 3, 0x8003)["w"], "b": state(*[0x3F80] * 299, 0xBF80)["w"], "f": torch.arange(5.0) * 1.5,
    "i": torch.tensor([0, 1, 2, -3, 4, 5], dtype=torch.int8), "c": torch.arange(3.0),
}  # fmt: skip


def test_a_delta_of_the_second_format_is_read_whole_and_tensor_by_tensor() -> None:
    delta = base64.b64decode(SECOND_FORMAT)
    assert digest_of(apply_delta(SECOND_BASE, delta)) == digest_of(SECOND_NEW)
    assert read_base(lambda start, stop: delta[start:stop]) == digest_of(SECOND_BASE) == read_head(delta).base
    patch = Patch(delta, SECOND_BASE, base_digest=digest_of(SECOND_BASE))
    assert patch.names == {"a", "b", "f", "i"}
    for name in sorted(patch.names):
        assert torch.equal(patch.patched([name], {name: SECOND_BASE[name]})[name], SECOND_NEW[name])


@settings(max_examples=150, deadline=None)
@given(place=st.integers(0, 10_000), flip=st.integers(1, 255), text=st.sampled_from((FIRST_FORMAT, SECOND_FORMAT)))
def test_a_damaged_delta_of_an_older_format_never_gives_wrong_weights(place: int, flip: int, text: str) -> None:
    delta = bytearray(base64.b64decode(text))
    delta[place % len(delta)] ^= flip
    base = SECOND_BASE if text is SECOND_FORMAT else {name: SECOND_BASE[name] for name in ("a", "b", "old")}
    try:
        found = apply_delta(base, bytes(delta))
    except (BadInput, StaleDelta):
        return
    assert digest_of(found) == digest_of(apply_delta(base, base64.b64decode(text)))


def opened(delta: bytes) -> tuple[Any, bytes]:
    """Header and frames."""
    start = len(MAGIC) + 4 + int.from_bytes(delta[len(MAGIC) : len(MAGIC) + 4], "little")
    return msgspec.json.decode(zstandard.ZstdDecompressor().decompress(delta[len(MAGIC) + 4 : start])), delta[start:]


def sealed(header: Any, frames: bytes) -> bytes:
    written = zstandard.ZstdCompressor().compress(msgspec.json.encode(header))
    return MAGIC + len(written).to_bytes(4, "little") + written + frames


def section(*parts: list[Any], **changes: Any) -> dict[str, Any]:
    """One class of the thousand elements of `w`, without streams."""
    given = {"dtype": "BF16", "parts": list(parts), "below": [], "listings": ["near"], "least": [0], "frames": [0] * 5}
    return given | changes


THREE = ["w", 0, 1000, [3], []]
TWO_CLASSES = {"listings": ["near"] * 2, "least": [0, 0], "frames": [0] * 10}
BASE = state(*range(1000))


@pytest.mark.parametrize(
    "sections",
    [
        [section(["w", 0, 1000, [1 << 50], []])],
        [section(["w", 0, 1000, [3], [1 << 50]])],
        [section(["w", 0, 1 << 50, [3], []])],
        [section(["w", 0, 1000, [0], []])],
        [section(["w", 0, 1000, [-3], []])],
        [section(["w", -1, 1000, [3], []])],
        [section(["w", 500, 501, [3], []])],
        [section(["w", 0, 1000, [3, 3], []])],
        [section(THREE, dtype="F32")],
        [section(THREE, dtype="nothing")],
        [section(["other", 0, 1000, [3], []])],
        [section(THREE, THREE)],
        [section(THREE), section(THREE)],
        [section(["w", 500, 500, [3], []], ["w", 0, 500, [3], []])],
        [section(["w", 0, 501, [3], []], ["w", 500, 500, [3], []])],
        [section(THREE, frames=[1 << 60, 0, 0, 0, 0])],
        [section(THREE, frames=[-5, 5, 0, 0, 0])],
        [section(THREE, frames=[0] * 4)],
        [section(THREE, listings=["far", "far"])],
        [section(THREE, listings=["some"])],
        [section(THREE, least=[1 << 16])],
        [section(THREE, least=[-1])],
        [section(["w", 0, 1000, [3, 3], []], below=[256], **TWO_CLASSES)],
        [section(["w", 0, 1000, [3, 3], []], below=[0], **TWO_CLASSES)],
        [section(["w", 0, 1000, [3] * 3, []], below=[100, 100], listings=["near"] * 3, least=[0] * 3, frames=[0] * 15)],
        [section(["w", 0, 1000, [1] * 300, []], below=[*range(255, 0, -1)], listings=["near"] * 256, least=[0] * 256, frames=[0] * 1280)],
        "x", [[]], [{"frames": [0, 0, 0]}], {"a": 1}, 7, None,
    ],
)  # fmt: skip
def test_a_header_that_cannot_be_true_is_refused_before_memory_is_taken(sections: object) -> None:
    header, frames = opened(encode_delta(BASE, BASE))
    _refused_in_little_memory(sealed(header | {"sections": sections}, frames))


@pytest.mark.parametrize(
    "whole", [[["bomb", "F32", [1 << 40], 0]], [["w", "F32", [2], 0]] * 2, [["b", "F32", [-4, -4], 0]], [["b", "F32", [2], 1 << 60]], [7]]
)
def test_tensors_sent_whole_that_cannot_be_are_refused_before_memory_is_taken(whole: object) -> None:
    header, frames = opened(encode_delta(BASE, BASE))
    _refused_in_little_memory(sealed(header | {"whole": whole}, frames))


def _refused_in_little_memory(delta: bytes) -> None:
    tracemalloc.start()
    with pytest.raises(BadInput):
        apply_delta(BASE, delta)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20


def test_classes_in_an_overwriting_delta_or_of_integers_are_refused() -> None:
    """An overwriting delta may be applied twice, and would find other classes the second time."""
    parted = section(["w", 0, 1000, [3, 3], []], below=[100], **TWO_CLASSES)
    header, frames = opened(encode_delta(BASE, BASE, mode=Mode.OVERWRITE))
    with pytest.raises(BadInput):
        apply_delta(BASE, sealed(header | {"sections": [parted]}, frames))
    integers = {"w": torch.zeros(1000, dtype=torch.int8)}
    header, frames = opened(encode_delta(integers, integers))
    with pytest.raises(BadInput):
        apply_delta(integers, sealed(header | {"sections": [parted | {"dtype": "I8"}]}, frames))


@pytest.mark.parametrize("stream", range(5))
def test_a_frame_that_claims_more_than_its_tensors_have_is_not_opened(stream: int) -> None:
    header, frames = opened(encode_delta(BASE, BASE))
    bomb = zstandard.ZstdCompressor().compress(bytes(200 << 20))
    said = section(THREE, listings=["far"], frames=[len(bomb) if index == stream else 0 for index in range(5)])
    delta = sealed(header | {"sections": [said]}, frames + bomb)
    tracemalloc.start()
    with pytest.raises(BadInput, match="claims"):
        apply_delta(BASE, delta)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20


def test_a_header_that_claims_to_be_longer_than_any_is_not_opened() -> None:
    written = zstandard.ZstdCompressor().compress(bytes(65 << 20))
    delta = MAGIC + len(written).to_bytes(4, "little") + written
    for read in (lambda: read_head(delta), lambda: read_base(lambda start, stop: delta[start:stop])):
        with pytest.raises(BadInput, match="not a weight delta"):
            read()


def moved_base() -> tuple[State, State]:
    """Two tensors with small and large weights, so that there are classes; some of each changed."""
    random = torch.Generator().manual_seed(2)
    base = {"a": torch.randn(4000, generator=random).bfloat16(), "b": (torch.randn(40, 100, generator=random) * 1e-4).bfloat16()}
    step = {name: 3e-6 * torch.randn(tensor.shape, generator=random).sign() for name, tensor in base.items()}
    return base, {name: (tensor.float() + step[name] * 100).bfloat16() for name, tensor in base.items()}


def numbers_of(value: Any, found: list[Callable[[int], None]]) -> list[Callable[[int], None]]:
    """What sets each number in a header."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in entries:
        if isinstance(inner, int):
            found.append(lambda number, value=value, key=key: value.__setitem__(key, number))
        numbers_of(inner, found)
    return found


@settings(max_examples=300, deadline=None)
@given(which=st.integers(0, 10_000), number=st.one_of(st.integers(-3, 300), st.integers(0, 1 << 62)))
def test_whatever_number_of_a_header_lies_nothing_but_the_right_weights_comes_out(which: int, number: int) -> None:
    base, new = moved_base()
    header, frames = opened(encode_delta(base, new))
    setters = numbers_of(header, [])
    setters[which % len(setters)](number)
    try:
        found = apply_delta(base, sealed(header, frames))
    except (BadInput, StaleDelta):
        return
    assert digest_of(found) == digest_of(new)


@settings(max_examples=200, deadline=None)
@given(place=st.integers(0, 100_000), flip=st.integers(1, 255), cut=st.booleans())
def test_a_damaged_delta_with_classes_never_gives_wrong_weights(place: int, flip: int, cut: bool) -> None:
    base, new = moved_base()
    damaged_is_refused_or_harmless(base, new, place=place, flip=flip, cut=cut)


def test_more_new_tensors_than_the_base_has_go_as_a_snapshot() -> None:
    base = state(1, 2)
    with pytest.raises(Refused, match="snapshot"):
        encode_delta(base, {**base, "new": torch.zeros(2 << 20)})
