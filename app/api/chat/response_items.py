"""The input items of `/v1/responses` as the messages of a chat, and its tools as a chat's."""

from typing import Any

from app.domain.errors import BadRequest

_TEXTS = frozenset({"input_text", "output_text", "text"})


def messages_of(given: str | list[dict[str, Any]], instructions: str | None) -> list[dict[str, Any]]:
    """The conversation. Raises `BadRequest` for an item that is no message, call or answer to a call."""
    messages: list[dict[str, Any]] = [] if instructions is None else [{"role": "system", "content": instructions}]
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    for index, item in enumerate(given):
        _add(messages, item, f"input[{index}]")
    return messages


def _add(messages: list[dict[str, Any]], item: dict[str, Any], at: str) -> None:
    match item.get("type", "message"):
        case "message":
            messages.append({"role": item.get("role"), "content": _content(item.get("content"), f"{at}.content")})
        case "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            if messages and messages[-1].get("role") == "assistant":  # what was said and called in one answer is one message
                messages[-1].setdefault("tool_calls", []).append(call)
            else:
                messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        case "function_call_output":
            output = _content(item.get("output"), f"{at}.output")
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
        case "reasoning":
            pass  # of another model: ours is in the text
        case kind:
            raise BadRequest(f"{at}: items of type {kind!r} are not understood; send messages, function calls and their outputs", param=at)


def _content(content: object, at: str) -> object:
    if not isinstance(content, list):
        return content
    parts: list[dict[str, Any]] = []
    for part in content:
        if not isinstance(part, dict) or str(part.get("type")) not in _TEXTS:
            raise BadRequest(f"{at}: only parts of text are understood", param=at, code="unsupported_content")
        parts.append({"type": "text", "text": part.get("text")})
    return parts


def tools_of(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Functions as a chat has them. Raises `BadRequest` for tools that run elsewhere (search, files, …)."""
    for index, tool in enumerate(tools):
        if tool.get("type") != "function":
            raise BadRequest("only tools of type `function` are offered to the model: others run at OpenAI", param=f"tools[{index}]")
    return [{"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}} for tool in tools]
