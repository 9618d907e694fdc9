"""Answers with tool calls anywhere in them, in chunks of any size: what a client puts together is the whole answer, in each style."""

import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.api.chat import inference, responses
from app.api.chat.answer import ChatStyle, logprob_items
from app.domain.telemetry.serving import GenerationChunk
from tests.unit.app.api.test_answers import CALL, END, TOOL, piece, recording, streamed

Said = tuple[str, list[tuple[str, str, str]], list[int]]
"""The text, (id, name, arguments) of each call, and the tokens whose log-probabilities were told."""

CHAT = {"model": "composer", "messages": [{"role": "user", "content": "x"}], "tools": [TOOL], "logprobs": True}
RESPONSE = {
    "model": "composer", "input": "x", "tools": [{"type": "function", **TOOL["function"]}], "include": ["message.output_text.logprobs"],
}  # fmt: skip
INFERENCE = {"function_name": "composer", "input": {"messages": [{"role": "user", "content": "x"}]}, "additional_tools": [TOOL["function"]]}

PARTS = st.one_of(
    st.text(alphabet="<tool_ca>/{} \n\u2003x", max_size=12),
    st.sampled_from([
        CALL, f"\n{CALL}\n", '<tool_call>{"name": "g"}</tool_call>', f"<tool_call>[{CALL[11:-12]}, {CALL[11:-12]}]</tool_call>",
        "<tool_call>f(</tool_call>", "<tool_call>", CALL[:30], " so ",
    ]),
)  # fmt: skip


def chat_whole(answer: Any) -> Said:
    (choice,) = answer["choices"]
    message = choice["message"]
    calls = [(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]
    return message["content"] or "", calls, [item["token_id"] for item in choice["logprobs"]["content"]]


def chat_streamed(events: Sequence[Any]) -> Said:
    """As openai's client does: texts are put behind each other, calls by their index."""
    text, calls, tokens = "", dict[int, tuple[str, str, str]](), list[int]()
    for (choice,) in [event["choices"] for event in events if event != "[DONE]"]:
        text += choice["delta"].get("content") or ""
        tokens += [item["token_id"] for item in (choice["logprobs"] or {"content": []})["content"]]
        for call in choice["delta"].get("tool_calls", []):
            before = calls.get(call["index"], ("", "", ""))
            now = (call["id"], call["function"]["name"], call["function"]["arguments"])
            calls[call["index"]] = (before[0] + now[0], before[1] + now[1], before[2] + now[2])
    return text, [calls[index] for index in range(len(calls))], tokens


def response_whole(answer: Any) -> Said:
    texts = [item["content"][0] for item in answer["output"] if item["type"] == "message"]
    calls = [(item["call_id"], item["name"], item["arguments"]) for item in answer["output"] if item["type"] == "function_call"]
    return "".join(text["text"] for text in texts), calls, [one["token_id"] for text in texts for one in text["logprobs"]]


def response_streamed(events: Sequence[Any]) -> Said:
    """As openai's client does: items are opened at the next place, and each delta is put behind what its item has."""
    output: list[Any] = []
    for event in events:
        match event["type"]:
            case "response.output_item.added":
                assert event["output_index"] == len(output), "an item is opened where another one stands"
                output.append(event["item"])
            case "response.content_part.added":
                output[event["output_index"]]["content"].append(event["part"])
            case "response.output_text.delta":
                output[event["output_index"]]["content"][0]["text"] += event["delta"]
            case "response.output_text.done":
                part = output[event["output_index"]]["content"][0]
                assert part["text"] == event["text"], "the deltas are the text that they end with"
                part["logprobs"] = event["logprobs"]
            case "response.function_call_arguments.delta":
                output[event["output_index"]]["arguments"] += event["delta"]
            case _:
                pass
    told = response_whole({"output": output})
    assert told == response_whole(events[-1]["response"])
    return told


def inference_whole(answer: Any) -> Said:
    texts = [part["text"] for part in answer["content"] if part["type"] == "text"]
    calls = [(part["id"], part["raw_name"], part["raw_arguments"]) for part in answer["content"] if part["type"] == "tool_call"]
    return "".join(texts), calls, []


def inference_streamed(events: Sequence[Any]) -> Said:
    return inference_whole({"content": [part for event in events if event != "[DONE]" for part in event["content"]]})


def chat() -> tuple[dict[str, Any], Any]:
    return CHAT, ChatStyle()


def response() -> tuple[dict[str, Any], Any]:
    raw, style = responses.read(json.dumps(RESPONSE).encode())
    return json.loads(raw), style


def told_by_inference() -> tuple[dict[str, Any], Any]:
    raw, style = inference.read(json.dumps(INFERENCE).encode())
    return json.loads(raw), style


def in_chunks(text: str, cuts: Sequence[int]) -> list[GenerationChunk]:
    bounds = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [*(piece(text[start:end], 10 + number) for number, (start, end) in enumerate(pairwise(bounds))), END]


STYLES = pytest.mark.parametrize(
    ("opened", "of_whole", "of_stream"),
    [(chat, chat_whole, chat_streamed), (response, response_whole, response_streamed),
        (told_by_inference, inference_whole, inference_streamed)],
    ids=["chat", "response", "inference"],
)  # fmt: skip
Opened = Callable[[], tuple[dict[str, Any], Any]]


def both(opened: Opened, of_whole: Callable[[Any], Said], of_stream: Callable[[Any], Said], text: str, cuts: Sequence[int]) -> list[Said]:
    said, style = opened()
    chunks = in_chunks(text, cuts)
    made = recording(*chunks, said=said)
    items = [item for chunk in chunks for item in logprob_items(chunk)] if made.request.logprobs else []
    return [of_whole(json.loads(style.whole([(made, items)]))), of_stream(streamed(style, made, chunks))]


@STYLES
def test_what_is_said_behind_a_call_is_streamed_too(
    opened: Opened, of_whole: Callable[[Any], Said], of_stream: Callable[[Any], Said]
) -> None:
    text = f"Let me look.\n{CALL}\nThen I shall tell you.\n"
    for cuts in ([], range(len(text))):
        whole, streamed_ = both(opened, of_whole, of_stream, text, cuts)
        assert streamed_ == whole
        assert whole[:2] == ("Let me look.\n\nThen I shall tell you.", [("call_i_0", "f", '{"a":1}')])


@STYLES
@given(parts=st.lists(PARTS, max_size=6), cuts=st.lists(st.integers(0, 1000), max_size=30))
def test_whatever_is_said_and_called_the_pieces_are_the_whole(
    opened: Opened, of_whole: Callable[[Any], Said], of_stream: Callable[[Any], Said], parts: list[str], cuts: list[int]
) -> None:
    whole, streamed_ = both(opened, of_whole, of_stream, "".join(parts), cuts)
    assert streamed_ == whole
