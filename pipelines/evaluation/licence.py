"""The licence gate: a release whose obligations are not met does not go out."""

from datetime import datetime

import msgspec

from app.domain.policies import DeploymentFacts
from app.domain.release.gates import GateName, GateResult, Verdict, content_hash
from app.domain.release.licences import licences, obligations_of
from app.domain.release.versions import Version


def judge_licence(version: Version, facts: DeploymentFacts, *, now: datetime) -> GateResult:
    """Pass when every obligation that holds is met; fail when one is not; inconclusive when a number was never declared."""
    licence = licences().get(version.licence)
    if licence is None:
        verdict, reason = Verdict.FAIL, f"licence {version.licence} is not known: declare it in licences.toml with its obligations"
    else:
        answer = obligations_of(licence, base_model=version.base_model, facts=facts)
        if answer.unmet:
            verdict, reason = Verdict.FAIL, "; ".join(f"{licence.name} asks to {o.does} (declare `{o.id}` once done)" for o in answer.unmet)
        elif answer.undecided:
            names = " and ".join(answer.undecided)
            verdict, reason = Verdict.INCONCLUSIVE, f"{licence.name} depends on {names}: declare it under [policies.NAME.deployment]"
        else:
            verdict, reason = Verdict.PASS, f"every obligation of {licence.name} is met"
    evidence = {"licence": version.licence, "base_model": version.base_model, "facts": msgspec.to_builtins(facts)}
    rules = msgspec.to_builtins(licence) if licence else None
    return GateResult(
        gate=GateName.LICENCE, digest=version.digest, verdict=verdict, reason=reason, evidence=evidence, config_hash=content_hash(rules),
        evidence_hash=content_hash(evidence), decided_at=now,
    )  # fmt: skip
