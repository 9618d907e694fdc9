"""The configuration file as a whole: what no stage knows, or what two stages cannot both mean, is refused with the cure."""

import pytest

from app.domain.errors import BadConfig
from pipelines.config import loop_config


def test_a_table_that_nobody_reads_is_refused_with_those_that_are_read() -> None:
    with pytest.raises(BadConfig, match=r"unknown tables gate, trainings; known ones are .*gates.*training"):
        loop_config({"trainings": {}, "gate": {}, "policies": {}, "kafka": {}})


def test_a_value_of_another_kind_is_told_by_its_place() -> None:
    with pytest.raises(BadConfig, match=r"the configuration: Expected `int`, got `str` - at `\$\.batching\.min_turns`"):
        loop_config({"batching": {"min_turns": "many"}})


@pytest.mark.parametrize("chain", [-1, 3])
def test_a_chain_is_never_longer_than_labels_are_fresh(chain: int) -> None:
    assert loop_config({"schedule": {"chain": 2}, "batching": {"staleness": 2}}).schedule.chain == 2
    with pytest.raises(BadConfig, match=r"\[schedule\] chain = -?\d: at most \[batching\] staleness \(2\)"):
        loop_config({"schedule": {"chain": chain}, "batching": {"staleness": 2}})


def test_people_who_judge_need_as_many_pairs_as_they_give_votes() -> None:
    with pytest.raises(BadConfig, match=r"wants 30 votes, and \[offline\] keeps 20 pairs: set blind_pairs to 60"):
        loop_config({"gates": {"people": {"enabled": True, "votes": 30}}, "offline": {"blind_pairs": 20}})
    assert loop_config({"gates": {"people": {"enabled": False, "votes": 30}}, "offline": {"blind_pairs": 20}}).offline.blind_pairs == 20
