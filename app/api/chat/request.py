"""What a chat request may say. Unknown fields are refused by name; what OpenAI defines and cannot matter here is listed in `IGNORED`."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from app.api.chat.shapes import Bias, Penalty, read_choice, read_format, shape_of
from app.api.entry.access import Caller
from app.api.telemetry.drafts import decode
from app.api.telemetry.intake import BRACKETS, Limits, characters, check_tree, more_than
from app.domain.errors import BadRequest
from app.domain.ids import hash_actor, uuid7
from app.domain.policies import PolicyConfig
from app.domain.telemetry.events import GATEWAY, is_rollout
from app.domain.telemetry.schemas import is_schema
from app.domain.telemetry.turns import Consent, SamplingParams, Shape
from app.listening.errors import HttpError
from app.listening.headers import Headers, header

IGNORED = (
    "service_tier", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "prediction", "reasoning_effort",
    "verbosity",
)  # fmt: skip
"""OpenAI fields that are accepted and have no effect: hints about price, caching and style of thinking."""
ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_MESSAGE_FIELDS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", "refusal", "annotations", "audio", "function_call"})
_KEPT_FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id")
SEGMENT_VALUE_CHARS = 48

MOST_ANSWERS = 16
"""To one request: as many as an engine decodes together."""

Text = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's stream options."""

    include_usage: bool = False
    include_obfuscation: bool | None = None


class ChatBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The JSON body: OpenAI's fields, vLLM's, TensorZero's and OpenClaw's extras."""

    model: str
    """The policy's name."""
    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1, max_length=2000)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] | None = None
    """vLLM's: draw from so many of the most probable tokens; -1 and 0 are all."""
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=10_000_000)] | None = None
    max_completion_tokens: Annotated[int, msgspec.Meta(ge=1, le=10_000_000)] | None = None
    seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | Annotated[list[str], msgspec.Meta(max_length=4)] | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=MOST_ANSWERS)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Bias | None = None
    response_format: dict[str, Any] | None = None
    tools: Annotated[list[dict[str, Any]], msgspec.Meta(max_length=128)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    modalities: list[Literal["text"]] | None = None
    metadata: Annotated[dict[str, Annotated[str, msgspec.Meta(max_length=512)]], msgspec.Meta(max_length=16)] | None = None
    user: Annotated[str, msgspec.Meta(max_length=400)] | None = None
    safety_identifier: Annotated[str, msgspec.Meta(max_length=400)] | None = None
    store: bool | None = None
    service_tier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    parallel_tool_calls: bool | None = None
    tensorzero_episode_id: Text | None = msgspec.field(default=None, name="tensorzero::episode_id")
    tensorzero_tags: dict[str, str] | None = msgspec.field(default=None, name="tensorzero::tags")
    tensorzero_dryrun: bool | None = msgspec.field(default=None, name="tensorzero::dryrun")
    tensorzero_variant_name: str | None = msgspec.field(default=None, name="tensorzero::variant_name")
    """Kept as a tag; it does not choose the version, or the logged assignment probabilities would be false."""
    session_id: Text | None = None
    turn_type: Literal["main", "side"] | None = None
    session_done: bool | None = None


_body = msgspec.json.Decoder(ChatBody)


@dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """A request understood: what to sample, for whom, and what may be done with it."""

    inference_id: str
    episode_id: str
    continues: bool
    """Whether the caller named the episode, so that it may have begun elsewhere."""
    ends: bool
    """Whether this is the episode's last turn (`X-Session-Done`)."""
    policy: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    sampling: SamplingParams
    shape: Shape | None
    actor: str | None
    segment: dict[str, str]
    tags: dict[str, str]
    consent: Consent
    stream: bool
    include_usage: bool
    logprobs: bool
    likely: int | None
    """How many of the likeliest tokens are wanted beside each sampled one; None without log-probabilities."""
    dryrun: bool
    stored: bool = True
    """False where the caller said `store: false`: nothing that was said is kept beyond serving it."""
    source: str = GATEWAY
    """Of the turn, as the caller's key says."""
    rateable: bool = True
    """Whether the answer brings the token that rates it: never to a session's key, which the agent at work holds."""


class _Outline(msgspec.Struct, frozen=True, kw_only=True):
    """Where the large parts of a body are; finding them makes no objects of them."""

    messages: list[dict[str, msgspec.Raw]] = []
    tools: msgspec.Raw = msgspec.Raw(b"")


class _Message(msgspec.Struct, frozen=True, gc=False):
    role: msgspec.Raw


class _Roles(msgspec.Struct, frozen=True, gc=False):
    """The messages, as far as it takes to see that each has a role: reading them ends at the first that has none."""

    messages: list[_Message] = []


_roles = msgspec.json.Decoder(_Roles)
_outline = msgspec.json.Decoder(_Outline)
OUTLINED_BYTES = 32 * 1024
"""Of a body, from which on its outline is looked at first: 20,000 lists fit into 64 KB."""
BYTES_PER_CHAR = 4
"""Characters that JSON escapes take six bytes; tools are not written in them."""


def _refuse_unread(raw: bytes, limits: Limits) -> None:
    """Refuse what would be refused after decoding, 40 ms a megabyte of small objects in one piece. Raises `BadRequest`."""
    most = limits.nodes // 3  # an object, its `role` and what that is: three values
    if more_than(most, raw, b'"role"'):
        raise BadRequest(f"the messages have more than {limits.nodes} values", param="messages", code="too_many_values")
    try:
        if more_than(most, raw, b"{"):
            _roles.decode(raw)
        outline = _outline.decode(raw)
    except msgspec.ValidationError as error:
        if "`role`" not in str(error):
            return
        place = str(error).rpartition("$.")[2].rstrip("`")
        raise BadRequest(f"{place}.role: one of {', '.join(sorted(ROLES))}", param=f"{place}.role") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return  # said in full by who decodes it
    if len(memoryview(outline.tools)) > limits.tool_chars * BYTES_PER_CHAR:
        raise _too_many_tools(limits)
    nested = [bytes(value) for message in outline.messages for value in message.values() if bytes(memoryview(value)[:1]) in (b"[", b"{")]
    if more_than(2 * limits.nodes, b"".join(nested), *BRACKETS):
        raise BadRequest(f"the messages have more than {limits.nodes} values", param="messages", code="too_many_values")


def _too_many_tools(limits: Limits) -> BadRequest:
    return BadRequest(f"the tools have more than {limits.tool_chars} characters: send fewer or shorter ones", param="tools", code="size")


def read_body(raw: bytes, limits: Limits) -> tuple[ChatBody, Shape | None]:
    """Decode a body, and work out how it bends its draw. Raises `BadRequest` naming the field."""
    if len(raw) > OUTLINED_BYTES:
        _refuse_unread(raw, limits)
    body: ChatBody = decode(_body, raw)
    for field, value in (
        ("messages", body.messages), ("tools", body.tools), ("metadata", body.metadata), ("tags", body.tensorzero_tags),
        ("response_format", body.response_format), ("tool_choice", body.tool_choice),
    ):  # fmt: skip
        try:
            check_tree(value, limits)
        except BadRequest as error:
            raise BadRequest(str(error), param=field, code=error.code) from error
    if len(raw) > limits.tool_chars and characters(body.tools, at_most=limits.tool_chars) > limits.tool_chars:
        raise _too_many_tools(limits)
    if body.top_logprobs and not body.logprobs:
        raise BadRequest("top_logprobs: ask for `logprobs` as well", param="top_logprobs")
    if body.tool_choice != "none":
        _check_tools(body.tools or [])
    for field in ("user", "safety_identifier", "tensorzero_variant_name", "session_id", "tensorzero_episode_id", "model"):
        if "\x00" in (getattr(body, field) or ""):
            raise BadRequest("the text contains the character U+0000: remove it", param=field.replace("tensorzero_", "tensorzero::"))
    return body, _shape(body)


def _shape(body: ChatBody) -> Shape | None:
    choice = read_choice(body.tool_choice)
    return shape_of(
        presence_penalty=body.presence_penalty, frequency_penalty=body.frequency_penalty, logit_bias=body.logit_bias,
        response_format=read_format(body.response_format), tools=[] if choice == "none" else body.tools or [], tool_choice=choice,
        parallel=body.parallel_tool_calls,
    )  # fmt: skip


def understand(
    body: ChatBody, headers: Headers, caller: Caller, config: PolicyConfig, *, salt: str, shape: Shape | None = None
) -> ChatRequest:
    """What a body means for its policy. Raises `BadRequest`."""
    metadata = dict(body.metadata or {})
    episode = _episode(body, metadata, headers, caller)
    side = (body.turn_type or header(headers, b"x-turn-type") or "main") == "side"
    who = None if is_rollout(caller.source) else body.safety_identifier or body.user
    return ChatRequest(
        inference_id=uuid7(),
        episode_id=episode or uuid7(),
        continues=episode is not None,
        ends=body.session_done or (header(headers, b"x-session-done") or "").lower() in ("true", "1"),
        policy=body.model,
        messages=[_message(index, message) for index, message in enumerate(body.messages)],
        tools=None if body.tool_choice == "none" else body.tools or None,
        sampling=_sampling(body, config),
        shape=shape,
        actor=hash_actor(who, salt=salt) if who else None,
        segment=_segment(metadata, config),
        tags=_tags(body, metadata, config),
        consent=Consent(train=_consents(body, metadata, config, side=side)),
        stream=bool(body.stream),
        include_usage=body.stream_options is not None and body.stream_options.include_usage,
        logprobs=bool(body.logprobs),
        likely=body.top_logprobs or 0 if body.logprobs else None,
        dryrun=bool(body.tensorzero_dryrun),
        stored=body.store is not False,
        source=caller.source,
        rateable=caller.episode_id is None,
    )


def _episode(body: ChatBody, metadata: dict[str, str], headers: Headers, caller: Caller) -> str | None:
    named = body.tensorzero_episode_id or metadata.pop("episode_id", None) or body.session_id
    named = named or header(headers, b"x-session-id") or caller.episode_id
    if named is not None and (not 0 < len(named) <= 64 or not named.isprintable()):
        raise BadRequest("an episode id has 1 to 64 printable characters", param="metadata.episode_id")
    if caller.episode_id is not None and named != caller.episode_id:
        raise HttpError(403, "this session key is for another episode", code="wrong_episode")
    return named


def _consents(body: ChatBody, metadata: dict[str, str], config: PolicyConfig, *, side: bool) -> bool:
    """Any no wins; a yes only matters where the policy's default is no."""
    said = metadata.pop("train", "").lower()
    if body.store is False or side or said in ("false", "0", "no"):
        return False
    return config.train_by_default or said in ("true", "1", "yes")


def _segment(metadata: dict[str, str], config: PolicyConfig) -> dict[str, str]:
    """The metadata that the policy groups turns by; `,` and `=` separate in stored segments, so they are replaced."""
    chosen = {name: metadata.pop(name) for name in config.segment_tags if metadata.get(name)}
    return {name: value.replace(",", "_").replace("=", "_")[:SEGMENT_VALUE_CHARS] for name, value in chosen.items()}


def _tags(body: ChatBody, metadata: dict[str, str], config: PolicyConfig) -> dict[str, str]:
    tags = {**metadata, **(body.tensorzero_tags or {})}
    for name in (*config.segment_tags, "train", "episode_id"):
        tags.pop(name, None)
    return tags | ({"variant_name": body.tensorzero_variant_name} if body.tensorzero_variant_name else {})


def _sampling(body: ChatBody, config: PolicyConfig) -> SamplingParams:
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    return SamplingParams(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        max_tokens=min(body.max_completion_tokens or body.max_tokens or config.max_tokens, config.max_tokens),
        seed=body.seed,
        stop=tuple(text for text in stop if text),
        top_k=body.top_k if body.top_k and body.top_k > 0 else msgspec.UNSET,
    )


def _message(index: int, message: dict[str, Any]) -> dict[str, Any]:
    """One message as the chat template wants it: text content, no empty fields."""
    at = f"messages[{index}]"
    for name in message:
        if name not in _MESSAGE_FIELDS:
            raise BadRequest(f"{at}.{name}: unknown field", param=f"{at}.{name}", code="unknown_field")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise BadRequest(f"{at}.role: one of {', '.join(sorted(ROLES))}", param=f"{at}.role")
    kept = {name: message[name] for name in _KEPT_FIELDS if message.get(name) is not None}
    kept["role"] = "system" if role == "developer" else role
    kept["content"] = _content(message.get("content"), f"{at}.content", optional=role == "assistant")
    if "tool_calls" in kept and not _are_tool_calls(kept["tool_calls"]):
        raise BadRequest(f"{at}.tool_calls: a list of function calls", param=f"{at}.tool_calls")
    for name in ("name", "tool_call_id"):
        if not isinstance(kept.get(name, ""), str):
            raise BadRequest(f"{at}.{name}: a text", param=f"{at}.{name}")
    return kept


def _content(content: object, at: str, *, optional: bool) -> str:
    if isinstance(content, str):
        return content
    if content is None and optional:
        return ""
    if not isinstance(content, list) or not content:
        raise BadRequest(f"{at}: a text or a list of text parts", param=at)
    texts: list[str] = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise BadRequest(f"{at}: only parts of type `text` are understood", param=at, code="unsupported_content")
        texts.append(text)
    return "".join(texts)


def _are_tool_calls(calls: object) -> bool:
    if not isinstance(calls, list):
        return False
    functions = [call.get("function") if isinstance(call, dict) else None for call in calls]
    return all(isinstance(f, dict) and isinstance(f.get("name"), str) and isinstance(f.get("arguments"), str) for f in functions)


def _check_tools(tools: list[dict[str, Any]]) -> None:
    """Raise `BadRequest` for what is no function with a schema; before `understand`, so beside the event loop where the body is large."""
    for index, tool in enumerate(tools):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRequest("a tool is {type: 'function', function: {name, parameters}}", param=f"tools[{index}]")
        if not isinstance(function.get("parameters", {}), dict) or not is_schema(function.get("parameters", {})):
            raise BadRequest("parameters is a JSON schema", param=f"tools[{index}].function.parameters")
