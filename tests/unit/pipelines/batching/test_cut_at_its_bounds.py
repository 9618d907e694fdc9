"""The cut at each of its bounds: how much is drawn, what is too little, what is equal, what is too old, and whose turn it is."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from app.domain.errors import BadConfig, Held
from app.domain.learning.batches import BatchManifest, LabelledTurn, Voice
from app.domain.learning.rewards import Exclusion
from app.domain.release.versions import HoldReason
from pipelines.batching import BatchingConfig, cut_batch
from pipelines.batching.cut import channels, choose, deciding, judge, newest_rule_set, outcomes, pay_chains, seats
from tests.fakes.batching import MemoryBatchStore, MemoryCutSession
from tests.fakes.learning import NOON
from tests.unit.pipelines.batching.test_choosing import turn

BIT = timedelta(microseconds=1)
LATER = NOON + timedelta(hours=1)


def cut(store: MemoryBatchStore, *, slot: int = 0, now: datetime = LATER, **config: Any) -> BatchManifest:
    made = BatchingConfig(**{"min_turns": 1, **config})
    return cut_batch(store, policy="composer", slot=slot, champion="v1", anchor="v1", config=made, now=now)


def stored(turns: Sequence[LabelledTurn]) -> MemoryBatchStore:
    return MemoryBatchStore(labels=list(turns), parents={"v1": None})


class Drawing(MemoryBatchStore):
    """Hands out as many labels as are asked for, and remembers how many those were, and before when a rater is new."""

    def __init__(self, turns: Sequence[LabelledTurn]) -> None:
        super().__init__(labels=list(turns), parents={"v1": None})
        self.asked: list[int | None] = []
        self.before: list[datetime] = []

    def cutting(self, policy: str) -> Any:
        store = self

        class Session(MemoryCutSession):
            def unused_labels(self, *, at_most: int | None = None, **asked: Any) -> list[LabelledTurn]:
                store.asked.append(at_most)
                return super().unused_labels(**asked)[:at_most]

            def voices(self, turns: Sequence[LabelledTurn], *, before: datetime) -> Any:
                store.before.append(before)
                return super().voices(turns, before=before)

        class Block:
            def __enter__(self) -> MemoryCutSession:
                return Session(store, policy)

            def __exit__(self, *_: object) -> None:
                return None

        return Block()


@pytest.mark.parametrize(
    ("labels", "loud", "asked"),
    [
        (100, 0, [8]),  # two for each of four places
        (100, 6, [8]),
        (100, 7, [8, 32]),  # three places filled of eight drawn, so four times as many are drawn
        (100, 40, [8, 32, 128]),
        (500, 500, [8, 32, 128]),  # thirty-two times the places, and no further
        (7, 7, [8]),  # there are no more
        (8, 8, [8, 32]),
    ],
)
def test_as_many_labels_are_drawn_as_fill_the_batch_and_no_more_than_thirty_two_times_its_places(
    labels: int, loud: int, asked: list[int]
) -> None:
    turns = [turn(n, reward=float(n % 2), actor="loud" if n < loud else f"p{n}") for n in range(labels)]
    store = Drawing(turns)
    cut(store, max_turns=4, max_turns_per_actor=2, quarantine=False)
    assert store.asked == asked


def test_who_was_heard_of_a_day_before_the_cut_is_no_newcomer() -> None:
    store = Drawing([turn(n, reward=float(n)) for n in range(2)])
    cut(store, newcomer_days=1.5)
    assert store.before == [LATER - timedelta(days=1.5)]


def test_a_batch_of_exactly_the_least_is_cut_and_one_less_is_held() -> None:
    turns = [turn(n, reward=float(n)) for n in range(3)]
    assert len(cut(stored(turns), min_turns=3).items) == 3
    with pytest.raises(Held, match=r"2 turns are eligible and batching\.min_turns is 3 \(none left out\): wait") as held:
        cut(stored(turns[:2]), min_turns=3)
    assert held.value.reason == HoldReason.TOO_FEW_LABELS


@pytest.mark.parametrize(("difference", "tells"), [(0.5e-9, False), (1.5e-9, True)])
def test_rewards_are_equal_within_a_billionth(difference: float, *, tells: bool) -> None:
    store = stored([turn(0, reward=0.0), turn(1, reward=difference)])
    if tells:
        assert len(cut(store).items) == 2
    else:
        with pytest.raises(Held, match="all 2 eligible turns have the reward 0"):
            cut(store)


def test_only_labels_of_the_window_are_counted_as_left_out_and_a_window_begins_behind_the_last() -> None:
    first = [turn(n, reward=float(n)) for n in range(2)]
    store = stored([*first, turn(7, train_consent=False)])
    batch = cut(store)
    assert (batch.window_from, batch.window_to, batch.left_out) == (NOON, LATER, {"no_consent": 1})
    store.labels += [turn(10 + n, reward=float(n), labelled_at=LATER + timedelta(minutes=1), train_consent=n != 2) for n in range(3)]
    store.labels.append(turn(20, labelled_at=LATER, train_consent=False))
    second = cut(store, slot=1, now=LATER + timedelta(hours=1))
    assert (second.window_from, second.left_out) == (LATER, {"no_consent": 1})
    assert cut(store, slot=1) == second, "the slot has one already"


@pytest.mark.parametrize(
    ("changes", "against"),
    [
        ({}, None),
        ({"erased": True, "train_consent": False}, Exclusion.ERASED),
        ({"train_consent": False, "imported": True}, Exclusion.NO_CONSENT),
        ({"imported": True, "rollout": True}, Exclusion.IMPORTED),
        ({"rollout": True, "exclusion": "engine_fault"}, Exclusion.ROLLOUT),
        ({"exclusion": "engine_fault", "has_logprobs": False}, Exclusion.ENGINE_FAULT),
        ({"has_logprobs": False, "completion_tokens": 0}, Exclusion.NO_LOGPROBS),
        ({"completion_tokens": 0, "version": "v0"}, Exclusion.EMPTY_COMPLETION),
        ({"completion_tokens": 1}, None),
        ({"version": "v0", "payload_segment": None}, Exclusion.STALE_VERSION),
        ({"version": "other", "payload_segment": None}, Exclusion.UNKNOWN_VERSION),
        ({"payload_segment": None, "held_out": True}, Exclusion.PAYLOAD_MISSING),
        ({"held_out": True, "tries": 3}, Exclusion.HELD_OUT),
        ({"tries": 3, "rule_set": "older"}, Exclusion.HELD_AGAIN),
        ({"tries": 2}, None),
        ({"rule_set": "older", "episode_open": True}, Exclusion.OTHER_RULE_SET),
        ({"episode_open": True, "exclusion": "no_signal"}, Exclusion.EPISODE_OPEN),
        ({"exclusion": "no_signal", "has_outcome": False}, Exclusion.NO_SIGNAL),
    ],
)
def test_the_first_reason_counts_and_what_is_for_good_comes_first(changes: dict[str, Any], against: Exclusion | None) -> None:
    labels = [turn(0, **changes), turn(1, labelled_at=NOON + BIT)]
    found = judge(labels, versions=("v1",), known=frozenset({"v0", "v1"}), config=BatchingConfig())
    assert found == {"turn-000": against, "turn-001": None}


@pytest.mark.parametrize(("staleness", "eligible"), [(0, ["v3"]), (1, ["v3", "v2"]), (2, ["v3", "v2", "v1"])])
def test_practice_is_so_many_versions_old_at_the_most(staleness: int, eligible: list[str]) -> None:
    labels = [turn(n, version=f"v{n}", rollout=True) for n in range(1, 4)]
    config = BatchingConfig(rollout_share=0.5, rollout_staleness=staleness)
    found = judge(labels, versions=("v3", "v2", "v1"), known=frozenset({"v1", "v2", "v3"}), config=config)
    assert [one.version for one in reversed(labels) if found[one.inference_id] is None] == eligible


def test_an_open_episode_waits_only_where_it_is_asked_for() -> None:
    labels = [turn(0, episode_open=True)]
    config = BatchingConfig(wait_for_episodes=False)
    assert judge(labels, versions=("v1",), known=frozenset(), config=config) == {"turn-000": None}


def test_the_newest_label_s_rule_set_counts_and_of_two_at_once_the_last_by_name() -> None:
    assert newest_rule_set([]) == ""
    assert newest_rule_set([turn(0, rule_set="b"), turn(1, rule_set="a", labelled_at=NOON + BIT)]) == "a"
    assert newest_rule_set([turn(0, rule_set="b"), turn(1, rule_set="a")]) == "b"


@pytest.mark.parametrize(
    ("config", "fine"),
    [
        ({"min_turns": 1, "max_turns": 1}, True), ({"min_turns": 2, "max_turns": 1}, False), ({"max_turns_per_rater": 1}, True),
        ({"max_turns_per_rater": 0}, False), ({"newcomer_weight": 1.0}, True), ({"newcomer_weight": 1.01}, False),
        ({"newcomer_weight": 0.01}, True), ({"newcomer_weight": 0.0}, False), ({"newcomer_days": 0.0}, True),
        ({"newcomer_days": -0.1}, False), ({"max_tries": 1}, True), ({"max_tries": 0}, False), ({"rollout_share": 0.0}, True),
        ({"rollout_share": 1.0}, True), ({"rollout_share": -0.01}, False), ({"rollout_share": 1.01}, False),
        ({"rollout_staleness": 0}, True), ({"rollout_staleness": -1}, False), ({"max_turns_per_actor": 1}, True),
        ({"max_turns_per_actor": 0}, False), ({"staleness": 0}, True), ({"staleness": -1}, False),
    ],
)  # fmt: skip
def test_a_setting_is_taken_at_its_bound_and_refused_beyond_it(config: dict[str, Any], *, fine: bool) -> None:
    if fine:
        assert BatchingConfig(**config)
    else:
        with pytest.raises(BadConfig, match=next(iter(config))):
            BatchingConfig(**config)


def test_everybody_has_a_seat_where_they_fit_exactly_and_remainders_decide_where_they_do_not() -> None:
    assert seats({"a": 3, "b": 2}, 5) == {"a": 3, "b": 2}
    # 4 seats for 3 and 2 of 5 are 2.4 and 1.6: the second has the larger remainder
    assert seats({"a": 3, "b": 2}, 4) == {"a": 2, "b": 2}
    assert seats({"a": 1, "b": 1, "c": 1}, 2) == {"a": 1, "b": 1, "c": 0}
    assert seats({}, 3) == {}


def chosen(turns: Sequence[LabelledTurn], heard: dict[str, list[Voice]] | None = None, **config: Any) -> tuple[list[str], dict[str, Any]]:
    verdicts: dict[str, Exclusion | None] = {}
    found = choose(turns, verdicts, slot=0, config=BatchingConfig(min_turns=1, **config), heard=heard)
    return sorted(one.inference_id for one in found), verdicts


def test_the_cap_of_a_rater_counts_strangers_words_and_not_what_people_say_of_their_own_answers() -> None:
    turns = [turn(n, actor=f"p{n % 5}") for n in range(10)]
    own = {one.inference_id: [Voice(rater=one.actor, newcomer=False)] for one in turns}
    assert len(chosen(turns, own, max_turns_per_rater=1)[0]) == 10
    nameless = {one.inference_id: [Voice(rater=None, newcomer=False)] for one in turns}
    assert len(chosen(turns, nameless, max_turns_per_rater=1)[0]) == 10
    busy = {one.inference_id: [Voice(rater="busy", newcomer=False), Voice(rater=f"r{n}", newcomer=False)] for n, one in enumerate(turns)}
    found, verdicts = chosen(turns, busy, max_turns_per_rater=3)
    assert len(found) == 3
    assert list(verdicts.values()).count(Exclusion.RATER_CAP) == 7


def test_a_full_batch_is_full_and_practice_takes_places_from_production() -> None:
    served = [turn(n, segment=f"s{n % 2}") for n in range(20)]
    practice = [turn(50 + n, rollout=True, group=f"g{n // 2}", episode_id=f"e{n}") for n in range(20)]
    found, verdicts = chosen([*served, *practice], max_turns=10, rollout_share=0.4)
    assert len(found) == 10
    assert sum(name >= "turn-050" for name in found) == 4
    assert list(verdicts.values()).count(Exclusion.NOT_SAMPLED) == 30


def chain(*rewards: tuple[float, float], **changes: Any) -> list[LabelledTurn]:
    """(reward, process) of the turns of one episode, a minute after each other."""
    return [
        turn(n, episode_id="e", reward=reward, process=process, finished_at=NOON + timedelta(minutes=n), **changes)
        for n, (reward, process) in enumerate(rewards)
    ]


def test_what_came_of_a_chain_is_its_last_outcome_or_their_mean() -> None:
    turns = chain((1.0, 0.25), (-0.5, 0.25), (0.5, 0.0))
    assert outcomes(list(reversed(turns)), BatchingConfig()) == {"e": 0.5}
    assert outcomes(turns, BatchingConfig(episode_reward="mean")) == {"e": pytest.approx((0.75 - 0.75 + 0.5) / 3)}
    assert outcomes(turns, BatchingConfig(episode_reward="own")) == {}
    silent = [*turns, replace(turns[2], inference_id="z", has_outcome=False, reward=9.0, finished_at=LATER)]
    assert outcomes(silent, BatchingConfig()) == {"e": 0.5}
    left_out = [*turns, replace(turns[2], inference_id="z", exclusion="engine_fault", reward=9.0, finished_at=LATER)]
    assert outcomes(left_out, BatchingConfig()) == {"e": 0.5}
    older = [*turns, replace(turns[2], inference_id="z", rule_set="older", reward=9.0, finished_at=LATER, labelled_at=NOON - BIT)]
    assert outcomes(older, BatchingConfig()) == {"e": 0.5}
    assert [one.reward for one in pay_chains(turns, turns, BatchingConfig())] == pytest.approx([0.75, 0.75, 0.5])


def test_whose_word_decides_a_chain_is_the_last_that_says_something() -> None:
    turns = chain((1.0, 0.0), (-0.5, 0.0))
    assert deciding(list(reversed(turns)), BatchingConfig())["e"] == turns[1]
    assert deciding(turns, BatchingConfig(episode_reward="own")) == {}
    empty = [*turns, replace(turns[1], inference_id="z", exclusion="empty_completion", finished_at=LATER)]
    assert deciding(empty, BatchingConfig())["e"].inference_id == "z"
    faulty = [*turns, replace(turns[1], inference_id="z", exclusion="engine_fault", finished_at=LATER)]
    assert deciding(faulty, BatchingConfig())["e"] == turns[1]


def test_a_term_is_a_channel_from_its_second_value_on() -> None:
    spoken = [turn(n, spoke=(("b", float(n)), ("a", float(n)), ("c", 1.0))) for n in range(2)]
    assert channels(spoken, spoken, BatchingConfig()) == {"turn-000": "a,b", "turn-001": "a,b"}
    assert channels(spoken[:1], spoken, BatchingConfig()) == {"turn-000": ""}
