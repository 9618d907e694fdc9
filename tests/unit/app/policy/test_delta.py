"""The delta codec: bit-exact on every pattern of every kind, bound to its base, and small."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from app.domain.errors import BadInput
from app.policy.storage.delta import Mode, Patch, StaleDelta, apply_delta, encode_delta, read_head
from app.policy.storage.delta_classes import chosen
from app.policy.storage.delta_head import Located
from app.policy.storage.delta_sections import PART, Listing
from app.policy.storage.weights import digest_of

State = dict[str, torch.Tensor]
PATTERNS = st.integers(0, 65_535)


def state(*patterns: int, name: str = "w") -> State:
    """Weights from 16-bit patterns."""
    return {name: torch.tensor(patterns, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)}


def bits(tensors: State) -> dict[str, list[int]]:
    return {name: tensor.view(torch.uint16).int().flatten().tolist() for name, tensor in tensors.items()}


def damaged_is_refused_or_harmless(base: State, new: State, *, place: int, flip: int, cut: bool) -> None:
    """A delta that ends at `place`, or has bits of the byte there turned, gives the new weights or none."""
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
    assert [name for section in head.sections for name in section.names] == ["layer.0"]
    assert [tensor.name for tensor in head.whole] == ["layer.1", "layer.9"]
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
    damaged_is_refused_or_harmless(base, new, place=place, flip=flip, cut=cut)


def test_one_percent_of_small_steps_costs_about_nine_bits_each() -> None:
    """H(.01)/.01 + 1 = 9.08 bits per changed weight are the least where nothing says which move."""
    random = torch.Generator().manual_seed(3)
    count = 2_000_000
    weights = (torch.randn(count, generator=random) * 0.02).bfloat16()
    patterns = weights.view(torch.uint16).int()
    moved = torch.rand(count, generator=random) < 0.01
    steps = torch.where(torch.rand(count, generator=random) < 0.5, 1, -1) * moved
    new = (patterns + steps).clamp(0, 65_535).to(torch.uint16).view(torch.bfloat16)
    delta = encode_delta({"w": weights}, {"w": new})
    per_changed = 8 * len(delta) / read_head(delta).changed
    assert 9.0 < per_changed < 9.3
    assert 2 * count / len(delta) > 165


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
    assert {name for section in read_head(delta).sections for name in section.names} == {"w", "w_scale"}


def test_sections_are_coded_apart_and_applied_one_tensor_at_a_time() -> None:
    random = torch.Generator().manual_seed(6)
    base = {f"l{i}": torch.randn(40, generator=random).bfloat16() for i in range(9)}
    new = {name: tensor + (0.5 if index % 2 else 0.0) for index, (name, tensor) in enumerate(base.items())}
    delta = encode_delta(base, new, section_bytes=100)
    assert len(read_head(delta).sections) > 2
    patch = Patch(delta, base, base_digest=digest_of(base))
    assert patch.names == {"l1", "l3", "l5", "l7"}
    assert set(patch.patched(["l0", "l3"], {"l3": base["l3"]})) == {"l3"}
    before = base["l3"].clone()
    assert torch.equal(patch.patched(["l3"], base)["l3"], new["l3"])
    assert torch.equal(base["l3"], before), "whoever said nothing keeps theirs"
    given = {"l3": before}
    assert patch.patched(["l3"], given, in_place=True)["l3"] is before
    assert torch.equal(before, new["l3"])
    assert digest_of(apply_delta(base, delta)) == digest_of(new)


def test_a_tensor_of_several_parts_comes_back_also_into_memory_that_is_there() -> None:
    random = torch.Generator().manual_seed(8)
    count = 2 * PART + 1000
    base = {"big": torch.randn(count, generator=random).bfloat16(), "small": torch.ones(3).bfloat16()}
    moved = torch.zeros(count, dtype=torch.int16)
    moved[torch.tensor([0, 5, PART - 1, 2 * PART, count - 1])] = 1  # nothing in the second part
    new = {"big": (base["big"].view(torch.int16) + moved).view(torch.bfloat16), "small": base["small"]}
    patch = Patch(encode_delta(base, new, section_bytes=1 << 20), base, base_digest=digest_of(base))
    assert len(patch.head.sections) == 2
    there = {"big": torch.full((count,), 7.0).bfloat16()}
    for into in (None, there):
        ((name, made),) = patch.changed(base, into=into)
        assert name == "big"
        assert torch.equal(made.view(torch.int16), new["big"].view(torch.int16))
    assert made.data_ptr() == there["big"].data_ptr()
    assert torch.equal(patch.patched(["big", "small"], base)["big"].view(torch.int16), new["big"].view(torch.int16))
    with pytest.raises(ValueError, match="cannot be written into"):
        list(patch.changed(base, into={"big": torch.zeros(count)}))


def dithered_step(count: int, rate: float) -> tuple[torch.Tensor, torch.Tensor]:
    """bfloat16 weights before and after a step of about `rate` of float32 masters that lie anywhere between their places."""
    random = torch.Generator().manual_seed(4)
    masters = torch.randn(count, generator=random) * 0.02
    masters += (torch.rand(count, generator=random) - 0.5) * masters.abs() / 128
    moved = masters + rate * (0.35 * torch.randn(count, generator=random) + torch.randn(count, generator=random).sign())
    return masters.bfloat16(), moved.bfloat16()


def entropy(counts: torch.Tensor) -> float:
    share = counts[counts > 0].double() / counts.sum()
    return float(-(counts[counts > 0].double() * share.log2()).sum())


def test_a_step_of_training_costs_little_more_than_what_its_base_leaves_open() -> None:
    """Against the entropy of which weights of an exponent move and how far, and a bit for each sign; a codec that ignores the base pays the
    entropy of all positions and of all steps."""
    count = 2_000_000
    old, new = dithered_step(count, 3e-6)
    before, after = (bits.view(torch.int16).int() for bits in (old, new))
    moved, exponents = before != after, before >> 7 & 0xFF
    far = (after - before).abs()  # none of them crosses zero, where this would be no distance
    changed = int(moved.sum())
    left_open = float(changed)
    for exponent in exponents.unique():
        mine = exponents == exponent
        left_open += entropy(torch.stack([(mine & moved).sum(), (mine & ~moved).sum()]))
        left_open += entropy(far[mine & moved].unique(return_counts=True)[1])
    delta = encode_delta({"w": old}, {"w": new})
    assert torch.equal(apply_delta({"w": old}, delta)["w"].view(torch.int16), new.view(torch.int16))
    blind = entropy(torch.tensor([changed, count - changed])) + entropy(far[moved].unique(return_counts=True)[1]) + changed
    assert 1.0 < 8 * len(delta) / left_open < 1.15
    assert 8 * len(delta) < 0.9 * blind


def test_small_tensors_that_are_changed_at_once_become_what_they_become_alone() -> None:
    sizes = (40_000, 3, PART - 5, 20_000, 7, 90_000)
    old, new = (side.split(sizes) for side in dithered_step(sum(sizes), 3e-6))
    base = {f"l{index}": tensor.clone() for index, tensor in enumerate(old)}
    after = {f"l{index}": tensor.clone() for index, tensor in enumerate(new)} | {"l4": base["l4"].clone()}
    delta = encode_delta(base, after)
    (section,) = read_head(delta).sections
    assert isinstance(section, Located)
    assert section.said.below, "classes are what makes the difference"
    assert {Listing.REST, Listing.NEAR} <= set(section.said.listings)
    patch = Patch(delta, base, base_digest=digest_of(base))
    assert patch.names >= {"l0", "l2", "l3", "l5"}
    assert "l4" not in patch.names
    together = dict(patch.changed(base, threads=1))
    assert bits(together) == bits({name: after[name] for name in together})
    assert bits({name: patch.patched([name], base)[name] for name in together}) == bits(together)


def test_classes_are_parted_where_likely_and_unlikely_movers_meet() -> None:
    """By hand: a thousand small elements of which half moved, a million large ones of which a thousandth did. Apart they cost
    1000·1 + 10⁶·H(.001) = 1,000 + 11,408 bits and the price of a class, together 1,001,000·H(.0014985) = 16,247."""
    sizes, moved = torch.zeros(256).double().numpy(), torch.zeros(256, 64).double().numpy()
    sizes[100], sizes[120] = 1e3, 1e6
    moved[100, 0], moved[120, 0] = 500, 1000
    assert chosen(sizes, moved) == (101,)
    moved[100, 0] = 1
    assert chosen(sizes, moved) == ()
    sizes[[0, 1]], moved[[0, 1], 0] = sizes[[100, 120]], (500, 1000)
    sizes[[100, 120]], moved[[100, 120], 0] = 0, 0
    assert chosen(sizes, moved) == (1,), "zeros are a class as well"
