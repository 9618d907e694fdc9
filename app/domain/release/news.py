"""News for people: the few events that somebody has to hear of.

A signed webhook gets every event it asked for, as it is; a channel (`slack+https://…`, `teams+https://…`, `mailto:…`) gets news: one
message for what happened, however many events that makes, and what can flap once in six hours.

    JUDGING               release.judging: people are asked to judge what no traffic can
    READY                 release.ready, release.rebound where people are asked anew, and release.waiting at half of their time
    harm                  release.aborted by a program
    rollback              deployment.rollback
    hold                  gate.decided with the action `hold`
    frozen, incident      alarm.raised and alarm.ended
"""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

SLACK, TEAMS, MAIL = "slack+", "teams+", "mailto:"
CHANNELS = (SLACK, TEAMS, MAIL)
"""How the addresses of channels begin."""
FLAPPING = frozenset({"release.ready", "release.rebound", "release.waiting", "gate.decided", "alarm.raised", "alarm.ended"})
REST = timedelta(hours=6)
"""What can flap comes again about the same thing after this long at the earliest; rollbacks and aborts come every time."""
OF_EVIDENCE = frozenset({"release.ready", "release.waiting"})
"""What is about a release's evidence: other evidence is other news. That it was taken again flaps as the data do."""


def is_news(action: str, actor: str, detail: Mapping[str, Any]) -> bool:
    """Whether somebody has to hear of it."""
    match action:
        case "release.ready" | "release.rebound" | "release.judging" | "release.waiting":
            return True
        case "deployment.rollback" | "alarm.raised" | "alarm.ended":
            return True
        case "release.aborted":
            return not actor.startswith("user:")
        case "gate.decided":
            return detail.get("action") == "hold"
        case _:
            return False
