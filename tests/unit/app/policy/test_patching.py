"""A version made from the one that serves is that version, bit for bit, and whatever goes wrong leaves the base as it is."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType] - its PathLike has no parameter

from app.domain.errors import BadInput
from app.domain.ports import Way
from app.domain.telemetry.turns import SamplingParams
from app.policy.decoding.sampling import sample
from app.policy.model import Policy, load_policy
from app.policy.packing.linear import PackedEmbedding, PackedLinear
from app.policy.packing.products import can_pack
from app.policy.patching import LiveWeights, _joined, follow, places_of
from app.policy.storage.delta import StaleDelta, encode_delta
from app.policy.storage.snapshot import WEIGHTS, snapshot_digest, write_snapshot
from app.policy.storage.weights import digest_of

EMBEDDING = "model.embed_tokens.weight"
DTYPES = (torch.bfloat16, torch.float32)


@pytest.fixture(params=["own head", "tied head"])
def folder(request: pytest.FixtureRequest, tiny_model: Path, tied_model: Path) -> Path:
    return tiny_model if request.param == "own head" else tied_model


def changed(folder: Path, out: Path, *names: str) -> Path:
    """A version whose tensors of these names (all of them without any) moved."""
    tensors = load_file(folder / WEIGHTS)
    for name in names or tensors:
        tensors[name] = tensors[name].clone()
        tensors[name].view(-1)[::7] *= 1.25
    write_snapshot(out, tensors, like=folder)
    return out


def way(old: Path, new: Path, kind: str) -> Way:
    if kind == "snapshot":
        return Way(base=snapshot_digest(old), snapshot=new)
    return Way(base=snapshot_digest(old), deltas=(encode_delta(load_file(old / WEIGHTS), load_file(new / WEIGHTS)),))


def logits(policy: Policy) -> torch.Tensor:
    with torch.no_grad():
        return policy.model(torch.arange(5, 40)[None]).logits


@pytest.mark.parametrize("dtype", DTYPES)
def test_live_weights_have_the_digest_of_the_snapshot(folder: Path, dtype: torch.dtype) -> None:
    policy = load_policy(folder, dtype=dtype)
    assert digest_of(LiveWeights(places_of(policy.model))) == policy.digest


@pytest.mark.parametrize("kind", ["snapshot", "delta"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("names", [(), (EMBEDDING,), ("model.norm.weight", "model.layers.0.self_attn.k_proj.weight")])
def test_a_patched_version_is_what_a_fresh_load_gives(
    folder: Path, tmp_path: Path, kind: str, dtype: torch.dtype, names: tuple[str, ...]
) -> None:
    """The embedding alone as well: where the head is tied to it, a head packed apart must follow."""
    new = changed(folder, tmp_path / "new", *names)
    base, fresh = load_policy(folder, dtype=dtype), load_policy(new, dtype=dtype)
    before = logits(base)
    made = follow(base, way(folder, new, kind), digest=fresh.digest)
    assert made.digest == fresh.digest
    assert torch.equal(logits(made), logits(fresh))
    assert not torch.equal(logits(made), before)
    assert torch.equal(logits(base), before), "the base serves on"


def test_several_deltas_are_followed_one_after_the_other(tiny_model: Path, tmp_path: Path) -> None:
    one = changed(tiny_model, tmp_path / "one", EMBEDDING)
    two = changed(one, tmp_path / "two")
    deltas = way(tiny_model, one, "delta").deltas + way(one, two, "delta").deltas
    base = load_policy(tiny_model)
    made = follow(base, Way(base=base.digest, deltas=deltas), digest=snapshot_digest(two))
    assert torch.equal(logits(made), logits(load_policy(two)))
    with pytest.raises(StaleDelta):
        follow(base, Way(base=base.digest, deltas=deltas[::-1]), digest=snapshot_digest(two))


def test_another_digest_than_promised_is_never_served(tiny_model: Path, tmp_path: Path) -> None:
    new = changed(tiny_model, tmp_path / "new")
    with pytest.raises(BadInput, match="load the version whole"):
        follow(load_policy(tiny_model), way(tiny_model, new, "snapshot"), digest="0" * 64)


class StaleHead(PackedLinear):
    """Is packed once, and keeps that."""

    def pack(self, weight: torch.Tensor) -> None:
        if not hasattr(self, "rows"):
            super().pack(weight)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tied_head_that_kept_the_old_weights_is_found(tied_model: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    """What vLLM's processor engine does: every stored tensor is right, and the head multiplies by the old ones."""
    base = load_policy(tied_model, dtype=dtype)
    head = base.model.get_output_embeddings()
    if not isinstance(head, PackedLinear):
        assert not can_pack(dtype), "where nothing is packed a tied head is one with its embedding"
        return
    plain = torch.nn.Linear(head.columns, head.rows, bias=False, device="meta")
    plain.weight = torch.nn.Parameter(head.plain().to(dtype), requires_grad=False)
    base.model.set_output_embeddings(StaleHead(plain))
    new = changed(tied_model, tmp_path / "new", EMBEDDING)
    with pytest.raises(BadInput, match="tied"):
        follow(base, way(tied_model, new, "delta"), digest=snapshot_digest(new))


def test_what_did_not_change_is_shared(tiny_model: Path, tmp_path: Path) -> None:
    new = changed(tiny_model, tmp_path / "new", "model.norm.weight")
    base = load_policy(tiny_model)
    made = follow(base, way(tiny_model, new, "delta"), digest=snapshot_digest(new))
    before, after = (cast("Any", one.model).get_input_embeddings() for one in (base, made))
    if isinstance(before, PackedEmbedding):
        assert after.layer._product is before.layer._product
    else:
        assert after.weight is before.weight
    assert cast("Any", made.model).base_model.norm.weight is not cast("Any", base.model).base_model.norm.weight


def test_modules_are_not_shared_nor_what_hooks_into_them(tiny_model: Path, tmp_path: Path) -> None:
    base = load_policy(tiny_model)
    made = follow(base, way(tiny_model, changed(tiny_model, tmp_path / "new"), "delta"), digest=snapshot_digest(tmp_path / "new"))
    held = [{id(value) for module in one.model.modules() for value in (module, *dictionaries(module))} for one in (base, made)]
    assert held[0].isdisjoint(held[1])
    assert len(held[0]) == len(held[1])
    assert [type(module) for module in base.model.modules()] == [type(module) for module in made.model.modules()]
    made.model.register_forward_hook(lambda *_: pytest.fail("it was another version that was asked"))
    logits(base)


def dictionaries(module: torch.nn.Module) -> list[object]:
    return [value for value in vars(module).values() if isinstance(value, dict)]


def test_the_base_can_be_sampled_from_while_and_after(tiny_model: Path, tmp_path: Path) -> None:
    new = changed(tiny_model, tmp_path / "new")
    base = load_policy(tiny_model)
    prompts = [base.chat.encode("def f(x):")]
    params = SamplingParams(max_tokens=6, seed=3)
    before = sample(base, prompts, params)[0]
    made = follow(base, way(tiny_model, new, "delta"), digest=snapshot_digest(new))
    assert sample(base, prompts, params)[0].logprobs == before.logprobs
    assert sample(made, prompts, params)[0].logprobs == sample(load_policy(new), prompts, params)[0].logprobs


def test_rows_that_were_unpacked_together_are_packed_together_without_a_copy() -> None:
    whole = torch.arange(12.0).view(6, 2)
    for parts in (whole.split([1, 2, 3]), [whole[2:4], whole[4:]], [whole]):
        joined = _joined(parts)
        assert joined.data_ptr() == parts[0].data_ptr()
        assert torch.equal(joined, torch.cat(list(parts)))
    others = torch.arange(12.0).view(6, 2)
    for parts in ([whole[2:], whole[:2]], [whole[:2], others[2:]], [whole[:2], whole[3:]], [whole[:2, :1], whole[2:, :1]]):
        joined = _joined(parts)
        assert joined.data_ptr() != parts[0].data_ptr()
        assert torch.equal(joined, torch.cat(parts))
