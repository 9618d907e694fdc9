"""Running episodes as the database knows them: for a gateway that did not serve them itself."""

from datetime import datetime
from typing import Any

import msgspec
from sqlalchemy import Engine, Row, select

from app.db.engine import expected_to_answer, reading
from app.db.ingestion.words import COMPLETION, WITH_WORDS
from app.db.tables import exposures, inbox, turns
from app.domain.ports import EpisodeState, EpisodeSummary
from app.domain.release.assignment import Arm
from app.domain.telemetry.events import EventType
from app.domain.telemetry.turns import FinishReason

SUMMARY = "summary"
WHOLE = (FinishReason.STOP.value, FinishReason.LENGTH.value)
"""How a summary ended that may be gone on from; of one that broke off only the beginning is there."""


class _Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """What a summary is, of a turn that waits in the inbox."""

    policy: str
    kind: str = ""
    finish_reason: str = ""
    completion: str = ""
    finished_at: datetime
    tags: dict[str, str] = {}


class SqlEpisodes:
    """The Episodes port over the applied exposures and turns, and over the turns that another gateway has just committed."""

    def __init__(self, engine: Engine, inbox_engine: Engine | None = None) -> None:
        self._engine = engine
        self._inbox = inbox_engine or engine

    def find(self, episode_id: str, policy: str) -> EpisodeState | None:
        """The newest exposure of the episode under this policy and its summaries, oldest first. Raises `Unavailable`."""
        mine = (exposures.c.episode_id == episode_id) & (exposures.c.policy == policy)
        newest = select(exposures).where(mine).order_by(exposures.c.occurred_at.desc()).limit(1)
        with expected_to_answer(), reading(self._engine) as connection:
            exposure = connection.execute(newest).one_or_none()
        if exposure is None:
            return None
        return EpisodeState(
            arm=_arm(exposure), last_inference_id=exposure.inference_id, summaries=self.summaries(episode_id, policy)
        )  # fmt: skip

    def summaries(self, episode_id: str, policy: str) -> tuple[EpisodeSummary, ...]:
        """From the inbox first, then from the turns: one that is applied in between is read twice and counts once. Raises `Unavailable`."""
        event = inbox.c
        turn_of = (event.key == episode_id) & (event.type == EventType.TURN.value) & event.applied_at.is_(None)
        with expected_to_answer(), reading(self._inbox) as connection:
            found = [msgspec.json.decode(raw, type=_Waiting) for raw in connection.execute(select(event.payload).where(turn_of)).scalars()]
        its = (turns.c.episode_id == episode_id) & (turns.c.policy == policy) & (turns.c.kind == SUMMARY)
        its &= turns.c.finish_reason.in_(WHOLE)
        written = select(COMPLETION, turns.c.tags, turns.c.finished_at).select_from(WITH_WORDS).where(its)
        with expected_to_answer(), reading(self._engine) as connection:
            known = {
                row.finished_at: EpisodeSummary(text=row.completion, tags=msgspec.convert(row.tags, dict[str, str]))
                for row in connection.execute(written)
            }
        waiting = [turn for turn in found if (turn.kind, turn.policy) == (SUMMARY, policy) and turn.finish_reason in WHOLE]
        known |= {turn.finished_at: EpisodeSummary(text=turn.completion, tags=turn.tags) for turn in waiting}
        return tuple(known[at] for at in sorted(known))


def _arm(row: Row[Any]) -> Arm:
    return Arm(
        digest=row.digest, release_id=row.release_id, stage=row.stage, arm=row.arm, probability=row.probability, share=row.share,
        holdback=row.holdback,
    )  # fmt: skip
