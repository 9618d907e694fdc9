"""Chats as tokens, and text as it grows."""

import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from app.domain.errors import BadRequest
from app.policy.chat import Chat
from app.policy.decoding.textstream import TextStream

TOOL = {"type": "function", "function": {"name": "look_up", "description": "Look up.", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def chat(tiny_model: Path) -> Chat:
    return Chat.load(tiny_model)


def text(chat: Chat, *messages: dict[str, object], tools: list[dict[str, object]] | None = None) -> str:
    """The prompt as text, special tokens written out."""
    return chat.tokenizer.backend_tokenizer.decode(chat.prompt(messages, tools=tools), skip_special_tokens=False)


def test_a_prompt_ends_where_the_answer_begins(chat: Chat) -> None:
    assert text(chat, {"role": "user", "content": "hi"}) == "<|im_start|>user\nhi<|im_end|>\n<|assistant|>"


def test_a_tokenizer_that_was_saved_cutting_and_padding_does_neither(tiny_model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(folder / "tokenizer.json"))
    known, text = Chat.load(tiny_model), "one two three four five six"
    assert 4 < len(known.encode(text)) < 64
    assert Chat.load(folder).encode(text) == known.encode(text)


def test_content_may_be_absent_or_a_list_of_text_parts(chat: Chat) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    found = text(chat, {"role": "user", "content": parts}, {"role": "assistant", "content": None})
    assert found == "<|im_start|>user\nab<|im_end|>\n<|assistant|><|im_end|>\n<|assistant|>"


def test_an_image_is_refused_in_words(chat: Chat) -> None:
    with pytest.raises(BadRequest, match="text"):
        chat.prompt([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])


def test_tools_go_into_the_system_message_where_the_template_knows_none(chat: Chat) -> None:
    made = text(chat, {"role": "user", "content": "hi"}, tools=[TOOL])
    assert made.startswith("<|im_start|>system\nYou may call one or more functions")
    assert '"name": "look_up"' in made
    kept = text(chat, {"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}, tools=[TOOL])
    assert kept.startswith("<|im_start|>system\nBe brief.\n\nYou may call")
    assert kept.count("<|im_start|>system") == 1


def test_an_earlier_tool_call_is_written_back_as_the_model_wrote_it(chat: Chat) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look_up", "arguments": '{"q": 1}'}}
    found = text(chat, {"role": "assistant", "content": None, "tool_calls": [call]})
    assert '<tool_call>\n{"name": "look_up", "arguments": {"q": 1}}\n</tool_call>' in found


QWEN = (
    "{% for message in messages %}{{ message.content }}{% for call in message.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}{% endfor %}"
)
DEEPSEEK = "{% for call in messages[0].tool_calls %}{{ call.function.name + ' ' + call.function.arguments }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "arguments", "written"),
    [
        (QWEN, '{"q": "a b"}', '"arguments": {"q": "a b"}}'),
        (QWEN, '{"q": {"r": [1]}}', '"arguments": {"q": {"r": [1]}}}'),
        (QWEN, "", '"arguments": {}}'),
        (QWEN, "{broken", '"arguments": "{broken"}'),  # what the model really wrote
        (DEEPSEEK, '{"q": 1}', 'look_up {"q": 1}'),
    ],
)
def test_arguments_of_an_earlier_tool_call_are_encoded_once(tiny_model: Path, template: str, arguments: str, written: str) -> None:
    other = Chat.load(tiny_model)
    other.tokenizer.chat_template = template
    call = {"id": "1", "type": "function", "function": {"name": "look_up", "arguments": arguments}}
    assert written in text(other, {"role": "assistant", "content": None, "tool_calls": [call]})


def test_what_the_template_refuses_is_a_bad_request(tiny_model: Path) -> None:
    strict = Chat.load(tiny_model)
    strict.tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(BadRequest, match="roles must alternate"):
        strict.prompt([{"role": "user", "content": "hi"}])


@settings(max_examples=60, deadline=None)
@given(written=st.text(max_size=40).filter(lambda text: "<|" not in text))  # special tokens written out count as such
def test_any_text_round_trips(chat: Chat, written: str) -> None:
    assert chat.decode(chat.encode(written)) == written


@settings(max_examples=60, deadline=None)
@given(written=st.text(max_size=40).filter(lambda text: "<|" not in text))  # special tokens written out count as such
def test_streamed_text_adds_up_and_never_shows_half_a_character(chat: Chat, written: str) -> None:
    stream = TextStream(chat)
    shown = [stream.push(token) for token in chat.encode(written)]
    assert "".join(shown) + stream.finish() == written


def test_a_character_that_is_never_completed_shows_as_the_replacement_character(chat: Chat) -> None:
    tokens = chat.encode("é")
    assert len(tokens) == 2
    stream = TextStream(chat)
    assert stream.push(tokens[0]) == ""
    assert stream.finish() == "\ufffd"


def test_what_may_begin_a_stop_string_is_held_back_until_it_is_not(chat: Chat) -> None:
    stream = TextStream(chat, stop=("END",))
    shown = [stream.push(token) for letter in "xENyEND" for token in chat.encode(letter)]
    assert shown == ["x", "", "", "ENy", "", "", ""]
    assert stream.stopped
    assert stream.finish() == ""


def test_a_stop_string_at_the_very_beginning_leaves_nothing(chat: Chat) -> None:
    stream = TextStream(chat, stop=("END",))
    shown = [stream.push(token) for letter in "END" for token in chat.encode(letter)]
    assert (shown, stream.stopped, stream.finish()) == (["", "", ""], True, "")


def test_what_was_held_back_is_shown_when_nothing_follows(chat: Chat) -> None:
    stream = TextStream(chat, stop=("END",))
    shown = "".join(stream.push(token) for letter in "xEN" for token in chat.encode(letter))
    assert shown == "x"
    assert stream.finish() == "EN"


# --- long texts, and one message more ----------------------------------------------------------------------------------------------------


def test_a_text_far_above_what_fits_is_refused_by_its_beginning_less_what_cuts_may_have_added(chat: Chat) -> None:
    content = "é" * 70_000
    written = f"<|im_start|>user\n{content}<|im_end|>\n<|assistant|>"
    slices = [len(chat.encode(written[at : at + 32_768])) for at in range(0, len(written), 32_768)]
    assert len(slices) == 3
    messages = [{"role": "user", "content": content}]
    for most, said in ((slices[0] - 1, slices[0]), (slices[0], sum(slices[:2]) - 64), (sum(slices[:2]) - 65, sum(slices[:2]) - 64),
                       (sum(slices[:2]) - 64, sum(slices) - 128), (sum(slices) - 129, sum(slices) - 128)):  # fmt: skip
        with pytest.raises(BadRequest, match=f"length is {most} tokens and the prompt has more than {said}: shorten") as refused:
            chat.prompt(messages, most=most)
        assert (refused.value.param, refused.value.code) == ("messages", "context_length_exceeded")
    assert len(chat.prompt(messages, most=sum(slices) - 128)) > sum(slices) - 128, "whoever feeds it counts exactly"


def test_a_text_of_one_slice_is_counted_by_whoever_feeds_it(chat: Chat) -> None:
    around = len("<|im_start|>user\n<|im_end|>\n<|assistant|>")
    fits, one_more = ("é" * (32_768 - around + more) for more in (0, 1))
    assert len(chat.prompt([{"role": "user", "content": fits}], most=1)) > 1
    with pytest.raises(BadRequest, match="shorten"):
        chat.prompt([{"role": "user", "content": one_more}], most=1)


def test_a_message_more_follows_what_was_sampled_from_as_the_template_would_have_written_it(chat: Chat) -> None:
    first, second = {"role": "user", "content": "hi"}, {"role": "user", "content": "more"}
    sampled_from = chat.prompt([first])
    assert chat.and_then(sampled_from, "more") == chat.prompt([first, second])
    assert chat.and_then(tuple(sampled_from), "more") == chat.prompt([first, second])
    assert chat.and_then(sampled_from[:-1], "more") is None, "the answer does not begin at its end"
    assert chat.and_then([], "more") is None


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{% for m in messages %}{{ messages | length }}{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}",
        "{% if add_generation_prompt %}>{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content }}{% endfor %}",
    ],
    ids=["refuses", "counts", "opens at the front", "opens nothing"],
)
def test_a_template_that_does_not_write_one_message_after_the_other_takes_no_message_more(tiny_model: Path, template: str) -> None:
    other = Chat.load(tiny_model)
    other.tokenizer.chat_template = template
    assert other.and_then(other.encode("a>"), "more") is None


def test_a_template_that_knows_tools_is_given_them_and_writes_calls_itself(tiny_model: Path) -> None:
    other = Chat.load(tiny_model)
    other.tokenizer.chat_template = (
        "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}{% for m in messages %}{{ m.role }}:{{ m.content }};"
        "{% for call in m.tool_calls or [] %}<{{ call.function.name }}>{% endfor %}{% endfor %}"
    )
    call = {"id": "1", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}
    messages: tuple[dict[str, object], ...] = (
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    )
    assert text(other, *messages, tools=[TOOL]) == "[look_up]user:hi;assistant:;<look_up>"
    assert text(other, *messages) == "user:hi;assistant:;<look_up>"


@pytest.mark.parametrize("content", [5, ["a"], [{"type": "text"}], [{"text": 5}], {"text": "a"}])
def test_content_that_is_no_text_is_refused(chat: Chat, content: object) -> None:
    with pytest.raises(BadRequest, match="text or a list of text parts") as refused:
        chat.prompt([{"role": "user", "content": content}])
    assert refused.value.param == "messages"


@pytest.mark.parametrize(
    ("function", "written"),
    [
        ({"name": "f", "arguments": ""}, '{"name": "f", "arguments": {}}'),
        ({"name": "f"}, '{"name": "f", "arguments": {}}'),
        ({"name": "f", "arguments": {"a": 1}}, '{"name": "f", "arguments": {"a": 1}}'),
        ({}, '{"name": "", "arguments": {}}'),
        (None, '{"name": "", "arguments": {}}'),
    ],
)
def test_a_call_of_which_little_is_said_is_written_all_the_same(chat: Chat, function: object, written: str) -> None:
    found = text(chat, {"role": "assistant", "content": "so", "tool_calls": [{"id": "1", "type": "function", "function": function}]})
    assert f"so<tool_call>\n{written}\n</tool_call>" in found
