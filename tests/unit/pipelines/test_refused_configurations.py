"""A setting that could only do harm is refused at the start, by its name and with what it may be."""

import tomllib

import pytest

from app.domain.errors import BadConfig
from pipelines.config import LoopConfig, loop_config
from pipelines.ingestion.config import RelayConfig, streaming_config

REFUSED = [
    ("[batching]\nmin_turns = 0", r"batching\.min_turns is 0: give 1 to batching\.max_turns \(1024\)"),
    ("[batching]\nmin_turns = 9\nmax_turns = 8", r"batching\.min_turns is 9: give 1 to batching\.max_turns \(8\)"),
    ("[batching]\nmax_turns_per_rater = 0", r"batching\.max_turns_per_rater is at least 1"),
    ("[batching]\nnewcomer_weight = 0.0", r"newcomer_weight above 0 and at most 1"),
    ("[batching]\nnewcomer_weight = 1.1", r"newcomer_weight above 0 and at most 1"),
    ("[batching]\nnewcomer_days = -1.0", r"newcomer_days at least 0"),
    ("[batching]\nmax_tries = 0", r"batching\.max_tries is 0: give at least 1"),
    ("[batching]\nrollout_share = 1.1", r"batching\.rollout_share is from 0 to 1"),
    ("[batching]\nrollout_staleness = -1", r"batching\.rollout_staleness at least 0"),
    ("[batching]\nmax_turns_per_actor = 0", r"batching\.max_turns_per_actor must be at least 1"),
    ("[batching]\nstaleness = -1", r"batching\.staleness at least 0"),
    ("[rollouts]\ngroup_size = 1", r"rollouts\.group_size is at least 2"),
    ("[rollouts]\nslots = 0", r"rollouts\.slots is at least 1"),
    ("[rollouts]\nahead = -1", r"rollouts\.staleness and rollouts\.ahead at least 0"),
    ("[rollouts]\nheartbeat_s = 0.0", r"heartbeat_s is above 0"),
    ("[rollouts]\nheartbeat_s = 5.0\nlease_s = 5.0", r"heartbeat_s is above 0 and below rollouts\.lease_s"),
    ("[rollouts]\nprobe_s = 0.0", r"rollouts\.probe_s above 0"),
    ("[rollouts]\nadmission_quantile = 0.49", r"admission_quantile is from 0\.5"),
    ("[rollouts]\nmost_flagged_share = 0.0", r"most_flagged_share and rollouts\.most_fault_share are above 0"),
    ("[rollouts]\nmost_flagged_share = 1.01", r"most_fault_share are above 0 and at most 1"),
    ("[rollouts]\nmost_fault_share = 0.0", r"most_fault_share are above 0"),
    ("[rollouts]\nmost_fault_share = 1.01", r"most_fault_share are above 0 and at most 1"),
    ("[rollouts]\nsearch_budget_s = 0.0", r"search_budget_s is above 0"),
    ("[rollouts]\nsearch_latency_weight = -0.01", r"search_latency_weight from 0 to below 1"),
    ("[rollouts]\nsearch_latency_weight = 1.0", r"search_latency_weight from 0 to below 1"),
    ("[rollouts]\nstaleness = -1", r"rollouts\.staleness and rollouts\.ahead at least 0"),
    ("[rollouts]\nheartbeat_s = 60.0", r"heartbeat_s is above 0 and below rollouts\.lease_s"),
    ("[rollouts]\nprobe_s = 1.5", r"rollouts\.probe_s above 0 and at most 1"),
    ("[rollouts]\nadmission_quantile = 1.0", r"rollouts\.admission_quantile is from 0\.5 to below 1"),
    ("[training]\nturns_per_step = 1", r"training\.turns_per_step is 1: give at least 2, because one turn shows no spread"),
    ("[training]\nfinal_pass_turns = 1", r"training\.final_pass_turns is 1: give at least 2"),
    ("[training]\nworkers = 0", r"training\.workers is 0: give a number above 0"),
    ("[training]\nloss_tokens = -1", r"training\.loss_tokens is -1\.0: give a number above 0"),
    ("[training.hindsight]\nmax_person_share = 0.0", r"max_person_share is 0\.0: give a share above 0 and up to 1"),
    ("[training.hindsight]\nscalar_weight = -0.1", r"weight and scalar_weight are at least 0"),
    ("[training.hindsight]\nnewcomer_weight = 0.0", r"newcomer_weight is above 0 and at most 1"),
    ("[training.hindsight]\nclip = 0.0", r"clip and dpo_beta are above 0"),
    ("[schedule]\nchain = 3", r"\[schedule\] chain = 3: at most \[batching\] staleness \(2\)"),
    ("[schedule]\nchain = -1", r"\[schedule\] chain = -1"),
    ("[offline]\nblind_pairs = 1\n[gates.people]\nenabled = true", r"keeps 1 pairs: set blind_pairs to \d+"),
    ("[scedule]\nslot_s = 1", r"unknown tables scedule; known ones are batching, drafting, gates,"),
    ("[schedule]\nslots = 1", r"the configuration: .*slots.*schedule"),
]


@pytest.mark.parametrize(("toml", "said"), REFUSED, ids=[toml for toml, _ in REFUSED])
def test_a_setting_that_cannot_work_is_refused_and_named(toml: str, said: str) -> None:
    with pytest.raises(BadConfig, match=said):
        loop_config(tomllib.loads(toml))


def test_the_bounds_themselves_are_allowed() -> None:
    allowed = "[batching]\nmin_turns = 8\nmax_turns = 8\nrollout_share = 1.0\nnewcomer_weight = 1.0\n[schedule]\nchain = 2\n"
    allowed += "[rollouts]\ngroup_size = 2\nadmission_quantile = 0.5\nprobe_s = 1.0\nslots = 1\n"
    allowed += "staleness = 0\nahead = 0\nsearch_latency_weight = 0.0\n"
    allowed += "most_flagged_share = 1.0\nmost_fault_share = 1.0\n[training.hindsight]\nmax_person_share = 1.0\n"
    found = loop_config(tomllib.loads(allowed))
    assert (found.batching.max_turns, found.schedule.chain, found.rollouts.group_size) == (8, 2, 2)
    assert loop_config({"policies": {}, "kafka": {}}) == LoopConfig(), "tables of others are none of the loop's business"


def test_the_streaming_processes_read_their_tables_alone_and_refuse_what_they_do_not_know() -> None:
    ingestion, relay = streaming_config({"ingestion": {"group": "mine"}, "training": {"nonsense": 1}})
    assert (ingestion.group, relay) == ("mine", RelayConfig())
    with pytest.raises(BadConfig, match=r"\[ingestion\] or \[relay\] in the configuration: .*bach"):
        streaming_config({"relay": {"bach": 1}})
