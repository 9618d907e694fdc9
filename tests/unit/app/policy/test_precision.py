"""Rounding to MXFP8 and NVFP4: by hand, against torch's own casts, and what holds for any weights."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType] - its PathLike has no parameter
from torch import Tensor

from app.domain.errors import BadInput, Refused
from app.domain.ports import Way
from app.policy.decoding.invariance import TEXTS, invariance
from app.policy.model import Policy, load_policy
from app.policy.patching import Snapshot, as_published, follow, patched, places_of
from app.policy.precision import Precision, mxfp8, nvfp4, round_model, rounded
from app.policy.storage.delta import encode_delta
from app.policy.storage.snapshot import WEIGHTS, snapshot_digest, write_snapshot
from app.policy.storage.weights import digest_of
from app.policy.tiny_moe import Architecture, write_tiny_moe

LOW = [Precision.MXFP8, Precision.NVFP4]
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def row(*values: float) -> Tensor:
    return torch.tensor([values])


def test_mxfp8_by_hand() -> None:
    # the largest, 1.0 = 2⁰, gives the scale 2⁻⁸: 1.0 is 256, 0.3 is 76.8 and E4M3 has 72 and 80 there, 0.001 is .256 and it has .25 and .28
    assert mxfp8(row(1.0, 0.3, -0.001)).tolist() == [[1.0, 80 / 256, -0.25 / 256]]
    # 1.9 is 486.4 at the same scale, above the largest: 448
    assert mxfp8(row(1.9, 1.0)).tolist() == [[1.75, 1.0]]
    # half-way between 16 and 18 is the even one
    assert mxfp8(row(1.0, 17 / 256, 19 / 256)).tolist() == [[1.0, 16 / 256, 20 / 256]]
    # another block of 32 has another scale: 2⁻⁸ of the first would make nothing of 2⁻³⁰
    assert mxfp8(row(*[1.0] * 32, 2.0**-30)).tolist() == [[1.0] * 32 + [2.0**-30]]
    assert mxfp8(row(1.0, 2.0**-30)).tolist() == [[1.0, 0.0]]


def test_nvfp4_by_hand() -> None:
    # 6 · 448 = 2688 brings every scale to 1: of 0 to 6 there are eight, ties go to the even code
    block = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -5.1, 0.26, -2.4, 0.0, 6.0, 1.0, 3.0, 2.0, 4.9]
    grid = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, -6.0, 0.5, -2.0, 0.0, 6.0, 1.0, 3.0, 2.0, 4.0]
    assert nvfp4(row(2688.0, *[0.0] * 15, *block)).tolist() == [[2688.0, *[0.0] * 15, *grid]]
    # a block's largest of 6.6 asks for a scale of 1.1; E4M3 has 1.125, so it is 6.75
    assert nvfp4(row(2688.0, *[0.0] * 15, 6.6)).tolist() == [[2688.0, *[0.0] * 15, 6.75]]
    # one of 0.005 asks for less than half of E4M3's least, 2⁻⁹: zero; 0.03 gets it: 6 · 2⁻⁹ · 0.5 is its half
    assert nvfp4(row(2688.0, *[0.0] * 15, 0.005))[0, -1] == 0.0
    assert nvfp4(row(2688.0, *[0.0] * 15, 6 * 2.0**-9))[0, -1] == 6 * 2.0**-9


@pytest.mark.parametrize("rounding", [mxfp8, nvfp4])
def test_zeros_stay_and_what_is_not_finite_is_refused(rounding: Callable[[Tensor], Tensor]) -> None:
    assert rounding(torch.zeros(2, 40)).abs().max() == 0
    tiny = torch.full((1, 40), 2.0**-133, dtype=torch.bfloat16)  # the least that bfloat16 has
    assert torch.isfinite(rounding(tiny)).all()
    for wrong in (float("inf"), float("nan")):
        with pytest.raises(BadInput, match="not finite, and no low precision holds it"):
            rounding(row(1.0, wrong))


WEIGHTS_OF = st.lists(st.floats(-300, 300, width=16).filter(lambda x: x == 0 or abs(x) > 1e-4), min_size=1, max_size=70)


@settings(max_examples=60, deadline=None)
@given(WEIGHTS_OF)
def test_any_row_is_on_the_grid_as_near_as_it_gets_and_stays(values: list[float]) -> None:
    given_ = torch.tensor([values]).bfloat16().float()
    for rounding, size in ((mxfp8, 32), (nvfp4, 16)):
        found = rounding(given_)
        assert torch.allclose(rounding(found), found, rtol=1e-6, atol=0), "rounding what is round changes nothing"
        for at in range(0, len(values), size):
            was, now = given_[0, at : at + size], found[0, at : at + size]
            assert bool((now.sign() * was.sign() >= 0).all())
            most = was.abs().max()
            assert abs(now.abs().max() - most) <= most / 8 + 2e-3 * given_.abs().max() / 448
    # MXFP8 against torch's casts of scale and elements
    for at in range(0, len(values), 32):
        was = given_[0, at : at + 32]
        if was.abs().max() == 0:
            continue
        scale = torch.exp2(torch.floor(torch.log2(was.abs().max().double())) - 8).float().to(torch.float8_e8m0fnu).float()
        cast = (was / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
        assert torch.equal(mxfp8(given_)[0, at : at + 32], cast)
    # NVFP4: of the eight sizes times the block's scale none is nearer
    of_tensor = given_.abs().max() / 2688
    for at in range(0, len(values), 16):
        was, now = given_[0, at : at + 16], nvfp4(given_)[0, at : at + 16]
        scale = (was.abs().max() / 6 / of_tensor.clamp_min(1e-30)).to(torch.float8_e4m3fn).float() * of_tensor
        best = (was.abs()[:, None] - E2M1 * scale).abs().amin(-1)
        assert torch.allclose((was - now).abs(), best, rtol=1e-3, atol=1e-5 * float(given_.abs().max()))


@pytest.mark.parametrize("precision", LOW)
def test_a_model_is_rounded_in_its_layers_alone_and_keeps_the_digest_of_what_was_published(tiny_model: Path, precision: Precision) -> None:
    policy = load_policy(tiny_model, precision=precision)
    stored = load_file(tiny_model / WEIGHTS)
    assert policy.digest == snapshot_digest(tiny_model) == digest_of(as_published(policy))
    live = {name: tensor for place in _places(policy) for name, tensor in place.items()}
    changed = {name for name, tensor in stored.items() if not torch.equal(live[name].float(), tensor.float())}
    assert changed == set(policy.published)
    assert all("proj" in name for name in changed)
    for name in changed:
        assert torch.equal(live[name], rounded(stored[name].to(policy.model.dtype), precision).to(live[name].dtype))


def _places(policy: Policy) -> list[dict[str, Tensor]]:
    return [dict(zip(place.names, place.read(), strict=True)) for place in places_of(policy.model) if not place.tied]


def loaded(folder: Path, precision: Precision, kind: str) -> Policy:
    return load_policy(folder, dtype=getattr(torch, kind), precision=precision)


@pytest.mark.parametrize("kind", ["bfloat16", "float32"])
@pytest.mark.parametrize("precision", LOW)
def test_a_patched_version_is_what_a_fresh_load_gives(tiny_model: Path, tmp_path: Path, precision: Precision, kind: str) -> None:
    old = load_file(tiny_model / WEIGHTS)
    new = {name: (tensor * 1.07).bfloat16() if "down_proj" in name or "k_proj" in name else tensor for name, tensor in old.items()}
    write_snapshot(tmp_path / "new", new, like=tiny_model)
    base, fresh = loaded(tiny_model, precision, kind), loaded(tmp_path / "new", precision, kind)
    way = Way(base=base.digest, deltas=(encode_delta(old, new),))
    for made in (patched(base, [Snapshot(tmp_path / "new")], digest=fresh.digest), follow(base, way, digest=fresh.digest)):
        for one, other in zip(_places(made), _places(fresh), strict=True):
            assert all(torch.equal(one[name], other[name]) for name in other)
        assert made.precision is precision
        assert all(torch.equal(made.published[name], new[name]) for name in fresh.published)
    assert digest_of(as_published(base)) == base.digest, "the base is untouched"
    with pytest.raises(BadInput, match="load the version whole"):
        patched(base, [Snapshot(tmp_path / "new")], digest="0" * 64)


def test_live_weights_that_are_not_what_the_published_ones_round_to_are_found(tiny_model: Path, tmp_path: Path) -> None:
    """A base whose live layers are of another precision than it says: the digest of what was published does not show it."""
    tensors = {name: tensor * 1.5 if name.endswith("norm.weight") else tensor for name, tensor in load_file(tiny_model / WEIGHTS).items()}
    write_snapshot(tmp_path / "new", tensors, like=tiny_model)
    lying = replace(load_policy(tiny_model, precision=Precision.MXFP8), precision=Precision.NVFP4)
    with pytest.raises(BadInput, match="is not what its published weights round to in nvfp4: load the version whole"):
        patched(lying, [Snapshot(tmp_path / "new")], digest=snapshot_digest(tmp_path / "new"))


def test_a_model_of_experts_is_refused_with_the_cure(tmp_path: Path) -> None:
    write_tiny_moe(tmp_path / "moe", Architecture.QWEN3_MOE)
    with pytest.raises(Refused, match="serve it with --precision bf16"):
        load_policy(tmp_path / "moe", precision=Precision.MXFP8)


@pytest.mark.parametrize("precision", LOW)
def test_bits_do_not_depend_on_company_where_they_do_not_as_published(tiny_model: Path, precision: Precision) -> None:
    as_it_was, low = (load_policy(tiny_model, precision=each) for each in (Precision.BF16, precision))
    assert invariance(low, texts=TEXTS[:3], tokens=4).holds or not invariance(as_it_was, texts=TEXTS[:3], tokens=4).holds


def test_bf16_is_as_published(tiny_model: Path) -> None:
    policy = load_policy(tiny_model)
    assert policy.published == {}
    assert round_model(policy.model, Precision.BF16) == frozenset()
