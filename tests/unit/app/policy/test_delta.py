"""The delta codec: bit-exact on every pattern of every kind, bound to its base, small, and safe to read from a stranger."""

import base64
import json
import tracemalloc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from app.domain.errors import BadInput, Refused
from app.policy.storage.delta import MAGIC, Mode, Patch, StaleDelta, apply_delta, encode_delta, read_head
from app.policy.storage.weights import digest_of

State = dict[str, torch.Tensor]
PATTERNS = st.integers(0, 65_535)


def state(*patterns: int, name: str = "w") -> State:
    """Weights from 16-bit patterns."""
    return {name: torch.tensor(patterns, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)}


def bits(tensors: State) -> dict[str, list[int]]:
    return {name: tensor.view(torch.uint16).int().flatten().tolist() for name, tensor in tensors.items()}


@settings(max_examples=200, deadline=None)
@given(pairs=st.lists(st.tuples(PATTERNS, PATTERNS), min_size=1, max_size=50), mode=st.sampled_from(Mode))
def test_any_patterns_come_back_bit_for_bit(pairs: list[tuple[int, int]], mode: Mode) -> None:
    """Negative zero, infinities and every NaN payload included."""
    base, new = state(*(old for old, _ in pairs)), state(*(new for _, new in pairs))
    assert bits(apply_delta(base, encode_delta(base, new, mode=mode))) == bits(new)


@settings(max_examples=50, deadline=None)
@given(places=st.sets(st.integers(0, 5_000), max_size=30), mode=st.sampled_from(Mode))
def test_sparse_changes_far_apart_come_back(places: set[int], mode: Mode) -> None:
    """Gaps beyond 255 and their multiples need the escape."""
    base = state(*[0x3F80] * 5_001)
    changed = [0x3F81 if place in places else 0x3F80 for place in range(5_001)]
    delta = encode_delta(base, state(*changed), mode=mode)
    assert bits(apply_delta(base, delta))["w"] == changed
    assert read_head(delta).changed == len(places)


@pytest.mark.parametrize("gap", [0, 254, 255, 256, 509, 510, 511])
def test_gaps_around_the_escape(gap: int) -> None:
    base, new = state(*[1] * (gap + 2)), state(*[1] * gap, 2, 3)
    assert bits(apply_delta(base, encode_delta(base, new)))["w"][gap:] == [2, 3]


def test_many_tensors_some_unchanged_some_new_some_gone_some_of_other_shape() -> None:
    random = torch.Generator().manual_seed(1)
    base = {f"layer.{i}": torch.randn(7, 5, generator=random).bfloat16() for i in range(6)}
    new = {**base, "layer.0": base["layer.0"] + 1, "layer.1": torch.ones(3).bfloat16(), "layer.9": torch.arange(4.0)}
    del new["layer.2"]
    delta = encode_delta(base, new)
    head = read_head(delta)
    assert [tensor.name for section in head.sections for tensor in section.tensors] == ["layer.0"]
    assert [name for section in head.sections for name, _, _ in section.whole] == ["layer.1", "layer.9"]
    applied = apply_delta(base, delta)
    assert digest_of(applied) == digest_of(new) == head.digest
    assert applied["layer.1"].shape == (3,)


def test_an_unchanged_state_makes_a_delta_of_nothing() -> None:
    base = state(1, 2, 3)
    delta = encode_delta(base, base)
    assert read_head(delta).changed == 0
    assert bits(apply_delta(base, delta)) == bits(base)


def test_a_relative_delta_is_refused_on_any_other_base() -> None:
    base, new = state(1, 2, 3), state(1, 5, 3)
    delta = encode_delta(base, new)
    for other in (new, state(9, 9, 9)):
        with pytest.raises(StaleDelta, match="apply the deltas before it first"):
            apply_delta(other, delta)


def test_an_overwriting_delta_may_be_applied_again() -> None:
    base, new = state(1, 2, 3), state(1, 5, 3)
    delta = encode_delta(base, new, mode=Mode.OVERWRITE)
    assert bits(apply_delta(apply_delta(base, delta), delta)) == bits(new)
    with pytest.raises(StaleDelta):
        apply_delta(state(9, 9, 9), delta)


def test_the_base_stays_as_it_was() -> None:
    base = state(1, 2, 3)
    apply_delta(base, encode_delta(base, state(4, 5, 6)))
    assert bits(base)["w"] == [1, 2, 3]


@settings(max_examples=150, deadline=None)
@given(place=st.integers(0, 10_000), flip=st.integers(1, 255), cut=st.booleans())
def test_a_damaged_delta_never_gives_wrong_weights(place: int, flip: int, cut: bool) -> None:
    random = torch.Generator().manual_seed(2)
    base = {"a": torch.randn(400, generator=random).bfloat16(), "b": torch.randn(30, 30, generator=random).bfloat16()}
    new = {name: tensor + (torch.rand(tensor.shape, generator=random) < 0.1) * 0.01 for name, tensor in base.items()}
    new = {name: tensor.bfloat16() for name, tensor in new.items()}
    delta = bytearray(encode_delta(base, new))
    place %= len(delta)
    if cut:
        del delta[place:]
    else:
        delta[place] ^= flip
    try:
        found = apply_delta(base, bytes(delta))
    except (BadInput, StaleDelta):
        return
    assert digest_of(found) == digest_of(new)


def test_one_percent_of_small_steps_costs_about_eleven_bits_each() -> None:
    """The sheet's table: 10.6 bits per changed weight at 1 % density, 151.7 times smaller than the weights."""
    random = torch.Generator().manual_seed(3)
    count = 2_000_000
    weights = (torch.randn(count, generator=random) * 0.02).bfloat16()
    patterns = weights.view(torch.uint16).int()
    moved = torch.rand(count, generator=random) < 0.01
    steps = torch.where(torch.rand(count, generator=random) < 0.5, 1, -1) * moved
    new = (patterns + steps).clamp(0, 65_535).to(torch.uint16).view(torch.bfloat16)
    delta = encode_delta({"w": weights}, {"w": new})
    per_changed = 8 * len(delta) / read_head(delta).changed
    assert per_changed < 11.5
    assert 2 * count / len(delta) > 135


KINDS = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
]


@settings(max_examples=120, deadline=None)
@given(data=st.data(), kind=st.sampled_from(KINDS), mode=st.sampled_from(Mode))
def test_any_pattern_of_any_kind_comes_back(data: st.DataObject, kind: torch.dtype, mode: Mode) -> None:
    """Block-scaled weights are such tensors: MXFP8 is float8 elements and E8M0 exponents, NVFP4 packed bytes and float8 scales."""
    size = data.draw(st.integers(1, 40)) * kind.itemsize
    old, new = (data.draw(st.binary(min_size=size, max_size=size)) for _ in range(2))
    base = {"w": torch.frombuffer(bytearray(old), dtype=torch.uint8).view(kind)}
    after = {"w": torch.frombuffer(bytearray(new), dtype=torch.uint8).view(kind)}
    assert bytes(apply_delta(base, encode_delta(base, after, mode=mode))["w"].view(torch.uint8).tolist()) == new


def test_a_block_scaled_weight_changes_together_with_its_scales() -> None:
    random = torch.Generator().manual_seed(5)
    elements, scales = torch.randn(64, 32, generator=random), torch.full((64, 1), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    base = {"w": elements.to(torch.float8_e4m3fn), "w_scale": scales}
    raised = scales.view(torch.uint8).clone()
    raised[3] += 1
    new = {"w": (elements * 1.01).to(torch.float8_e4m3fn), "w_scale": raised.view(torch.float8_e8m0fnu)}
    delta = encode_delta(base, new)
    assert digest_of(apply_delta(base, delta)) == digest_of(new)
    assert {tensor.name for section in read_head(delta).sections for tensor in section.tensors} == {"w", "w_scale"}


def test_sections_are_coded_apart_and_applied_one_tensor_at_a_time() -> None:
    random = torch.Generator().manual_seed(6)
    base = {f"l{i}": torch.randn(40, generator=random).bfloat16() for i in range(9)}
    new = {name: tensor + (0.5 if index % 2 else 0.0) for index, (name, tensor) in enumerate(base.items())}
    delta = encode_delta(base, new, section_bytes=100)
    assert len(read_head(delta).sections) > 2
    patch = Patch(delta, base, base_digest=digest_of(base))
    assert patch.names == {"l1", "l3", "l5", "l7"}
    assert set(patch.patched(["l0", "l3"], {"l3": base["l3"]})) == {"l3"}
    assert torch.equal(patch.patched(["l3"], base)["l3"], new["l3"])
    assert digest_of(apply_delta(base, delta)) == digest_of(new)


FIRST_FORMAT = (
    "UkFUQ0hFVEQxCgYBAAB7ImJhc2UiOiI4NWE4Zjk3ZWVlZDkyNWNiMzliNWY4ZDI1ZTQ1ZjM2MzVjYzEzNDkzZWYxNThmNGNkZGY1YzJjZDNiYWIxNGRiIiwi"
    "ZGlnZXN0IjoiYjM1NjNkY2U4M2FhMWRmOTMyNjFiZmRlM2JhNTUwMzIyM2IyMDdhZWVlNTBlMTJhNmY2NDRiMmZkNGYzYWI4NCIsIm1vZGUiOiJ1bHAiLCJ0"
    "ZW5zb3JzIjpbWyJhIiwyLDIsMF0sWyJiIiwxLDIsMV1dLCJyYXciOltbImMiLCJGMzIiLFszXV1dLCJnb25lIjpbIm9sZCJdLCJmcmFtZXMiOlsxMywxMiwx"
    "MSwyMV19KLUv/SAEIQAAAQH/LCi1L/0gAxkAAAYD/yi1L/0gAhEAAAH+KLUv/SAMYQAAAAAAAAAAgD8AAABA"
)


def test_a_delta_of_the_first_format_is_read() -> None:
    base = {"a": state(1, 2, 3, 0x8001)["w"], "b": state(*[0x3F80] * 300)["w"], "old": state(5)["w"]}
    new = {"a": state(1, 5, 3, 0x8003)["w"], "b": state(*[0x3F80] * 299, 0xBF80)["w"], "c": torch.arange(3.0)}
    assert digest_of(apply_delta(base, base64.b64decode(FIRST_FORMAT))) == digest_of(new)


def forged(delta: bytes, **changes: object) -> bytes:
    """The same delta with another header."""
    length = int.from_bytes(delta[len(MAGIC) : len(MAGIC) + 4], "little")
    start = len(MAGIC) + 4 + length
    header = json.dumps(json.loads(delta[len(MAGIC) + 4 : start]) | changes).encode()
    return MAGIC + len(header).to_bytes(4, "little") + header + delta[start:]


@pytest.mark.parametrize(
    "sections",
    [
        [{"whole": True, "tensors": [["bomb", "F32", [1 << 40]]], "frames": [0]}],
        [{"whole": True, "tensors": [["w", "F32", [-4, -4]]], "frames": [0]}],
        [{"tensors": [["w", "BF16", 1 << 50, 1 << 50, 0]], "frames": [0, 0, 0]}],
        [{"tensors": [["w", "BF16", 1, 1 << 40, 0]], "frames": [0, 0, 0]}],
        [{"tensors": [["w", "BF16", 1, 1, 1 << 40]], "frames": [0, 0, 0]}],
        [{"tensors": [["w", "F32", 1, 1, 0]], "frames": [0, 0, 0]}],
        [{"tensors": [["w", "BF16", 1, 1, 0], ["w", "BF16", 1, 1, 0]], "frames": [0, 0, 0]}],
        [{"tensors": [["other", "BF16", 1, 1, 0]], "frames": [0, 0, 0]}],
        [{"tensors": [], "frames": [1 << 60, 0, 0]}],
        [{"tensors": [], "frames": [-5, 5, 0]}],
        "x", [[]], [{"frames": [0, 0, 0]}], {"a": 1}, 7,
    ],
)  # fmt: skip
def test_a_header_that_cannot_be_true_is_refused_before_memory_is_taken(sections: object) -> None:
    base = state(*range(1000))
    delta = forged(encode_delta(base, base), sections=sections)
    tracemalloc.start()
    with pytest.raises(BadInput):
        apply_delta(base, delta)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20


def test_a_frame_that_claims_more_than_its_tensors_have_is_not_opened() -> None:
    import zstandard

    base = state(*range(1000))
    bomb = zstandard.ZstdCompressor().compress(bytes(200 << 20))
    sections = [{"tensors": [["w", "BF16", 3, 3, 0]], "frames": [len(bomb), 0, 0]}]
    delta = forged(encode_delta(base, base) + bomb, sections=sections)
    with pytest.raises(BadInput, match="claims"):
        apply_delta(base, delta)


def test_more_new_tensors_than_the_base_has_go_as_a_snapshot() -> None:
    base = state(1, 2)
    with pytest.raises(Refused, match="snapshot"):
        encode_delta(base, {**base, "new": torch.zeros(2 << 20)})
