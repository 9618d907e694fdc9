"""What a vLLM server's words mean: its refusals as errors of ours, whose weights sampled, what it holds."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from app.domain.errors import BadRequest, NotFound, Overloaded, RatchetError, Unavailable
from app.domain.telemetry.serving import Likely
from app.domain.telemetry.turns import Form, SamplingParams
from app.serving.servers.held import Place, held_of, is_digest, other_weights
from app.serving.servers.sglang import Sglang
from app.serving.servers.vllm import Vllm, chunk_of, sampling_body
from app.serving.servers.wire import aborted, events, gone, masked, schema_of

ASKED, OTHER = "a" * 64, "b" * 64


def said(status: int, body: Any, **headers: str) -> RatchetError:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Vllm().refusal("http://v", status, content, {name.replace("_", "-"): value for name, value in headers.items()})


@pytest.mark.parametrize(
    ("status", "body", "kind", "words"),
    [
        (400, {"error": {"message": "bad stop"}}, BadRequest, "bad stop"),
        (422, {"message": "no such field"}, BadRequest, "no such field"),
        (400, {"error": "flat"}, BadRequest, "flat"),
        (404, {"detail": "Not Found"}, NotFound, "use vLLM 0.32 or newer"),
        (404, {"error": {"message": "the model `x` does not exist"}}, Unavailable, "the model `x` does not exist"),
        (500, b"<html>oops", Unavailable, "vLLM at http://v answered 500"),
        (502, [1], Unavailable, "vLLM at http://v answered 502"),
    ],
)
def test_a_refusal_is_whose_fault_it_is_in_the_servers_own_words(status: int, body: Any, kind: type[RatchetError], words: str) -> None:
    error = said(status, body)
    assert type(error) is kind
    assert words in str(error)


def test_a_prompt_that_is_too_long_is_told_apart_from_other_bad_requests() -> None:
    long, bad = (said(400, {"message": text}) for text in ("exceeds the maximum context length of 8", "bad stop"))
    assert isinstance(long, BadRequest)
    assert isinstance(bad, BadRequest)
    assert (long.code, bad.code) == ("context_length_exceeded", "invalid_request")


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ({"retry_after": "7"}, 7.0),
        ({}, 1.0),
        ({"retry_after": "Wed, 21 Oct 2026 07:28:00 GMT"}, 1.0),
        ({"retry_after": "nan"}, 1.0),
        ({"retry_after": "9" * 400}, 1.0),
    ],
)
def test_a_full_server_says_when_to_come_back_and_a_date_of_a_proxys_breaks_nothing(header: dict[str, str], seconds: float) -> None:
    error = said(429, {"message": "full"}, **header)
    assert isinstance(error, Overloaded)
    assert error.retry_after_s == seconds


def test_tokens_of_other_weights_than_asked_for_are_noticed() -> None:
    def of(*spans: tuple[str, int]) -> str | None:
        return other_weights([{"version": version, "start": start} for version, start in spans], asked=ASKED)

    assert of((ASKED, 0)) is None
    assert other_weights(None, asked=ASKED) is other_weights([{"version": OTHER, "start": 0}], asked=None) is None
    assert of((OTHER, 0)) == f"sampled by the weights {OTHER[:12]}, not by {ASKED[:12]}: the server's weights were replaced before it began"
    both = f"({ASKED[:12]} from token 0, {OTHER[:12]} from token 5)"
    assert of((ASKED, 0), (OTHER, 5)) == f"sampled by more than one version {both}: the server's weights were replaced meanwhile"


def test_what_a_server_holds_is_its_base_and_adapters_and_one_without_a_base_is_none() -> None:
    held = held_of({"data": [{"id": ASKED, "parent": "base"}, {"id": "base"}]}, "v", url="http://v")
    assert (held.base, held.version, held.adapters) == ("base", "v", frozenset({ASKED}))
    with pytest.raises(Unavailable, match="http://v/v1/models names no base model"):
        held_of({}, None, url="http://v")
    assert (is_digest(ASKED), is_digest("base"), is_digest("A" * 64)) == (True, False, False)


METRICS = """# HELP vllm:num_requests_running Number of requests in model execution batches.
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:generation_tokens_total{engine="0",model_name="m"} 700.0
vllm:generation_tokens_total{engine="1",model_name="m"} 300.0
vllm:spec_decode_num_draft_tokens_total{engine="0"} 40.0
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 30.0
broken line
"""


def test_a_server_is_seen_by_its_metrics_summed_over_its_engines() -> None:
    seen = Vllm().sight("http://v", METRICS)
    assert (seen.address, seen.answers) == ("http://v", True)
    assert seen.queue == 6, "four that run and two that wait"
    assert (seen.sampled_tokens, seen.acceptance) == (1000, 0.75)


def test_what_a_server_does_not_tell_is_not_known() -> None:
    nothing = Vllm().sight("http://v", "up 1\n")
    assert (nothing.queue, nothing.sampled_tokens, nothing.acceptance) == (None, None, None)
    assert Vllm().sight("http://v", "vllm:num_requests_running 3\n").queue is None, "half of a queue is none"
    assert Vllm().sight("http://v", "vllm:num_requests_waiting 3\n").queue is None
    assert Vllm().sight("http://v", "vllm:spec_decode_num_draft_tokens_total 4\n").acceptance == 0.0


def test_a_text_is_scored_as_a_prompt_of_which_one_token_more_is_sampled() -> None:
    place = Place(url="http://v", model="m", label=None)
    assert Vllm().scoring(place, (7, 8)) == (
        "/v1/completions", {"model": "m", "prompt": [7, 8], "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0},
    )  # fmt: skip
    places = [None, {"8": {"logprob": -1.5}, "9": {"logprob": -0.1}}, {"9": {"logprob": -0.25}}]
    assert Vllm().scored({"choices": [{"prompt_logprobs": places}]}, [7, 8, 9]) == [-1.5, -0.25]
    for missing in ([], places[:2], None):
        with pytest.raises(BadRequest, match="for 3 tokens: it cannot score here"):
            Vllm().scored({"choices": [{"prompt_logprobs": missing}]}, [7, 8, 9])


@pytest.mark.parametrize(("likely", "asked"), [(None, 0), (0, 0), (1, 2), (5, 6)])
def test_the_sampled_token_is_asked_for_beside_the_likeliest(likely: int | None, asked: int) -> None:
    body = sampling_body(SamplingParams(temperature=0.5, top_p=0.9, max_tokens=7, stop=("x",), seed=None), likely=likely, ignore_eos=True)
    assert body == {
        "temperature": 0.5, "top_p": 0.9, "max_tokens": 7, "stop": ["x"], "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0,
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "logprobs": asked, "ignore_eos": True,
    }  # fmt: skip
    assert sampling_body(SamplingParams(seed=0))["seed"] == 0


def choice(*logprobs: float, tokens: tuple[int, ...] = (1, 2), text: str = "ab") -> dict[str, Any]:
    named = [{"token": "x", "logprob": -3.0}, {"token": "y", "logprob": -1.0}, {"token": "é", "logprob": -2.0, "bytes": [195]}]
    content = [{"token": "a", "logprob": value, "top_logprobs": named} for value in logprobs]
    return {"token_ids": list(tokens), "text": text, "logprobs": {"content": content}}


def test_a_chunk_holds_tokens_and_log_probabilities_as_they_came_even_where_their_counts_differ() -> None:
    both = chunk_of(choice(-0.5, -1.5), logged=True)
    assert both is not None
    assert (both.tokens, both.logprobs, both.text, both.likely) == ([1, 2], [-0.5, -1.5], "ab", None)
    short = chunk_of(choice(-0.5), logged=True, likely=2)
    assert short is not None
    assert (short.tokens, short.logprobs, short.likely) == ([1, 2], [-0.5], None)
    doubted = chunk_of(choice(-0.5, -1.5), logged=False, likely=2)
    assert doubted is not None
    assert (doubted.logprobs, doubted.likely) == ([], None)
    assert chunk_of({"token_ids": [], "text": ""}, logged=True) is None
    assert chunk_of({"text": "late"}, logged=True) is not None
    assert chunk_of({"token_ids": [3]}, logged=True) is not None


def test_the_likeliest_are_ordered_and_cut_to_as_many_as_were_asked_for() -> None:
    chunk = chunk_of(choice(-0.5, tokens=(1,)), logged=True, likely=2)
    assert chunk is not None
    assert chunk.likely == [[Likely(1, -0.5, b"a"), Likely(None, -1.0, b"y"), Likely(None, -2.0, b"\xc3")]]


@pytest.mark.parametrize(
    ("version", "base", "digest"),
    [
        (None, ASKED, ASKED), ("default", ASKED, ASKED), (OTHER, ASKED, OTHER), (None, "base", None), ("v7", ASKED, None),
        (OTHER[:63], ASKED, None),
    ],
)  # fmt: skip
def test_the_base_is_what_it_was_labelled_last_or_else_what_it_was_started_as(version: str | None, base: str, digest: str | None) -> None:
    held = held_of({"data": [{"id": base}]}, version, url="http://v")
    assert held.base_digest == digest
    found = held.place(digest, "http://v", doubt="odd") if digest is not None else None
    assert (found is None) is (digest is None)
    if found is not None:
        assert (found.model, found.label, found.adapter, found.doubt) == (base, version, False, "odd")
    assert held.place("f" * 64, "http://v") is None


# --- what a server holds, and how it is -----------------------------------------------------------------------------------------------


def test_a_version_is_sampled_as_the_base_by_its_digest_or_as_an_adapter_by_its_name() -> None:
    cards = {"data": [{"id": "base"}, {"id": OTHER, "parent": "base"}]}
    held = held_of(cards, ASKED, url="http://v")
    assert (held.base, held.version, held.adapters, held.base_digest) == ("base", ASKED, frozenset({OTHER}), ASKED)
    assert held.place(ASKED, "http://v", doubt="why") == Place(url="http://v", model="base", label=ASKED, doubt="why")
    assert held.place(OTHER, "http://v") == Place(url="http://v", model=OTHER, label=ASKED, adapter=True)
    assert held.place("c" * 64, "http://v") is None


@pytest.mark.parametrize(
    ("name", "label", "digest"),
    [(ASKED, None, ASKED), (ASKED, "default", ASKED), (ASKED, OTHER, OTHER), ("base", "default", None), ("base", "step-7", None)],
)
def test_the_base_s_weights_are_known_by_their_label_else_by_the_name_they_were_started_under(
    name: str, label: str | None, digest: str | None
) -> None:
    assert held_of({"data": [{"id": name}]}, label, url="http://v").base_digest == digest


def test_a_server_without_a_base_is_no_model_server() -> None:
    for cards in ({}, {"data": []}, {"data": [{"id": OTHER, "parent": "base"}]}):
        with pytest.raises(Unavailable, match="http://v/v1/models names no base model"):
            held_of(cards, None, url="http://v")


@pytest.mark.parametrize(
    ("name", "is_one"), [("0123456789abcdef" * 4, True), ("a" * 64, True), ("a" * 63, False), ("a" * 65, False), ("g" * 64, False)]
)
def test_a_digest_has_sixty_four_hex_digits(name: str, is_one: bool) -> None:
    assert is_digest(name) is is_one


RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
DRAFTED, ACCEPTED = "vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total"


@pytest.mark.parametrize(
    ("metrics", "queue", "sampled", "acceptance"),
    [
        (f'{RUNNING}{{e="0"}} 2\n{RUNNING}{{e="1"}} 3\n{WAITING} 1\nvllm:generation_tokens_total 70\n', 6, 70, None),
        (f"{RUNNING} 2\n", None, None, None), (f"{WAITING} 2\n", None, None, None), ("# HELP x y\n\n", None, None, None),
        (f"{DRAFTED} 8\n{ACCEPTED} 2\n", None, None, 0.25), (f"{DRAFTED} 8\n", None, None, 0.0),
        (f"{DRAFTED} 0\n{ACCEPTED} 0\n", None, None, None),
    ],
)  # fmt: skip
def test_a_server_is_seen_by_its_own_metrics_labels_added_up(
    metrics: str, queue: int | None, sampled: int | None, acceptance: float | None
) -> None:
    seen = Vllm().sight("http://v", metrics)
    assert (seen.address, seen.answers) == ("http://v", True)
    assert (seen.queue, seen.sampled_tokens, seen.acceptance) == (queue, sampled, acceptance)


@pytest.mark.parametrize(
    ("metrics", "queue", "sampled", "acceptance"),
    [
        ("sglang:num_running_reqs 2\nsglang:num_queue_reqs 1\nsglang:generation_tokens_total 9\nsglang:spec_accept_rate 0.5\n", 3, 9, 0.5),
        ("sglang:num_running_reqs 2\nsglang:spec_accept_rate 0\n", None, None, None), ("sglang:num_queue_reqs 2\n", None, None, None),
    ],
)  # fmt: skip
def test_an_sglang_server_is_seen_likewise(metrics: str, queue: int | None, sampled: int | None, acceptance: float | None) -> None:
    seen = Sglang().sight("http://s", metrics)
    assert (seen.address, seen.answers) == ("http://s", True)
    assert (seen.queue, seen.sampled_tokens, seen.acceptance) == (queue, sampled, acceptance)


@pytest.mark.parametrize(
    ("form", "kept_to"),
    [(Form(answer={"type": "object"}), {"type": "object"}), (Form(call={}), None), (Form(answer={}, call={}), None), (Form(), None)],
)
def test_an_answer_is_kept_to_json_and_never_to_a_call(form: Form, kept_to: dict[str, Any] | None) -> None:
    if kept_to is not None:
        assert schema_of(form, "vLLM") == kept_to
        return
    with pytest.raises(BadRequest, match="vLLM cannot be made to call a tool here") as refused:
        schema_of(form, "vLLM")
    assert (refused.value.param, refused.value.code) == ("tool_choice", "unsupported_parameter")


def test_what_is_said_of_a_server_that_is_gone_aborts_or_masks_names_its_make() -> None:
    assert str(gone("vLLM", "http://v", ConnectionError())).startswith("vLLM at http://v does not answer (ConnectionError): start it")
    assert aborted("vLLM").startswith("vLLM aborted it")
    assert masked("vLLM").startswith("drawn under vLLM's own token masks")


def test_events_are_read_to_the_end_that_the_server_names() -> None:
    async def read(text: str) -> list[dict[str, Any]]:
        return [event async for event in events(httpx.Response(200, content=text.encode()))]

    said = 'data: {"a": 1}\n\n: beat\nevent: x\ndata:{"b": 2}\ndata:\ndata: [DONE]\ndata: {"c": 3}\n'
    assert asyncio.run(read(said)) == [{"a": 1}, {"b": 2}]
