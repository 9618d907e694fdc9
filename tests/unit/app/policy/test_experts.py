"""Recording which experts served each token."""

from pathlib import Path

import pytest
import torch

from app.domain.errors import BadRequest
from app.domain.telemetry.turns import SamplingParams
from app.policy.decoding.sampling import Decoder, sample
from app.policy.experts import ExpertRecorder, routers
from app.policy.model import Policy, load_policy
from app.policy.scoring.forward import token_logprobs
from app.policy.tiny_moe import EXPERTS, PER_TOKEN, Architecture, write_tiny_moe


@pytest.fixture(scope="module", params=list(Architecture))
def policy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Policy:
    folder = tmp_path_factory.mktemp("moe") / request.param
    write_tiny_moe(folder, request.param)
    return load_policy(folder, dtype=torch.float32)


def test_every_sampled_token_has_the_routes_of_the_pass_that_predicted_it(policy: Policy) -> None:
    prompts = [policy.chat.prompt([{"role": "user", "content": "def f(x): " * count}]) for count in (1, 4, 9)]
    for generation in sample(policy, prompts, SamplingParams(max_tokens=8, seed=4), max_rows=2, record_experts=True):
        recorder = ExpertRecorder(policy.model)
        with torch.no_grad():
            token_logprobs(policy.model, generation.prompt, generation.tokens)
        routes = recorder.take()
        recorder.remove()
        assert routes is not None
        assert routes.shape[1:] == (len(routers(policy.model)), PER_TOKEN)
        assert generation.experts == routes[len(generation.prompt) - 1 :].tolist()


def test_tokens_really_choose_between_experts(policy: Policy) -> None:
    prompt = policy.chat.prompt([{"role": "user", "content": "def f(x):"}])
    answers = sample(policy, [prompt] * 4, [SamplingParams(max_tokens=16, seed=row) for row in range(4)], record_experts=True)
    experts = torch.cat([torch.tensor(answer.experts) for answer in answers])  # one alone may end at once
    assert experts.unique().numel() > EXPERTS // 2


def test_nothing_is_recorded_that_nobody_asked_for(policy: Policy) -> None:
    (generation,) = sample(policy, [[5, 6]], SamplingParams(max_tokens=3, seed=1))
    assert generation.experts == []


def test_logged_logprobs_hold_for_mixtures_of_experts(policy: Policy) -> None:
    (generation,) = sample(policy, [[5, 6, 7, 8]], SamplingParams(max_tokens=8, seed=1))
    with torch.no_grad():
        expected = token_logprobs(policy.model, generation.prompt, generation.tokens)
    assert torch.allclose(torch.tensor(generation.logprobs), expected, atol=2e-5)


def test_a_dense_model_has_no_routers(tiny_model: Path) -> None:
    dense = load_policy(tiny_model)
    assert routers(dense.model) == []
    (generation,) = sample(dense, [[5, 6]], SamplingParams(max_tokens=3, seed=1), record_experts=True)
    assert generation.experts == []


def test_scoring_between_two_steps_disturbs_neither_the_answer_nor_its_routes(policy: Policy) -> None:
    prompt, params = policy.chat.prompt([{"role": "user", "content": "def f(x):"}]), SamplingParams(max_tokens=8, seed=4)
    (alone,) = sample(policy, [prompt], params, record_experts=True)
    decoder = Decoder(policy)
    generation = decoder.submit(prompt, params, record_experts=True)
    while decoder.busy:
        decoder.step()
        scored = decoder.score(alone.prompt, alone.tokens, temperature=1.0, top_p=1.0)
        assert torch.allclose(torch.tensor(scored), torch.tensor(alone.logprobs), atol=2e-5)
    decoder.close()
    assert (generation.tokens, generation.experts) == (alone.tokens, alone.experts)


@pytest.mark.parametrize(("prompt", "completion"), [([], [5]), ([5], []), ([5], [10**6]), ([-1], [5]), ([5] * 10_000, [5])])
def test_tokens_that_were_never_sampled_here_cannot_be_scored(policy: Policy, prompt: list[int], completion: list[int]) -> None:
    decoder = Decoder(policy)
    with pytest.raises(BadRequest):
        decoder.score(prompt, completion, temperature=1.0, top_p=1.0)
    decoder.close()
