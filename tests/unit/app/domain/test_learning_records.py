"""Records of learning: how far two readers agree, what a batch is known by, and what a settled question says of itself."""

from array import array
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from app.domain.learning.batches import BatchItem, LabelledTurn, TurnPayload, batch_id, group_of, payload_of, without_payload
from app.domain.learning.label_reports import TermReport
from app.domain.learning.readings import Agreed, Mood, cohens_kappa, three
from app.domain.learning.rewards import segment_key
from app.domain.learning.rule_sets import Mover, Proposal
from app.domain.telemetry.turns import PayloadClaim, SamplingParams, Shape
from tests.fakes.served import turn

NOW = datetime(2026, 11, 27, 4, tzinfo=UTC)


def test_two_readers_agree_as_far_as_chance_does_not_explain_it() -> None:
    # 6 of 10 alike; a says yes 7 of 10 times and b 5 of 10: by chance (7 · 5 + 3 · 5) / 100 = 0.5, so (0.6 − 0.5) / 0.5 = 0.2
    assert cohens_kappa({("yes", "yes"): 4, ("yes", "no"): 3, ("no", "yes"): 1, ("no", "no"): 2}) == pytest.approx(0.2)
    assert cohens_kappa({("yes", "yes"): 1, ("no", "no"): 1}) == pytest.approx(1.0)
    # each the other's opposite, half and half: (0 − 0.5) / 0.5
    assert cohens_kappa({("yes", "no"): 1, ("no", "yes"): 1}) == pytest.approx(-1.0)
    # they share one word of three: expected (2 · 1 + 0 + 0) / 4
    assert cohens_kappa({("yes", "yes"): 1, ("yes", "no"): 1}) == pytest.approx(0.0)
    assert cohens_kappa({("yes", "yes"): 9}) is None, "whoever only ever says one thing shows no agreement"


def test_agreement_is_of_the_sure_and_beside_them_of_the_unsure_in_three_moods() -> None:
    agreed = Agreed(
        counted={
            (Mood.SATISFIED, Mood.SATISFIED, False): 3, (Mood.REFINEMENT, Mood.NEUTRAL, False): 2,
            (Mood.DISSATISFIED, Mood.NEUTRAL, False): 1, (Mood.SATISFIED, Mood.DISSATISFIED, True): 4,
            (Mood.NEUTRAL, Mood.NEUTRAL, True): 1,
        }
    )  # fmt: skip
    assert agreed.share(unsure=False) == (5, 6), "a refinement and a neutral message are the same to whoever rewards"
    assert agreed.share(unsure=True) == (1, 5)
    # of the sure: 5 of 6 alike; reader 3 satisfied, 2 other, 1 not, people 3 satisfied, 3 other: (9 + 6) / 36, so (5/6 − 5/12) / (7/12)
    assert agreed.kappa() == pytest.approx(5 / 7)


@pytest.mark.parametrize(
    ("counted", "kappa"),
    [
        ({(Mood.SATISFIED, Mood.SATISFIED, False): 1}, None), ({(Mood.SATISFIED, Mood.SATISFIED, True): 5}, None), ({}, None),
        ({(Mood.SATISFIED, Mood.SATISFIED, False): 1, (Mood.DISSATISFIED, Mood.DISSATISFIED, False): 1}, 1.0),
    ],
    ids=["one", "all unsure", "none", "two"],
)  # fmt: skip
def test_fewer_than_two_sure_ones_show_no_agreement(counted: dict[tuple[str, str, bool], int], kappa: float | None) -> None:
    assert Agreed(counted=counted).kappa() == kappa


def test_a_mood_is_one_of_three() -> None:
    assert [three(mood) for mood in Mood] == ["dissatisfied", "satisfied", "other", "other"]


@pytest.mark.parametrize(
    ("spoke", "abstained", "share"),
    [(3, {"unclear": 1}, 0.25), (0, {"unclear": 1, "late": 1}, 1.0), (0, {}, 0.0), (5, {}, 0.0), (1, {"late": 1}, 0.5)],
)  # fmt: skip
def test_a_term_was_silent_for_a_share_of_all_it_was_asked(spoke: int, abstained: dict[str, int], share: float) -> None:
    assert TermReport(name="rating", spoke=spoke, mean=None, abstained=abstained).abstention_share == share


@pytest.mark.parametrize(
    ("settled", "digest", "state"), [(None, None, "waiting"), (None, "d", "waiting"), (NOW, None, "refused"), (NOW, "d", "in force")]
)  # fmt: skip
def test_a_proposal_waits_until_it_is_settled_one_way_or_the_other(settled: datetime | None, digest: str | None, state: str) -> None:
    asked = Proposal(id="p", policy="tab", toml="", proposed_by="user:ada", proposed_at=NOW, settled_at=settled, digest=digest)
    assert asked.state == state


def test_a_mover_moved_from_before_to_after() -> None:
    assert Mover(inference_id="t", segment="", before=0.25, after=-0.5, paid_before={}, paid_after={}).change == -0.75


def test_a_segment_is_written_in_one_order() -> None:
    assert segment_key({"tier": "pro", "task": "edit"}) == segment_key({"task": "edit", "tier": "pro"}) == "task=edit,tier=pro"
    assert segment_key({}) == ""


def item(id_: str, *, reward: float = 1.0, revision: int = 0) -> BatchItem:
    return BatchItem(inference_id=id_, episode_id="e", reward=reward, label_revision=revision, segment="", actor=None)


def known_by(*items: BatchItem, **other: Any) -> str:
    return batch_id(**({"policy": "tab", "champion": "c", "rule_set": "r", "items": items} | other))


def test_a_batch_is_known_by_what_is_learned_from_it_and_not_by_its_order() -> None:
    one = known_by(item("a"), item("b"))
    assert len(one) == 32
    assert one == known_by(item("b"), item("a"))
    assert one == known_by(item("a"), item("b"), tries=0)
    others = [
        known_by(item("a"), item("b", reward=0.5)), known_by(item("a"), item("b", revision=1)), known_by(item("a")),
        known_by(item("a"), item("b"), tries=1), known_by(item("a"), item("b"), tries=2), known_by(item("a"), item("b"), policy="chat"),
        known_by(item("a"), item("b"), champion="d"), known_by(item("a"), item("b"), rule_set="s"),
    ]  # fmt: skip
    assert len({one, *others}) == 9


def test_what_was_served_is_kept_as_it_was_drawn() -> None:
    bent = Shape(presence_penalty=0.5)
    served = turn(
        "t", sampling=SamplingParams(temperature=0.7, top_p=0.9, top_k=40), shape=bent, precision="mxfp8", kept_log_mass=[-0.1, -0.2],
        routed_experts=[[[1, 2]], [[0, 3]]],
    )  # fmt: skip
    kept = payload_of(served)
    assert (kept.temperature, kept.top_p, kept.top_k, kept.shape, kept.precision) == (0.7, 0.9, 40, bent, "mxfp8")
    assert (kept.kept_log_mass, kept.routed_experts) == ((-0.1, -0.2), (((1, 2),), ((0, 3),)))
    assert (kept.tokens, kept.logprobs, kept.completion) == ((1, 2, 3, 4, 5), (-0.5, -0.25), "answer t")
    assert kept.messages == ({"role": "user", "content": "question t"},)


def test_what_nobody_asked_for_is_kept_as_nothing() -> None:
    kept = payload_of(turn("t", logprobs=None))
    assert (kept.top_k, kept.shape, kept.precision) == (0, None, "")
    assert (kept.logprobs, kept.kept_log_mass, kept.routed_experts) == (None, None, None)


def test_a_long_prompt_stays_the_array_it_is_and_a_list_becomes_what_cannot_be_changed() -> None:
    long = array("i", [1, 2, 3])
    assert payload_of(turn("t", prompt_tokens=long)).prompt_tokens is long
    assert payload_of(turn("t", prompt_tokens=[1, 2, 3])).prompt_tokens == (1, 2, 3)


CUT = TurnPayload(
    inference_id="t", episode_id="e", policy="tab", version="v", prompt_tokens=(1,), completion_tokens=(2,), logprobs=(-0.5,),
    temperature=1.0, top_p=1.0, finished_at=NOW,
)  # fmt: skip


@pytest.mark.parametrize(("top_p", "top_k", "is_cut"), [(1.0, 0, False), (0.999, 0, True), (1.0, 1, True), (0.5, 5, True)])
def test_a_draw_is_cut_where_some_tokens_could_not_be_drawn(top_p: float, top_k: int, is_cut: bool) -> None:
    assert replace(CUT, top_p=top_p, top_k=top_k).is_cut is is_cut
    assert SamplingParams(top_p=top_p, top_k=top_k).is_cut is is_cut
    assert SamplingParams(top_p=top_p).is_cut is (top_p < 1)


def test_a_turn_whose_words_lie_elsewhere_has_none_of_them_left() -> None:
    claim = PayloadClaim(segment="s", digest="d", bytes=9, has_logprobs=True)
    bare = without_payload(turn("t", shape=Shape(presence_penalty=0.5), kept_log_mass=[-0.1, -0.2], routed_experts=[[[1]], [[2]]]), claim)
    assert bare.payload == claim
    assert (bare.messages, bare.prompt_tokens, bare.completion_tokens) == ([], [], [])
    assert (bare.logprobs, bare.routed_experts, bare.kept_log_mass, bare.shape) == (None, None, None, msgspec.UNSET)
    assert bare.completion == "answer t"


def test_a_label_of_which_nothing_more_is_known_is_of_a_whole_conversation_that_people_had_once() -> None:
    label = LabelledTurn(
        inference_id="t", episode_id="e", version="v", reward=0.5, label_revision=1, rule_set="r", exclusion="no_signal", segment="",
        actor=None, held_out=True, kind="answer", imported=False, train_consent=True, erased=False, has_logprobs=True, payload_segment=None,
        completion_tokens=2, finished_at=NOW, labelled_at=NOW,
    )  # fmt: skip
    assert (label.episode_open, label.process, label.has_outcome, label.tries, label.rollout) == (False, 0.0, True, 0, False)
    assert group_of(label) == ("no_signal", "v", True, "r")
    assert CUT.top_k == 0
