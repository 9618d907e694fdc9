"""Licences as data: what a base model's licence asks of a product, and whether a deployment meets it.

The rules are in `licences.toml` beside this file; they paraphrase and are no legal advice. A licence that is not in it, or a threshold
that depends on numbers nobody declared, blocks a release: missing evidence never promotes.
"""

from dataclasses import dataclass
from functools import cache
from importlib import resources

import msgspec

from app.domain.policies import DeploymentFacts


class Obligation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One thing a licence asks for. Without thresholds it always holds; with several, any one of them suffices."""

    id: str
    """What the deployment declares when it does it (`[policies.NAME.deployment] fulfils = [...]`)."""
    does: str
    """What has to be done, as a sentence."""
    text: str = ""
    """Text the product has to show; `{model}` is the base model's name."""
    monthly_users_over: int | None = None
    monthly_revenue_usd_over: float | None = None


class Licence(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One licence."""

    id: str
    """SPDX id where there is one."""
    name: str
    obligations: tuple[Obligation, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LicenceAnswer:
    """What a licence asks of one deployment."""

    unmet: tuple[Obligation, ...]
    undecided: tuple[str, ...]
    """Numbers that have to be declared before anybody can say."""
    texts: tuple[str, ...]
    """What the product must show now."""


@cache
def licences() -> dict[str, Licence]:
    """Every known licence by id."""
    text = resources.files("app.domain.release").joinpath("licences.toml").read_text()
    return {licence.id: licence for licence in msgspec.toml.decode(text, type=dict[str, list[Licence]])["licences"]}


def obligations_of(licence: Licence, *, base_model: str, facts: DeploymentFacts) -> LicenceAnswer:
    """Which obligations hold for this deployment, and which of them it does not meet."""
    undecided = tuple(sorted({name for o in licence.obligations for name in _missing(o, facts)}))
    holding = [o for o in licence.obligations if _holds(o, facts)]
    unmet = tuple(o for o in holding if o.id not in facts.fulfils)
    texts = tuple(o.text.format(model=base_model) for o in holding if o.text)
    return LicenceAnswer(unmet=unmet, undecided=undecided, texts=texts)


def _thresholds(obligation: Obligation, facts: DeploymentFacts) -> list[tuple[str, float, float | None]]:
    given = [
        ("monthly_users", obligation.monthly_users_over, facts.monthly_users),
        ("monthly_revenue_usd", obligation.monthly_revenue_usd_over, facts.monthly_revenue_usd),
    ]
    return [(name, limit, value) for name, limit, value in given if limit is not None]


def _holds(obligation: Obligation, facts: DeploymentFacts) -> bool:
    thresholds = _thresholds(obligation, facts)
    return not thresholds or any(value is not None and value > limit for _, limit, value in thresholds)


def _missing(obligation: Obligation, facts: DeploymentFacts) -> list[str]:
    thresholds = _thresholds(obligation, facts)
    if any(value is not None and value > limit for _, limit, value in thresholds):
        return []
    return [name for name, _, value in thresholds if value is None]
