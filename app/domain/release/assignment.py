"""Who gets which version: a pure function of the route and the unit, so that every logged probability is a true one.

Two independent draws, each a hash (so sticky without memory, and re-drawn when the stage changes and on every day, UTC):

    u0 = hash(policy, "lasting", candidate release, unit)                          < lasting  → never the candidate, in no stage
    u1 = hash(policy, "holdback", pointer generation[, release, stage], day, unit) < holdback → reference,  probability = holdback
    u2 = hash(policy, candidate release, stage, day, unit)                         < share    → candidate,  probability = share
    otherwise                                                                                 → champion,   probability = 1 - share
                                                                (or 1 - holdback where there is no canary)

People come back: with one draw for ever everybody would be one unit, and once all were seen nothing new could be learned. A day later they
are drawn anew, whatever they met before, so a person's day is a unit of its own with a true probability.

Both draws belong to the stage of the canary that runs meanwhile, and both arms name it: who is left for the champion after a canary has
taken its share differs from stage to stage, so a holdback is compared within one stage alone, and nobody's arm of one stage says
anything about their arm of the next.

Harm that lasts in whoever had the candidate in an earlier stage is in both arms of the next one. So a part of the people is drawn once for
the whole ramp, and is on the champion (or the holdback's reference) throughout: the lasting cohort. Both its arms name it (`-lasting`) and
have a share of 0, so the canary's stages compare the others, and a holdback compares either by itself.

Before all of these, the long-term holdout (`app.domain.release.holdouts`), which neither day, generation nor release draws anew:

    u3 = hash(policy, "holdout", its id, person) < its share → its version, in no stage of anything else

It is independent of the other draws, so whoever it does not hold has the probabilities above. Only people who can be recognised are held:
nothing builds up in an episode.

The canary compares units outside the holdback, so its probabilities are conditional on that. The unit is the hashed actor, or
the episode for anonymous requests. A running episode finishes on its arm: the gateway's business, not this function's.
"""

import hashlib
from datetime import datetime

import msgspec

from app.domain.release.holdouts import BESIDE, HELD, STAGE, Holdout, Member
from app.domain.release.releases import Route

DAY_S = 86_400
LASTING = "-lasting"
"""At the end of the stage's name: of somebody in the lasting cohort."""


class Arm(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The outcome of the draws for one unit. Unknown to the collector, because every gateway remembers a hundred thousand of them."""

    digest: str
    release_id: str | None
    """The canary's release while one runs, whoever is served; else that of the champion."""
    stage: str
    """`champion`; `canary-<index>.<day>`; `holdback.<day>`, or `holdback-<index>.<day>` for its reference while a canary is in that
    stage; `canary-<index>-lasting.<day>` and `holdback-<index>-lasting.<day>` for the lasting cohort; `rollout` for practice; `pinned`;
    `holdout` of the long-term holdout. The day is that of the draw (UTC, since 1970)."""
    arm: str
    """`champion`, `candidate`, `rollout`, `pinned`, `held` or `previous`, the holdback's reference (previous champion, later anchor)."""
    probability: float
    share: float
    holdback: float


def unit_interval(*parts: str) -> float:
    """A uniform number in [0, 1) from the first 53 bits of SHA-256 over the parts (joined by U+001F)."""
    digest = hashlib.sha256("\x1f".join(parts).encode()).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) / (1 << 53)


def day_of(at: datetime) -> int:
    """Days since 1970 (UTC)."""
    return int(at.timestamp() // DAY_S)


def is_lasting(stage: str) -> bool:
    """Whether a stage's name is of somebody in the lasting cohort."""
    return stage.partition(".")[0].endswith(LASTING)


def practise(route: Route) -> Arm:
    """The champion, for a rollout: it is part of no experiment, whatever runs, and its next turn meets whoever is champion then."""
    return Arm(digest=route.pointer.digest, release_id=None, stage="rollout", arm="rollout", probability=1.0, share=0.0, holdback=0.0)


PINNED = "pinned"
"""Arm and stage of a turn whose caller chose the version: nobody was exposed to anything by a draw."""


def pin(digest: str) -> Arm:
    """A version that the caller named: part of no experiment."""
    return Arm(digest=digest, release_id=None, stage=PINNED, arm=PINNED, probability=1.0, share=0.0, holdback=0.0)


def member_of(holdout: Holdout, person: str) -> Member | None:
    """What somebody is to a holdout, for as long as there is it; None for most."""
    drawn = unit_interval(holdout.policy, "holdout", holdout.id, person)
    if drawn < holdout.share:
        return Member.HELD
    return Member.BESIDE if drawn < (1 + BESIDE) * holdout.share else None


def _holding(route: Route, person: str, at: datetime) -> Holdout | None:
    """The holdout, where it keeps this person on its version."""
    holdout = route.holdout
    if holdout is None or at >= holdout.ends_at or holdout.digest in route.quarantined:
        return None
    return holdout if member_of(holdout, person) is Member.HELD else None


def assign(route: Route, unit: str, *, at: datetime, recognised: bool = True) -> Arm:
    """Draw the arm of `unit` under `route` for the day of `at`. `recognised`: it is a person, who can come back, not an episode."""
    if recognised and (kept := _holding(route, unit, at)) is not None:
        return Arm(digest=kept.digest, release_id=None, stage=STAGE, arm=HELD, probability=kept.share, share=0.0, holdback=0.0)
    pointer, day = route.pointer, str(day_of(at))
    reference = pointer.reference
    holdback = pointer.holdback if reference is not None else 0.0
    runs = route.canary_digest is not None and route.canary_release is not None
    share, during = (route.canary_share, (str(route.canary_release), str(route.canary_stage))) if runs else (0.0, ())
    lasting = runs and unit_interval(route.policy, "lasting", str(route.canary_release), unit) < route.canary_lasting
    named, share = (f"{route.canary_stage}{LASTING}", 0.0) if lasting else (str(route.canary_stage), share)
    if holdback > 0 and unit_interval(route.policy, "holdback", str(pointer.generation), *during, day, unit) < holdback:
        assert reference is not None
        return Arm(
            digest=reference, release_id=route.canary_release if runs else pointer.release_id, arm="previous",
            stage=f"holdback-{named}.{day}" if runs else f"holdback.{day}", probability=holdback, share=share,
            holdback=holdback,
        )  # fmt: skip
    if route.canary_digest is None or route.canary_release is None:
        stage = f"holdback.{day}" if holdback > 0 else "champion"
        return Arm(
            digest=pointer.digest, release_id=pointer.release_id, stage=stage, arm="champion",
            probability=1 - holdback, share=0.0, holdback=holdback,
        )  # fmt: skip
    stage = f"canary-{named}.{day}"
    drawn = unit_interval(route.policy, route.canary_release, str(route.canary_stage), day, unit) < share
    return Arm(
        digest=route.canary_digest if drawn else pointer.digest, release_id=route.canary_release, stage=stage,
        arm="candidate" if drawn else "champion", probability=share if drawn else 1 - share, share=share, holdback=holdback,
    )  # fmt: skip
