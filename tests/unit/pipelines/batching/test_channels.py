"""Which terms decided a turn's outcome, as the baseline is told."""

from datetime import timedelta

from app.domain.learning.batches import LabelledTurn
from pipelines.batching import BatchingConfig
from pipelines.batching.cut import channels
from tests.fakes.learning import NOON

CONFIG = BatchingConfig()


def turn(name: str, *spoke: tuple[str, float], episode: str | None = None, minute: int = 0) -> LabelledTurn:
    return LabelledTurn(
        inference_id=name, episode_id=episode or name, version="v1", reward=0.5, label_revision=1, rule_set="rules", exclusion=None,
        segment="", actor=name, held_out=False, kind="answer", imported=False, train_consent=True, erased=False, has_logprobs=True,
        payload_segment="s", completion_tokens=4, finished_at=NOON + timedelta(minutes=minute), labelled_at=NOON, spoke=spoke,
        has_outcome=bool(spoke),
    )  # fmt: skip


def test_channels_are_the_terms_that_spoke_and_say_different_things() -> None:
    turns = [
        turn("a", ("rating", 1.0), ("follow_up", -0.4)), turn("b", ("rating", -1.0)), turn("c", ("follow_up", 0.2), ("undo", -1.0)),
        turn("d", ("undo", -1.0)), turn("e"),
    ]  # fmt: skip
    assert channels(turns, turns, CONFIG) == {"a": "follow_up,rating", "b": "rating", "c": "follow_up", "d": "", "e": ""}


def test_a_chain_has_the_channels_of_the_turn_that_decides_it() -> None:
    turns = [turn("a", ("follow_up", 0.1), episode="e"), turn("b", ("rating", 1.0), episode="e", minute=1), turn("c", ("rating", -1.0))]
    assert channels(turns, turns, CONFIG) == {"a": "rating", "b": "rating", "c": "rating"}
    own = BatchingConfig(episode_reward="own")
    assert channels(turns, turns, own)["a"] == ""  # said once only: nothing is usual there
