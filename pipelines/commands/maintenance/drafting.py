"""What `ratchet model draft` does: a draft head for the version that serves, from what it answered."""

from typing import Any

import msgspec

from app import wiring
from app.policy.storage.heads import HeadRecord
from app.settings import Settings
from pipelines.training.drafting import DraftingConfig, LoggedAnswer, draft


def draft_for_live(settings: Settings, policy: str, config: DraftingConfig, *, by: str) -> HeadRecord:
    """Train, judge and keep or refuse a head for a policy's champion; what became of it stands beside the version and in the audit log."""
    digest = wiring.release_desk(settings).pointer(policy).digest
    answers = [
        LoggedAnswer(unit=unit, prompt=tuple(payload.prompt_tokens), completion=tuple(payload.completion_tokens))
        for unit, payload in wiring.own_answers(settings, policy, digest)
    ]
    record = draft(
        answers, policy=policy, digest=digest, weights=wiring.open_weights(settings), progress=wiring.progress_log(settings), config=config
    )
    detail: dict[str, Any] = msgspec.to_builtins(record)
    wiring.write_audit(settings, actor=by, action="draft_head.trained", subject=f"{policy}:{digest}", detail=detail)
    return record
