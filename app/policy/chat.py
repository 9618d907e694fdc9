"""Chat messages to token ids and back: the model's own chat template, tools included where the template knows none."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from app.domain.errors import BadRequest

TOOLS_PROMPT = (
    "You may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n{tools}\n</tools>\n\n"
    "For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:\n"
    '<tool_call>\n{{"name": <function-name>, "arguments": <args-json-object>}}\n</tool_call>'
)
"""The Hermes convention, which SmolLM2-Instruct and Qwen were trained on; used where the chat template does not mention tools."""


SLICE_CHARS = 32_768
CUT_TOKENS = 64
"""By how many tokens a text may grow where it is cut: the tokens of the one word that the cut goes through."""


@dataclass(frozen=True, kw_only=True)
class Chat:
    """The tokenizer of one model with its chat template."""

    tokenizer: PreTrainedTokenizerFast
    end_token: int | None

    @classmethod
    def load(cls, folder: Path) -> "Chat":
        """Load the tokenizer files of a snapshot."""
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()
        return cls(tokenizer=tokenizer, end_token=tokenizer.eos_token_id)

    def prompt(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None, most: int | None = None
    ) -> list[int]:
        """Token ids of a chat, ending where the assistant's answer begins. Raises `BadRequest` for what the template refuses, and for
        what has clearly more than `most` tokens, after looking at no more text than `most` tokens and a slice have."""
        template = str(self.tokenizer.chat_template or "")
        plain = [_plain(message, in_template="tool_calls" in template) for message in messages]
        if tools and "tools" not in template:
            plain = _with_tools(plain, tools)
        given: list[Any] | None = [dict(tool) for tool in tools] if tools and "tools" in template else None
        try:
            text = self._written([_with_objects(message) for message in plain], given)
        except TypeError:  # a template that joins the arguments as text, as DeepSeek's does
            text = self._written(plain, given)
        if most is not None:
            self._refuse_far_above(text, most)
        return self.encode(text)

    def _written(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> str:
        """The chat as the template writes it. Raises `BadRequest`; `TypeError` where it wants arguments in the other form."""
        as_objects = any(_has_objects(message) for message in messages)
        try:
            return str(self.tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False))
        except (TemplateError, TypeError, KeyError, ValueError) as error:
            if as_objects and isinstance(error, TypeError):
                raise
            raise BadRequest(f"the model's chat template refuses these messages: {error}", param="messages") from error

    def and_then(self, prompt: Sequence[int], text: str) -> list[int] | None:
        """A prompt as it was sampled from, with one more message of the user before the answer begins; None where the template does not
        write messages one after the other, or the prompt does not end as it lets answers begin."""
        first: list[dict[str, Any]] = [{"role": "user", "content": "a"}]
        try:
            plain, opened, more = (
                str(self.tokenizer.apply_chat_template(messages, add_generation_prompt=opens, tokenize=False))
                for messages, opens in ((first, False), (first, True), ([*first, {"role": "user", "content": text}], False))
            )
        except (TemplateError, TypeError, KeyError, ValueError):
            return None  # a template that insists on turns of user and assistant, as Mistral's does
        opening = self.encode(opened.removeprefix(plain))
        is_read = opened.startswith(plain) and more.startswith(plain) and opening and list(prompt[-len(opening) :]) == opening
        return [*prompt[: -len(opening)], *self.encode(more.removeprefix(plain)), *opening] if is_read else None

    def _refuse_far_above(self, text: str, most: int) -> None:
        """Tokenising 4 MB takes eleven seconds; a text of which the beginning is too long already need not be tokenised whole."""
        total = 0
        for cuts, at in enumerate(range(0, len(text), SLICE_CHARS) if len(text) > SLICE_CHARS else ()):
            total += len(self.encode(text[at : at + SLICE_CHARS]))
            if total - cuts * CUT_TOKENS > most:
                raise BadRequest(
                    f"this model's maximum context length is {most} tokens and the prompt has more than {total - cuts * CUT_TOKENS}: "
                    "shorten the conversation", param="messages", code="context_length_exceeded",
                )  # fmt: skip

    def encode(self, text: str) -> list[int]:
        """Token ids of text as it is: nothing is added, special tokens written out in it count as such."""
        # the backend itself: transformers' wrapper resets truncation with every call, which other threads may not meet ("Already borrowed")
        return self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        return str(self.tokenizer.backend_tokenizer.decode(list(tokens), skip_special_tokens=True))


def _plain(message: Mapping[str, Any], *, in_template: bool) -> dict[str, Any]:
    """A message in the form templates expect: content as text, tool calls written into it where the template knows none."""
    plain = {key: value for key, value in message.items() if value is not None}
    plain["content"] = _text(message.get("content"))
    if message.get("tool_calls") and not in_template:
        plain["content"] += "".join(f"<tool_call>\n{_call(call)}\n</tool_call>" for call in message["tool_calls"])
    return plain


def _with_objects(message: dict[str, Any]) -> dict[str, Any]:
    """The message with the arguments of its tool calls as objects. OpenAI sends them as JSON text, and templates such as Qwen's write them
    with `tojson`: text would come out encoded twice, and the model would learn to answer so. What is not JSON stays text."""
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_call_with_object(call) for call in calls]} if calls else message


def _call_with_object(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return dict(call)
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        return dict(call)
    return {**call, "function": {**function, "arguments": arguments}}


def _has_objects(message: Mapping[str, Any]) -> bool:
    return any(not isinstance((call.get("function") or {}).get("arguments", ""), str) for call in message.get("tool_calls") or [])


def _text(content: object) -> str:
    """Text of a message's content: text, absent, or OpenAI's list of text parts. Raises `BadRequest` for parts that are not text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
        return "".join(part["text"] for part in content)
    raise BadRequest("message content must be text or a list of text parts: this model reads nothing else", param="messages")


def _call(call: Mapping[str, Any]) -> str:
    function = call.get("function") or {}
    arguments = function.get("arguments") or "{}"
    written = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return f'{{"name": {json.dumps(function.get("name", ""))}, "arguments": {written}}}'


def _with_tools(messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The tools as text in the system message, made where there is none."""
    text = TOOLS_PROMPT.format(tools="\n".join(json.dumps(tool) for tool in tools))
    if messages and messages[0].get("role") == "system":
        return [{**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]
