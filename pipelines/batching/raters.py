"""Who said what labels rest on, and which of them act together: found before the batch is cut, from the drawn labels alone. Pure.

Whoever may send feedback can steer weights. Three things bound that:

| against                                   | what                                                                                     |
|-------------------------------------------|------------------------------------------------------------------------------------------|
| one loud rater                            | a cap of turns per rater (`choose`), whoever asked                                        |
| raters nobody knows                       | their outcomes are drawn half-way to everybody's mean (`weighted`)                        |
| raters who agree on something else        | `suspects`: their labels wait in quarantine, counted as `quarantined`, for an operator    |

`suspects` asks two questions. *Sybils*: did far more newcomers begin within an hour than in other hours, and do they judge unlike
everybody else? *A shared cause*: is there a word, a pair of words or a length for which some raters' verdicts go by its presence, far
beyond how everybody else feels about it? Given how many good verdicts a rater gave, which of the turns got them is a hypergeometric draw;
with an odds ratio psi it is Fisher's noncentral one. The likelihood ratio of 200 times everybody's psi against everybody's has mean 1 for
whoever judges like everybody, so the mixture prod_r(1 - s + s LR_r) over raters is an e-value (Vovk and Wang 2021): above features/ALPHA
it is no chance.

Not found: raters who judge like everybody but for a few turns (their influence is their share), and a majority. A small group with a
taste of its own looks the same as a bought one: that is why it waits and is not thrown away.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache
from itertools import pairwise
from statistics import fmean, median

import numpy as np

from app.domain.learning.batches import LabelledTurn, Voice

ALPHA = 0.01
"""Chance per cut and question, at most, that honest raters are suspected; what it costs is that a few labels wait."""
STRONGER = 200.0
"""How many times everybody's odds ratio a group must show for one feature."""
HEARD = 16
"""Verdicts that one rater counts as, at most, in what is usual for everybody: nobody is everybody, however much they say."""
SHARES = (0.01, 0.03, 0.06, 0.12, 0.25)
SURE = 0.8
"""Posterior probability, once there is a group, that a rater belongs to it."""
FEWEST = 3
"""Raters in a group; fewer are bounded by the cap."""
COMMON, RARE = 0.6, 10
"""A feature is in at most this share of the verdicts and in at least so many of them."""
WORDS = 200
"""Words looked at per answer, from its start."""
BURST_S = 3600.0
FEWEST_HOURS = 3
"""From the first newcomer's to the last one's: in fewer there is no usual hour to compare one with."""
_WORD = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One rater's word on one turn."""

    rater: str
    newcomer: bool
    good: bool
    """Above the mean of all outcomes."""
    at: datetime
    features: frozenset[str]


def voices_of(turn: LabelledTurn, heard: Mapping[str, Sequence[Voice]]) -> Sequence[Voice]:
    """Who decided the turn's outcome; where nobody is known to have, whoever asked."""
    return heard.get(turn.inference_id) or (Voice(rater=turn.actor, newcomer=False),)


def quarantined(labels: Sequence[LabelledTurn], heard: Mapping[str, Sequence[Voice]]) -> dict[str, str]:
    """The raters whose labels wait, and why; by rater."""
    told = [turn for turn in labels if turn.has_outcome and turn.exclusion is None]
    if not told:
        return {}
    middle = fmean(turn.reward - turn.process for turn in told)
    long = sorted(turn.completion_tokens for turn in told)[len(told) * 3 // 4]
    verdicts = [
        Verdict(
            rater=voice.rater, newcomer=voice.newcomer, good=turn.reward - turn.process > middle, at=turn.finished_at,
            features=features(turn, long=long),
        )
        for turn in told for voice in voices_of(turn, heard) if voice.rater is not None
    ]  # fmt: skip
    return suspects(verdicts)


def features(turn: LabelledTurn, *, long: int) -> frozenset[str]:
    """What a rater could go by: the words and pairs of words of an answer, and whether it is among the longest quarter."""
    words = _WORD.findall(turn.completion.lower())[:WORDS]
    pairs = (f"{first} {second}" for first, second in pairwise(words))
    return frozenset([*words, *pairs, *(["<long>"] if turn.completion_tokens > long else [])])


def suspects(verdicts: Sequence[Verdict]) -> dict[str, str]:
    """Raters that act together, each with what gave them away; nobody where they are half of all or more."""
    found = {**_shared_cause(verdicts), **_sybils(verdicts)}
    everybody = {verdict.rater for verdict in verdicts}
    return found if 2 * len(found) < len(everybody) else {}


def _sybils(verdicts: Sequence[Verdict]) -> dict[str, str]:
    """Newcomers of an hour in which far more began than in the hours around it, and who judge unlike everybody else."""
    first: dict[str, datetime] = {}
    for verdict in sorted(verdicts, key=lambda verdict: verdict.at):
        if verdict.newcomer:
            first.setdefault(verdict.rater, verdict.at)
    hours: defaultdict[int, set[str]] = defaultdict(set)
    for rater, at in first.items():
        hours[int(at.timestamp() // BURST_S)].add(rater)
    span = range(min(hours), max(hours) + 1) if hours else range(0)
    if len(span) < FEWEST_HOURS:
        return {}
    usual = median(len(hours.get(hour, ())) for hour in span)
    found: dict[str, str] = {}
    for raters in hours.values():
        if _poisson_tail(len(raters), usual + 1.0) < ALPHA / len(span):
            theirs = [verdict.good for verdict in verdicts if verdict.rater in raters]
            others = [verdict.good for verdict in verdicts if verdict.rater not in raters]
            if _differ(theirs, others):
                found |= dict.fromkeys(raters, f"{len(raters)} newcomers of one hour (usually {usual:g}) judge unlike everybody else")
    return found


def _differ(theirs: Sequence[bool], others: Sequence[bool]) -> bool:
    """Whether two shares differ by more than four standard errors: pooled, two-sided 6e-5."""
    if not theirs or not others:
        return False
    pooled = (sum(theirs) + sum(others)) / (len(theirs) + len(others))
    error = math.sqrt(pooled * (1.0 - pooled) * (1.0 / len(theirs) + 1.0 / len(others)))
    return abs(sum(theirs) / len(theirs) - sum(others) / len(others)) > 4.0 * error


def _poisson_tail(count: int, mean: float) -> float:
    """P(N >= count)."""
    return max(0.0, 1.0 - sum(math.exp(n * math.log(mean) - mean - math.lgamma(n + 1)) for n in range(count)))


Cell = tuple[int, int, int, int]
"""(verdicts, good ones, with the feature, good ones with the feature) of one rater."""


def _shared_cause(verdicts: Sequence[Verdict]) -> dict[str, str]:
    """Raters whose good verdicts follow one feature, far beyond everybody's."""
    total, good = Counter(v.rater for v in verdicts), Counter(v.rater for v in verdicts if v.good)
    cells: defaultdict[str, dict[str, list[int]]] = defaultdict(dict)
    counted = Counter(feature for verdict in verdicts for feature in verdict.features)
    wanted = {feature for feature, count in counted.items() if RARE <= count <= COMMON * len(verdicts)}
    for verdict in verdicts:
        for feature in verdict.features & wanted:
            cell = cells[feature].setdefault(verdict.rater, [0, 0])
            cell[0] += 1
            cell[1] += verdict.good
    found: dict[str, str] = {}
    questions = len({tuple((rater, *cell) for rater, cell in raters.items()) for raters in cells.values()})
    for feature, raters in cells.items():
        table = {rater: (total[rater], good[rater], seen, liked) for rater, (seen, liked) in raters.items()}
        for rater in _group(table, features=questions):
            found.setdefault(rater, f"its verdicts go by {feature!r}")
    return found


def _group(table: Mapping[str, Cell], *, features: int) -> list[str]:
    """The raters of a group that the feature decides for; none where there is no such group beyond chance.

    Raters who never saw it are not in the table: their ratio is 1.
    """
    usual = _log_odds(table.values())
    for step in (math.log(STRONGER), -math.log(STRONGER)):
        ratios = np.array([_log_ratio(*cell, usual, usual + step) for cell in table.values()])
        belongs = np.log(SHARES)[:, None] + ratios  # [SHARES, raters], as logarithms: a ratio may be beyond every float
        either = np.logaddexp(np.log1p(-np.array(SHARES))[:, None], belongs)
        log_e = either.sum(axis=1)
        most = int(log_e.argmax())
        mixed = float(log_e[most]) - math.log(len(SHARES))
        members = [rater for rater, sure in zip(table, belongs[most] > math.log(SURE) + either[most], strict=True) if sure]
        if mixed > math.log(2 * features / ALPHA) and len(members) >= FEWEST:
            return members
    return []


def _log_odds(cells: Iterable[Cell]) -> float:
    """Everybody's log odds ratio of a good verdict with the feature (Mantel and Haenszel 1959), half a verdict in each cell; in halves.

    A rater of more than `HEARD` verdicts weighs as one of `HEARD`: the weights are free where the odds ratio is one for all, and one busy
    rater who goes by a word would otherwise make honest people look like a group.
    """
    above, below = 0.5, 0.5
    for verdicts, good, seen, liked in cells:
        heard = min(verdicts, HEARD) / verdicts
        above += heard * liked * (verdicts - good - (seen - liked)) / verdicts
        below += heard * (seen - liked) * (good - liked) / verdicts
    return round(2.0 * math.log(above / below)) / 2.0


def _log_choose(of: int, some: int) -> float:
    return math.lgamma(of + 1) - math.lgamma(some + 1) - math.lgamma(of - some + 1)


@lru_cache(maxsize=65_536)
def _log_ratio(verdicts: int, good: int, seen: int, liked: int, usual: float, stronger: float) -> float:
    """The log likelihood ratio of one rater's cell under two log odds ratios, given its margins; 0 where these leave no choice."""
    possible = range(max(0, seen - (verdicts - good)), min(seen, good) + 1)
    if len(possible) == 1:
        return 0.0
    ways = [_log_choose(good, j) + _log_choose(verdicts - good, seen - j) for j in possible]

    def log_probability(odds: float) -> float:
        terms = [way + j * odds for way, j in zip(ways, possible, strict=True)]
        most = max(terms)
        return ways[liked - possible.start] + liked * odds - most - math.log(sum(math.exp(term - most) for term in terms))

    return log_probability(stronger) - log_probability(usual)


def weighted(
    chosen: Sequence[LabelledTurn], heard: Mapping[str, Sequence[Voice]], deciding: Mapping[str, LabelledTurn], *, newcomer: float
) -> list[LabelledTurn]:
    """The chosen turns, the outcomes that nobody but newcomers or nameless raters decided drawn towards the mean of all.

    `deciding`: by episode, the turn whose outcome its chain is paid. Where everybody is new, nobody is. Practice is judged by
    tests, not by raters.
    """
    practised = [turn for turn in chosen if turn.rollout]
    chosen = [turn for turn in chosen if not turn.rollout]
    weights = {t.inference_id: _weight(voices_of(deciding.get(t.episode_id, t), heard), newcomer) for t in chosen}
    most = max(weights.values(), default=1.0)
    mean = sum(turn.reward - turn.process for turn in chosen) / max(1, len(chosen))
    return [_drawn(turn, mean, weights[turn.inference_id] / most) for turn in chosen] + practised


def _weight(voices: Sequence[Voice], newcomer: float) -> float:
    return max(newcomer if voice.newcomer or voice.rater is None else 1.0 for voice in voices)


def _drawn(turn: LabelledTurn, mean: float, weight: float) -> LabelledTurn:
    outcome = turn.reward - turn.process
    return turn if weight == 1.0 else replace(turn, reward=turn.process + mean + weight * (outcome - mean))
