"""Learning from corrections: by hand, against the exact gradient, with the sign broken, and in whole updates."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from app.domain.learning.batches import TurnPayload
from app.domain.learning.corrections import Correction, CorrectionKind
from app.domain.learning.training import LossSpec
from app.domain.release.versions import HoldReason, RunStatus, Version
from app.policy.chat import Chat
from app.policy.model import load_model
from app.policy.tiny import write_tiny_tokenizer
from pipelines.training import TrainingConfig, TrainingPorts
from pipelines.training.hindsight.config import HindsightConfig
from pipelines.training.hindsight.lessons import HINTS, Lessons
from pipelines.training.hindsight.objective import Hindsight
from pipelines.training.hindsight.trust import trusted
from pipelines.training.numerics.loss import Teacher, token_loss
from pipelines.training.trainer import LocalTrainer, TrainerSetup
from tests.fakes.learning import FakeProgress, LocalTrainers, fake_ports, make_batch, put_version, sample_turns, version_of
from tests.fakes.updating import CONFIG, run
from tests.unit.pipelines.training.test_update_rule import assert_unbiased, log_table, per_completion_gradients, policy

DISTIL = HindsightConfig(objective="self_distillation", weight=0.1)


# --- the loss -----------------------------------------------------------------------------------------------------------------


def test_the_pull_by_hand() -> None:
    # log π −1 and −3, teacher −2 and −0.5: apart −1 and 2.5, the latter cut to 2; A = 0.5 − 0.1·1 = 0.4 and −1 + 0.1·2 = −0.8
    # ρ = 1: loss −(0.4·−1 + −0.8·−3)/4 = −0.5
    spec = LossSpec(normaliser=4.0, teacher_clip=2.0)
    logprobs = torch.tensor([-1.0, -3.0], requires_grad=True)
    teacher = Teacher(logprobs_M=torch.tensor([-2.0, -0.5]), pull_M=torch.tensor([0.1, 0.1]))
    loss = token_loss(spec, logprobs, logprobs.detach(), torch.tensor([0.5, -1.0]), teacher)
    assert loss.item() == pytest.approx(-0.5)
    loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-0.1, 0.2])  # −A / 4: the teacher itself is not differentiated


def reverse_kl_gradient(theta: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """∇ of −Σ_a π(a) [KL of the first token, and of the second given a], the states' own probabilities held fixed."""
    theta = theta.clone().requires_grad_()
    (first, second), (far_first, far_second) = log_table(theta), log_table(teacher)
    kl_first = (first.exp() * (first - far_first)).sum()
    kl_second = (first.detach().exp() * (second.exp() * (second - far_second)).sum(1)).sum()
    return torch.autograd.grad(-(kl_first + kl_second), theta)[0]


def pulls(theta: torch.Tensor, teacher: torch.Tensor, *, sign: float = 1.0) -> torch.Tensor:
    """[1500, 12] gradients of our loss on single completions of the policy, without any reward."""
    (first, second), (far_first, far_second) = log_table(theta), log_table(teacher)
    drawn = torch.multinomial((first[:, None] + second).exp().flatten(), 1500, replacement=True, generator=torch.Generator().manual_seed(5))
    table = per_completion_gradients(*log_table(grown := theta.clone().requires_grad_()), grown)
    spec, found = LossSpec(normaliser=1.0, teacher_clip=99.0), list[torch.Tensor]()
    for x, y in ((int(d) // 3, int(d) % 3) for d in drawn):
        logprobs = torch.stack([first[x], second[x, y]]).detach().requires_grad_()
        taught = Teacher(logprobs_M=torch.stack([far_first[x], far_second[x, y]]), pull_M=torch.full((2,), sign, dtype=torch.float64))
        token_loss(spec, logprobs, logprobs.detach(), torch.zeros(2, dtype=torch.float64), taught).backward()
        assert logprobs.grad is not None
        found.append(-(logprobs.grad[0] * table[0][x] + logprobs.grad[1] * table[1][x, y]))
    return torch.stack(found)


def test_the_pull_is_the_gradient_of_the_reverse_kl_per_token() -> None:
    assert_unbiased(pulls(policy(1), policy(4)), reverse_kl_gradient(policy(1), policy(4)))


def test_with_the_sign_broken_it_is_not() -> None:
    with pytest.raises(AssertionError):
        assert_unbiased(pulls(policy(1), policy(4), sign=-1.0), reverse_kl_gradient(policy(1), policy(4)))


# --- how much a person weighs -----------------------------------------------------------------------------------------------------


def shown(count: int, author: str | None, **changes: Any) -> list[Correction]:
    return [
        Correction(inference_id=f"{author}-{n}", kind=CorrectionKind.DEMONSTRATION, said="x", wanted="x", author=author, **changes)
        for n in range(count)
    ]


def test_one_persons_corrections_weigh_no_more_than_their_share() -> None:
    # 9 people with one correction, one with a hundred: a cap c with c = 0.2·(9 + c), so c = 2.25 and 0.0225 each
    weights = trusted([c for n in range(9) for c in shown(1, f"p{n}")] + shown(100, "loud"), max_share=0.2, newcomer=0.5)
    assert weights["p3-0"] == 1.0
    assert weights["loud-7"] == pytest.approx(0.0225)
    loud = sum(weight for name, weight in weights.items() if name.startswith("loud"))
    assert loud / sum(weights.values()) == pytest.approx(0.2)


def test_with_too_few_people_nothing_is_learned_and_all_who_are_not_named_are_one() -> None:
    assert trusted(shown(5, "a") + shown(5, "b"), max_share=0.4, newcomer=0.5) == {}
    assert trusted(shown(50, None), max_share=0.5, newcomer=0.5) == {}
    assert trusted([], max_share=0.5, newcomer=0.5) == {}


def test_newcomers_weigh_half_beside_others_and_all_where_everybody_is_new() -> None:
    known = [c for n in range(4) for c in shown(1, f"p{n}")]
    assert trusted([*known, *shown(1, "new", newcomer=True)], max_share=0.5, newcomer=0.5)["new-0"] == 0.5
    only = [c for n in range(4) for c in shown(1, f"n{n}", newcomer=True)]
    assert set(trusted(only, max_share=0.5, newcomer=0.5).values()) == {1.0}


# --- whole updates ------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def ports(tmp_path: Path) -> TrainingPorts:
    return fake_ports(tmp_path)


def a_parent(ports: TrainingPorts) -> tuple[Version, Chat]:
    """A small random model that reads text."""
    parent = put_version(ports, vocabulary=512)
    folder = ports.weights.path(parent.digest)
    write_tiny_tokenizer(folder)
    return parent, Chat.load(folder)


def some_turns(ports: TrainingPorts, parent: Version, chat: Chat, count: int = 12) -> list[TurnPayload]:
    prompts = [tuple(chat.prompt([{"role": "user", "content": f"q{number}"}])) for number in range(count)]
    return sample_turns(ports.weights.path(parent.digest), prompts, version=parent.digest, length=4)


def learn(
    ports: TrainingPorts, hindsight: HindsightConfig, *, rewards: Callable[[int], float] = lambda place: 0.0, authors: int = 12,
    name: str = "run", **changes: Any,
) -> tuple[Any, Version, list[TurnPayload], TrainingConfig]:  # fmt: skip
    """One update from twelve turns, each corrected to the same word by one of so many people."""
    parent, chat = a_parent(ports)
    turns = some_turns(ports, parent, chat)
    batch = make_batch(ports, turns, [rewards(place) for place in range(len(turns))], champion=parent.digest)
    corrections = [
        Correction(inference_id=turn.inference_id, kind=CorrectionKind.DEMONSTRATION, said="no", wanted="no", author=f"p{place % authors}")
        for place, turn in enumerate(turns)
    ]
    settings = {"hindsight": hindsight, "turns_per_step": 64, "max_tokens": 128} | changes
    config = msgspec.structs.replace(CONFIG, **settings)
    made = run(replace(ports, corrections=lambda batch: corrections), batch, parent, config=config, name=name)
    return made, parent, turns, config


def test_an_update_learns_from_corrections_alone_and_says_from_whose(ports: TrainingPorts) -> None:
    made, *_ = learn(ports, DISTIL)  # all rewards are equal: without corrections this is held
    assert made.status is RunStatus.SUCCEEDED, made.message
    said = made.metrics["corrections"]
    assert (said["objective"], said["used"], said["people"], said["left_out"]) == ("self_distillation", 12, 12, {})
    assert said["largest_share"] == pytest.approx(1 / 12)
    assert said["teacher_gap"] < 0.0  # the served answers are likelier without the hint than with it, on average


@pytest.mark.parametrize("hindsight", [HindsightConfig(objective="none"), msgspec.structs.replace(DISTIL, max_person_share=0.05)])
def test_switched_off_or_by_too_few_people_nothing_is_learned_from_them(ports: TrainingPorts, hindsight: HindsightConfig) -> None:
    made, *_ = learn(ports, hindsight)
    assert (made.status, made.hold_reason) == (RunStatus.HELD, HoldReason.EQUAL_REWARDS)


class Cut(Exception):
    """The run is killed."""


def test_a_killed_update_learns_the_same_when_it_is_resumed(ports: TrainingPorts, tmp_path: Path) -> None:
    whole, *_ = learn(ports, DISTIL, turns_per_step=4)
    other = fake_ports(tmp_path / "cut")
    assert isinstance(other.progress, FakeProgress)

    def interrupt(count: int) -> None:
        if count == 3:
            raise Cut

    other.progress.on_report = interrupt
    with pytest.raises(Cut):
        learn(other, DISTIL, turns_per_step=4)
    other.progress.on_report = lambda count: None
    parent, chat = version_of(whole.parent), Chat.load(other.weights.path(whole.parent))
    turns = some_turns(other, parent, chat)
    batch = make_batch(other, turns, [0.0] * len(turns), champion=parent.digest)
    made = run(other, batch, parent, config=msgspec.convert(whole.config, TrainingConfig))  # what people said is taken back meanwhile
    assert made.metrics["resumed_from_step"] >= 1
    assert made.candidate == whole.candidate


# --- the gradient that reaches the parameters, against plain torch -------------------------------------------------------------------


class Recording(LocalTrainer):
    """Keeps the gradients that the optimizer is about to act on."""

    kept: dict[str, torch.Tensor]

    def optim_step(self, params: Any) -> Any:
        self.kept = {name: p.grad.clone() for name, p in self.parameters.items() if p.grad is not None}
        return super().optim_step(params)


class Recorders(LocalTrainers):
    """Remembers the trainer it opened."""

    trainer: Recording

    @contextmanager
    def opened(self, setup: TrainerSetup, *, workers: int, timeout_s: float) -> Iterator[LocalTrainer]:
        self.trainer = Recording(setup)
        yield self.trainer


def plain_logprobs(model: Any, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
    """log π of each token of the answer, [T], by nothing but the model's own forward pass."""
    logits = model(torch.tensor([[*prompt, *answer]])).logits[0].float().log_softmax(-1)
    return logits[len(prompt) - 1 : -1].gather(1, torch.tensor(answer)[:, None])[:, 0]


@pytest.mark.parametrize("objective", ["self_distillation", "sft", "dpo"])
def test_the_gradient_is_that_of_the_formula(ports: TrainingPorts, objective: Any) -> None:
    recorders = Recorders()
    hindsight = HindsightConfig(objective=objective, weight=0.7, scalar_weight=0.5, clip=50.0, dpo_beta=0.3)
    made, parent, turns, config = learn(
        replace(ports, trainers=recorders), hindsight, rewards=lambda place: float(place % 3), authors=12, estimator="batch_mean",
        micro_batch_tokens=96,
    )  # fmt: skip
    assert made.status is RunStatus.SUCCEEDED, made.message
    expected = formula(ports.weights.path(parent.digest), turns, hindsight, normaliser=12 * config.loss_tokens)
    for name, gradient in recorders.trainer.kept.items():
        torch.testing.assert_close(gradient, expected[name], rtol=2e-4, atol=2e-6)


def formula(folder: Path, turns: Sequence[TurnPayload], hindsight: HindsightConfig, *, normaliser: float) -> dict[str, torch.Tensor]:
    """The gradient of −Σ s·(r − mean of the others)·log π − w·(objective), all over the normaliser, in plain torch."""
    model, chat = load_model(folder, dtype=torch.float32), Chat.load(folder)
    rewards = [float(place % 3) for place in range(len(turns))]
    wanted = chat.encode("no")
    total = torch.zeros(())
    for turn, reward in zip(turns, rewards, strict=True):
        own = plain_logprobs(model, turn.prompt_tokens, turn.completion_tokens)
        above = reward - (sum(rewards) - reward) / (len(rewards) - 1)
        total = total - hindsight.scalar_weight * above * own.sum()
        if hindsight.objective == "self_distillation":
            hinted = [*turn.prompt_tokens[:-1], *chat.encode(f"<|im_start|>user\n{HINTS[CorrectionKind.DEMONSTRATION]}\n\nno<|im_end|>\n")]
            with torch.no_grad():
                far = plain_logprobs(model, [*hinted, turn.prompt_tokens[-1]], turn.completion_tokens)
            total = total - hindsight.weight * ((far - own.detach()) * own).sum()
        good = plain_logprobs(model, turn.prompt_tokens, wanted)
        if hindsight.objective == "sft":
            total = total - hindsight.weight * good.sum()
        if hindsight.objective == "dpo":  # the reference is the parent, so the margin is 0 and its derivative is that of the difference
            margin = hindsight.dpo_beta * ((good.sum() - good.sum().detach()) - (own.sum() - own.sum().detach()))
            total = total - hindsight.weight * torch.nn.functional.logsigmoid(margin)
    (total / normaliser).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("good", "bad", "loss", "slope"),
    [
        (-1.0, -6.0, math.log1p(math.exp(-2)), 0.11920292),  # h = 0.5·((−1 − −3) − (−6 − −4)) = 2: the slope falls from 1/2 to σ(−2)
        (-2003.0, -4.0, 1000.0, 1.0),  # h = 0.5·(−2000 − 0) = −1000, of which no exponential can be taken
        (-3.0, -2004.0, 0.0, 0.0),
    ],
)
def test_a_pair_that_is_won_already_pulls_less(good: float, bad: float, loss: float, slope: float) -> None:
    class Pairs:
        seen: Sequence[Any] = ()

        def forward(self, data: Sequence[Any]) -> Any:
            return type("Found", (), {"logprobs": ((good,), (bad,))})

        def forward_backward(self, data: Sequence[Any], loss: LossSpec) -> Any:
            self.seen = data
            return None

    payload = type("Payload", (), {"prompt_tokens": (1, 2), "completion_tokens": (3,), "temperature": 1.0})()
    sample = type("Sample", (), {"item": type("Item", (), {"inference_id": "i"})(), "payload": payload})()
    lessons = Lessons(weights={"i": 1.0}, wanted={"i": [4]}, reference={"i": [-3.0, -4.0]})
    pairs = Pairs()
    hindsight = Hindsight(HindsightConfig(objective="dpo", weight=1.0, dpo_beta=0.5), lessons, [sample])  # pyright: ignore[reportArgumentType]
    assert hindsight.learn_pairs(pairs, [0], 1.0) == pytest.approx(loss)  # pyright: ignore[reportArgumentType]
    weights = list(itertools.chain.from_iterable(datum.advantages for datum in pairs.seen))
    assert weights == pytest.approx([0.5 * slope, -0.5 * slope])


@pytest.mark.parametrize(
    ("people", "share", "weights"),
    [
        ({"a": 1, "b": 3}, 0.5, {"a": 1.0, "b": 1 / 3}),  # 1 each
        ({"a": 1, "b": 3}, 0.499, {}),  # two people cannot both stay below a half
        ({"a": 1, "b": 1}, 0.5, {"a": 1.0, "b": 1.0}),
        ({"a": 1, "b": 1, "c": 2}, 0.5, {"a": 1.0, "b": 1.0, "c": 1.0}),  # exactly half of it
        ({"a": 1, "b": 1, "c": 4}, 0.5, {"a": 1.0, "b": 1.0, "c": 0.5}),  # c = .5 (2 + c)
        ({"a": 1, "b": 4, "c": 4}, 0.4, {"a": 1.0, "b": 0.5, "c": 0.5}),  # c = .4 (1 + 2c)
        ({"a": 5}, 1.0, {"a": 1.0}),
        ({"a": 2, "b": 4, "c": 8, "d": 8}, 0.25, {"a": 1.0, "b": 0.5, "c": 0.25, "d": 0.25}),  # everybody as the smallest
    ],
)
def test_the_cap_is_the_largest_at_which_everybody_keeps_to_their_share(
    people: dict[str, int], share: float, weights: dict[str, float]
) -> None:
    found = trusted([c for author, count in people.items() for c in shown(count, author)], max_share=share, newcomer=0.5)
    assert {author: found[f"{author}-0"] for author in people if f"{author}-0" in found} == {
        author: pytest.approx(weight) for author, weight in weights.items()
    }


def test_nobody_who_is_not_named_weighs_as_a_newcomer_beside_somebody_who_is() -> None:
    known = [c for n in range(3) for c in shown(1, f"p{n}")]
    assert trusted([*known, *shown(1, None)], max_share=0.5, newcomer=0.25)["None-0"] == 0.25
    assert trusted([*shown(1, "new", newcomer=True), *shown(1, None)], max_share=0.5, newcomer=0.25)["None-0"] == 1.0
