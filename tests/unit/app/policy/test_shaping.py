"""What a request's shape adds to the logits: the answer keeps to it, and whoever scores it later finds the very same distribution."""

import itertools
import json
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from app.domain.errors import BadRequest
from app.domain.telemetry.turns import FinishReason, Form, SamplingParams, Shape
from app.policy.chat import Chat
from app.policy.decoding.grammars import Grammars
from app.policy.decoding.sampling import Decoder, Generation
from app.policy.decoding.shaping import FORM_A_TOKEN_S, FORM_S, Bends, Shaper, changes_of, unpacked
from app.policy.model import Policy, load_grammars, load_policy
from app.policy.scoring.forward import token_logprobs
from app.policy.scoring.packing import ScoredSequence, pack
from app.policy.scoring.scorer import Cut, Scorer
from app.policy.tiny import VOCABULARY

PERSON = {
    "type": "object", "required": ["name", "age", "tags"], "additionalProperties": False,
    "properties": {
        "name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 0, "maximum": 9},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
}  # fmt: skip
CALL = {
    "type": "object", "required": ["name", "arguments"], "additionalProperties": False,
    "properties": {
        "name": {"const": "look"},
        "arguments": {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False},
    },
}  # fmt: skip
SHAPES = {
    "penalties": Shape(presence_penalty=0.9, frequency_penalty=-0.4),
    "bias": Shape(logit_bias={300: 12.0, 301: -100.0}),
    "json": Shape(form=Form(answer=PERSON)),
    "call": Shape(form=Form(call=CALL, many=True)),
    "either, and penalised": Shape(form=Form(answer=PERSON, call=CALL), frequency_penalty=0.3),
}


@pytest.fixture(scope="module")
def policy(tiny_model: Path) -> Policy:
    return load_policy(tiny_model, dtype=torch.float32)


@pytest.fixture(scope="module")
def scorer(tiny_model: Path) -> Scorer:
    from app.policy.model import load_model

    return Scorer(load_model(tiny_model, dtype=torch.float32), vocabulary_chunk=96)


def drawn(policy: Policy, shape: Shape | None, *, likely: int | None = None, **sampling: float) -> list[Generation]:
    decoder = Decoder(policy, max_rows=4)
    prompt = policy.chat.prompt([{"role": "user", "content": "def f(x):"}])
    asked = [SamplingParams(**{"max_tokens": 60, **sampling}, seed=seed) for seed in range(4)]  # type: ignore[arg-type]
    rows = [decoder.submit(prompt, params, likely=likely, processor=shape and Shaper.of(shape, policy)) for params in asked]
    rows.append(decoder.submit(prompt, SamplingParams(max_tokens=8, seed=9)))  # company without a shape
    while decoder.busy:
        decoder.step()
    decoder.close()
    return rows


def scored(scorer: Scorer, grammars: Grammars, rows: list[Generation], shapes: list[Shape | None]) -> tuple[torch.Tensor, torch.Tensor]:
    row = pack([ScoredSequence(tokens=(*r.prompt, *r.tokens), first_scored=len(r.prompt)) for r in rows], share_prefixes=True)
    bends, at = Bends(), 0
    for generation, shape in zip(rows, shapes, strict=True):
        bends.add(shape, generation.tokens, grammars, at=at)
        at += len(generation.tokens)
    temperature = torch.tensor([r.sampling.temperature for r in rows for _ in r.tokens])
    top_p = torch.tensor([r.sampling.top_p for r in rows for _ in r.tokens])
    top_k = torch.tensor([r.sampling.top_k or 0 for r in rows for _ in r.tokens])
    scores = scorer(row, temperature, torch.float32, Cut(top_p_M=top_p, top_k_M=top_k), bends.on(torch.device("cpu")))
    assert scores.kept_log_mass is not None
    return scores.logprobs, scores.kept_log_mass


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(("temperature", "top_p", "top_k"), [(1.0, 1.0, 0), (0.8, 0.9, 0), (0.9, 0.8, 6)])
def test_a_turn_is_scored_under_the_distribution_it_was_drawn_from(
    policy: Policy, scorer: Scorer, tiny_model: Path, name: str, temperature: float, top_p: float, top_k: int
) -> None:
    rows = drawn(policy, SHAPES[name], temperature=temperature, top_p=top_p, top_k=top_k)
    found, kept = scored(scorer, load_grammars(tiny_model), rows, [SHAPES[name]] * 4 + [None])
    logged = torch.tensor([value for row in rows for value in row.logprobs])
    assert torch.allclose(found - kept, logged, atol=5e-5)
    plain, _ = scored(scorer, policy.grammars, rows, [None] * 5)
    assert (plain - logged).abs().max() > 0.1  # the shape matters


def test_an_answer_keeps_to_its_schema_and_ends_when_it_is_whole(policy: Policy) -> None:
    for row in drawn(policy, SHAPES["json"])[:4]:
        said = json.loads(row.text)
        assert row.finish_reason is FinishReason.STOP
        assert set(said) == {"name", "age", "tags"}
        assert 0 <= said["age"] <= 9
        assert set(said["tags"]) <= {"a", "b"}


def test_a_forced_call_is_written_in_the_marks_of_tool_calls(policy: Policy) -> None:
    for row in drawn(policy, Shape(form=Form(call=CALL)))[:4]:
        inside = row.text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
        assert json.loads(inside)["name"] == "look"
        assert row.finish_reason is FinishReason.STOP


def test_the_gradient_of_what_the_form_forced_is_zero(policy: Policy, scorer: Scorer) -> None:
    """Under its own distribution a token without an alternative has probability 1, whatever the weights."""
    shape = Shape(form=Form(answer={"const": {"a": 1}}))
    (row, *_) = drawn(policy, shape)
    assert sum(row.logprobs) > -3.0  # only how the text is cut into tokens was free
    forced = [place for place, logprob in enumerate(row.logprobs) if logprob > -1e-7]
    assert forced
    found, _ = scored(scorer, policy.grammars, [row], [shape])
    scorer.zero_grad()
    found[forced].sum().backward()
    assert all(p.grad is None or p.grad.abs().max() == 0 for p in scorer.parameters())


def test_penalties_and_biases_move_the_logits_as_openai_defines_it(policy: Policy) -> None:
    rows = drawn(policy, SHAPES["bias"])
    assert all(301 not in row.tokens for row in rows[:4])
    (row, *_) = drawn(policy, SHAPES["penalties"])
    with torch.no_grad():
        for place in range(1, len(row.tokens)):
            before = torch.tensor([[*row.prompt, *row.tokens[:place]]])
            logits = policy.model(before).logits[0, -1].float()
            for token in set(row.tokens[:place]):
                logits[token] -= 0.9 + -0.4 * row.tokens[:place].count(token)
            assert float(logits.log_softmax(-1)[row.tokens[place]]) == pytest.approx(row.logprobs[place], abs=5e-5)


def test_the_likeliest_tokens_are_those_of_the_sampled_distribution(policy: Policy) -> None:
    rows = drawn(policy, SHAPES["call"], likely=3)
    for row in rows[:4]:
        for place, (itself, *others) in enumerate(row.likely):
            assert (itself.token, itself.logprob) == (row.tokens[place], row.logprobs[place])
            assert [o.logprob for o in others] == sorted((o.logprob for o in others), reverse=True)
            assert sum(2.718281828**o.logprob for o in others) <= 1.0001
        said = b"".join(itself.piece or b"" for itself, *_ in row.likely)
        assert said.decode().removesuffix("<|im_end|>") == row.text
    assert not rows[4].likely
    plain = token_logprobs(policy.model, rows[4].prompt, rows[4].tokens)
    assert torch.allclose(plain, torch.tensor(rows[4].logprobs), atol=5e-5)


@pytest.mark.parametrize(
    ("shape", "param"),
    [
        (Shape(logit_bias={VOCABULARY: 1.0}), "logit_bias"),
        (Shape(form=Form(answer={"type": "object", "not": {}})), "response_format"),
        (Shape(form=Form(answer={"allOf": [{"multipleOf": 37}, {"multipleOf": 41}]})), "response_format"),
        (Shape(form=Form(call={"properties": {"n": {"type": "number", "multipleOf": 0.001}}})), "response_format"),
    ],
)
def test_what_the_model_cannot_keep_to_is_refused_with_the_reason(policy: Policy, shape: Shape, param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        Shaper.of(shape, policy)
    assert refused.value.param == param


def optional(count: int, name: str = "p") -> dict[str, object]:
    return {"type": "object", "properties": {f"{name}{i}": {"type": "integer"} for i in range(count)}}


HOSTILE: dict[str, dict[str, object]] = {
    "many words": {"enum": [f"{i:05d}" for i in range(5_000)]},
    "words that begin alike": {"enum": ["a" * i for i in range(1, 300)]},
    "optional letters": {"type": "string", "pattern": "^(a?){300}a{300}$"},
    "letters far from the end": {"type": "string", "pattern": "^(a|b)*a(a|b){18}$"},
    "counts of counts": {"type": "string", "pattern": "^((a{1,50}){1,50}){1,50}$"},
    "a long text": {"type": "string", "minLength": 50_000, "maxLength": 100_000},
    "optional properties": {"anyOf": [optional(250, f"p{j}x") for j in range(8)]},
    "patterns everywhere": {"type": "object", "properties": {f"p{i}": {"type": "string", "pattern": f"^.*{i}.*$"} for i in range(250)}},
    "objects alike": {"anyOf": [{"required": ["a", f"p{i}"], **optional(1, "a")} for i in range(500)]},
    "lists of lists of themselves": {
        "$defs": {
            f"n{k}": {"type": "array", "items": {"anyOf": [{"$ref": f"#/$defs/n{(k * 7 + j) % 40}"} for j in range(40)]}} for k in range(40)
        },
        "$ref": "#/$defs/n0",
    },
}


@pytest.mark.parametrize("what", HOSTILE)
def test_the_worst_forms_found_are_refused_or_followed_within_what_an_answer_may_take(policy: Policy, what: str) -> None:
    """Bounds in the processor's time of this thread, far above what was measured: what has none took a minute, or all of the memory."""
    form, began = Form(answer=HOSTILE[what]), time.thread_time()
    try:
        policy.grammars.prepare(form)
    except BadRequest:
        return
    assert time.thread_time() - began < 5
    decoder = Decoder(policy, max_rows=4)
    shape, prompt = Shape(form=form), policy.chat.prompt([{"role": "user", "content": "x"}])
    beside = decoder.submit(prompt, SamplingParams(max_tokens=8, seed=1))
    answer = decoder.submit(prompt, SamplingParams(max_tokens=40, seed=2), processor=Shaper.of(shape, policy))
    began = time.thread_time()
    while decoder.busy:
        decoder.step()
    decoder.close()
    assert time.thread_time() - began < FORM_S + 40 * FORM_A_TOKEN_S + 5
    assert (len(beside.tokens), beside.finish_reason is FinishReason.ERROR) == (8, False), "company is answered"
    assert answer.finish_reason is not None


def test_an_answer_whose_form_takes_too_much_work_ends_and_nobody_else_s_does(policy: Policy) -> None:
    """11 ms a mask: the one after 35 tokens makes .396 s, and .25 + 35 x .004 = .390 are allowed; the one before .385 of .386."""
    now = itertools.count()
    slow = Shaper(Shape(form=Form(answer={"type": "string", "minLength": 200})), policy.grammars, vocabulary=policy.vocabulary,
                  clock=lambda: next(now) * 0.011)  # fmt: skip
    decoder, prompt = Decoder(policy, max_rows=4), policy.chat.prompt([{"role": "user", "content": "x"}])
    beside = decoder.submit(prompt, SamplingParams(max_tokens=80, seed=1))
    answer = decoder.submit(prompt, SamplingParams(max_tokens=80, seed=2), processor=slow)
    while decoder.busy:
        decoder.step()
    decoder.close()
    assert (answer.finish_reason, len(answer.tokens)) == (FinishReason.ERROR, 35)
    assert "takes too much work to follow" in (answer.fault or "")
    assert beside.finish_reason is not FinishReason.ERROR


def test_an_object_has_no_properties_that_its_schema_does_not_name(policy: Policy) -> None:
    inner = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    schema = {"$defs": {"i": inner}, "type": "object", "properties": {"a": {"$ref": "#/$defs/i"}}, "required": ["a"]}
    for row in drawn(policy, Shape(form=Form(answer=schema)))[:4]:
        assert json.loads(row.text)["a"].keys() == {"n"}
    parted = {"allOf": [inner, {"properties": {"m": {"enum": [3]}}, "required": ["m"]}], "additionalProperties": True}
    (row, *_) = drawn(policy, Shape(form=Form(answer=parted)), max_tokens=30)
    assert row.tokens, "properties that are named in several places do not exclude each other"


def test_tokens_that_a_form_does_not_allow_are_told_from_those_it_does(policy: Policy) -> None:
    form = Form(answer=PERSON)
    (row, *_) = drawn(policy, Shape(form=form))
    assert policy.grammars.allow(form, row.tokens)
    assert policy.grammars.allow(form, row.tokens[:-1])  # cut off by length
    assert not policy.grammars.allow(form, [*row.tokens, row.tokens[0]])
    assert not policy.grammars.allow(form, row.tokens[::-1])
    assert not policy.grammars.allow(Form(answer={"type": "object", "not": {}}), row.tokens)


def test_versions_of_one_tokenizer_share_what_took_seconds_to_make_and_another_vocabulary_does_not(tiny_model: Path) -> None:
    one, another = load_grammars(tiny_model), load_grammars(tiny_model)
    assert one is not another
    assert one.tokenizer is another.tokenizer
    chat, ends = Chat.load(tiny_model), frozenset({2})
    small = [Grammars(lambda: (chat, ends), vocabulary=one.tokenizer.vocab_size + more).tokenizer for more in (0, 0, 8)]
    assert small[0] is small[1] is not small[2]


# --- by hand -----------------------------------------------------------------------------------------------------------------------------


def test_a_bias_names_a_token_of_the_vocabulary(policy: Policy) -> None:
    for token in (0, VOCABULARY - 1):
        logits = Shaper.of(Shape(logit_bias={token: 2.0}), policy)(torch.zeros(VOCABULARY))
        assert (logits[token].item(), logits.abs().sum().item()) == (2.0, 2.0)
    for token in (-1, VOCABULARY):
        with pytest.raises(BadRequest, match=f"names the token {token}, and this model's are 0 to 511") as refused:
            Shaper.of(Shape(logit_bias={token: 2.0}), policy)
        assert refused.value.param == "logit_bias"


def test_penalties_are_of_what_was_drawn_how_often_and_whether(policy: Policy) -> None:
    shaper = Shaper.of(Shape(logit_bias={7: 1.0}, presence_penalty=0.5, frequency_penalty=0.25), policy)
    for token in (7, 8, 7):
        shaper.accept(token)
    logits = shaper(torch.zeros(VOCABULARY))
    assert (logits[7].item(), logits[8].item(), logits[9].item()) == (1.0 - 2 * 0.25 - 0.5, -0.25 - 0.5, 0.0)
    assert not shaper.is_done
    assert changes_of(Shape(frequency_penalty=0.5), Counter({3: 2})) == {3: -1.0}
    assert changes_of(Shape(presence_penalty=0.5), Counter({3: 2})) == {3: -0.5}
    assert changes_of(Shape(logit_bias={3: 1.0}), Counter({3: 2})) == {3: 1.0}


@pytest.mark.parametrize(("start", "stop"), [(0, 64), (0, 31), (31, 33), (32, 64), (5, 40), (63, 64), (64, 70)])
def test_bits_are_unpacked_from_any_token_to_any_other(start: int, stop: int) -> None:
    allowed = {0, 5, 31, 32, 39, 63, 64, 69}
    words = torch.tensor([[sum(1 << token % 32 for token in allowed if token // 32 == word) for word in range(3)]])
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    assert unpacked(words, start, stop)[0].tolist() == [token in allowed for token in range(start, stop)]


def test_of_all_bends_those_of_these_rows_and_this_part_of_the_vocabulary_are_added(policy: Policy) -> None:
    bends = Bends()
    bends.add(None, [1, 2], policy.grammars, at=0)
    assert bends.on(torch.device("cpu")) is None
    bends.add(Shape(logit_bias={4: 1.0, 8: 2.0}, presence_penalty=0.5), [4, 9, 4], policy.grammars, at=2)
    made = bends.on(torch.device("cpu"))
    assert made is not None
    whole = made.bend(torch.zeros(6, 12))
    assert whole[:2].abs().sum().item() == whole[5].abs().sum().item() == 0.0
    assert [whole[2, 4].item(), whole[3, 4].item(), whole[4, 4].item()] == [1.0, 0.5, 0.5]
    assert [whole[2, 9].item(), whole[3, 9].item(), whole[4, 9].item()] == [0.0, 0.0, -0.5]
    for first, count, start, width in ((2, 1, 4, 1), (3, 2, 4, 5), (0, 3, 8, 4), (4, 2, 0, 9), (3, 1, 5, 4)):
        part = made.bend(torch.zeros(count, width), start=start, first=first)
        assert torch.equal(part, whole[first : first + count, start : start + width])


def test_under_a_mask_what_may_not_be_drawn_is_far_below_everything_in_its_rows_alone(policy: Policy) -> None:
    (row, *_) = drawn(policy, SHAPES["json"])
    bends = Bends()
    bends.add(SHAPES["json"], row.tokens, policy.grammars, at=1)
    made, count = bends.on(torch.device("cpu")), len(row.tokens)
    assert made is not None
    whole = made.bend(torch.zeros(count + 2, VOCABULARY))
    assert whole[0].abs().sum().item() == whole[-1].abs().sum().item() == 0.0
    assert [whole[1 + place, token].item() for place, token in enumerate(row.tokens)] == [0.0] * count
    assert set(whole[1:-1].unique().tolist()) == {0.0, float(torch.tensor(-1e30))}
    part = made.bend(torch.zeros(2, 40), start=33, first=1)
    assert torch.equal(part, whole[1:3, 33:73])
    with pytest.raises(ValueError, match="does not allow its own tokens"):
        bends.add(SHAPES["json"], row.tokens[::-1], policy.grammars, at=0)


@pytest.mark.parametrize(
    ("divisors", "is_taken"),
    [((1000,), True), ((1001,), False), ((10, 100), True), ((10, 101), False), ((0.5,), False), ((2.0,), True), ((1, 1, 1000), True)],
)
def test_divisors_come_to_a_thousand_remainders_at_most(policy: Policy, divisors: tuple[float, ...], is_taken: bool) -> None:
    properties = {f"p{number}": {"type": "integer", "multipleOf": divisor} for number, divisor in enumerate(divisors)}
    form = Form(answer={"type": "array", "items": [{"type": "object", "properties": properties}]})
    if is_taken:
        policy.grammars.prepare(form)
    else:
        with pytest.raises(BadRequest, match="more than 1000 remainders") as refused:
            policy.grammars.prepare(form)
        assert refused.value.param == "response_format"
