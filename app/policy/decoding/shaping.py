"""What a request's shape (`app.domain.telemetry.turns.Shape`) adds to the logits: token by token where answers are
sampled, all at once where they are scored. Both add the same, so that a shaped turn is trained on under the
distribution that it was drawn from.

Shapes: V vocabulary, C a chunk of it, T tokens of an answer, M scored tokens of a row, W words of 32 bits, one bit per token.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from app.domain.errors import BadRequest, Unavailable
from app.domain.telemetry.turns import Shape
from app.policy.decoding.grammars import Grammars, Words
from app.policy.model import Policy

FORM_S, FORM_A_TOKEN_S = 0.25, 0.004
"""Of the processor's time that following a form may take in all, and for each token besides: an honest one takes .03 to .3 ms a token with
49 thousand tokens, the worst found 13 ms at every token, and everybody's next token waits for it."""
NEVER = -1e30
"""Added to what may not be drawn: a number, because minus infinity times a probability of zero is none."""


class Shaper:
    """The logits processor of one answer. Raises `BadRequest` for a shape that this model cannot keep to."""

    def __init__(self, shape: Shape, grammars: Grammars, *, vocabulary: int, clock: Callable[[], float] = time.thread_time) -> None:
        unknown = next((token for token in shape.logit_bias if not 0 <= token < vocabulary), None)
        if unknown is not None:
            raise BadRequest(f"logit_bias names the token {unknown}, and this model's are 0 to {vocabulary - 1}", param="logit_bias")
        self._shape = shape
        self._matcher = None if shape.form is None else grammars.matcher(shape.form)
        self._words = None if shape.form is None else np.zeros((1, (vocabulary + 31) // 32), dtype=np.int32)
        self._counts: Counter[int] = Counter()
        self._clock, self._spent_s = clock, 0.0

    @classmethod
    def of(cls, shape: Shape, policy: Policy) -> "Shaper":
        """For an answer of this policy."""
        return cls(shape, policy.grammars, vocabulary=policy.vocabulary)

    def __call__(self, logits_V: Tensor) -> Tensor:
        """The logits with what the shape adds before the next token, in place. Raises `Unavailable` where the form takes too much work."""
        changes = changes_of(self._shape, self._counts)
        if changes:
            tokens = torch.tensor(list(changes), device=logits_V.device)
            logits_V[tokens] += torch.tensor(list(changes.values()), dtype=logits_V.dtype, device=logits_V.device)
        if self._matcher is not None and self._words is not None:
            began = self._clock()
            self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
            self._spent_s += self._clock() - began
            if self._matcher.is_error():
                raise Unavailable(f"an answer's form cannot be followed: {self._matcher.get_error()}")
            if self._spent_s > FORM_S + FORM_A_TOKEN_S * self._counts.total():
                raise Unavailable(f"an answer's form took {self._spent_s:.2f} s to follow for {self._counts.total()} tokens")
            logits_V.masked_fill_(~unpacked(torch.from_numpy(self._words), 0, len(logits_V)).to(logits_V.device)[0], -torch.inf)
        return logits_V

    def accept(self, token: int) -> None:
        """What was drawn."""
        self._counts[token] += 1
        if self._matcher is not None:
            self._matcher.consume_token(token)

    @property
    def is_done(self) -> bool:
        """Whether nothing may follow."""
        return self._matcher is not None and self._matcher.is_stopped() and not self._matcher.is_error()


def changes_of(shape: Shape, counts: Counter[int]) -> dict[int, float]:
    """What biases and penalties add to the logit of each token that has any, after tokens that were drawn so often."""
    changes = dict(shape.logit_bias)
    if shape.presence_penalty or shape.frequency_penalty:
        for token, count in counts.items():
            changes[token] = changes.get(token, 0.0) - shape.frequency_penalty * count - shape.presence_penalty
    return changes


def unpacked(words_NW: Tensor, start: int, stop: int) -> Tensor:
    """Whether each token from `start` to `stop` may be drawn, [N, stop - start]."""
    first, last = start // 32, (stop + 31) // 32
    bits = (words_NW[:, first:last, None] >> torch.arange(32, dtype=torch.int32, device=words_NW.device)) & 1
    return bits.flatten(1)[:, start - first * 32 : stop - first * 32].bool()


@dataclass(kw_only=True)
class Bends:
    """What the shapes of a row's sequences add to the logits of its M scored tokens."""

    rows: list[int] = field(default_factory=list[int])
    tokens: list[int] = field(default_factory=list[int])
    values: list[float] = field(default_factory=list[float])
    """Biases and penalties: which scored token's logits, of which token, by how much."""
    masked: list[int] = field(default_factory=list[int])
    """The scored tokens under a mask, and what each may be."""
    words: list[Words] = field(default_factory=list[Words])

    def add(self, shape: Shape | None, tokens: Sequence[int], grammars: Grammars, *, at: int) -> None:
        """A sequence of which these tokens are scored, the first at place `at`. Raises `ValueError` for tokens its form does not allow."""
        if shape is None:
            return
        counts: Counter[int] = Counter()
        for place, token in enumerate(tokens):
            for changed, value in changes_of(shape, counts).items():
                self.rows.append(at + place)
                self.tokens.append(changed)
                self.values.append(value)
            counts[token] += 1
        if shape.form is not None:
            words = grammars.masks(shape.form, tokens)
            if words is None:
                raise ValueError("the form of a turn does not allow its own tokens: leave the turn out (`Grammars.masks`)")
            self.masked += range(at, at + len(tokens))
            self.words.append(words)

    def on(self, device: torch.device) -> "BendTensors | None":
        """As tensors; None where nothing is bent."""
        if not self.rows and not self.masked:
            return None
        return BendTensors(
            rows=torch.tensor(self.rows, dtype=torch.int64, device=device),
            tokens=torch.tensor(self.tokens, dtype=torch.int64, device=device),
            values=torch.tensor(self.values, dtype=torch.float32, device=device),
            masked=torch.tensor(self.masked, dtype=torch.int64, device=device),
            words=torch.from_numpy(np.concatenate(self.words)).to(device) if self.words else torch.zeros((0, 1), dtype=torch.int32),
        )


@dataclass(frozen=True, kw_only=True)
class BendTensors:
    """`Bends` where the logits are."""

    rows: Tensor
    tokens: Tensor
    values: Tensor
    masked: Tensor
    words: Tensor

    def bend(self, logits_MC: Tensor, *, start: int = 0, first: int = 0) -> Tensor:
        """Add what belongs to these logits, in place: of the scored tokens from `first` on, for the vocabulary from `start` on."""
        count, width = logits_MC.shape
        inside = (self.tokens >= start) & (self.tokens < start + width) & (self.rows >= first) & (self.rows < first + count)
        logits_MC.index_put_((self.rows[inside] - first, self.tokens[inside] - start), self.values[inside], accumulate=True)
        chosen = (self.masked >= first) & (self.masked < first + count)
        if bool(chosen.any()):
            rows = self.masked[chosen] - first
            logits_MC[rows] = logits_MC[rows].masked_fill(~unpacked(self.words[chosen], start, start + width), NEVER)
        return logits_MC
