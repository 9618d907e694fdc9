"""Answers as they go over the wire in each of the three styles, whole and piece by piece, field for field."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from app.api.chat import completions, responses
from app.api.chat.answer import ChatStyle, logprob_items
from app.api.chat.recording import Recording, unkept
from app.api.chat.request import read_body, understand
from app.api.entry.access import ANONYMOUS
from app.api.telemetry.intake import Limits
from app.api.telemetry.redaction import Redactor, redact
from app.domain.errors import BadRequest
from app.domain.release.assignment import pin
from app.domain.telemetry.serving import GenerationChunk, Likely
from app.domain.telemetry.turns import FinishReason
from tests.fakes.gateway import CHAMPION, policy_config

AT = datetime(2026, 11, 21, 12, tzinfo=UTC)
CREATED = int(AT.timestamp())
TOOL = {"type": "function", "function": {"name": "f"}}
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


def recording(*chunks: GenerationChunk, said: dict[str, Any] | None = None, token: str | None = None) -> Recording:
    """A turn that has heard these chunks, of inference `i` in episode `e`."""
    body = {"model": "composer", "messages": [{"role": "user", "content": "x"}]} | (said or {})
    read, shape = read_body(json.dumps(body).encode(), Limits())
    request = understand(read, {}, ANONYMOUS, policy_config(), salt="salt", shape=shape)
    object.__setattr__(request, "inference_id", "i")
    object.__setattr__(request, "episode_id", "e")
    made = Recording(
        request=request, arm=pin(CHAMPION), config=policy_config(), started_at=AT, messages=request.messages, feedback_token=token
    )
    for chunk in chunks:
        made.take(chunk)
    made.parse()
    return made


def piece(text: str, *tokens: int, **more: Any) -> GenerationChunk:
    return GenerationChunk(text=text, tokens=list(tokens), logprobs=[-0.5] * len(tokens), **more)


END = piece("", 2, finish_reason=FinishReason.STOP, prompt_tokens=[1, 2, 3])
LENGTH = piece("", finish_reason=FinishReason.LENGTH, prompt_tokens=[1, 2, 3])


def events(stream: bytes) -> list[Any]:
    """What server-sent events say; `[DONE]` as it is."""
    lines = [line.removeprefix(b"data: ") for line in stream.split(b"\n") if line.startswith(b"data: ")]
    assert stream.endswith(b"\n\n")
    return [line.decode() if line == b"[DONE]" else json.loads(line) for line in lines]


def streamed(style: Any, made: Recording, chunks: Sequence[GenerationChunk]) -> list[Any]:
    """All events of an answer whose chunks come one by one."""
    fresh = Recording(
        request=made.request, arm=made.arm, config=made.config, started_at=AT, messages=made.messages, feedback_token=made.feedback_token
    )
    writer = style.streaming([fresh], 0)
    out = writer.first()
    for chunk in chunks[:-1]:
        fresh.take(chunk)
        out += writer.chunk(chunk)
    fresh.take(chunks[-1])
    fresh.parse()
    return events(out + writer.last(chunks[-1]) + style.end([fresh]))


FRAME = {"id": "i", "created": CREATED, "model": "composer", "system_fingerprint": CHAMPION, "episode_id": "e"}


def test_a_chat_completion_field_for_field() -> None:
    first, second = recording(piece("Hi", 7), piece("!", 8), END, token="ft"), recording(piece("Ho", 9), LENGTH)
    assert json.loads(ChatStyle().whole([(first, []), (second, [])])) == FRAME | {
        "object": "chat.completion", "feedback_token": "ft",
        "choices": [
            {
                "index": 0, "message": {"role": "assistant", "content": "Hi!", "refusal": None}, "logprobs": None, "finish_reason": "stop",
                "inference_id": "i", "feedback_token": "ft",
            },
            {
                "index": 1, "message": {"role": "assistant", "content": "Ho", "refusal": None}, "logprobs": None, "finish_reason": "length",
                "inference_id": "i",
            },
        ],
        "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "finish", "content", "called", "reason"),
    [
        (CALL, FinishReason.STOP, None, ['{"a":1}'], "tool_calls"), (f"so {CALL}", FinishReason.STOP, "so", ['{"a":1}'], "tool_calls"),
        (CALL, FinishReason.LENGTH, None, ['{"a":1}'], "length"), ("none", FinishReason.STOP, "none", [], "stop"),
        ("", FinishReason.STOP, "", [], "stop"),
        ("<tool_call>f(", FinishReason.STOP, "<tool_call>f(", [], "stop"),
        (CALL + "<tool_call>", FinishReason.STOP, CALL + "<tool_call>", [], "stop"),
        ('<tool_call>{"name": "g"}</tool_call>', FinishReason.STOP, None, ["{}"], "tool_calls"),
    ],
)  # fmt: skip
def test_calls_that_can_be_read_are_calls_and_all_others_stay_text(
    text: str, finish: FinishReason, content: str | None, called: list[str], reason: str
) -> None:
    made = recording(piece(text, 7), piece("", 2, finish_reason=finish, prompt_tokens=[1]), said={"tools": [TOOL]})
    (choice,) = json.loads(ChatStyle().whole([(made, [])]))["choices"]
    calls = choice["message"].get("tool_calls", [])
    assert (choice["message"]["content"], [call["function"]["arguments"] for call in calls], choice["finish_reason"]) == (
        content, called, reason,
    )  # fmt: skip
    assert [(call["id"], call["type"]) for call in calls] == [(f"call_i_{n}", "function") for n in range(len(called))]


def test_a_streamed_chat_is_what_the_whole_one_says() -> None:
    chunks = [piece("Hi", 7), piece("", 8), piece("!", 9), END]
    said = {"stream_options": {"include_usage": True}, "logprobs": True}
    found = streamed(ChatStyle(), recording(*chunks, said=said, token="ft"), chunks)
    assert found[-1] == "[DONE]"
    assert all(one["object"] == "chat.completion.chunk" and FRAME.items() <= one.items() for one in found[:-1])
    assert [one["usage"] for one in found[:-1]] == [None] * 6 + [{"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}]
    assert [one["choices"] for one in found[-2:-1]] == [[]]
    choices = [one["choices"][0] for one in found[:-2]]
    assert choices[0] == {
        "index": 0, "delta": {"role": "assistant", "content": "", "refusal": None}, "logprobs": None, "finish_reason": None,
        "inference_id": "i", "feedback_token": "ft",
    }  # fmt: skip
    assert found[0]["feedback_token"] == "ft"
    assert [one["delta"] for one in choices[1:]] == [{"content": "Hi"}, {"content": ""}, {"content": "!"}, {"content": ""}, {}]
    assert [one["finish_reason"] for one in choices] == [None] * (len(choices) - 1) + ["stop"]
    tokens = [item["token_id"] for one in choices if one["logprobs"] for item in one["logprobs"]["content"]]
    assert tokens == [7, 8, 9, 2]


def test_without_being_asked_a_stream_says_neither_usage_nor_what_adds_nothing() -> None:
    chunks = [piece("Hi", 7), piece("", 8), END]
    found = streamed(ChatStyle(), recording(*chunks), chunks)
    assert [one["choices"][0]["delta"].get("content") for one in found[:-1]] == ["", "Hi", None]
    assert all("usage" not in one for one in found[:-1])
    assert ChatStyle().streaming([recording()], 0).failure(b'{"error":1}') == b'data: {"error":1}\n\n'


def test_a_call_is_not_streamed_as_text() -> None:
    chunks = [piece("so ", 7), piece(CALL[:5], 8), piece(CALL[5:], 9), END]
    found = streamed(ChatStyle(), recording(*chunks, said={"tools": [TOOL]}), chunks)
    deltas = [one["choices"][0]["delta"] for one in found[:-1]]
    assert [delta.get("content") for delta in deltas] == ["", "so", None, None]
    assert deltas[2]["tool_calls"] == [
        {"index": 0, "id": "call_i_0", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}, "verdict": "valid"}
    ]
    assert found[-2]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("chunk", "items"),
    [
        (piece("Hi", 5), [{"token": "Hi", "logprob": -0.5, "bytes": [72, 105], "token_id": 5, "top_logprobs": []}]),
        (
            piece("Hi", 5, 6),
            [{"token": f"token_id:{n}", "logprob": -0.5, "bytes": None, "token_id": n, "top_logprobs": []} for n in (5, 6)],
        ),
        (piece("", 5), [{"token": "", "logprob": -0.5, "bytes": [], "token_id": 5, "top_logprobs": []}]),
        (piece("Hi"), []),
        (
            piece("", 5, likely=[[Likely(5, -0.1, b"\xc3"), Likely(None, -2.0, b"a")]]),
            [
                {
                    "token": "bytes:\\xc3", "logprob": -0.1, "bytes": [195], "token_id": 5,
                    "top_logprobs": [{"token": "a", "logprob": -2.0, "bytes": [97]}],
                }
            ],
        ),
    ],
)  # fmt: skip
def test_log_probabilities_of_a_chunk(chunk: GenerationChunk, items: list[dict[str, Any]]) -> None:
    assert logprob_items(chunk) == items


def test_a_text_completion_field_for_field() -> None:
    raw, style = completions.read(b'{"model":"composer","prompt":["go"],"suffix":"on","logprobs":2,"max_tokens":5}')
    said = json.loads(raw)
    assert said == {
        "model": "composer", "max_tokens": 5, "messages": [{"role": "user", "content": "<|fim_prefix|>go<|fim_suffix|>on<|fim_middle|>"}],
        "logprobs": True, "top_logprobs": 2,
    }  # fmt: skip
    chunks = [
        piece("Hi", 7, likely=[[Likely(7, -0.5, b"Hi"), Likely(8, -1.5, b"Ho")]]), piece("!", 9, likely=[[Likely(9, -0.5, b"!")]]), LENGTH,
    ]  # fmt: skip
    made = recording(*chunks, said=said, token="ft")
    items = [item for chunk in chunks for item in logprob_items(chunk)]
    assert json.loads(style.whole([(made, items)])) == FRAME | {
        "object": "text_completion", "feedback_token": "ft",
        "choices": [
            {
                "index": 0, "text": "Hi!", "finish_reason": "length", "inference_id": "i", "feedback_token": "ft",
                "logprobs": {
                    "tokens": ["Hi", "!"], "token_logprobs": [-0.5, -0.5], "top_logprobs": [{"Ho": -1.5}, {}], "text_offset": [0, 2],
                },
            }
        ],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
    }  # fmt: skip
    found = streamed(style, made, chunks)
    assert found[-1] == "[DONE]"
    assert [one["choices"][0]["text"] for one in found[:-1]] == ["", "Hi", "!", ""]
    assert [one["choices"][0]["finish_reason"] for one in found[:-1]] == [None, None, None, "length"]
    assert [one["choices"][0]["logprobs"] and one["choices"][0]["logprobs"]["tokens"] for one in found[:-1]] == [None, ["Hi"], ["!"], []]
    offsets = [one["choices"][0]["logprobs"]["text_offset"] for one in found[1:-1]]
    assert offsets == [[0], [2], []], "where a token stands in the whole text, whatever chunk it came in"
    assert found[0]["feedback_token"] == found[0]["choices"][0]["feedback_token"] == "ft"


@pytest.mark.parametrize(
    ("more", "logprobs", "likely", "prompt"),
    [('"prompt":"go"', False, 0, "go"), ('"prompt":["go"],"logprobs":0', True, 0, "go"),
        ('"prompt":"go","logprobs":5,"echo":false', True, 5, "go")],
)  # fmt: skip
def test_a_completion_asks_what_a_chat_asks(more: str, logprobs: bool, likely: int, prompt: str) -> None:
    said = json.loads(completions.read(f'{{"model":"m",{more}}}'.encode())[0])
    assert (said["logprobs"], said["top_logprobs"], said["messages"][0]["content"]) == (logprobs, likely, prompt)


@pytest.mark.parametrize(
    "more", ['"prompt":[]', '"prompt":["a","b"]', '"prompt":"a","logprobs":6', '"prompt":"a","best_of":2', '"prompt":"a","echo":true']
)
def test_what_a_completion_cannot_honour_is_refused(more: str) -> None:
    with pytest.raises(BadRequest):
        completions.read(f'{{"model":"m",{more}}}'.encode())


def response_of(*chunks: GenerationChunk, token: str | None = None, **said: Any) -> tuple[Any, Recording]:
    raw, style = responses.read(json.dumps({"model": "composer", "input": "x"} | said).encode())
    return style, recording(*chunks, said=json.loads(raw), token=token)


def test_a_response_field_for_field() -> None:
    style, made = response_of(piece("Hi", 7), END, token="ft", instructions="be brief", metadata={"a": "b"}, max_output_tokens=9, user="u")
    assert json.loads(style.whole([(made, [])])) == {
        "id": "i", "object": "response", "created_at": CREATED, "status": "completed", "background": False, "error": None,
        "incomplete_details": None, "instructions": "be brief", "max_output_tokens": 9, "metadata": {"a": "b"}, "model": "composer",
        "output": [
            {
                "type": "message", "id": "msg_i", "status": "completed", "role": "assistant",
                "content": [{"type": "output_text", "text": "Hi", "annotations": [], "logprobs": []}],
            }
        ],
        "previous_response_id": None, "parallel_tool_calls": True, "text": {"format": {"type": "text"}}, "temperature": 1.0, "top_p": 1.0,
        "tool_choice": "auto", "tools": [], "truncation": "disabled",
        "usage": {
            "input_tokens": 3, "input_tokens_details": {"cached_tokens": 0}, "output_tokens": 2,
            "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 5,
        },
        "user": "u", "system_fingerprint": CHAMPION, "episode_id": "e", "feedback_token": "ft",
    }  # fmt: skip


def test_a_response_that_was_cut_says_so_and_one_that_calls_has_an_item_for_each() -> None:
    style, made = response_of(piece("Hi", 7), LENGTH, parallel_tool_calls=False)
    whole = json.loads(style.whole([(made, [])]))
    assert (whole["status"], whole["incomplete_details"], whole["parallel_tool_calls"]) == (
        "incomplete", {"reason": "max_output_tokens"}, False,
    )  # fmt: skip
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    style, made = response_of(piece(f"so {CALL}", 7), END, tools=[tool])
    items = json.loads(style.whole([(made, [])]))["output"]
    assert [item["type"] for item in items] == ["message", "function_call"]
    assert items[1] == {
        "type": "function_call", "id": "fc_call_i_0", "call_id": "call_i_0", "name": "f", "arguments": '{"a":1}', "status": "completed",
    }  # fmt: skip
    style, made = response_of(piece(CALL, 7), END, tools=[tool])
    assert [item["type"] for item in json.loads(style.whole([(made, [])]))["output"]] == ["function_call"]
    style, made = response_of(END)
    assert [item["content"][0]["text"] for item in json.loads(style.whole([(made, [])]))["output"]] == [""]


def test_a_streamed_response_is_numbered_and_says_each_thing_once() -> None:
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    chunks = [piece("so ", 7), piece(CALL[:5], 8), piece(CALL[5:], 9), END]
    style, made = response_of(*chunks, tools=[tool])
    found = streamed(style, made, chunks)
    assert [one["sequence_number"] for one in found] == list(range(len(found)))
    assert [one["type"].removeprefix("response.") for one in found] == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done", "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    assert [one.get("output_index") for one in found] == [None, None, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, None]
    assert {one.get("content_index") for one in found[3:7]} == {0}
    assert (found[4]["delta"], found[5]["text"], found[9]["delta"], found[10]["arguments"]) == ("so", "so", '{"a":1}', '{"a":1}')
    assert (found[8]["item"]["arguments"], found[8]["item"]["status"], found[11]["item"]["status"]) == ("", "in_progress", "completed")
    assert (found[0]["response"]["status"], found[0]["response"]["output"], found[0]["response"]["usage"]) == ("in_progress", [], None)
    assert found[2]["item"] == {"type": "message", "id": "msg_i", "status": "in_progress", "role": "assistant", "content": []}


def test_a_streamed_response_without_a_word_is_opened_and_closed() -> None:
    style, made = response_of(LENGTH)
    found = streamed(style, made, [LENGTH])
    assert [one["type"].removeprefix("response.") for one in found] == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.done", "content_part.done", "output_item.done",
        "incomplete",
    ]  # fmt: skip
    failed = style.streaming([made], 0).failure(b'{"error":{"code":"c","message":"m","param":null}}')
    assert events(failed) == [{"type": "error", "sequence_number": 0, "code": "c", "message": "m", "param": None}]


@pytest.mark.parametrize(
    ("tokens", "logprobs", "chunk", "whole"),
    [
        ([7], [-0.5], END, True), ([7], [-0.5, -0.5], END, False), ([7], [-0.5], piece("", finish_reason=FinishReason.STOP), False),
        ([7], [-0.5], piece("", finish_reason=FinishReason.STOP, prompt_tokens=[1], mixed_versions="two"), False),
    ],
)  # fmt: skip
def test_log_probabilities_are_recorded_where_every_token_has_one(
    tokens: list[int], logprobs: list[float], chunk: GenerationChunk, whole: bool
) -> None:
    made = recording(GenerationChunk(text="x\x00", tokens=tokens, logprobs=logprobs), chunk)
    turn = made.turn(finished_at=AT)
    assert (turn.logprobs is not None, turn.completion) == (whole, "x\ufffd")
    assert (turn.finish_reason, turn.kind, turn.version, turn.policy) == (FinishReason.STOP, "answer", CHAMPION, "composer")


def test_the_first_end_of_an_answer_counts_and_a_fault_is_told_in_two_hundred_characters() -> None:
    made = recording(piece("x", 7), piece("", finish_reason=FinishReason.ERROR, message="f" * 300, unscorable="u" * 200))
    made.finish(FinishReason.STOP, "later")
    assert made.turn(finished_at=AT).tags == {"fault": "f" * 200, "unscorable": "u" * 200}
    assert made.turn(finished_at=AT).finish_reason == FinishReason.ERROR


def test_of_a_turn_with_personal_data_and_of_one_that_is_not_kept_no_token_stays() -> None:
    bent = {"presence_penalty": 1.0, "metadata": {"a": "b"}}
    made = recording(piece("mail a@example.org", 7, 8), END, said=bent)
    clean = recording(piece("nothing", 7), END).turn(finished_at=AT)
    assert redact(clean, Redactor()) is clean
    for found, completion, tags in (
        (redact(made.turn(finished_at=AT), Redactor()), "mail [EMAIL]", {"a": "b", "redacted": "true"}),
        (unkept(made.turn(finished_at=AT)), "", {"stored": "false"}),
    ):
        assert (found.completion, found.tags) == (completion, tags)
        assert (found.prompt_tokens, found.completion_tokens, found.logprobs, found.kept_log_mass) == ([], [], None, None)
        assert found.shape is msgspec.UNSET
        assert found.usage.completion_tokens == 3
