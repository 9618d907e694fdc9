"""Cycles of sampling, rewarding and updating, all real but people, Ray and database: for learning tests and benchmarks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from app.domain.learning.batches import TurnPayload
from app.domain.release.versions import Version
from app.policy.model import load_model
from pipelines.training import TrainingConfig, TrainingPorts, train
from pipelines.training.config import GuardLimits
from tests.fakes.learning import NOON, drawn, make_batch, put_version, random_prompts, version_of

LIKED = 8
"""Tokens below this please the simulated user: a third of the 24 there are, so a random policy starts near 1/3 and the optimum is 1."""
OPEN = GuardLimits(max_kl_champion=99, max_kl_anchor=99, min_entropy_share=0.0, max_mismatch=99, max_mismatch_p99=99,
                   min_effective_sample_share=0.0, min_mean_ratio=0.0, max_mean_ratio=1e9)  # fmt: skip
"""Guards out of the way: what is measured is the update rule."""
CONFIG = TrainingConfig(
    learning_rate=6e-3, turns_per_step=24, micro_batch_tokens=512, threads=1, dtype="float32", checkpoint_every_s=999.0, guards=OPEN,
    kl_beta=0.0, final_pass_turns=8,
)  # fmt: skip


def liking(turn: TurnPayload) -> float:
    """Share of tokens the user likes."""
    return sum(token < LIKED for token in turn.completion_tokens) / len(turn.completion_tokens)


@dataclass
class Curve:
    """What the user really liked, cycle by cycle, and how off-policy the data were."""

    liked: list[float] = field(default_factory=list[float])
    effective_share: list[float] = field(default_factory=list[float])
    would_hold: list[bool] = field(default_factory=list[bool])
    """Whether the default guards of the importance ratio, which `CONFIG` switches off, would have held that cycle's update: they do where
    the data are too far off before its first step."""
    would_retreat: list[bool] = field(default_factory=list[bool])
    """Whether they would have taken it part of the way back, as they do where it left their bounds by its own steps."""


def iterate(
    ports: TrainingPorts,
    *,
    cycles: int,
    turns: int = 48,
    lag: int = 0,
    seed: int = 0,
    repeat: int = 1,
    reward: Callable[[TurnPayload], float] = liking,
    config: TrainingConfig = CONFIG,
) -> Curve:
    """Run the cycles; with `lag` the turns are sampled from the version that many cycles back, as a slow deployment would.

    `repeat` is how many answers each prompt gets (the group mean needs more than one)."""
    versions: list[Version] = [put_version(ports, seed=seed)]
    curve = Curve()
    for cycle in range(cycles):
        source = versions[max(0, len(versions) - 1 - lag)]
        number = 1000 * seed + cycle
        prompts = [prompt for prompt in random_prompts(turns // repeat, seed=number) for _ in range(repeat)]
        sampled = answers(ports.weights.path(source.digest), prompts, version=source.digest, seed=number)
        batch = make_batch(ports, sampled, [reward(turn) for turn in sampled], champion=source.digest, slot=number)
        parent = versions[-1]
        made = train(batch, run_id=f"{ports.folder.name}-{number}", parent=parent, anchor=parent, config=config, ports=ports)
        curve.liked.append(satisfaction(ports, parent, seed=number + 500_000))
        if made.candidate is None:
            continue  # held (rewards all equal once the optimum is reached): the version stays
        curve.effective_share.append(made.metrics["effective_share"])
        first, *later = [is_allowed(step) for step in made.metrics["steps"]]
        curve.would_hold.append(not first)
        curve.would_retreat.append(first and not all(later))
        versions.append(version_of(made.candidate, parent=parent.digest, step=cycle + 1, optimizer_uri=made.metrics["optimizer_uri"]))
    curve.liked.append(satisfaction(ports, versions[-1], seed=seed + 900_000))
    return curve


def is_allowed(step: Mapping[str, float], limits: GuardLimits = GuardLimits()) -> bool:  # noqa: B008 - frozen
    """Whether production goes on after a step with such importance ratios."""
    within = limits.min_mean_ratio <= step["mean_ratio"] <= limits.max_mean_ratio
    return within and step["effective_share"] >= limits.min_effective_sample_share


def answers(folder: Path, prompts: Sequence[tuple[int, ...]], *, version: str, seed: int, length: int = 5) -> list[TurnPayload]:
    """One answer per prompt with its true log-probabilities; the prompts are equally long, so all are sampled together."""
    model = load_model(folder, dtype=torch.float32).eval()
    tokens, logprobs = drawn(model, prompts, length=length, seed=seed)
    return [
        TurnPayload(
            inference_id=f"turn-{seed}-{number:04d}", episode_id=f"episode-{seed}-{number:04d}", policy="composer", version=version,
            prompt_tokens=prompt, completion_tokens=tuple(row[len(prompt) :]), logprobs=tuple(logged),
            temperature=1.0, top_p=1.0, finished_at=NOON,
        )
        for number, (prompt, row, logged) in enumerate(zip(prompts, tokens.tolist(), logprobs.tolist(), strict=True))
    ]  # fmt: skip


def satisfaction(ports: TrainingPorts, version: Version, *, seed: int, turns: int = 64) -> float:
    """Mean liking of fresh answers to prompts not used for training."""
    found = answers(ports.weights.path(version.digest), random_prompts(turns, seed=seed), version=version.digest, seed=seed)
    return sum(liking(turn) for turn in found) / turns
