"""An answer's span: who may claim its context, and what it says of its end."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from app.api.chat import tracing
from app.api.chat.recording import Recording
from app.api.chat.request import ChatRequest, read_body, understand
from app.api.entry.access import ANONYMOUS
from app.api.telemetry.intake import Limits
from app.domain.release.assignment import pin
from app.domain.telemetry.traceparent import TRACEPARENT
from app.domain.telemetry.turns import FinishReason, Usage
from app.telemetry.traces import Span, Traces
from tests.fakes.gateway import CHAMPION, NOON, policy_config


def request(**tags: str) -> ChatRequest:
    body, shape = read_body(b'{"model": "composer", "messages": [{"role": "user", "content": "x"}]}', Limits())
    return replace(understand(body, {}, ANONYMOUS, policy_config(), salt="salt", shape=shape), tags=tags)


def test_without_traces_a_request_stays_what_it_is_and_no_context_is_claimed_in_a_tag() -> None:
    plain = request(ticket="7")
    assert tracing.begin(Traces(), plain, pin(CHAMPION), {}, NOON) == (plain, None)
    assert tracing.begin(Traces(), plain, pin(CHAMPION), {}, NOON)[0] is plain
    claimed, span = tracing.begin(Traces(), request(**{"ticket": "7", TRACEPARENT: "forged"}), pin(CHAMPION), {}, NOON)
    assert (claimed.tags, span) == ({"ticket": "7"}, None)


class Written:
    """A span that is written down."""

    def __init__(self) -> None:
        self.said: dict[str, Any] = {}
        self.ended: list[str | None] = []

    def set(self, **attributes: Any) -> None:
        self.said |= attributes

    def end(self, *, failed: str | None = None) -> None:
        self.ended.append(failed)


def ended(reason: FinishReason | None, *, kind: str = "answer") -> Written:
    span = Written()
    recording = SimpleNamespace(kind=kind, finish_reason=reason, usage=Usage(prompt_tokens=3, completion_tokens=2))
    tracing.end(cast("Span", span), cast("Recording", recording))
    return span


@pytest.mark.parametrize("reason", [None, *FinishReason])
def test_a_span_ends_with_its_answer_and_has_failed_where_the_engine_did(reason: FinishReason | None) -> None:
    span = ended(reason)
    told = "error" if reason is None else reason.value
    assert span.ended == [told if told in ("error", "timeout") else None]
    assert span.said == {
        "gen_ai__usage__input_tokens": 3, "gen_ai__usage__output_tokens": 2, "gen_ai__response__finish_reason": told,
    }  # fmt: skip


def test_a_summary_ends_no_span_and_an_answer_that_is_not_traced_has_none() -> None:
    assert ended(FinishReason.STOP, kind="summary").ended == []
    tracing.end(None, cast("Recording", SimpleNamespace(kind="answer")))
