"""`model="composer@sha256:…"`: a version that the caller chooses. Such a turn is part of no experiment, and no exposure is written for it.

It is refused for a version that is quarantined, and where no engine holds it: engines hold what the deployment may need (champion, what it
may come back to, candidates).
"""

from app.domain.errors import BadRequest
from app.domain.ports import Routes
from app.domain.release.assignment import Arm, pin
from app.listening.errors import HttpError

MARK = "@sha256:"


def named(model: str) -> tuple[str, str | None]:
    """The policy of a request's `model`, and the digest where one is pinned. Raises `BadRequest` for one that is no digest."""
    policy, mark, digest = model.partition(MARK)
    if not mark:
        return model, None
    if len(digest) != 64 or set(digest) - set("0123456789abcdef"):
        raise BadRequest(
            f"{digest[:64]!r} is no digest: give the 64 hexadecimal digits that answers carry as x-ratchet-version", param="model"
        )
    return policy, digest


def pinned(routes: Routes, policy: str, digest: str) -> Arm:
    """The arm of a pinned version. Raises `HttpError` for another policy's, and for one in quarantine."""
    if not routes.knows(policy, digest):
        raise HttpError(404, f"{policy} has no version {digest[:12]}: see /v1/versions", code="unknown_version", param="model")
    if digest in routes.route(policy).quarantined:
        raise HttpError(409, f"the version {digest[:12]} was taken back: pin another one", code="quarantined", param="model")
    return pin(digest)
