"""What an update leaves for engines of other make, and what it works out of turns that such engines sampled."""

import json
import random
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from app.domain.learning.batches import BatchManifest, TurnPayload
from app.domain.release.versions import Version
from app.domain.telemetry.turns import SamplingParams
from app.policy.decoding.sampling import sample
from app.policy.model import load_model, load_policy
from app.policy.scoring.fixed_probe import Expected, expected, not_arrived, probe_tokens, strange
from app.policy.scoring.forward import token_logprobs
from app.policy.storage.snapshot import ADAPTER, ADAPTER_CONFIG, PROBE, WEIGHTS, write_snapshot
from pipelines.training import TrainingConfig, TrainingPorts
from pipelines.training.config import LoraConfig
from pipelines.training.samples import Limits, read_samples
from tests.fakes.learning import NOON, fake_ports, make_batch, version_of
from tests.fakes.updating import CONFIG, low_tokens, run

TEMPLATE = TurnPayload(
    inference_id="", episode_id="", policy="composer", version="", prompt_tokens=(), completion_tokens=(), logprobs=(),
    temperature=1.0, top_p=1.0, finished_at=NOON,
)  # fmt: skip
LORA = msgspec.structs.replace(CONFIG, lora=LoraConfig(rank=4, alpha=8, learning_rate=1e-2))


@pytest.fixture
def ports(tmp_path: Path) -> TrainingPorts:
    return fake_ports(tmp_path)


def sampled_batch(
    ports: TrainingPorts, snapshot: Path, *, top_p: float = 1.0, top_k: int = 0
) -> tuple[Version, BatchManifest, dict[str, list[float]]]:
    """Turns of the tiny model whose kept mass was not recorded, and what it was."""
    digest = ports.weights.publish(snapshot)
    policy = load_policy(snapshot, dtype=torch.float32)
    prompts = [policy.chat.prompt([{"role": "user", "content": f"def f{number}(x):"}]) for number in range(16)]
    drawn = sample(policy, prompts, SamplingParams(max_tokens=6, temperature=1.3, top_p=top_p, top_k=top_k, seed=2))
    turns = [
        replace(
            TEMPLATE, inference_id=f"t{number:02d}", episode_id=f"e{number:02d}", version=digest, prompt_tokens=tuple(g.prompt),
            completion_tokens=tuple(g.tokens), logprobs=tuple(g.logprobs), temperature=1.3, top_p=top_p, top_k=top_k,
        )
        for number, g in enumerate(drawn)
    ]  # fmt: skip
    rewards = [low_tokens(turn) + number % 2 for number, turn in enumerate(turns)]
    batch = make_batch(ports, turns, rewards, champion=digest)
    return version_of(digest), batch, {turn.inference_id: g.kept_log_mass for turn, g in zip(turns, drawn, strict=True)}


def trained(ports: TrainingPorts, snapshot: Path, config: TrainingConfig) -> tuple[Path, Path]:
    """Folders of a version and of the one that an update made of it."""
    parent, batch, _ = sampled_batch(ports, snapshot)
    made = run(ports, batch, parent, config=config)
    assert made.candidate is not None, made.message
    return ports.weights.path(parent.digest), ports.weights.path(made.candidate)


@pytest.mark.parametrize(("top_p", "top_k"), [(0.6, 0), (1.0, 5), (0.6, 9)])
def test_what_top_p_kept_is_worked_out_where_the_engine_did_not_say_it(
    ports: TrainingPorts, tiny_model: Path, top_p: float, top_k: int
) -> None:
    parent, batch, masses = sampled_batch(ports, tiny_model, top_p=top_p, top_k=top_k)
    made = run(ports, batch, parent, config=CONFIG)
    assert made.candidate is not None, made.message
    assert made.metrics["masses_worked_out"] == len(masses) == 16
    assert made.metrics["left_out"] == {}
    assert made.metrics["mismatch"] < 1e-6  # what was logged is what the weights say, with the mass that was worked out
    assert min(mass for row in masses.values() for mass in row) < -0.1


def test_turns_whose_weights_are_gone_have_no_ratio(ports: TrainingPorts, tiny_model: Path) -> None:
    _, batch, _ = sampled_batch(ports, tiny_model, top_p=0.6)
    limits = Limits(vocabulary=10**6, max_tokens=10**6)
    samples, left_out = read_samples(batch, ports.trajectories, limits, has_weights=lambda digest: False)
    assert (samples, left_out) == ([], {"no_ratio": 16})


def test_an_update_of_adapters_publishes_one_that_gives_the_merged_weights_on_its_base(ports: TrainingPorts, tiny_model: Path) -> None:
    base, made = trained(ports, tiny_model, LORA)
    stated = json.loads((made / ADAPTER_CONFIG).read_text())
    assert stated["ratchet"] == {"base": base.name, "sha256": sha256((made / ADAPTER).read_bytes()).hexdigest()}
    assert (stated["peft_type"], stated["r"], stated["lora_alpha"]) == ("LORA", 4, 8)
    adapter, old, new = load_file(made / ADAPTER), load_file(base / WEIGHTS), load_file(made / WEIGHTS)
    changed = [name for name in old if not torch.equal(old[name], new[name])]
    assert changed
    for name in changed:
        layer = f"base_model.model.{name.removesuffix('.weight')}"
        product = adapter[f"{layer}.lora_B.weight"].float() @ adapter[f"{layer}.lora_A.weight"].float() * 8 / 4
        apart = (old[name].float() + product - new[name].float()).abs()
        assert bool((apart <= new[name].float().abs() * 2**-7 + 1e-4).all()), name  # a place of bfloat16, and the adapter's own rounding


def test_an_adapter_does_not_follow_a_version_that_was_not_trained_as_one(ports: TrainingPorts, tiny_model: Path, tmp_path: Path) -> None:
    _, made = trained(ports, tiny_model, LORA)
    write_snapshot(tmp_path / "next", load_file(made / WEIGHTS), like=made)
    assert not {ADAPTER, ADAPTER_CONFIG, PROBE} & {file.name for file in (tmp_path / "next").iterdir()}


def test_a_published_version_carries_what_its_own_weights_say_of_the_probe(ports: TrainingPorts, tiny_model: Path) -> None:
    _, made = trained(ports, tiny_model, CONFIG)
    found = expected(made)
    assert (made / PROBE).is_file()
    with torch.no_grad():
        told = token_logprobs(load_model(made, dtype=torch.float32), found.tokens[:1], found.tokens[1:]).tolist()
    assert found.tokens == probe_tokens(made)
    assert found.logprobs == pytest.approx(told, abs=1e-4)


def test_the_probe_tells_a_version_from_another_and_from_half_of_each() -> None:
    old = Expected(tokens=tuple(range(101)), logprobs=(-2.0,) * 100)
    new = Expected(tokens=old.tokens, logprobs=(-1.6, -2.4) * 50)  # a step of 0.4 a token, which bfloat16 does not hide
    assert strange(new.logprobs, new) is None
    assert strange(old.logprobs, new) is not None  # KL of 0.4 a token: 0.08
    assert strange([float("nan")] * 100, new) is not None
    assert not_arrived(old.logprobs, new.logprobs, old, new) is None
    assert "0% of the way" in str(not_arrived(old.logprobs, old.logprobs, old, new))
    assert "40% of the way" in str(not_arrived(old.logprobs, (-1.84, -2.16) * 50, old, new))


def test_a_step_that_rounding_hides_is_not_taken_for_weights_that_did_not_arrive() -> None:
    blur = random.Random(0)
    old = Expected(tokens=tuple(range(138)), logprobs=(-2.0,) * 137)
    new = Expected(tokens=old.tokens, logprobs=tuple(-2.0 + blur.gauss(0, 0.09) for _ in range(137)))
    before, after = ([-2.0 + blur.gauss(0, 0.06) for _ in range(137)] for _ in range(2))
    assert not_arrived(before, after, old, new) is None
    assert strange(after, new) is None
