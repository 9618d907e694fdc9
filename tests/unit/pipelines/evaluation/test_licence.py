"""The licence gate."""

from datetime import UTC, datetime

import pytest

from app.domain.policies import DeploymentFacts
from app.domain.release.gates import Verdict
from app.domain.release.licences import licences, obligations_of
from app.domain.release.versions import Version, VersionKind
from pipelines.evaluation.licence import judge_licence

NOW = datetime(2026, 11, 21, tzinfo=UTC)
KIMI = "Kimi-K2.5-modified-MIT"


def verdict(licence: str, facts: DeploymentFacts) -> Verdict:
    version = Version(
        digest="d", policy="p", name="n", kind=VersionKind.RL, parent=None, step=1, run_id=None, created_at=NOW, base_model="Kimi K2.5",
        licence=licence,
    )  # fmt: skip
    return judge_licence(version, facts, now=NOW).verdict


@pytest.mark.parametrize(
    ("licence", "facts", "expected"),
    [
        ("MIT", DeploymentFacts(), Verdict.PASS),
        ("Apache-2.0", DeploymentFacts(), Verdict.PASS),
        ("Unheard-of", DeploymentFacts(), Verdict.FAIL),
        ("Gemma", DeploymentFacts(), Verdict.FAIL),
        ("Gemma", DeploymentFacts(fulfils=("gemma-terms",)), Verdict.PASS),
        (KIMI, DeploymentFacts(), Verdict.INCONCLUSIVE),
        (KIMI, DeploymentFacts(monthly_users=5_000, monthly_revenue_usd=1_000.0), Verdict.PASS),
        (KIMI, DeploymentFacts(monthly_users=5_000), Verdict.INCONCLUSIVE),
        (KIMI, DeploymentFacts(monthly_users=100_000_001), Verdict.FAIL),
        (KIMI, DeploymentFacts(monthly_users=5_000, monthly_revenue_usd=20_000_001.0), Verdict.FAIL),
        (KIMI, DeploymentFacts(monthly_users=100_000_001, fulfils=("attribution",)), Verdict.PASS),
    ],
)
def test_a_release_goes_out_only_with_its_obligations_met(licence: str, facts: DeploymentFacts, expected: Verdict) -> None:
    assert verdict(licence, facts) is expected


def test_the_text_to_show_names_the_base_model() -> None:
    answer = obligations_of(licences()[KIMI], base_model="Kimi K2.5", facts=DeploymentFacts(monthly_users=200_000_000))
    assert answer.texts == ("Built with Kimi K2.5",)
