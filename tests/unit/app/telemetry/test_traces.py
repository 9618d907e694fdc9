"""Spans of a turn's way: what continues what, what is not taken, and that nothing is imported where nobody wants them."""

import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import msgspec
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from sqlalchemy import Engine

from app import wiring
from app.api.chat.recording import turn_event
from app.db.tables import turns
from app.domain.errors import BadConfig
from app.domain.release.releases import Release, ReleaseState
from app.domain.telemetry.events import envelope
from app.domain.telemetry.traceparent import TRACEPARENT, traceparent_in
from app.release.tracing import traced
from app.settings import from_environment
from app.telemetry.traces import MOST_LINKS, NOWHERE, SpanKind, Traces
from tests.fakes.served import turn
from tests.unit.app.db.rows import fill

NOW = datetime(2026, 11, 23, 4, 0, tzinfo=UTC)
TAKEN = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
NOT_TAKEN = f"{TAKEN[:-2]}00"


class Kept:
    """Traces that are looked at here."""

    def __init__(self, share: float = 1.0) -> None:
        self._kept = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._kept))
        self.traces = Traces(provider, share=share)

    @property
    def spans(self) -> list[ReadableSpan]:
        return list(self._kept.get_finished_spans())


def test_what_a_caller_began_is_gone_on_with() -> None:
    kept = Kept(share=0.0)
    span = kept.traces.begin("chat", kind=SpanKind.SERVER, parent=TAKEN, ratchet__arm="champion")
    assert span is not None
    kept.traces.tell("label", parent=span.traceparent, started=NOW, ended=NOW + timedelta(seconds=2))
    span.end()
    label, chat = kept.spans
    assert f"{chat.get_span_context().trace_id:032x}" == TAKEN[3:35]  # type: ignore[union-attr]
    assert chat.parent is not None
    assert f"{chat.parent.span_id:016x}" == TAKEN[36:52]
    assert dict(chat.attributes or {}) == {"ratchet.arm": "champion"}
    assert label.parent is not None
    assert label.parent.span_id == chat.get_span_context().span_id  # type: ignore[union-attr]
    assert ((label.end_time or 0) - (label.start_time or 0)) == 2_000_000_000


@pytest.mark.parametrize("parent", [NOT_TAKEN, None])
def test_what_a_caller_or_the_lot_leaves_out_costs_nothing_further_on(parent: str | None) -> None:
    kept = Kept(share=0.0)
    assert kept.traces.begin("chat", parent=parent) is None
    kept.traces.tell("label", parent=None, started=NOW, ended=NOW)
    with kept.traces.span("commit", parent=None) as span:
        assert span is None
    assert kept.spans == []


def test_of_what_begins_a_trace_the_share_is_taken() -> None:
    kept = Kept(share=0.2)
    taken = sum(kept.traces.begin("chat") is not None for _ in range(2_000))
    assert 300 < taken < 500  # 400 ± 5.6 standard deviations
    assert all(kept.traces.begin("chat", parent=TAKEN) is not None for _ in range(20))
    assert all(kept.traces.begin("cycle", always=True) is not None for _ in range(20)), "there is one every five hours"


@pytest.mark.parametrize("parent", ["", "nonsense", TAKEN[:-1], TAKEN.upper(), f"00-{'0' * 32}-{'0' * 16}-01", "\x00" * 55])
def test_a_context_that_is_none_begins_a_trace_of_its_own(parent: str) -> None:
    kept = Kept()
    span = kept.traces.begin("chat", parent=parent)
    assert span is not None
    span.end()
    assert kept.spans[0].parent is None


def test_of_an_error_its_class_is_told_and_not_what_it_says() -> None:
    kept = Kept()
    with pytest.raises(ValueError, match="words"), kept.traces.span("commit", parent=TAKEN):
        raise ValueError("words of somebody")
    (span,) = kept.spans
    assert dict(span.attributes or {}) == {"error.type": "ValueError"}
    assert (span.events, span.status.description) == ((), None)


def test_a_release_is_told_state_by_state_where_its_version_was_made_in_a_trace() -> None:
    kept, before = Kept(share=0.0), release_in(ReleaseState.CANARY, stage=1)
    after = replace(before, state=ReleaseState.READY, stage=None, changed_at=NOW + timedelta(minutes=5))
    traced(kept.traces, lambda policy, digest: {TRACEPARENT: TAKEN} if (policy, digest) == ("composer", "d2") else {})(before, after)
    traced(kept.traces, lambda policy, digest: {})(before, after)
    (span,) = kept.spans
    assert (span.name, span.parent is not None and f"{span.parent.span_id:016x}") == ("release CANARY", TAKEN[36:52])
    assert (span.end_time or 0) - (span.start_time or 0) == 300_000_000_000
    told = span.attributes or {}
    assert (told["ratchet.state"], told["ratchet.stage"], told["ratchet.release"]) == ("READY", 1, "r2")


def release_in(state: ReleaseState, *, stage: int | None) -> Release:
    return Release(
        id="r2", policy="composer", digest="d2", version_name="v2", state=state, generation=3, stage=stage, champion_digest="d1",
        champion_generation=1, evidence_digest=None, reason=None, created_at=NOW, changed_at=NOW,
    )  # fmt: skip


def test_a_batch_names_no_more_turns_than_a_collector_takes() -> None:
    kept = Kept()
    span = kept.traces.begin("batch")
    assert span is not None
    span.link([f"00-{number:032x}-{number:016x}-01" for number in range(1, MOST_LINKS + 500)])
    span.end()
    assert len(kept.spans[0].links) <= MOST_LINKS


def test_the_tag_of_an_encoded_turn_is_found_and_nothing_that_was_said_is_taken_for_it() -> None:
    said = [{"role": "user", "content": f'"traceparent":"{NOT_TAKEN}"'}]
    untraced = msgspec.structs.replace(turn("t1"), messages=said, tags={"a": "b"})
    traced = msgspec.structs.replace(untraced, tags={"a": "b", TRACEPARENT: TAKEN})
    assert traceparent_in(msgspec.json.encode(untraced)) is None
    assert traceparent_in(msgspec.json.encode(traced)) == TAKEN
    assert f"ce_{TRACEPARENT}" not in envelope(turn_event(untraced), NOW)
    assert envelope(turn_event(traced), NOW)[f"ce_{TRACEPARENT}"] == TAKEN


def test_without_a_collector_nothing_is_imported_and_nothing_traced() -> None:
    code = (
        "import sys, app.main, pipelines.cycle, pipelines.ingestion.relay, pipelines.labelling.labeller\n"
        "from app.telemetry.traces import open_traces\n"
        "open_traces(None, process='api', share=1.0)\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry.sdk')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    assert not NOWHERE.on
    assert NOWHERE.begin("chat", parent=TAKEN) is None


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [("TRACES", "collector:4318", "such as http://127"), ("TRACES_SHARE", "2", "from 0 to 1"), ("TRACES_SHARE", "few", "from 0 to 1")],
)
def test_an_address_or_a_share_that_is_none_is_refused(name: str, value: str, said: str) -> None:
    with pytest.raises(BadConfig, match=said):
        from_environment({f"RATCHET_{name}": value})


def test_those_turns_that_are_traced_are_found_by_their_ids(sqlite_url: str, sqlite_engine: Engine) -> None:
    tags = {"i1": {TRACEPARENT: TAKEN, "a": "b"}, "i2": {"a": "b"}, "i3": {TRACEPARENT: NOT_TAKEN}}
    fill(sqlite_engine, turns, 3, inference_id=lambda n: f"i{n + 1}", tags=lambda n: tags[f"i{n + 1}"])
    settings = from_environment({"RATCHET_DATABASE_URL": sqlite_url})
    assert sorted(wiring.traced_turns(settings, ["i1", "i2", "i3", "i4"])) == [NOT_TAKEN, TAKEN]
    assert wiring.traced_turns(settings, ["i2"]) == []
