"""From a rollout to the update: a real sampler, real boxes and grades, labels, a batch of practice alone, and one step of learning."""

from datetime import timedelta
from pathlib import Path

import torch
from sqlalchemy import Engine

from app.db.ingestion.streams import SqlEffects
from app.db.learning.batches import SqlBatchStore
from app.db.learning.labels import SqlLabels
from app.domain.policies import PolicyConfig
from app.domain.telemetry.streams import EffectBatch
from app.policy.model import load_policy
from pipelines.batching import BatchingConfig, cut_batch
from pipelines.labelling.labeller import label_due
from pipelines.labelling.rule_set import parse_rule_set
from pipelines.rollouts.tasks import TaskData
from tests.fakes.gateway import CHAMPION
from tests.fakes.served import applied
from tests.fakes.streaming import MemorySegments
from tests.integration.rollouts.practising import Practice
from tests.integration.training.test_served_to_trained import RULES, TinyEngine, trained

GRADED = 'name = "graded"\n[[terms]]\nname = "practice"\nweight = 1.0\n'
EVEN = "def test_it():\n    with open('answer.txt') as file:\n        assert len(file.read()) % 2 == 0\n"


def task(key: str) -> TaskData:
    """Something that a model of random weights does half of the time."""
    return TaskData(
        taskset="even", key=key, instruction=f"Say something of an even length about {key}.", files={"README": ""},
        answer_file="answer.txt", editable=("answer.txt",),
        tests={"hidden/test_it.py": EVEN}, expected=("hidden/test_it.py::test_it",), gold={"answer.txt": "ab"},
        most_turns=1, deadline_s=60,
    )  # fmt: skip


def test_practice_is_graded_labelled_and_learned_from_against_its_group(sqlite_engine: Engine, tiny_model: Path, tmp_path: Path) -> None:
    practice = Practice(sqlite_engine, tmp_path, TinyEngine(load_policy(tiny_model, dtype=torch.float32)))
    counted = practice.dispatch(task("cats"), task("dogs"), config={"group_size": 8, "slots": 2}).run(groups=2)
    practice.close()
    assert set(counted) == {"solved", "failed"}
    turns, said = practice.turns(), practice.said()
    assert len(turns) == len(said) == 16
    segments = MemorySegments()
    store = SqlEffects(sqlite_engine, rules=lambda: RULES, segments=segments)
    end = max(turn.finished_at for turn in turns) + timedelta(minutes=1)
    store.apply(EffectBatch(events=tuple(applied(effect, offset=place) for place, effect in enumerate([*turns, *said]))), now=end)
    config, now = PolicyConfig(model="m", base_name="b", base_model="B"), end + timedelta(minutes=5)
    label_due(
        SqlLabels(sqlite_engine),
        policy="composer",
        config=config,
        rule_set=parse_rule_set(GRADED),
        now=now,
        limit=100,
        learn_from_rollouts=True,
    )
    batch = cut_batch(
        SqlBatchStore(sqlite_engine), policy="composer", slot=0, champion=CHAMPION, anchor=CHAMPION, now=now,
        config=BatchingConfig(min_turns=16, rollout_share=1.0),
    )  # fmt: skip
    paid = {one.episode_id: one.value for one in said}
    assert {item.episode_id: item.reward for item in batch.items} == paid
    assert {item.group for item in batch.items} == {turn.tags["group"] for turn in turns}
    run = trained(batch, tiny_model, segments, tmp_path)
    assert run.metrics["turns"] == 16
    assert run.metrics["left_out"] == {}
    assert run.metrics["mismatch"] < 1e-6, "what was sampled in practice is scored exactly as it was sampled"
