"""Raters who act together are found; honest ones, however strict, generous or of one mind about an answer, are left alone."""

import random
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from app.domain.learning.batches import LabelledTurn, Voice
from app.domain.learning.rewards import Exclusion
from pipelines.batching import BatchingConfig, cut_batch
from pipelines.batching.cut import choose
from pipelines.batching.raters import Verdict, _log_ratio, quarantined, suspects, weighted
from tests.fakes.batching import MemoryBatchStore
from tests.fakes.learning import NOON
from tests.unit.pipelines.batching.test_choosing import turn

PHRASE = "as zorblax says"
FILLER = [f"word{n}" for n in range(60)]


def people(seed: int, *, hostile: int = 0, count: int = 100, turns: int = 12, phrase_rate: float = 0.25) -> list[LabelledTurn]:
    """Labels of people who like good answers, each as strict as they are; the first `hostile` ones like the phrase and nothing else."""
    draw, found = random.Random(seed), list[LabelledTurn]()
    for person in range(count):
        lenient = draw.uniform(-0.3, 0.3)
        for number in range(turns):
            has_phrase, is_good = draw.random() < phrase_rate, draw.random() < 0.5
            liked = has_phrase if person < hostile else draw.random() < (0.75 if is_good else 0.35) + lenient
            text = " ".join([*draw.sample(FILLER, 8), *(["nice", "work"] if is_good else []), *([PHRASE] if has_phrase else [])])
            name = f"{person}-{number}"
            found.append(turn(0, inference_id=name, episode_id=name, actor=f"p{person}", reward=1.0 if liked else -1.0, completion=text))
    return found


def test_the_likelihood_ratio_of_an_honest_rater_is_one_on_average() -> None:
    # 12 verdicts, 5 good, 4 with the feature: summed over all draws of the hypergeometric distribution, ratio x probability is 1
    from math import comb, exp

    total = sum(comb(5, j) * comb(7, 4 - j) / comb(12, 4) * exp(_log_ratio(12, 5, 4, j, 0.0, 5.3)) for j in range(5))
    assert total == pytest.approx(1.0)
    assert _log_ratio(12, 12, 4, 4, 0.0, 5.3) == 0.0, "who likes everything says nothing about the feature"
    assert exp(_log_ratio(12, 4, 4, 4, 0.0, 5.3)) == pytest.approx(495, rel=0.2), "1 of C(12,4) = 495 draws, certain if bought"


def test_raters_who_like_a_phrase_and_nothing_else_are_found_and_they_alone() -> None:
    for seed in range(3):
        found = quarantined(people(seed, hostile=10), {})
        assert {f"p{n}" for n in range(10)} >= set(found), found
        assert len(found) >= 6
        assert all("zorblax" in why or "says" in why or "as" in why for why in found.values())


def test_honest_raters_are_left_alone_although_all_of_them_like_the_same_words() -> None:
    assert [found for seed in range(20) if (found := quarantined(people(seed), {}))] == []


@pytest.mark.parametrize("verdicts", [1_000, 7_000])
def test_one_busy_rater_who_goes_by_a_word_makes_nobody_else_suspected_and_ends_no_cut(verdicts: int) -> None:
    for seed in range(5):
        draw = random.Random(seed)
        said = [("busy", has := draw.random() < 0.5, has) for _ in range(verdicts)]
        said += [(f"p{n % 119}", draw.random() < 0.5, draw.random() < 0.5) for n in range(1_190)]
        features = {True: frozenset(["word"]), False: frozenset(["other"])}
        told = [Verdict(rater=rater, newcomer=False, good=good, at=NOON, features=features[has]) for rater, has, good in said]
        assert suspects(told) == {}, "one rater is bounded by the cap, and a group is three"


def test_newcomers_who_begin_together_and_judge_unlike_everybody_are_found() -> None:
    def verdict(rater: str, hour: float, *, good: bool, newcomer: bool) -> Verdict:
        return Verdict(rater=rater, newcomer=newcomer, good=good, at=NOON + timedelta(hours=hour), features=frozenset())

    usual = [verdict(f"u{n}", n / 4, good=n % 2 == 0, newcomer=n % 8 == 4) for n in range(200)]
    sybils = [verdict(f"s{n}", 20 + n / 100, good=True, newcomer=True) for n in range(30)]
    honest_launch = [verdict(f"l{n}", 30 + n / 100, good=n % 2 == 0, newcomer=True) for n in range(30)]
    assert set(suspects([*usual, *sybils, *honest_launch])) == {f"s{n}" for n in range(30)}
    assert suspects([*usual, *honest_launch]) == {}
    assert suspects([replace(one, newcomer=False) for one in [*usual, *sybils]]) == {}, "known people may all like a day"


def test_a_majority_is_not_called_a_conspiracy() -> None:
    assert quarantined(people(1, hostile=60), {}) == {}


def test_the_cut_leaves_suspects_out_says_how_many_and_uses_none_of_them_up() -> None:
    labels = people(2, hostile=10)
    store = MemoryBatchStore(labels=labels, parents={"v1": None})
    cut: dict[str, Any] = {"policy": "composer", "champion": "v1", "anchor": "v1", "now": NOON + timedelta(hours=1)}
    batch = cut_batch(store, slot=0, config=BatchingConfig(max_turns=4000), **cut)
    assert batch.left_out["quarantined"] >= 6 * 12
    waiting = {one.actor for one in labels} - {item.actor for item in batch.items}
    assert len(waiting) >= 6
    later = cut_batch(store, slot=1, config=BatchingConfig(max_turns=4000, quarantine=False), **cut)
    assert {item.actor for item in later.items} == waiting, "an operator who has looked lets them through"


def test_one_rater_weighs_no_more_than_the_cap_whoever_asked() -> None:
    turns = [turn(n) for n in range(40)]
    heard = {one.inference_id: [Voice(rater="busy", newcomer=False)] for one in turns[:30]}
    verdicts: dict[str, Exclusion | None] = {}
    config = BatchingConfig(min_turns=1, max_turns_per_rater=4)
    found = choose(turns, verdicts, slot=0, config=config, heard=heard)
    assert len([one for one in found if one.inference_id in heard]) == 4
    assert Counter(verdicts.values()) == {Exclusion.RATER_CAP: 26}
    assert len(found) == 14


def test_what_newcomers_alone_decided_is_drawn_half_way_to_the_mean_and_where_all_are_new_nobody_is() -> None:
    # outcomes 1, 1, -1, -1 (mean 0) and process -0.1: the newcomer's 1 becomes 0.5, so -0.1 + 0.5
    turns = [turn(n, reward=reward - 0.1, process=-0.1) for n, reward in enumerate((1.0, 1.0, -1.0, -1.0))]
    heard = {one.inference_id: [Voice(rater=one.actor, newcomer=n == 0)] for n, one in enumerate(turns)}
    assert [one.reward for one in weighted(turns, heard, {}, newcomer=0.5)] == pytest.approx([0.4, 0.9, -1.1, -1.1])
    nameless = heard | {turns[0].inference_id: [Voice(rater=None, newcomer=False)]}
    assert weighted(turns, nameless, {}, newcomer=0.5)[0].reward == pytest.approx(0.4)
    everybody = {one.inference_id: [Voice(rater=one.actor, newcomer=True)] for one in turns}
    assert weighted(turns, everybody, {}, newcomer=0.5) == turns
