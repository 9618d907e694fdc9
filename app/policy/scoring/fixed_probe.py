"""What a version says of a fixed text, so that an engine of other make can be asked whether it computes with these weights and no others.

Two questions, because one learning step moves a log-probability by less than bfloat16 blurs it:

    is it this version?     measured against expected, as KL per token and as largest gap
    did the swap move it?   (measured after − before) along (expected after − before): 1 where the new weights arrived, 0 where the old
                            ones answer still, in between where a part of them did; asked where the step is large enough to tell

Numbers per token are natural log-probabilities at temperature 1, [T].
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from app.policy.chat import Chat
from app.policy.model import load_policy
from app.policy.scoring.forward import token_logprobs
from app.policy.storage.snapshot import PROBE, READY

TEXT = (
    'def median(values):\n    """Return the middle of the sorted values."""\n    ordered = sorted(values)\n    half = len(ordered) // 2\n'
    "    if len(ordered) % 2:\n        return ordered[half]\n    return (ordered[half - 1] + ordered[half]) / 2\n\n"
    "The capital of France is Paris, and the Seine flows through it. When it rains in the morning, people take the metro; when the sun "
    "is out they walk along the river, drink a coffee and read the paper. Thank you, that was what I needed. Could you also add a test?"
)
MOST = 192
"""Tokens of the text at most: it has to fit the smallest context."""
MAX_KL = 0.01
"""Mean of r − 1 − log r, r = measured / expected: what healthy bfloat16 kernels differ by is a tenth of it."""
MAX_GAP = 1.5
"""Largest |Δ log π| of a single token. The text has tokens of e⁻¹⁰, whose logarithms are the blurred ones."""
BLUR = 0.06
"""Standard deviation of one token's log-probability between two bfloat16 implementations (SmolLM2: mean |Δ| .044)."""
CLEAR = 10.0
"""How often the blur's variance the mean square of a step has to be for the second question: what is expected is blurred as well (trainer
and engine round differently), twice, which shrinks the share by a fifth at this size. A step of real size asked at 0.3 times said 23 %."""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What the weights themselves say."""

    tokens: tuple[int, ...]
    """[1 + T]: the first one is given."""
    logprobs: tuple[float, ...]
    """[T]"""


def probe_tokens(folder: Path) -> tuple[int, ...]:
    """The fixed text in the snapshot's own tokens."""
    return tuple(Chat.load(folder).encode(TEXT)[:MOST])


def expected(folder: Path) -> Expected:
    """As the trainer wrote it into the snapshot; computed here where it did not (the base of a line), which loads the model once."""
    file = folder / PROBE
    if file.is_file():
        return written(file.read_bytes())
    tokens = probe_tokens(folder)
    with torch.inference_mode():
        logprobs = token_logprobs(load_policy(folder).model, tokens[:1], tokens[1:])
    return Expected(tokens=tokens, logprobs=tuple(logprobs.tolist()))


def written(content: bytes) -> Expected:
    """What `write_expected` wrote."""
    found = json.loads(content)
    return Expected(tokens=tuple(found["tokens"]), logprobs=tuple(found["logprobs"]))


def beginning(whole: Expected, tokens: int) -> Expected:
    """What is expected of the first so many scored tokens."""
    return Expected(tokens=whole.tokens[: 1 + tokens], logprobs=whole.logprobs[:tokens])


def write_expected(folder: Path, probe: Expected) -> None:
    """Put it into a snapshot that is not published yet."""
    if not (folder / READY).is_file():
        raise FileNotFoundError(f"{folder} is no finished snapshot")
    (folder / PROBE).write_text(json.dumps({"tokens": list(probe.tokens), "logprobs": [round(value, 5) for value in probe.logprobs]}))


def divergence(sampled: Sequence[float], scored: Sequence[float]) -> tuple[float, float]:
    """KL in nats per token (mean of r − 1 − log r) and the largest |Δ log π|. NaN where any number is."""
    gaps = [new - old for old, new in zip(sampled, scored, strict=True)]
    kl = math.fsum(math.expm1(min(gap, 50.0)) - gap for gap in gaps) / len(gaps)
    return kl, max(abs(gap) for gap in gaps) if math.isfinite(kl) else math.nan


def strange(measured: Sequence[float], wanted: Expected) -> str | None:
    """None where what was measured is this version; else how far off it is."""
    kl, gap = divergence(wanted.logprobs, measured)
    if kl <= MAX_KL and gap <= MAX_GAP:  # NaN is not
        return None
    far = f"KL {kl:.3g} nats per token, largest gap {gap:.2g}"
    return f"it answers the fixed probe with other log-probabilities than these weights have ({far})"


def way_moved(before: Sequence[float], after: Sequence[float], old: Expected, new: Expected) -> float | None:
    """Share of the way from the old version to the new one; None where the two are too near to each other to tell.

    Least squares through the origin: Σ m·d / Σ d² with d = expected after − before, m = measured after − before.
    """
    wanted = [b - a for a, b in zip(old.logprobs, new.logprobs, strict=True)]
    signal = math.fsum(d * d for d in wanted)
    if signal < CLEAR * BLUR**2 * len(wanted):
        return None
    return math.fsum((b - a) * d for a, b, d in zip(before, after, wanted, strict=True)) / signal


def not_arrived(before: Sequence[float], after: Sequence[float], old: Expected, new: Expected) -> str | None:
    """None where the new weights arrived, or nobody can tell; else a sentence."""
    share = way_moved(before, after, old, new)
    if share is None or 0.5 <= share <= 1.5:
        return None
    return f"its log-probabilities went {share:.0%} of the way from the old weights to the new ones: it serves neither version"
