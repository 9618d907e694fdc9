"""What the gateway's refusals mean to practice: whether it may be said again, or nothing will come of it."""

import httpx
import pytest

from app.domain.errors import NotFound, RatchetError, Refused, Unavailable
from app.domain.learning.rollouts import Closed, Outcome, Rollout
from pipelines.rollouts.service import Service

ROLLOUT = Rollout(id="r", policy="p", taskset="t", task="k", task_hash="h", group="g", attempt=0, harness_hash="x")
SOLVED = Closed(outcome=Outcome.SOLVED, reward=1.0, duration_s=1.0, turns=1)


def service(status: int, text: str) -> Service:
    transport = httpx.MockTransport(lambda request: httpx.Response(status, text=text))
    return Service(lambda headers: httpx.Client(transport=transport, base_url="http://gateway"), "p")


@pytest.mark.parametrize(
    ("status", "text", "kind"),
    [
        (429, "slower", Unavailable), (500, "oh", Unavailable), (502, "<html>bad gateway</html>", Unavailable), (503, "", Unavailable),
        (504, "", Unavailable), (404, "no such episode", NotFound), (401, "no key", Refused), (400, "<html>no</html>", Refused),
        (400, '{"error": {"code": "unknown_metric"}}', Refused), (400, '["odd"]', Refused),
    ],
)  # fmt: skip
def test_only_what_may_pass_by_itself_is_said_again(status: int, text: str, kind: type[RatchetError]) -> None:
    with pytest.raises(kind) as raised:
        service(status, text).report(ROLLOUT, "e", SOLVED)
    assert type(raised.value) is kind


def test_a_verdict_that_was_given_before_stands() -> None:
    service(400, '{"error": {"code": "conflict"}}').report(ROLLOUT, "e", SOLVED)
