"""Lines of versions in the world of styles: what a bench runs, cycle by cycle, over the real update."""

import shutil
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from app.domain.learning.batches import BatchItem, BatchManifest, batch_id
from app.domain.learning.corrections import Correction
from app.domain.release.versions import Version
from pipelines.training import TrainingConfig, TrainingPorts, train
from tests.fakes.learning import NOON, FakeWeights, fake_ports, version_of
from tests.learning.policy_iteration import OPEN
from tests.learning.styles import LENGTH, Turn

CONFIG = TrainingConfig(
    learning_rate=1e-3, turns_per_step=32, micro_batch_tokens=4096, threads=1, dtype="float32", checkpoint_every_s=9999.0, guards=OPEN,
    kl_beta=0.0, final_pass_turns=8, loss_tokens=float(LENGTH),
)  # fmt: skip
"""The tests' update: guards out of the way, because what is measured is what labels teach; a learning rate for a small model."""
T = {4: 2.776, 3: 3.182, 2: 4.303, 1: 12.706}
"""Student's t at 97.5 %, by degrees of freedom."""


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """A turn with what it is paid."""

    turn: Turn
    reward: float
    episode: str = ""
    segment: str = ""
    channels: str = ""
    actor: str | None = None

    def of_any_channel(self) -> "Lesson":
        """The same as if nobody knew who decided."""
        return replace(self, channels="")


class Line:
    """Versions one after the other, all of one base."""

    def __init__(self, folder: Path, base: Path, config: TrainingConfig) -> None:
        self.config, self.ports = config, fake_ports(folder)
        assert isinstance(self.ports.weights, FakeWeights)
        shutil.copytree(base, self.ports.weights.folder / "base")
        self.version: Version = version_of("base")
        self.cycle = 0
        self.held = 0

    @property
    def folder(self) -> Path:
        """Of the newest version."""
        return self.ports.weights.path(self.version.digest)

    def learn(self, lessons: Sequence[Lesson], corrections: Sequence[Correction] = ()) -> None:
        """One update; where it is held, the version stays."""
        ports: TrainingPorts = replace(self.ports, corrections=lambda batch: corrections)
        parent = self.version
        made = train(self._batch(lessons), run_id=f"run-{self.cycle}", parent=parent, anchor=parent, config=self.config, ports=ports)
        self.cycle += 1
        if made.candidate is None:
            self.held += 1
            return
        self.version = version_of(made.candidate, parent=parent.digest, step=self.cycle, optimizer_uri=made.metrics["optimizer_uri"])
        if parent.digest != "base":
            shutil.rmtree(self.ports.weights.path(parent.digest))

    def _batch(self, lessons: Sequence[Lesson]) -> BatchManifest:
        name = self.ports.trajectories.write(f"segment-{self.cycle}", [lesson.turn.payload for lesson in lessons])
        items = tuple(
            BatchItem(
                inference_id=lesson.turn.payload.inference_id, episode_id=lesson.episode or lesson.turn.payload.episode_id,
                reward=lesson.reward, label_revision=1, segment=lesson.segment, actor=lesson.actor, version=self.version.digest,
                payload_segment=name, channels=lesson.channels,
            )
            for lesson in lessons
        )  # fmt: skip
        champion = self.version.digest
        return BatchManifest(
            id=batch_id(policy="composer", champion=champion, rule_set="rules", items=items), policy="composer", slot=self.cycle,
            champion=champion, anchor=champion, rule_set="rules", window_from=NOON, window_to=NOON, items=items,
        )  # fmt: skip


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % of the mean over seeds, by Student's t."""
    middle = statistics.fmean(values)
    if len(values) < 2:
        return middle, middle
    half = T[min(4, len(values) - 1)] * statistics.stdev(values) / len(values) ** 0.5
    return middle - half, middle + half
