"""Running episodes as the database knows them: for a gateway that did not serve them itself."""

from typing import Any

import msgspec
from sqlalchemy import Engine, Row, select

from app.db.engine import expected_to_answer, reading
from app.db.tables import exposures, turns
from app.domain.ports import EpisodeState, EpisodeSummary
from app.domain.release.assignment import Arm


class SqlEpisodes:
    """The Episodes port over the applied exposures and turns."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def find(self, episode_id: str, policy: str) -> EpisodeState | None:
        """The newest exposure of the episode under this policy and its summaries, oldest first. Raises `Unavailable`."""
        mine = (exposures.c.episode_id == episode_id) & (exposures.c.policy == policy)
        newest = select(exposures).where(mine).order_by(exposures.c.occurred_at.desc()).limit(1)
        its = (turns.c.episode_id == episode_id) & (turns.c.policy == policy)
        written = select(turns.c.completion, turns.c.tags).where(its, turns.c.kind == "summary")
        with expected_to_answer(), reading(self._engine) as connection:
            exposure = connection.execute(newest).one_or_none()
            summaries = connection.execute(written.order_by(turns.c.finished_at)).all() if exposure is not None else []
        if exposure is None:
            return None
        return EpisodeState(
            arm=_arm(exposure),
            last_inference_id=exposure.inference_id,
            summaries=tuple(EpisodeSummary(text=row.completion, tags=msgspec.convert(row.tags, dict[str, str])) for row in summaries),
        )


def _arm(row: Row[Any]) -> Arm:
    return Arm(
        digest=row.digest, release_id=row.release_id, stage=row.stage, arm=row.arm, probability=row.probability, share=row.share,
        holdback=row.holdback,
    )  # fmt: skip
