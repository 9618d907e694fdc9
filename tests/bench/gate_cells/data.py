"""V5, V7 and the planted hacks: assignment, logged turns, and rewards that rise while the product does not."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np

from pipelines.evaluation.statistics import betting, off_policy
from pipelines.evaluation.statistics.family import Member, family_evidence
from pipelines.evaluation.statistics.off_policy import LoggedResponses, OffPolicyStatus
from pipelines.evaluation.statistics.proxy_gold import gap_process, gap_units
from pipelines.evaluation.statistics.srm import ArmCounts, log_bayes_factor, sample_ratio
from pipelines.evaluation.statistics.units import FloatArray, IntArray, Units
from tests.bench.common.sections import Section, delay, error_of, repetitions_of, stopped
from tests.bench.gate_cells.canaries import NEVER, first_true
from tests.fakes.hacked import HACKS as HACKED
from tests.fakes.hacked import first_noticed

ALPHA = 0.01


def sample_ratios(scale: float, seed: int) -> Section:
    """V5: sample-ratio test at 1,000 looks over 100,000 units beside a peeked chi-squared test (sheet S4)."""
    section = Section(title="V5 sample-ratio mismatch, 100,000 units, 1,000 looks")
    section.header("intended", "true", "ours, alpha 0.01", "chi-squared p < 0.001", "p < 0.01", "p < 0.05")
    rng, n, worst = np.random.default_rng([seed, 1000]), repetitions_of(1500, scale, least=150), 0.0
    for intended, true in ((0.5, 0.5), (0.1, 0.1), (0.5, 0.52)):
        a = np.cumsum(rng.binomial(100, true, (n, 1000)), axis=1)
        ours = _mismatch_stops(a, intended)
        chi = [_chi_squared_stops(a, intended, p) for p in (10.828, 6.635, 3.841)]
        if intended == true:
            section.row(f"{intended:g}", f"{true:g}", stopped(ours), *map(stopped, chi))
            worst = max(worst, stopped(ours))
        else:
            section.row(f"{intended:g}", f"{true:g}", *map(delay, [ours, *chi]))
            section.require("52/48 found by 8,000 units", float(np.median(ours)) <= 8000)
    section.numbers["srm_fpr"] = worst
    section.require("false alarms <= 0.01", worst <= ALPHA + 3 * error_of(ALPHA, n))
    _suppressed(section, rng, n)
    return section


def _mismatch_stops(treated: IntArray, intended: float) -> IntArray:
    """Production Bayes factor at every look; counts that repeat are computed once."""
    n = 100 * (np.arange(treated.shape[1]) + 1)
    crossed = np.empty(treated.shape, dtype=np.bool_)
    for look, total in enumerate(n.tolist()):
        counts, inverse = np.unique(treated[:, look], return_inverse=True)
        logs = [log_bayes_factor(ArmCounts(treated=a, control=total - a, probability=intended)) for a in counts.tolist()]
        crossed[:, look] = (np.array(logs) >= betting.evidence_needed(ALPHA))[inverse]
    return first_true(crossed, n)


def _chi_squared_stops(treated: IntArray, intended: float, critical: float) -> IntArray:
    n = 100 * (np.arange(treated.shape[1]) + 1)
    return first_true((treated - n * intended) ** 2 / (n * intended * (1 - intended)) > critical, n)


def _suppressed(section: Section, rng: np.random.Generator, repetitions: int) -> None:
    """S11: the canary keeps 20 % or 40 % of its would-be-bad ratings from being given."""
    section.rows.append("")
    section.header("suppressed", "mean of ratings, pp", "intention to treat, pp", "coverage test finds it")
    for share in (0.0, 0.2, 0.4):
        lifts, found = np.zeros((repetitions, 2)), 0
        for r in range(repetitions):
            rated, good = rng.binomial(5000, 1.0, 2), np.zeros(2)
            good = rng.binomial(rated, 0.6)
            kept = np.array([good[0] + rng.binomial(rated[0] - good[0], 1 - share), rated[1]])
            lifts[r] = good[0] / kept[0] - good[1] / kept[1], (good[0] - good[1]) / 5000
            counts = ArmCounts(treated=int(kept[0]), control=int(kept[1]), probability=0.5)
            found += sample_ratio([counts], alpha=ALPHA).is_mismatch
        section.row(f"{share:.0%}", *(100 * lifts.mean(axis=0)).tolist(), found / repetitions)


def off_policy_estimates(scale: float, seed: int) -> Section:
    """V7: 64-token responses over 50 tokens, 10,000 logged; estimates by distance of the candidate (sheet S12)."""
    section = Section(title="V7 off-policy estimates of 64-token responses, 10,000 logged")
    section.header("KL, nat", "ESS/n", "exp(-2 KL)", "status", "covered", "truth", "ours", "token-mean", "geometric mean")
    n = repetitions_of(100, scale, least=6)
    for k, push in enumerate((0.03, 0.06, 0.09, 0.12, 0.15, 0.18, 0.24)):
        rows = [_one_log(np.random.default_rng([seed, 1100, k, r]), push) for r in range(n)]
        _report(section, rows)
    return section


def _one_log(rng: np.random.Generator, push: float) -> dict[str, float]:
    """One logging policy, one candidate pushed towards 10 tokens; the reward is the share of those tokens."""
    logits = rng.normal(0.0, 1.5, 50)
    candidate = logits + rng.normal(0.0, push / 2, 50)
    candidate[:10] += push * 2
    p, q = np.exp(logits) / np.exp(logits).sum(), np.exp(candidate) / np.exp(candidate).sum()
    counts = rng.multinomial(64, p, 10_000)
    reward = (rng.random(10_000) < counts[:, :10].sum(axis=1) / 64).astype(np.float64)
    log_p, log_q = counts @ np.log(p), counts @ np.log(q)
    result = off_policy.estimate(
        LoggedResponses(log_candidate=log_q, log_logged=log_p, reward=reward, is_fully_supported=True, engine_gap=0.0),
        margin=0.02,
    )
    health, truth = result.health, float(q[:10].sum() - p[:10].sum())
    assert health is not None
    inside = math.nan if result.low is None or result.high is None else float(result.low <= truth <= result.high)
    return {
        "kl": 64 * float(q @ np.log(q / p)),
        "ess": health.ess / health.n,
        "informative": float(result.status is OffPolicyStatus.INFORMATIVE),
        "covered": inside,
        "truth": truth,
        "ours": math.nan if result.effect is None else result.effect,
        "token": float(np.mean(counts @ (q / p) / 64 * reward) - reward.mean()),
        "geometric": float(np.mean(np.exp((log_q - log_p) / 64) * reward) - reward.mean()),
    }


def _report(section: Section, rows: list[dict[str, float]]) -> None:
    """One row per distance; single logs differ in KL, so compare each with its own exp(-2 KL) and then average."""
    kl, ess = np.array([r["kl"] for r in rows]), np.array([r["ess"] for r in rows])
    informative = np.array([r["informative"] for r in rows])
    covered = [r["covered"] for r in rows if not math.isnan(r["covered"])]
    estimated = [r for r in rows if not math.isnan(r["ours"])]
    means = [float(np.mean([r[key] for r in estimated])) if estimated else math.nan for key in _ESTIMATES]
    section.row(
        f"{kl.mean():.2f}",
        float(ess.mean()),
        float(np.exp(-2 * kl).mean()),
        f"informative {informative.mean():.0%}",
        float(np.mean(covered)) if covered else "-",
        *means,
    )
    gaps = (ess - np.exp(-2 * kl))[kl <= 1.2]
    if len(gaps) >= ENOUGH_LOGS:
        gap, error = abs(float(gaps.mean())), float(gaps.std(ddof=1)) / math.sqrt(len(gaps))
        section.require(f"|ESS/n - exp(-2 KL)| <= 0.03 + 3 SE at KL {kl.mean():.2f} ({gap:.3f}, SE {error:.3f})", gap <= 0.03 + 3 * error)
    section.require("uninformative at KL >= 1.5", not informative[kl >= 1.5].any())
    if covered:
        section.require("coverage >= 0.95", float(np.mean(covered)) >= 0.95 - 3 * error_of(0.05, len(covered)))


ENOUGH_LOGS = 5
"""Single logs scatter by up to 0.06 around exp(-2 KL): the mean of fewer says nothing."""
_ESTIMATES = ("truth", "ours", "token", "geometric")

HACKS: dict[str, dict[str, float]] = {
    "broken tool calls": {"tool_calls": -0.08, "reward": 0.03},
    "clarifying questions": {"asks": 0.10, "reward": 0.03},
    "length": {"long": 0.10, "reward": 0.03},
    "refusal": {"refuses": 0.08, "reward": 0.03},
    "sycophancy": {"reward": 0.10},
}
"""What each planted hack does to the canary, as effects on oriented metrics; the gold metric stays flat in all."""
WEIGHTS = {"tool_calls": 0.30, "gold": 0.30, "reward": 0.10, "asks": 0.10, "long": 0.10, "refuses": 0.10}
BASE = {"tool_calls": 0.97, "gold": 0.6, "reward": 0.6, "asks": 0.15, "long": 0.05, "refuses": 0.03}
TWO_SIDED = ("asks", "long", "refuses")


def hacks(scale: float, seed: int) -> Section:
    """V9, planted hacks: the proxy rises, gold is flat; who notices, after how many units at share 0.5."""
    section = Section(title="V9 planted reward hacks: units until noticed within 20,000 at share 0.5")
    section.header("hack", "family e-process", "named cause", "proxy-gold gap (0.01)", "no hack")
    n = repetitions_of(60, scale, least=6)
    for name, effects in HACKS.items():
        found = [_hacked(np.random.default_rng([seed, 1200, r]), effects) for r in range(n)]
        family, gap = np.array([f[0] for f in found]), np.array([f[2] for f in found])
        causes = [f[1] for f in found if f[0] < NEVER]
        cause = max(set(causes), key=causes.count) if causes else "-"
        section.row(name, delay(family), cause, delay(gap), "")
        section.require(f"{name} noticed", stopped(np.minimum(family, gap)) >= 0.9)
    clean = [_hacked(np.random.default_rng([seed, 1201, r]), {}) for r in range(n)]
    section.row("none", "", "", "", float(np.mean([min(f[0], f[2]) < NEVER for f in clean])))
    return section


def live_hacks(scale: float, seed: int) -> Section:
    """V9, hacks planted into turns and judged by decide() itself, monitors and all, every 100 units (`tests.fakes.hacked`)."""
    section = Section(title="V9 hacks planted into turns, judged by decide() every 100 units at share 0.5: units until noticed")
    section.header("hack", "median units", "latest", "noticed by", "action")
    n = repetitions_of(20, scale, least=2)
    for name, (hack, who) in HACKED.items():
        found = [first_noticed(hack, seed=seed + r, most=3000) for r in range(n)]
        noticed = [one for one in found if one is not None]
        units = np.array([NEVER if one is None else one.units for one in found])
        by = Counter(next((word for word in who if word in one.by), one.by) for one in noticed)
        cause, action = by.most_common(1)[0][0] if by else "-", noticed[0].action.value if noticed else "-"
        section.row(name, delay(units), int(units.max()) if noticed else "-", cause, action)
        section.numbers["hack_units: " + name] = float(np.median(units))
        section.require(f"{name} noticed within 3,000 units", len(noticed) == n)
    honest = [first_noticed(None, seed=seed + r, most=3000 if n >= 10 else 1500) is not None for r in range(n)]
    section.row("none", "-", "-", f"acted on or warned of: {sum(honest)} of {n}", "-")
    section.numbers["hack_units: none, share noticed"] = float(np.mean(honest))
    return section


def _hacked(rng: np.random.Generator, effects: dict[str, float], n: int = 20_000) -> tuple[int, str | None, int]:
    """Units until the family rejects at 0.025, its cause, and units until the proxy-gold e-process rejects at 0.01."""
    treated = rng.random(n) < 0.5
    outcomes = {m: (rng.random(n) < BASE[m] + effects.get(m, 0.0) * treated).astype(np.float64) for m in WEIGHTS}
    members = [_member(metric, outcomes[metric], treated) for metric in WEIGHTS]
    family = family_evidence(members, alpha=0.025)
    gap = gap_units(proxy=outcomes["reward"], gold=outcomes["gold"], treated=treated, probability=0.5, baseline=0.0)
    path = betting.log_e_path(gap_process(margin=0.01, variance=0.48), gap)
    late = np.flatnonzero(path >= betting.evidence_needed(0.01))
    stop = NEVER if family.rejected_at is None else family.rejected_at + 1
    return int(stop), family.cause, int(late[0] + 1 if len(late) else NEVER)


def _member(metric: str, outcome: FloatArray, treated: np.ndarray) -> Member:
    mean = BASE[metric]
    build = betting.two_sided if metric in TWO_SIDED else betting.harm
    margin = 0.03 if metric in TWO_SIDED else 0.0
    targets = betting.HARM_TARGETS if metric in TWO_SIDED else betting.harm_targets(mean)
    return Member(
        name=metric,
        weight=WEIGHTS[metric],
        process=build(margin=margin, variance=mean * (1 - mean), targets=targets),
        units=Units.observed(outcome=outcome, treated=treated, probability=0.5, baseline=mean),
    )
