"""Small promises of the domain, each worked out by hand: defaults that two places share, states by name, and what is hashed."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from app.domain.learning.rollouts import Outcome
from app.domain.learning.rule_sets import AskedReplay
from app.domain.release.gates import canonical_json
from app.domain.telemetry.streams import JoinRules
from tests.fakes.gateway import policy_config

AT = datetime(2026, 11, 23, tzinfo=UTC)


def test_an_observation_may_be_as_late_in_a_policy_that_says_nothing_as_in_none() -> None:
    rules = JoinRules(policies={"composer": policy_config()})
    assert rules.policies["composer"].lateness_s == rules.lateness_s == 4 * 3600.0


def test_a_replay_waits_until_it_is_settled_and_then_says_how() -> None:
    asked = AskedReplay(id="1", policy="composer", toml="", asked_by="user:ada", asked_at=AT)
    settled = replace(asked, settled_at=AT)
    assert [one.state for one in (asked, settled, replace(settled, refused="no such term"))] == ["waiting", "replayed", "refused"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"b": 1, "a": [True, None]}, '{"a":[true,null],"b":1}'),
        ({"name": "Zoë – ü"}, '{"name":"Zoë – ü"}'),
        (0.1 + 0.2, "0.30000000000000004"),
    ],
)
def test_what_is_hashed_is_written_in_one_way(value: object, text: str) -> None:
    """RFC 8785, 3.2: UTF-8 as it is, members sorted, no spaces, the shortest number that reads back."""
    assert canonical_json(value) == text.encode()


def test_only_the_models_own_faults_say_something_about_it() -> None:
    mine = {outcome for outcome in Outcome if outcome.is_of_the_model}
    assert mine == {
        Outcome.SOLVED, Outcome.FAILED, Outcome.TURN_LIMIT, Outcome.TOKEN_LIMIT, Outcome.AGENT_TIMEOUT, Outcome.TOOL_ABUSE,
    }  # fmt: skip


def test_a_policy_s_own_times_join_its_turns_and_the_configured_ones_all_others() -> None:
    rules = JoinRules(policies={"composer": policy_config(label_wait_s=60.0, lateness_s=7.0)}, label_wait_s=1800.0, lateness_s=90.0)
    found = [(rules.label_wait(name).total_seconds(), rules.lateness(name).total_seconds()) for name in ("composer", "gone", None)]
    assert found == [(60.0, 7.0), (1800.0, 90.0), (1800.0, 90.0)]
