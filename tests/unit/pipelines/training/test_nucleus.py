"""The mass that top-p kept is worked out under the very weights that drew each turn."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from app.domain.learning.batches import BatchItem, TurnPayload
from app.domain.ports import Trainer
from pipelines.training.numerics.nucleus import with_masses, work_out_masses
from pipelines.training.samples import Sample
from tests.fakes.learning import NOON

TURN = TurnPayload(
    inference_id="", episode_id="e", policy="composer", version="", prompt_tokens=(1, 2), completion_tokens=(3, 4), logprobs=(-0.5, -0.25),
    temperature=1.0, top_p=0.9, finished_at=NOON,
)  # fmt: skip


MASS = {"old": -0.1, "new": -0.2}


class Weights:
    """A trainer whose mass is that of the weights it holds."""

    def __init__(self) -> None:
        self.held = "what was trained"
        self.loaded: list[str] = []

    def load_state(self, folder: Path) -> None:
        self.held = folder.name
        self.loaded.append(folder.name)

    def forward(self, data: list[Any]) -> Any:
        return SimpleNamespace(kept_log_mass=tuple((MASS[self.held],) * 2 for _ in data))


def sample(name: str, version: str, **more: Any) -> Sample:
    item = BatchItem(inference_id=name, episode_id="e", reward=0.0, label_revision=1, segment="", actor=None, version=version)
    return Sample(item=item, payload=replace(TURN, inference_id=name, version=version, **more), logprobs=(-0.5, -0.25))


def test_each_turn_is_asked_under_the_weights_that_drew_it_and_only_where_it_lacks_the_mass() -> None:
    samples = [
        sample("a", "new"), sample("b", "old"), sample("c", "new"), sample("known", "gone", kept_log_mass=(-0.3, -0.3)),
        sample("whole", "gone", top_p=1.0),
    ]  # fmt: skip
    trainer = Weights()
    masses = work_out_masses(cast(Trainer, trainer), samples, path_of=lambda version: Path("weights") / version, micro_batch_tokens=100)
    assert masses == {"a": [-0.2, -0.2], "b": [-0.1, -0.1], "c": [-0.2, -0.2]}
    assert trainer.loaded == ["new", "old"], "each once"
    assert [one.payload.kept_log_mass for one in with_masses(samples, masses)] == [
        (-0.2, -0.2), (-0.1, -0.1), (-0.2, -0.2), (-0.3, -0.3), None,
    ]  # fmt: skip
