"""Updates make a small language model give people what they like, and do not when something is broken on purpose."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from app.domain.learning.batches import TurnPayload
from pipelines.training.config import CorrectionConfig
from tests.fakes.learning import fake_ports
from tests.learning.policy_iteration import CONFIG, iterate, liking

pytestmark = pytest.mark.learning


@pytest.mark.parametrize(
    ("estimator", "correction"),
    [
        ("segment_tracker", "tis"),
        ("batch_mean", "tis"),
        ("segment_tracker", "icepop"),
        ("segment_tracker", "cispo"),
        ("segment_tracker", "none"),
    ],
)
def test_reward_goes_up(tmp_path: Path, estimator: Any, correction: Any) -> None:
    config = msgspec.structs.replace(CONFIG, estimator=estimator, correction=CorrectionConfig(name=correction))
    curve = iterate(fake_ports(tmp_path), cycles=8, config=config)
    assert curve.liked[0] < 0.5
    assert curve.liked[-1] > curve.liked[0] + 0.25, curve.liked


def test_reward_goes_down_when_its_sign_is_wrong(tmp_path: Path) -> None:
    curve = iterate(fake_ports(tmp_path), cycles=8, reward=lambda turn: -liking(turn))
    assert curve.liked[-1] < curve.liked[0] - 0.1, curve.liked


def test_nothing_is_learned_from_rewards_that_belong_to_other_turns(tmp_path: Path) -> None:
    def of_somebody_else(turn: TurnPayload) -> float:
        return (int(turn.inference_id[-4:]) * 7 % 5) / 4

    curve = iterate(fake_ports(tmp_path), cycles=8, reward=of_somebody_else)
    assert curve.liked[-1] < curve.liked[0] + 0.2, curve.liked
