"""A move of a release is a span from when its state was entered until it was left, and continues the slot that made its version."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest

from app.domain.release.releases import Release, ReleaseState
from app.domain.telemetry.traceparent import TRACEPARENT
from app.release.tracing import traced
from app.telemetry.traces import Traces

AT = datetime(2026, 11, 24, 6, tzinfo=UTC)
BEFORE = Release(
    id="r1", policy="tab", digest="v2", version_name="tab-v2", state=ReleaseState.CANARY, generation=4, stage=0, champion_digest="v1",
    champion_generation=1, evidence_digest=None, reason=None, created_at=AT, changed_at=AT, initiator="system:loop",
)  # fmt: skip
AFTER = replace(BEFORE, state=ReleaseState.READY, stage=None, changed_at=AT + timedelta(hours=1))


class Told:
    """Writes down the span it is told of."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, dict[str, Any]]] = []

    def tell(self, name: str, **said: Any) -> None:
        self.spans.append((name, said))


@pytest.mark.parametrize(("stage", "told"), [(0, 0), (2, 2), (None, -1)])
@pytest.mark.parametrize(("tags", "parent"), [({TRACEPARENT: "00-a-b-01"}, "00-a-b-01"), ({}, None)])
def test_a_move_is_told_with_the_stage_that_was_left(stage: int | None, told: int, tags: dict[str, str], parent: str | None) -> None:
    spans, asked = Told(), list[tuple[str, str]]()

    def tags_of(policy: str, digest: str) -> dict[str, str]:
        asked.append((policy, digest))
        return tags

    traced(cast("Traces", spans), tags_of)(replace(BEFORE, stage=stage), AFTER)
    assert asked == [("tab", "v2")]
    assert spans.spans == [
        (
            "release CANARY",
            {
                "parent": parent, "started": AT, "ended": AT + timedelta(hours=1), "ratchet__policy": "tab", "ratchet__release": "r1",
                "ratchet__version": "tab-v2", "ratchet__digest": "v2", "ratchet__state": "READY", "ratchet__stage": told,
            },
        )
    ]  # fmt: skip
