"""Fakes of training's ports, a small random snapshot, and a sampler to make turns with."""

import json
import random
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from app.domain.errors import NotFound
from app.domain.learning.batches import BatchItem, BatchManifest, TurnPayload, batch_id
from app.domain.release.versions import TrainingRun, Version, VersionKind
from app.policy.model import load_model
from app.policy.storage.snapshot import finish_snapshot, replacing, snapshot_digest
from pipelines.training.numerics.state_files import Rows, StateFiles
from pipelines.training.ports import TrainingPorts
from pipelines.training.trainer import LocalTrainer, TrainerSetup

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)


class FakeTrajectories:
    """Payloads in a dict by (segment, inference id)."""

    def __init__(self) -> None:
        self.segments: dict[str, dict[str, TurnPayload]] = {}

    def write(self, name: str, payloads: Sequence[TurnPayload]) -> str:
        self.segments[name] = {payload.inference_id: payload for payload in payloads}
        return name

    def read(self, locations: Iterable[tuple[str, str]]) -> dict[str, TurnPayload]:
        return {i: self.segments[name][i] for name, i in locations if i in self.segments.get(name, {})}


class FakeWeights:
    """Snapshots in a folder, by digest."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, digest: str) -> Path:
        if not self.exists(digest):
            raise NotFound(f"no weights {digest}")
        return self.folder / digest

    def publish(self, folder: Path) -> str:
        digest = snapshot_digest(folder)
        if not self.exists(digest):
            shutil.copytree(folder, self.folder / digest)
        return digest

    def exists(self, digest: str) -> bool:
        return (self.folder / digest).is_dir()


class FakeRuns:
    """Runs and trackers in dicts."""

    def __init__(self) -> None:
        self.runs: dict[str, TrainingRun] = {}
        self.trackers: dict[str, dict[str, Any]] = {}

    def get(self, run_id: str) -> TrainingRun | None:
        return self.runs.get(run_id)

    def put(self, run: TrainingRun) -> None:
        self.runs[run.id] = run

    def tracker(self, digest: str) -> dict[str, Any] | None:
        return self.trackers.get(digest)

    def put_tracker(self, digest: str, policy: str, state: dict[str, Any]) -> None:
        self.trackers[digest] = json.loads(json.dumps(state))

    def term_means(self, batch_id: str) -> dict[str, float]:
        return {}

    def labels_used_share(self, batch_id: str) -> float | None:
        return None

    def term_shares(self, batch_id: str) -> dict[str, float]:
        return {}


class FakeRegistry:
    """Remembers what was registered."""

    def __init__(self) -> None:
        self.versions: list[Version] = []

    def register(self, version: Version, *, folder: Path, run: TrainingRun | None, card: str) -> None:
        self.versions.append(version)

    def reconcile(self, policy: str, wanted: Mapping[str, str]) -> list[str]:
        return []


class FakeProgress:
    """Remembers every report; `on_report` may interrupt the work."""

    def __init__(self) -> None:
        self.reports: list[tuple[str, float, float, dict[str, Any]]] = []
        self.on_report: Callable[[int], None] = lambda count: None

    def report(self, policy: str, task: str, done: float, total: float, detail: dict[str, Any]) -> None:
        self.reports.append((task, done, total, detail))
        self.on_report(len(self.reports))


class LocalTrainers:
    """The local trainer in this process: Ray's place taken by a function call."""

    @contextmanager
    def opened(self, setup: TrainerSetup, *, workers: int, timeout_s: float) -> Iterator[LocalTrainer]:
        assert workers == 1
        trainer = LocalTrainer(setup)
        yield trainer
        trainer.close()


def fake_ports(folder: Path) -> TrainingPorts:
    """Fakes all round, and the local trainer in this process."""
    return TrainingPorts(
        trajectories=FakeTrajectories(), weights=FakeWeights(folder / "weights"), runs=FakeRuns(), progress=FakeProgress(),
        folder=folder / "training", trainers=LocalTrainers(), clock=lambda: NOON,
    )  # fmt: skip


def small_snapshot(folder: Path, *, vocabulary: int = 24, layers: int = 2, hidden: int = 16, seed: int = 0, tied: bool = True) -> str:
    """A random Llama of a few thousand parameters, without a tokenizer; returns its digest."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=tied, initializer_range=0.3,
    )  # fmt: skip
    folder.parent.mkdir(parents=True, exist_ok=True)
    with replacing(folder) as incoming:
        config.save_pretrained(incoming)
        model = LlamaForCausalLM(config)
        return finish_snapshot(incoming, model.state_dict())


def put_version(ports: TrainingPorts, *, seed: int = 0, **shape: Any) -> Version:
    """A small random version in the fake weight store."""
    weights = ports.weights
    assert isinstance(weights, FakeWeights)
    staging = weights.folder / "staging"
    digest = small_snapshot(staging, seed=seed, **shape)
    staging.rename(weights.folder / digest)
    return version_of(digest)


def version_of(digest: str, *, parent: str | None = None, step: int = 0, optimizer_uri: str | None = None) -> Version:
    """A version row."""
    return Version(
        digest=digest, policy="composer", name=f"tiny-s{step}", kind=VersionKind.BASE if parent is None else VersionKind.RL, parent=parent,
        step=step, run_id=None, created_at=NOON, base_model="tiny", licence="Apache-2.0", optimizer_uri=optimizer_uri,
    )  # fmt: skip


@torch.no_grad()
def sample_turns(
    folder: Path, prompts: Sequence[tuple[int, ...]], *, version: str, length: int, seed: int = 0, end: int | None = None
) -> list[TurnPayload]:
    """One completion per prompt from the snapshot, with true log-probabilities; up to `length` tokens or until `end`."""
    model = load_model(folder, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    turns: list[TurnPayload] = []
    for number, prompt in enumerate(prompts):
        tokens, logprobs = list(prompt), []
        for _ in range(length):
            row = model(torch.tensor([tokens])).logits[0, -1].float().log_softmax(-1)
            token = int(torch.multinomial(row.exp(), 1, generator=generator))
            tokens.append(token)
            logprobs.append(float(row[token]))
            if token == end:
                break
        turns.append(
            TurnPayload(
                inference_id=f"turn-{seed}-{number:04d}", episode_id=f"episode-{seed}-{number:04d}", policy="composer", version=version,
                prompt_tokens=prompt, completion_tokens=tuple(tokens[len(prompt) :]), logprobs=tuple(logprobs),
                temperature=1.0, top_p=1.0, finished_at=NOON,
            )
        )  # fmt: skip
    return turns


def make_batch(
    ports: TrainingPorts, turns: Sequence[TurnPayload], rewards: Sequence[float], *, champion: str, slot: int = 0, segment: str = ""
) -> BatchManifest:
    """A manifest over turns that are written to the fake trajectory store."""
    name = ports.trajectories.write(f"segment-{slot}", turns)
    items = tuple(
        BatchItem(
            inference_id=turn.inference_id, episode_id=turn.episode_id, reward=reward, label_revision=1, segment=segment, actor=None,
            version=turn.version, payload_segment=name,
        )
        for turn, reward in zip(turns, rewards, strict=True)
    )  # fmt: skip
    identity = batch_id(policy="composer", champion=champion, rule_set="rules", items=items)
    return BatchManifest(
        id=identity, policy="composer", slot=slot, champion=champion, anchor=champion, rule_set="rules", window_from=NOON,
        window_to=NOON, items=items,
    )  # fmt: skip


def random_prompts(count: int, *, length: int = 5, vocabulary: int = 24, seed: int = 0) -> list[tuple[int, ...]]:
    """Prompts of random tokens."""
    numbers = random.Random(seed)
    return [tuple(numbers.randrange(vocabulary) for _ in range(length)) for _ in range(count)]


def broken(turn: TurnPayload, **changes: Any) -> TurnPayload:
    """The turn with something wrong in it."""
    return replace(turn, **changes)


@torch.no_grad()
def drawn(model: Any, prompts: Sequence[Sequence[int]], *, length: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """An answer to each prompt, all of them equally long: tokens [N, P + length] with their prompts, and log-probabilities [N, length]."""
    generator = torch.Generator().manual_seed(seed)
    tokens, logprobs = torch.tensor(prompts), torch.empty(len(prompts), 0)
    for _ in range(length):
        likely = model(tokens).logits[:, -1].float().log_softmax(-1)
        taken = torch.multinomial(likely.exp(), 1, generator=generator)
        tokens, logprobs = torch.cat([tokens, taken], dim=1), torch.cat([logprobs, likely.gather(1, taken)], dim=1)
    return tokens, logprobs


def saved_by_several(folder: Path, stem: str, like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The state that several workers wrote, whole; `like` one worker's."""
    with StateFiles(folder, stem) as state:
        assert state.names == like.keys()
        return {name: state.read(name, Rows.all_of(tensor)) for name, tensor in like.items()}
