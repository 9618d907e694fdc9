"""A head learns what its version does from its own answers; one that learnt the wrong thing is refused, and the record says why."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from app.domain.errors import BadConfig, BadInput
from app.domain.telemetry.turns import SamplingParams
from app.policy.decoding.draft_head import HeadDrafter, head_of
from app.policy.decoding.drawing import cut
from app.policy.decoding.sampling import Decoder, sample
from app.policy.distribution import draw
from app.policy.model import Policy, load_policy
from app.policy.storage.heads import nearest_record, read_head, read_record
from app.policy.storage.prune import prune
from app.policy.storage.snapshot import HEAD, HEAD_RECORD, snapshot_digest, write_snapshot
from app.policy.storage.store import LocalWeights
from app.policy.tiny_moe import Architecture, write_tiny_moe
from pipelines.training.drafting import DraftingConfig
from pipelines.training.drafting.answers import LoggedAnswer, ReadAnswer, frequent, read, split, uniforms_of, usable
from pipelines.training.drafting.costs import costs_of
from pipelines.training.drafting.distil import Lessons, distil, lessons_of
from pipelines.training.drafting.gate import judge, rate
from pipelines.training.drafting.run import draft, make_head
from tests.fakes.toys import FIRST, WORDS, walk, write_toy

COSTS = {1: 1.2, 2: 1.3, 3: 1.4}
CONFIG = DraftingConfig(seconds=600, steps=60, positions=64, vocabulary=256, least_answers=20, learning_rate=3e-3)


class Progress:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, float]] = []

    def report(self, policy: str, task: str, done: float, total: float, detail: dict[str, object]) -> None:
        self.told.append((task, done / total))


def logged(count: int, *, length: int = 12) -> list[LoggedAnswer]:
    """Answers of the toy to people of its own each."""
    starts = random.Random(0)
    found = list[LoggedAnswer]()
    for person in range(count):
        start = FIRST + starts.randrange(WORDS)
        found.append(LoggedAnswer(unit=f"person-{person}", prompt=(5, 6, start), completion=walk(start, length)))
    return found


@pytest.fixture(scope="module")
def weights(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> LocalWeights:
    folder = tmp_path_factory.mktemp("toy")
    write_toy(folder / "toy", tiny_model)
    store = LocalWeights(folder / "weights")
    store.publish(folder / "toy")
    return store


@pytest.fixture(scope="module")
def digest(weights: LocalWeights) -> str:
    return next(iter(weights.ages_s()))


@pytest.fixture(scope="module")
def toy(weights: LocalWeights, digest: str) -> Policy:
    return load_policy(weights.path(digest))


def numbers_of(answers: Sequence[ReadAnswer], policy: Policy) -> list[torch.Tensor]:
    return [uniforms_of(policy, answer, torch.Generator().manual_seed(2)) for answer in answers]


def shuffled(lessons: Lessons) -> Lessons:
    """What follows is that of somewhere else."""
    order = torch.randperm(len(lessons.teacher_TD), generator=torch.Generator().manual_seed(1))
    return replace(lessons, teacher_TD=lessons.teacher_TD[order])


def test_a_head_for_a_deterministic_text_is_kept_beside_its_version_and_changes_nothing_of_it(weights: LocalWeights, digest: str) -> None:
    progress = Progress()
    record = draft(logged(60), policy="composer", digest=digest, weights=weights, progress=progress, config=CONFIG, costs=COSTS)
    assert record.kept, record.reason
    assert record.figures["first_draft_acceptance"][0] > 0.95
    assert record.figures["gain"]["3"][1] > 2
    told = {name: record.figures[name] for name in ("loss", "seconds", "covered")}
    assert told == {"loss": round(told["loss"], 4), "seconds": round(told["seconds"], 1), "covered": round(told["covered"], 4)}
    assert "gain" in record.reason
    assert progress.told[-1] == ("drafting", 1.0)
    assert read_record(weights, digest) == record
    head = read_head(weights, record)
    drafter = HeadDrafter(head, load_policy(weights.path(digest)))
    assert snapshot_digest(weights.path(digest)) == digest
    assert (weights.path(digest) / HEAD).stat().st_size < 1_000_000
    states = Decoder(drafting := load_policy(weights.path(digest)), max_rows=1).read([5, 6, 40])
    assert drafting.digest == digest
    assert drafter.draft(states[-1:], [walk(40, 1)[0]], [[0.1, 0.5, 0.9]], [SamplingParams()]) == [list(walk(40, 4)[1:])]


def test_the_same_answers_and_seed_give_the_same_head(toy: Policy) -> None:
    def made(seed: int) -> list[torch.Tensor]:
        known = read(toy, logged(10), go_on=lambda done: True)
        config = DraftingConfig(steps=5, positions=16, seed=seed)
        return list(distil(toy, lessons_of(known), range(256), config, left=lambda step, loss: 1.0)[0].parameters())

    assert all(torch.equal(one, other) for one, other in zip(made(1), made(1), strict=True))
    assert not all(torch.equal(one, other) for one, other in zip(made(1), made(2), strict=True))


def test_the_head_that_is_judged_is_the_one_that_will_be_stored(toy: Policy) -> None:
    """Stored in bfloat16, and read so by engines: another head may be right where this one is not, and its drafts cost something else."""
    made = make_head(logged(60), toy, policy="composer", progress=Progress(), config=CONFIG, costs=COSTS)
    stored = head_of(made.head.tensors())
    for name, parameter in made.head.named_parameters():
        assert torch.equal(parameter, stored.get_parameter(name)), name
    assert len(made.head.vocabulary) == len(stored.vocabulary) > 0


def test_a_head_that_learnt_shuffled_targets_is_refused_by_the_gate(toy: Policy) -> None:
    learnt, judged = split(logged(60), held_out=0.2)
    known, unseen = (read(toy, answers, go_on=lambda done: True) for answers in (learnt, judged))
    vocabulary, _ = frequent(learnt, most=256)
    for lessons, passes in ((lessons_of(known), True), (shuffled(lessons_of(known)), False)):
        head, _ = distil(toy, lessons, vocabulary, CONFIG, left=lambda step, loss: 1.0)
        verdict = judge(HeadDrafter(head, toy), unseen, numbers_of(unseen, toy), COSTS, CONFIG)
        assert verdict.passes is passes, verdict.reason
    assert "is the least" in verdict.reason


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.6}, {"top_p": 0.8}, {"temperature": 1.5, "top_k": 20}], ids=str)
def test_held_out_answers_are_judged_with_numbers_that_draw_them(tiny_model: Path, sampling: dict[str, Any]) -> None:
    policy, params = load_policy(tiny_model), SamplingParams(max_tokens=12, seed=3, **sampling)
    sampled = sample(policy, [[5, 6, 7], [9, 40]], params)
    asked = [LoggedAnswer(unit="a", prompt=tuple(one.prompt), completion=tuple(one.tokens), sampling=params) for one in sampled]
    head = cast("Any", policy.model.get_output_embeddings())
    for answer, numbers in zip(found := read(policy, asked, go_on=lambda done: True), numbers_of(found, policy), strict=True):
        logprobs = cut(head(answer.states_TD.to(policy.model.dtype)).float(), params)
        assert torch.equal(draw(logprobs, numbers), answer.tokens_T)
        assert len(numbers.unique()) == len(numbers)


def test_a_head_that_is_right_and_too_dear_is_refused(toy: Policy, weights: LocalWeights, digest: str) -> None:
    dear = {length: 2.0 + length for length in COSTS}
    record = draft(logged(60), policy="composer", digest=digest, weights=weights, progress=Progress(), config=CONFIG, costs=dear)
    assert not record.kept
    assert record.figures["first_draft_acceptance"][0] > 0.95
    assert record.sha256 is None
    assert weights.read_beside(digest, HEAD) is None, "nor is one that was there before"
    assert read_record(weights, digest) == record


@pytest.mark.parametrize(("count", "sentence"), [(10, "10 answers of this version can be used, 20 are the least"), (0, "0 answers")])
def test_too_little_trains_nothing_and_the_record_says_so(weights: LocalWeights, digest: str, count: int, sentence: str) -> None:
    record = draft(logged(count), policy="composer", digest=digest, weights=weights, progress=Progress(), config=CONFIG)
    assert not record.kept
    assert record.reason.startswith(sentence)
    assert read_record(weights, digest) == record


def test_nothing_is_trained_for_a_mixture_of_experts(tmp_path: Path) -> None:
    write_tiny_moe(tmp_path / "moe", Architecture.QWEN3_MOE)
    store = LocalWeights(tmp_path / "weights")
    digest = store.publish(tmp_path / "moe")
    record = draft(logged(60), policy="composer", digest=digest, weights=store, progress=Progress(), config=CONFIG)
    assert not record.kept
    assert "mixture of experts" in record.reason


def test_too_few_held_out_people_judge_nothing(toy: Policy) -> None:
    known = read(toy, [replace(answer, unit="one") for answer in logged(3)], go_on=lambda done: True)
    head, _ = distil(toy, lessons_of(known), range(256), DraftingConfig(steps=1), left=lambda step, loss: 1.0)
    verdict = judge(HeadDrafter(head, toy), known, numbers_of(known, toy), COSTS, CONFIG)
    assert not verdict.passes
    assert "1 held-out people" in verdict.reason


def test_time_ends_reading_and_training_and_nothing_read_is_said(toy: Policy) -> None:
    assert len(read(toy, logged(10), go_on=lambda done: done < 4)) == 4
    with pytest.raises(BadInput, match="--seconds"):
        lessons_of([])
    known = read(toy, logged(4), go_on=lambda done: True)
    _, losses = distil(toy, lessons_of(known), range(256), DraftingConfig(steps=50), left=lambda step, loss: 3.0 - step)
    assert len(losses) == 3


def test_nobody_is_on_both_sides_and_a_person_stays_on_one() -> None:
    answers = [replace(answer, unit=f"person-{index % 30}") for index, answer in enumerate(logged(90))]
    learnt, judged = split(answers, held_out=0.3)
    people = ({answer.unit for answer in side} for side in (learnt, judged))
    one, other = people
    assert one
    assert other
    assert not one & other
    assert {answer.unit for answer in split(answers[:31], held_out=0.3)[1]} <= other


def test_what_the_model_cannot_have_written_is_left_out(toy: Policy) -> None:
    good = logged(3)
    odd = [replace(good[0], completion=(1, 2)), replace(good[0], completion=(1, 2, 512)), replace(good[0], prompt=()),
           replace(good[0], prompt=tuple([5] * toy.context))]  # fmt: skip
    assert usable([*odd, *good], toy, tokens=30) == good[:2], "and so is what is more than the tokens it may take"


def test_the_most_frequent_tokens_are_drafted() -> None:
    answers = [LoggedAnswer(unit="a", prompt=(1,), completion=(7, 7, 7, 3, 3, 9))]
    assert frequent(answers, most=2) == ([3, 7], 5 / 6)


def test_the_bound_of_a_rate_is_by_person() -> None:
    """Four people, of whom one half has all ones: the mean is .5, and a person's places count as one observation."""
    values: Sequence[torch.Tensor] = [torch.ones(100), torch.ones(100), torch.zeros(100), torch.zeros(100)]
    found = rate(["a", "b", "c", "d"], values)
    # spread: 4 × 50² × 4/3 = 13,333, its root 115.5 over 400 places = .289; times 2.128
    assert found.mean == pytest.approx(0.5)
    assert found.lower == pytest.approx(0.5 - 2.128 * 0.2887, abs=1e-3)


def test_costs_are_measured_by_length(toy: Policy) -> None:
    learnt = logged(4)
    head, _ = distil(
        toy, lessons_of(read(toy, learnt, go_on=lambda done: True)), range(256), DraftingConfig(steps=1), left=lambda step, loss: 1.0
    )  # fmt: skip
    costs = costs_of(toy, HeadDrafter(head, toy), learnt[0].prompt, longest=3, rounds=1)
    assert list(costs) == [1, 2, 3]
    assert all(cost > 0 for cost in costs.values())
    assert max(abs(cost - 1.0) for cost in costs.values()) > 1e-3, "three drafted tokens take some time"


def test_a_version_without_a_head_finds_its_nearest_ancestors_and_one_that_was_refused_finds_none(
    tiny_model: Path, tmp_path: Path, weights: LocalWeights, digest: str
) -> None:
    store = LocalWeights(tmp_path / "weights")
    line = [store.publish(weights.path(digest))]
    for place in range(2):
        tensors = {name: tensor * (2.0 + place) for name, tensor in load_policy_tensors(store.path(line[-1])).items()}
        write_snapshot(tmp_path / f"next-{place}", tensors, like=store.path(line[-1]))
        line.append(store.publish(tmp_path / f"next-{place}"))
    record = draft(logged(60), policy="composer", digest=line[0], weights=store, progress=Progress(), config=CONFIG, costs=COSTS)
    assert record.kept
    assert nearest_record(store, line[2]) == record
    assert read_record(store, line[2]) is None
    refused = draft([], policy="composer", digest=line[1], weights=store, progress=Progress(), config=CONFIG)
    assert nearest_record(store, line[2]) == refused
    gone = prune(store, known=set(line), needed=lambda: {line[1], line[2]}, min_age_s=0)
    assert gone == [line[0]]
    assert store.read_beside(line[0], HEAD) is None, "it goes with its version"
    assert not {HEAD, HEAD_RECORD} & {file.name for file in store.path(line[2]).iterdir()}, "a version made from another inherits no file"


def load_policy_tensors(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType] - its PathLike has no parameter

    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("wrong", [{"seconds": 0.0}, {"held_out": 1.0}, {"margin": -0.1}, {"vocabulary": 0}], ids=str)
def test_a_setting_that_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(BadConfig, match="drafting"):
        DraftingConfig(**wrong)  # type: ignore[arg-type] - wrong on purpose
