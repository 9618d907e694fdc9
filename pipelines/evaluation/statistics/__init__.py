"""The arithmetic of the gates: what may be concluded from units, and how surely. Pure numpy, no I/O.

Fed by `pipelines.evaluation` (decide, gates, offline) and `pipelines.watch` with arrays of units; feeds them
numbers, never actions. Every formula names its source; "sheet" is the gates specification by section.

    units.py             Units: outcome, arm, probability, baseline; Z and its bounds; cluster() sessions into units
                         predictable baselines m_t: running_mean(), with_usual() (CUPED)
    betting.py           Bet, EProcess, Wealth: start / advance / log_e (stream) and log_e_path (batch, so_far)
                         harm(), non_inferiority(), two_sided() build the e-processes of the sheet
    resumed.py           Resumed: of a stream that goes on only what is new is followed
    family.py            Member, family_evidence(): weighted mixture over metrics, with the cause
    group_sequential.py  GroupSequentialPlan, evaluate(): Lan-DeMets looks with the score variance
    non_inferiority.py   NonInferiorityPlan, judge(): 0.01 betting + 0.04 group-sequential
    confidence.py        intervals for display only
    srm.py               sequential sample-ratio and feedback-coverage test
    shiryaev_roberts.py  change detector for the time after promotion
    power.py             N_max, time to detect, attainable margin, plan_canary() which accepts or refuses
    suites/              alpha_investing.py: many candidates against one suite; paired.py:
                         offline suites: cluster bootstrap, permutation, Holm, best-of-k, rule of three
    off_policy.py        veto or ramp hint from logged turns
    monitors.py          reward-hack monitors
    proxy_gold.py        proxy-gold gap alarm
    normal.py            the normal distribution

Signs: canary minus champion, good is up. Orient a metric (1 - y for errors) before it becomes Units.

    units = Units.observed(outcome=y, treated=arm, probability=pi, baseline=m, stratum=stage, closed_at=micros, keys=ids)
    family_evidence([Member(name=..., weight=..., process=harm(margin=0.0, variance=m * (1 - m)), units=units)], alpha=0.025)
    group_sequential.evaluate(GroupSequentialPlan(n_max=..., alpha=0.025), units, threshold=0.0, tail=Tail.BELOW)
    non_inferiority.judge(NonInferiorityPlan(margin=0.015, variance=m * (1 - m), n_max=...), units)

What must not be used (NaN, out of range, duplicated, unordered, two arms) raises ValueError with the cure; what is too
little is simply not rejected. Nothing here ever turns absence of evidence into a pass.
"""
