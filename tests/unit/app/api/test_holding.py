"""The long-term holdout at the gateway: who is kept, and what is written down about it."""

from dataclasses import replace
from datetime import timedelta

from app.domain.release.holdouts import Holdout
from tests.fakes.gateway import CANDIDATE, NOON, PREVIOUS, FixedRoutes
from tests.unit.app.api.test_gateway import ask, exposures, service, turns


def test_whoever_the_long_term_holdout_keeps_stays_through_canaries_and_whoever_nobody_knows_is_not_kept() -> None:
    routes = FixedRoutes("composer")
    routes.canary("composer", share=1.0)
    held = Holdout(
        id="h", policy="composer", digest=PREVIOUS, share=1.0, began_at=NOON, ends_at=NOON + timedelta(days=90), counted_until=NOON
    )
    routes.routes["composer"] = replace(routes.routes["composer"], holdout=held)
    client, inbox = service(routes=routes, clock=lambda: NOON)
    ask(client, user="ada", extra={"tensorzero::episode_id": "ep"})
    ask(client)
    routes.routes["composer"] = replace(routes.routes["composer"], holdout=None)
    ask(client, user="ada", extra={"tensorzero::episode_id": "ep"})
    assert [turn.version for turn in turns(inbox)] == [PREVIOUS, CANDIDATE, CANDIDATE]
    assert [(shown.stage.partition(".")[0], shown.arm, shown.release_id) for shown in exposures(inbox)] == [
        ("holdout", "held", None), ("canary-1", "candidate", "release-1"), ("canary-1", "candidate", "release-1"),
    ]  # fmt: skip
