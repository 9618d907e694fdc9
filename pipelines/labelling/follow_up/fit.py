"""Fits the classifier, and says out of fold how good what it fits is.

Nothing that is learned or chosen (vocabulary, rarities, coefficients, temperature, the threshold of punishing) sees the messages
that it is judged on: whoever holds some out calls `fit` with the others. Folds keep a conversation together.
"""

# scikit-learn ships no types: what comes out of it is Any here and nowhere else.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportMissingTypeStubs=false

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import f1_score
from sklearn.model_selection import StratifiedGroupKFold

from pipelines.labelling.follow_up.classifier import Block, Model, Mood
from pipelines.labelling.follow_up.examples import Example
from pipelines.labelling.follow_up.features import NAMES, features
from pipelines.labelling.follow_up.grams import BLOCKS, grams, rarities, weighted

CLASSES = tuple(Mood)
PENALTY = 3.0
"""Inverse L2 penalty: out of fold on the part that was read, macro-F1 is flat from 2 to 4."""
DENSE = 0.8
"""What phrases are multiplied by beside n-grams, which are of length 1 in each block: macro-F1 is flat from 0.5 on."""
AT_LEAST = {"word": 2, "char": 3, "opening": 3}
"""Messages that a gram has to be in."""
FOLDS = 5
PUNISH_PRECISION = 0.9
"""What the threshold of punishing is chosen for, out of fold."""
CONFIDENT = 0.6
"""The follow-up term's default: below it no reading counts."""
DROPPED_BELOW = 0.03
"""Grams none of whose rounded weights is larger are left out of the file."""


@dataclass(frozen=True, kw_only=True)
class Counted:
    """A message as the model sees it."""

    example: Example
    dense: list[float]
    grams: dict[str, Counter[str]]


@dataclass(frozen=True, kw_only=True)
class Figures:
    """How well messages were read that the model had not seen."""

    macro_f1: float
    """Over dissatisfied, satisfied and the rest."""
    precision_punished: float
    interval: tuple[float, float]
    """95 % of the precision (Wilson 1927)."""
    recall_punished: float
    ece: float
    messages: int
    punished: int


def counted(examples: Sequence[Example]) -> list[Counted]:
    """Count once what every fold looks at."""
    return [Counted(example=one, dense=features(one.text, answer=one.answer), grams=grams(one.text)) for one in examples]


def fit(messages: Sequence[Counted]) -> Model:
    """Choose temperature and threshold out of fold, then fit on all of `messages`."""
    found = _out_of_fold(messages)
    temperature = min((0.6 + 0.05 * step for step in range(29)), key=lambda t: _surprise(_softmax(found / t), messages))
    called = _three(_softmax(found / temperature))[:, 0]
    return _stored(messages, temperature=temperature, punish_from=punish_from(called, _truth(messages) == 0))


def punish_from(probability: Any, is_dissatisfied: Any, *, precision: float = PUNISH_PRECISION) -> float:  # noqa: ANN401 - arrays
    """The lowest threshold from `CONFIDENT` on at which so large a share of what is punished deserves it."""
    for threshold in np.arange(CONFIDENT, 0.96, 0.01):
        punished = probability >= threshold
        if punished.any() and is_dissatisfied[punished].mean() >= precision:
            return round(float(threshold), 2)
    return 0.95


def measure(model: Model, messages: Sequence[Counted]) -> Figures:
    """Read them with the model as production does and compare."""
    read = [model.probabilities(one.example.text, one.example.answer) for one in messages]
    found = np.array([[probabilities[mood] for mood in CLASSES] for probabilities in read])
    three, truth = _three(found), _truth(messages)
    called = (three[:, 0] >= max(CONFIDENT, model.punish_from)) & (three[:, 0] > three[:, 1])
    right, punished = int((truth[called] == 0).sum()), int(called.sum())
    return Figures(
        macro_f1=_macro_f1(three, truth), precision_punished=right / punished if punished else math.nan, interval=wilson(right, punished),
        recall_punished=float(called[truth == 0].mean()), ece=calibration_error(three, truth), messages=len(messages), punished=punished,
    )  # fmt: skip


def nested(messages: Sequence[Counted], *, seed: int = 0) -> Iterator[tuple[Model, list[Counted]]]:
    """For each fold: a model for which everything was chosen on the others, and the messages that it has not seen."""
    for train, test in _folds(messages, seed):
        yield fit([messages[i] for i in train]), [messages[i] for i in test]


def calibration_error(probabilities: Any, truth: Any, *, bins: int = 10) -> float:  # noqa: ANN401 - arrays
    """Expected calibration error of the likeliest class (Naeini et al. 2015): mean |confidence − accuracy| over equal-width bins."""
    confidence, right = probabilities.max(axis=1), probabilities.argmax(axis=1) == truth
    which = np.minimum((confidence * bins).astype(int), bins - 1)
    gaps = [abs(confidence[which == b].mean() - right[which == b].mean()) * (which == b).mean() for b in range(bins) if (which == b).any()]
    return float(sum(gaps))


def wilson(hits: int, count: int, *, z: float = 1.96) -> tuple[float, float]:
    """Interval of a share."""
    if count == 0:
        return 0.0, 1.0
    share, scale = hits / count, 1 + z * z / count
    middle, half = share + z * z / (2 * count), z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return (middle - half) / scale, (middle + half) / scale


def _folds(messages: Sequence[Counted], seed: int) -> Iterator[tuple[list[int], list[int]]]:
    moods = [CLASSES.index(one.example.mood) for one in messages]
    groups = [one.example.conversation for one in messages]
    splitter = StratifiedGroupKFold(FOLDS, shuffle=True, random_state=seed)
    for train, test in splitter.split(np.zeros(len(messages)), moods, groups):
        yield list(train), list(test)


def _out_of_fold(messages: Sequence[Counted]) -> Any:  # noqa: ANN401 - [n, classes]
    """Linear scores of every message by a model that was fitted without its fold."""
    scores = np.zeros((len(messages), len(CLASSES)))
    for train, test in _folds(messages, 1):
        known = [messages[i] for i in train]
        rarity = _rarity(known)
        scores[test] = _regression(known, rarity).decision_function(_matrix([messages[i] for i in test], rarity))
    return scores


def _rarity(messages: Sequence[Counted]) -> dict[str, dict[str, float]]:
    return {block: rarities((one.grams[block] for one in messages), at_least=AT_LEAST[block]) for block in BLOCKS}


def _matrix(messages: Sequence[Counted], rarity: dict[str, dict[str, float]]) -> Any:  # noqa: ANN401 - sparse [n, features]
    parts: list[Any] = [scipy.sparse.csr_matrix(DENSE * np.array([one.dense for one in messages]))]
    for block in BLOCKS:
        place = {gram: index for index, gram in enumerate(rarity[block])}
        rows = [[(place[gram], value) for gram, value in weighted(one.grams[block], rarity[block])] for one in messages]
        columns, values = [index for row in rows for index, _ in row], [value for row in rows for _, value in row]
        ends = np.cumsum([0, *(len(row) for row in rows)])
        parts.append(scipy.sparse.csr_matrix((values, columns, ends), shape=(len(messages), len(place))))
    return scipy.sparse.hstack(parts).tocsr()


def _regression(messages: Sequence[Counted], rarity: dict[str, dict[str, float]]) -> LogisticRegression:
    moods = [CLASSES.index(one.example.mood) for one in messages]
    return LogisticRegression(C=PENALTY, max_iter=1000).fit(_matrix(messages, rarity), moods)


def _stored(messages: Sequence[Counted], *, temperature: float, punish_from: float) -> Model:
    rarity = _rarity(messages)
    fitted: Any = _regression(messages, rarity)
    weights = fitted.coef_ / temperature
    start, blocks = len(NAMES), dict[str, Block]()
    for block in BLOCKS:
        mine = np.round(weights[:, start : start + len(rarity[block])], 2)
        kept = {gram: tuple(float(w) for w in mine[:, i]) for i, gram in enumerate(rarity[block]) if abs(mine[:, i]).max() > DROPPED_BELOW}
        blocks[block] = Block(rarity={gram: round(value, 3) for gram, value in rarity[block].items()}, weights=kept)
        start += len(rarity[block])
    return Model(
        features=NAMES, classes=CLASSES, weights=tuple(tuple(round(float(DENSE * w), 4) for w in row[: len(NAMES)]) for row in weights),
        biases=tuple(round(float(b / temperature), 4) for b in fitted.intercept_), blocks=blocks, punish_from=punish_from,
    )  # fmt: skip


def _truth(messages: Sequence[Counted]) -> Any:  # noqa: ANN401 - [n]: 0 dissatisfied, 1 satisfied, 2 the rest
    return np.minimum([CLASSES.index(one.example.mood) for one in messages], 2)


def _three(probabilities: Any) -> Any:  # noqa: ANN401 - [n, 4] → [n, 3]
    return np.stack([probabilities[:, 0], probabilities[:, 1], probabilities[:, 2] + probabilities[:, 3]], axis=1)


def _softmax(scores: Any) -> Any:  # noqa: ANN401 - [n, classes]
    odds = np.exp(scores - scores.max(axis=1, keepdims=True))
    return odds / odds.sum(axis=1, keepdims=True)


def _macro_f1(three: Any, truth: Any) -> float:  # noqa: ANN401 - arrays
    return float(f1_score(truth, three.argmax(axis=1), average="macro"))


def _surprise(probabilities: Any, messages: Sequence[Counted]) -> float:  # noqa: ANN401 - [n, classes]
    """Mean −log p of the truth."""
    moods = [CLASSES.index(one.example.mood) for one in messages]
    return float(-np.log(probabilities[np.arange(len(moods)), moods]).mean())
