"""Packed rows score exactly as the sequences do one by one, and so do their gradients."""

import copy
import random
from collections.abc import Sequence

import pytest
import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from app.policy.scoring.chunked_logprobs import chunked_logprobs
from app.policy.scoring.packed_attention import attends_in
from app.policy.scoring.packing import PackedRow, ScoredSequence, pack
from app.policy.scoring.scorer import Scorer

VOCABULARY = 96


def llama() -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        initializer_range=0.2, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def qwen3_moe() -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_experts=8,  # pyright: ignore[reportCallIssue] - a field of its superclass
        num_experts_per_tok=2, initializer_range=0.2,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config)


def deepseek_v3() -> PreTrainedModel:
    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, n_routed_experts=8, num_experts_per_tok=2, n_group=2, topk_group=1, first_k_dense_replace=1, q_lora_rank=16,
        kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, initializer_range=0.2,
    )  # fmt: skip
    return DeepseekV3ForCausalLM(config)


def chains() -> list[ScoredSequence]:
    """A system prompt that all share, chains whose turns contain the earlier ones, two answers to one prompt, twins, and a stranger."""
    numbers = random.Random(0)

    def some(count: int) -> tuple[int, ...]:
        return tuple(numbers.randrange(VOCABULARY) for _ in range(count))

    system, prompt = some(12), some(9)
    first = system + some(10)
    second = first + some(4) + some(11)
    return [
        ScoredSequence(tokens=first, first_scored=len(system) + 3),
        ScoredSequence(tokens=second, first_scored=len(first) + 4),
        ScoredSequence(tokens=system + prompt + some(5), first_scored=len(system + prompt)),
        ScoredSequence(tokens=system + prompt + some(7), first_scored=len(system + prompt)),
        ScoredSequence(tokens=first, first_scored=len(system) + 3),
        ScoredSequence(tokens=some(1) + some(3), first_scored=1),
    ]


def alone(model: PreTrainedModel, sequences: Sequence[ScoredSequence]) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies the plain way: one sequence at a time, whole logits."""
    logprobs: list[torch.Tensor] = []
    entropies: list[torch.Tensor] = []
    for sequence in sequences:
        rows = model(torch.tensor([sequence.tokens])).logits[0, sequence.first_scored - 1 : -1].float().log_softmax(-1)
        logprobs.append(rows.gather(1, torch.tensor(sequence.tokens[sequence.first_scored :])[:, None])[:, 0])
        entropies.append(-(rows.exp() * rows).sum(1))
    return torch.cat(logprobs), torch.cat(entropies)


def packed(model: PreTrainedModel, row: PackedRow, chunk: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    scores = Scorer(model, vocabulary_chunk=chunk)(row, torch.ones(len(row.targets)))
    return scores.logprobs, scores.entropy


@pytest.mark.parametrize("share_prefixes", [True, False])
@pytest.mark.parametrize("make", [llama, qwen3_moe, deepseek_v3])
def test_packed_equals_unpacked(make: "type[PreTrainedModel]", share_prefixes: bool) -> None:
    plain = make()  # type: ignore[call-arg]
    model = copy.deepcopy(plain)
    sequences = chains()
    weights = torch.linspace(-1, 1, sum(len(s.tokens) - s.first_scored for s in sequences))
    logprobs, entropy = packed(model, pack(sequences, share_prefixes=share_prefixes))
    (logprobs * weights).sum().backward()
    expected, expected_entropy = alone(plain, sequences)
    (expected * weights).sum().backward()
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy, expected_entropy.detach(), atol=1e-5, rtol=1e-5)
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        if theirs.grad is not None:
            assert ours.grad is not None, name
            torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-5, rtol=1e-4, msg=name)


def test_what_is_shared_is_computed_once() -> None:
    # system 12 + chain 10 + 15 | system + prompt 9 + 5 and 7 | twin of the first 0 | stranger 4 → 12+10+15+9+5+7+4 = 62 tokens of 139
    row = pack(chains())
    assert len(row.input_ids) == 62
    assert sum(len(s.tokens) for s in chains()) == 22 + 37 + 26 + 28 + 22 + 4
    assert len(pack(chains(), share_prefixes=False).input_ids) == 139


def test_short_common_beginnings_are_not_worth_a_node() -> None:
    # 3 shared tokens of two sequences save 3 < 8
    row = pack([ScoredSequence(tokens=(1, 2, 3, 4), first_scored=3), ScoredSequence(tokens=(1, 2, 3, 5), first_scored=3)])
    assert len(row.nodes) == 2
    assert all(not node.ancestors for node in row.nodes)


def test_a_sequence_cannot_see_another() -> None:
    model = llama()
    mine = ScoredSequence(tokens=tuple(range(20)), first_scored=10)
    before, _ = packed(model, pack([mine, ScoredSequence(tokens=tuple(range(40, 60)), first_scored=5)]))
    after, _ = packed(model, pack([mine, ScoredSequence(tokens=tuple(range(60, 90)), first_scored=7)]))
    assert torch.equal(before[:10], after[:10])


def test_nothing_to_score_before_the_first_token() -> None:
    with pytest.raises(ValueError, match="first_scored is 0"):
        pack([ScoredSequence(tokens=(1, 2), first_scored=0)])


@pytest.mark.parametrize("chunk", [1, 7, 50, 1000])
def test_chunks_of_any_size_agree_with_whole_logits(chunk: int) -> None:
    torch.manual_seed(1)
    hidden, weight = torch.randn(6, 8, requires_grad=True), torch.randn(50, 8, requires_grad=True)
    targets, temperature = torch.randint(50, (6,)), torch.tensor([1.0, 0.5, 2.0, 1.0, 0.7, 1.3])
    logprobs, entropy = chunked_logprobs(hidden, weight, targets, temperature, chunk=chunk)
    gradient = torch.autograd.grad((logprobs * torch.arange(6.0)).sum(), (hidden, weight))
    rows = (hidden @ weight.t() / temperature[:, None]).log_softmax(-1)
    expected = rows.gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected)
    torch.testing.assert_close(entropy, -(rows.exp() * rows).sum(1).detach())
    for ours, theirs in zip(gradient, torch.autograd.grad((expected * torch.arange(6.0)).sum(), (hidden, weight)), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_huge_logits_do_not_overflow() -> None:
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[3e4], [-3e4], [2.9999e4]])
    logprobs, entropy = chunked_logprobs(hidden, weight, torch.tensor([2]), torch.ones(1), chunk=1)
    # log p = 29999 - 30000 - log(1 + e^-1) = -1.3133
    assert logprobs.item() == pytest.approx(-1.31326, abs=1e-3)
    assert torch.isfinite(entropy).all()


def test_on_a_gpu_attention_is_computed_in_the_dtype_of_its_values() -> None:
    # `meta` stands for any device but the processor: under autocast queries and keys come out of their rotation in float32, values do not
    assert attends_in(torch.empty(1, 2, 8, 64, dtype=torch.bfloat16, device="meta")) is torch.bfloat16
    assert attends_in(torch.empty(1, 2, 8, 64, dtype=torch.bfloat16)) is torch.float32
