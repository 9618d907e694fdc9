"""A release's way as spans of the slot that made its version: one for each state, from when it was entered until it was left."""

from collections.abc import Callable, Mapping

from app.domain.release.releases import Release
from app.domain.telemetry.traceparent import TRACEPARENT
from app.telemetry.traces import Traces


def traced(traces: Traces, tags: Callable[[str, str], Mapping[str, str]]) -> Callable[[Release, Release], None]:
    """Tells of each move; `tags` are those of a version, by policy and digest."""

    def moved(before: Release, after: Release) -> None:
        traces.tell(
            f"release {before.state}", parent=tags(after.policy, after.digest).get(TRACEPARENT), started=before.changed_at,
            ended=after.changed_at, ratchet__policy=after.policy, ratchet__release=after.id, ratchet__version=after.version_name,
            ratchet__digest=after.digest, ratchet__state=after.state, ratchet__stage=-1 if before.stage is None else before.stage,
        )  # fmt: skip

    return moved
