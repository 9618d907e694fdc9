"""The sampler: what it logs is what it drew from, and company in the batch changes nothing."""

from pathlib import Path
from typing import Any

import pytest
import torch

from app.domain.errors import BadRequest
from app.domain.telemetry.turns import FinishReason, SamplingParams
from app.policy.decoding.keyvalues import GROW_TOKENS
from app.policy.decoding.sampling import Decoder, Generation, sample
from app.policy.distribution import nucleus_logprobs
from app.policy.model import Policy, load_policy
from app.policy.scoring.forward import token_logprobs
from app.policy.tiny import CONTEXT, END


@pytest.fixture(scope="module")
def policy(tiny_model: Path) -> Policy:
    return load_policy(tiny_model, dtype=torch.float32)


def prompts(policy: Policy, count: int = 6) -> list[list[int]]:
    """Prompts of ragged lengths with a common beginning."""
    return [policy.chat.prompt([{"role": "user", "content": "def f(x):\n" + "    # more\n" * (3 * i)}]) for i in range(count)]


def scored(policy: Policy, generation: Generation) -> torch.Tensor:
    sampling = generation.sampling
    with torch.no_grad():
        return token_logprobs(
            policy.model, generation.prompt, generation.tokens, temperature=sampling.temperature, top_p=sampling.top_p,
            top_k=sampling.top_k or 0,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"),
    [(1.0, 1.0, 0), (0.7, 1.0, 0), (1.0, 0.8, 0), (1.3, 0.5, 0), (0.0, 1.0, 0), (1.3, 1.0, 5), (1.2, 0.6, 7), (1.0, 1.0, 10**6)],
)
def test_logged_logprobs_are_those_of_the_sampled_distribution(policy: Policy, temperature: float, top_p: float, top_k: int) -> None:
    params = SamplingParams(max_tokens=12, temperature=temperature, top_p=top_p, top_k=top_k, seed=7)
    for generation in sample(policy, prompts(policy), params, max_rows=4):
        assert torch.allclose(torch.tensor(generation.logprobs), scored(policy, generation), atol=2e-5)


@pytest.mark.parametrize("cut", [{"top_p": 0.7}, {"top_k": 4}, {"top_p": 0.7, "top_k": 9}], ids=str)
def test_what_was_kept_is_logged_so_that_both_log_probabilities_are_known(policy: Policy, cut: dict[str, Any]) -> None:
    drawn = sample(policy, prompts(policy), SamplingParams(max_tokens=12, temperature=1.2, seed=7, **cut), max_rows=4)
    for generation in drawn:
        with torch.no_grad():
            whole = token_logprobs(policy.model, generation.prompt, generation.tokens, temperature=1.2)
        assert torch.allclose(torch.tensor(generation.logprobs) + torch.tensor(generation.kept_log_mass), whole, atol=2e-5)
    assert min(mass for generation in drawn for mass in generation.kept_log_mass) < -0.05
    assert max(mass for generation in drawn for mass in generation.kept_log_mass) <= 1e-6
    assert not sample(policy, prompts(policy)[:1], SamplingParams(max_tokens=2, seed=7))[0].kept_log_mass


def test_bfloat16_sampling_agrees_with_a_float32_forward_pass(tiny_model: Path, policy: Policy) -> None:
    """The engine/trainer mismatch: mean |Δ log-probability| well below the guard's 0.1."""
    engine = load_policy(tiny_model, dtype=torch.bfloat16)
    drawn = sample(engine, prompts(engine) * 4, SamplingParams(max_tokens=12, seed=1))
    differences = torch.cat([(torch.tensor(g.logprobs) - scored(policy, g)).abs() for g in drawn])
    assert differences.mean() < 0.02
    assert differences.max() < 0.2


def test_a_request_draws_the_same_alone_and_in_company(policy: Policy) -> None:
    params = [SamplingParams(max_tokens=10, seed=index) for index in range(6)]
    together = sample(policy, prompts(policy), params, max_rows=6)
    for prompt, sampling, expected in zip(prompts(policy), params, together, strict=True):
        (alone,) = sample(policy, [prompt], sampling, max_rows=1)
        assert alone.tokens == expected.tokens
        assert alone.logprobs == pytest.approx(expected.logprobs, abs=1e-5)


def test_sequences_join_and_leave_between_steps_and_more_wait_than_fit(policy: Policy) -> None:
    decoder = Decoder(policy, max_rows=2, chunk=16)
    params = [SamplingParams(max_tokens=3 + 4 * (index % 3), seed=index) for index in range(7)]
    generations = [decoder.submit(prompt, each) for prompt, each in zip(prompts(policy, 7), params, strict=True)]
    while decoder.busy:
        decoder.step()
    for generation, each in zip(generations, params, strict=True):
        (alone,) = sample(policy, [generation.prompt], each)
        assert generation.tokens == alone.tokens
        assert torch.allclose(torch.tensor(generation.logprobs), scored(policy, generation), atol=2e-5)


def test_rows_with_other_parameters_share_a_batch(policy: Policy) -> None:
    asked = [(1.0, 1.0, 0), (0.5, 1.0, 0), (1.0, 0.6, 0), (0.0, 1.0, 0), (1.0, 1.0, 3), (1.0, 0.6, 3)]
    params = [SamplingParams(max_tokens=8, seed=5, temperature=t, top_p=p, top_k=k) for t, p, k in asked]
    for generation in sample(policy, prompts(policy, 6), params):
        assert torch.allclose(torch.tensor(generation.logprobs), scored(policy, generation), atol=2e-5)


def test_a_cancelled_sequence_frees_its_row_and_disturbs_nobody(policy: Policy) -> None:
    decoder = Decoder(policy, max_rows=3, chunk=8)
    kept, gone, filling, waiting = [decoder.submit(prompt, SamplingParams(max_tokens=9, seed=2)) for prompt in prompts(policy, 4)]
    while not gone.tokens:
        decoder.step()
    for generation in (gone, filling, waiting):
        decoder.cancel(generation, FinishReason.ABORTED)
    while decoder.busy:
        decoder.step()
    (alone,) = sample(policy, [kept.prompt], SamplingParams(max_tokens=9, seed=2))
    assert kept.tokens == alone.tokens
    assert [g.finish_reason for g in (gone, filling, waiting)] == [FinishReason.ABORTED] * 3
    assert decoder.load == 0


def test_the_end_token_is_recorded_but_not_shown(policy: Policy) -> None:
    ended = [
        g for g in sample(policy, prompts(policy) * 8, SamplingParams(max_tokens=60, seed=None)) if g.finish_reason is FinishReason.STOP
    ]
    assert ended
    assert all(g.tokens[-1] == END and END not in g.tokens[:-1] for g in ended)
    assert all(g.text == policy.chat.decode(g.tokens) and "<|im_end|>" not in g.text for g in ended)


def test_a_stop_string_ends_the_completion_before_it(policy: Policy) -> None:
    for generation in sample(policy, prompts(policy) * 4, SamplingParams(max_tokens=40, seed=3, stop=("return", "= 0"))):
        assert "return" not in generation.text
        assert "= 0" not in generation.text
        whole = policy.chat.decode(generation.tokens)
        assert whole.startswith(generation.text)


def test_greedy_takes_the_most_probable_token_with_certainty(policy: Policy) -> None:
    first, second = sample(policy, prompts(policy, 1) * 2, SamplingParams(max_tokens=6, temperature=0.0))
    assert first.tokens == second.tokens
    assert first.logprobs == [0.0] * len(first.tokens)


def test_the_context_bounds_the_completion_and_a_longer_prompt_is_refused(policy: Policy) -> None:
    (generation,) = sample(policy, [[5] * (CONTEXT - 3)], SamplingParams(max_tokens=50, seed=1, temperature=0.5))
    assert len(generation.tokens) <= 3
    with pytest.raises(BadRequest, match="shorten the conversation") as refused:
        Decoder(policy).submit([5] * CONTEXT, SamplingParams())
    assert refused.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("params", "name"),
    [
        (SamplingParams(temperature=-0.01), "temperature"),
        (SamplingParams(temperature=100.1), "temperature"),
        (SamplingParams(temperature=float("nan")), "temperature"),
        (SamplingParams(top_p=0.0), "top_p"),
        (SamplingParams(top_p=1.001), "top_p"),
        (SamplingParams(top_k=-1), "top_k"),
        (SamplingParams(max_tokens=0), "max_tokens"),
    ],
)
def test_parameters_out_of_range_are_refused_by_name(policy: Policy, params: SamplingParams, name: str) -> None:
    with pytest.raises(BadRequest, match=name) as refused:
        Decoder(policy).submit([5], params)
    assert refused.value.param == name


def test_a_prompt_that_was_fed_before_is_not_fed_again_and_samples_the_same(policy: Policy) -> None:
    decoder = Decoder(policy, max_rows=2, chunk=16, prompt_cache_bytes=1 << 20)
    drawn: list[Generation] = []
    for _ in range(3):  # one after the other: nothing resident to share with
        for seed, prompt in enumerate(prompts(policy, 3)):
            drawn.append(decoder.submit(prompt, SamplingParams(max_tokens=8, seed=seed)))
            while decoder.busy:
                decoder.step()
    assert decoder._prompts.hits == 6
    for first, second in zip(drawn[:3], drawn[3:6], strict=True):
        assert first.tokens == second.tokens
        assert torch.allclose(torch.tensor(second.logprobs), scored(policy, second), atol=2e-5)
    decoder.close()


def test_the_prompt_cache_keeps_to_its_room(policy: Policy) -> None:
    # a prompt of n tokens takes n · 2 layers · 2 (keys, values) · 2 heads · 32 · 4 bytes = n kB
    decoder = Decoder(policy, prompt_cache_bytes=100_000)
    for prompt in [[5] * 40, [6] * 40, [7] * 40, [8] * 60]:  # 40, 40 and 40 kB: the third drives the first out; 60 is more than half
        decoder.submit(prompt, SamplingParams(max_tokens=1, seed=1))
        while decoder.busy:
            decoder.step()
    assert [decoder._prompts.find([token] * 39) is not None for token in (5, 6, 7)] == [False, True, True]
    assert decoder._prompts.find([8] * 59) is None


def test_finished_sequences_are_counted_for_the_progress_bar(policy: Policy) -> None:
    heard: list[int] = []
    sample(policy, prompts(policy), SamplingParams(max_tokens=5, seed=1), max_rows=2, on_done=heard.append)
    assert heard[-1] == 6
    assert heard == sorted(heard)


def test_the_cache_is_given_back_when_nothing_is_left_to_do(policy: Policy) -> None:
    decoder = Decoder(policy)
    decoder.submit(prompts(policy)[0], SamplingParams(max_tokens=2, seed=1))
    decoder.step()
    assert decoder._cache.nbytes > 0
    while decoder.busy:
        decoder.step()
    assert decoder._cache.nbytes == 0


def test_room_of_a_long_sequence_is_given_up_when_it_leaves_and_the_others_sample_on(policy: Policy) -> None:
    decoder, alone = Decoder(policy), Decoder(policy)
    short, params = prompts(policy)[0], SamplingParams(max_tokens=12, seed=3)
    staying = decoder.submit(short, params)
    decoder.step()
    decoder.submit([7] * 520, SamplingParams(max_tokens=1, seed=1))  # fed in three steps, gone after the third
    widest = 0
    while decoder.load > 1:
        decoder.step()
        widest = max(widest, decoder._cache.nbytes)
    assert widest == bytes_of(rows=2, tokens=512)
    assert decoder._cache.nbytes == bytes_of(rows=2, tokens=GROW_TOKENS)
    expected = alone.submit(short, params)
    for each in (decoder, alone):
        while each.busy:
            each.step()
    assert staying.tokens == expected.tokens
    assert staying.logprobs == pytest.approx(expected.logprobs, abs=2e-5)


def bytes_of(*, rows: int, tokens: int) -> int:
    """Keys and values in two layers, two heads of 32 numbers of four bytes."""
    return 2 * 2 * 2 * 32 * 4 * rows * tokens


# --- steps by hand ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [SamplingParams(temperature=100.0), SamplingParams(top_p=1e-9), SamplingParams(max_tokens=1)])
def test_parameters_at_their_very_bounds_are_taken(policy: Policy, params: SamplingParams) -> None:
    assert Decoder(policy).submit([5], params).max_tokens == params.max_tokens


def test_a_prompt_that_leaves_room_for_one_token_is_taken_and_one_of_nothing_is_not(policy: Policy) -> None:
    assert Decoder(policy).submit([5] * (CONTEXT - 1), SamplingParams()).max_tokens == 1
    assert Decoder(policy).submit([5] * (CONTEXT - 7), SamplingParams(max_tokens=7)).max_tokens == 7
    with pytest.raises(BadRequest, match="the prompt has 0"):
        Decoder(policy).submit([], SamplingParams())


@pytest.mark.parametrize(
    ("prompt", "completion", "why"),
    [
        ([], [5], "give at least one of each"),
        ([5], [], "give at least one of each"),
        ([5] * (CONTEXT - 1), [5, 5], "2048 in all at most"),
        ([5, 512], [5], "outside the model's vocabulary of 512"),
        ([5], [-1], "outside the model's vocabulary"),
    ],
)
def test_what_could_not_have_been_sampled_here_is_not_scored(policy: Policy, prompt: list[int], completion: list[int], why: str) -> None:
    with pytest.raises(BadRequest, match=why):
        Decoder(policy).score(prompt, completion, temperature=1.0, top_p=1.0)


def test_the_whole_context_and_the_whole_vocabulary_are_scored(policy: Policy) -> None:
    assert len(Decoder(policy).score([0] * (CONTEXT - 1), [511], temperature=1.0, top_p=1.0)) == 1


@pytest.mark.parametrize("length", [1, 64, 65, 200])
def test_a_completion_is_scored_a_few_positions_at_a_time_as_if_it_were_scored_whole(policy: Policy, length: int) -> None:
    completion, rows = [(7 * n) % 512 for n in range(length)], list[int]()
    decoder = Decoder(policy)
    whole_TV = decoder._head(decoder.read([5, 6, *completion[:-1]])[1:]).float()
    hook = decoder._head.register_forward_pre_hook(lambda _, given: rows.append(len(given[0])))
    found = decoder.score([5, 6], completion, temperature=0.7, top_p=0.9, top_k=40)
    hook.remove()
    wanted = nucleus_logprobs(whole_TV, temperature=0.7, top_p=0.9, top_k=40)[range(length), completion]
    assert found == pytest.approx(wanted.tolist(), abs=1e-5)
    assert (sum(rows), max(rows)) == (length, min(64, length))


def steps_of(decoder: Decoder, *lengths: int, different: bool = True, tokens: int = 1) -> list[int]:
    """How many answers each step continues, of prompts that long."""
    for number, length in enumerate(lengths):
        decoder.submit([10 + number * different] * length, SamplingParams(max_tokens=tokens, seed=1))
    found: list[int] = []
    while decoder.busy:
        found.append(len(decoder.step()))
    return found


@pytest.mark.parametrize(
    ("chunk", "lengths", "steps"),
    [(4, [10], [0, 0, 1]), (5, [10], [0, 1]), (10, [4, 4, 4], [2, 1]), (12, [4, 4, 4], [3]), (11, [4, 4, 4], [2, 1])],
)
def test_a_step_feeds_so_many_tokens_of_prompts_whoevers_they_are(policy: Policy, chunk: int, lengths: list[int], steps: list[int]) -> None:
    assert steps_of(Decoder(policy, chunk=chunk), *lengths) == steps


def test_two_hundred_and_fifty_six_tokens_of_prompts_are_fed_a_step_and_sixteen_answers_written_at_once(policy: Policy) -> None:
    assert steps_of(Decoder(policy), 256) == [1]
    assert steps_of(Decoder(policy), 257) == [0, 1]
    assert steps_of(Decoder(policy), *[2] * 17) == [16, 1]


def test_what_was_fed_is_counted_and_a_beginning_that_two_prompts_share_is_fed_once(policy: Policy) -> None:
    decoder = Decoder(policy, draft_rows=0, max_rows=3)
    steps_of(decoder, 10, tokens=3)
    fed = decoder.fed
    assert decoder.prompted == 10
    assert 10 <= fed <= 12, "the first token is drawn from the prompt, and the last one is not fed"
    resident = decoder.submit([20] * 10, SamplingParams(max_tokens=50, seed=3))
    decoder.step()
    assert decoder.prompted == 20
    decoder.submit([20] * 10, SamplingParams(max_tokens=1, seed=1))
    decoder.step()
    assert decoder.prompted == 20, "all but its last token is known, which is fed beside the other's newest"
    assert resident.finish_reason is None
    decoder.submit([20] * 5 + [21] * 5, SamplingParams(max_tokens=1, seed=1))
    decoder.step()
    assert decoder.prompted == 25
    assert (decoder.drafted, decoder.accepted) == (0, 0)


def test_load_is_what_was_submitted_and_is_not_finished(policy: Policy) -> None:
    decoder = Decoder(policy, max_rows=1, chunk=4)
    assert (decoder.busy, decoder.load, decoder.step()) == (False, 0, [])
    first, second = (decoder.submit([number] * 6, SamplingParams(max_tokens=2, seed=1)) for number in (10, 11))
    assert (decoder.busy, decoder.load) == (True, 2)
    decoder.step()
    assert decoder.load == 2, "one is being fed and one waits"
    decoder.cancel(second, FinishReason.ABORTED)
    assert decoder.load == 1
    decoder.cancel(first, FinishReason.ABORTED)
    decoder.cancel(first, FinishReason.STOP)
    assert (decoder.busy, decoder.load, first.finish_reason) == (False, 0, FinishReason.ABORTED)
