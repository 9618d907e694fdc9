"""The classifier: a multinomial logistic regression over phrases and n-grams, in plain Python (about a millisecond a message).

Its coefficients are in `model.json`, written by `python -m pipelines.labelling.follow_up.train`. How good it is says `make bench-followup`.
"""

import hashlib
import math
from dataclasses import dataclass
from functools import cache
from importlib import resources

import msgspec

from app.domain.learning.readings import Mood
from pipelines.labelling.follow_up.features import NAMES, features
from pipelines.labelling.follow_up.grams import grams, weighted


class Block(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One block of n-grams."""

    rarity: dict[str, float]
    weights: dict[str, tuple[float, ...]]
    """[classes] of each gram; one without weights counts for the vector's length only."""


class Model(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Coefficients as stored, already divided by the temperature that calibrates them."""

    features: tuple[str, ...]
    classes: tuple[Mood, ...]
    weights: tuple[tuple[float, ...], ...]
    """[classes, features]"""
    biases: tuple[float, ...]
    blocks: dict[str, Block]
    punish_from: float
    """p(dissatisfied) from which nine in ten such readings were right, out of fold."""

    def probabilities(self, text: str, answer: str) -> dict[Mood, float]:
        """Softmax of the linear scores."""
        scores = list(self.biases)
        for place, value in enumerate(features(text, answer=answer)):
            if value:
                scores = [score + row[place] * value for score, row in zip(scores, self.weights, strict=True)]
        counted = grams(text)
        for name, block in self.blocks.items():
            for gram, value in weighted(counted[name], block.rarity):
                row = block.weights.get(gram)
                if row is not None:
                    scores = [score + weight * value for score, weight in zip(scores, row, strict=True)]
        top = max(scores)
        odds = [math.exp(score - top) for score in scores]
        total = sum(odds)
        return {mood: odd / total for mood, odd in zip(self.classes, odds, strict=True)}


class Unread(Exception):
    """A reader gave no reading: it is away, or answered something else. The term abstains and says so."""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """Calibrated probabilities per mood."""

    probabilities: dict[Mood, float]
    by: str
    """Who read it, down to the version: it goes into the label's breakdown."""
    punish_from: float = 0.0
    """p(dissatisfied) below which this reader is not to be trusted with a punishment."""

    @property
    def mood(self) -> Mood:
        """The likeliest one."""
        return max(self.probabilities, key=lambda mood: self.probabilities[mood])

    def satisfaction(self, *, confident: float) -> float | None:
        """p(satisfied) − p(dissatisfied) in [-1, 1], exactly 0 for a next step; None (abstain) while no reading reaches `confident`, and
        where a punishment does not reach what its reader asks for."""
        p = self.probabilities
        other = p[Mood.REFINEMENT] + p[Mood.NEUTRAL]
        if max(p[Mood.SATISFIED], p[Mood.DISSATISFIED], other) < confident:
            return None
        if other >= confident:
            return 0.0
        value = p[Mood.SATISFIED] - p[Mood.DISSATISFIED]
        return value if value >= 0.0 or p[Mood.DISSATISFIED] >= self.punish_from else None


@cache
def model() -> Model:
    """The shipped model. Its features must be the ones computed here: both change together, by training again."""
    shipped = msgspec.json.decode(_shipped(), type=Model)
    assert shipped.features == NAMES, "model.json was trained on other features: run python -m pipelines.labelling.follow_up.train"
    return shipped


@cache
def version() -> str:
    """Of the shipped model: a digest of its coefficients."""
    return f"classifier:{hashlib.sha256(_shipped()).hexdigest()[:12]}"


def _shipped() -> bytes:
    return resources.files("pipelines.labelling.follow_up").joinpath("model.json").read_bytes()


def judge(text: str, *, request: str = "", answer: str = "") -> Judgement:
    """Read a follow-up; `answer` is what came before it, where known.

    Nothing is learned from `request`, the question before that: labelling does not have it.
    """
    shipped = model()
    return Judgement(probabilities=shipped.probabilities(text, answer), by=version(), punish_from=shipped.punish_from)
