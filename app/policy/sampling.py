"""Sampling: a batch that sequences join and leave between steps, every sampled token with its log-probability.

    submit ──▶ waiting ──▶ prefill (a chunk of the prompt per step) ──▶ decode (one token per step, all rows at once) ──▶ done

| part    | consumes                       | waits for                          | unblocked by                      |
|---------|--------------------------------|------------------------------------|-----------------------------------|
| waiting | `submit`                       | a free row, the prompt before it   | a sequence that leaves            |
| prefill | at most `chunk` tokens a step  | nothing: decoding rows go on       | the end of its prompt             |
| decode  | one token per row and step     | nothing                            | end token, stop string, length    |

A `Decoder` belongs to one `Policy`, so a batch never mixes weights, and to one thread.
Shapes: n decoding rows, N rows that get a token in this step, D hidden size, V vocabulary, L layers, K experts per token.
"""

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from app.domain.errors import BadRequest
from app.domain.serving import Likely
from app.domain.turns import FinishReason, SamplingParams, Shape
from app.policy.distribution import draw, nucleus_logprobs
from app.policy.experts import ExpertRecorder
from app.policy.forward import token_logprobs
from app.policy.keyvalues import KeyValues
from app.policy.logits import LogitsProcessor, processed
from app.policy.model import Policy
from app.policy.prompt_cache import PromptCache
from app.policy.shaping import Shaper
from app.policy.textstream import TextStream


@dataclass(eq=False, kw_only=True)
class Generation:
    """One completion on its way; `Decoder.step` appends to it."""

    prompt: list[int]
    sampling: SamplingParams
    record_experts: bool
    max_tokens: int
    """`sampling.max_tokens`, or what the context leaves."""
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    """Natural logarithm, of the distribution the token was drawn from."""
    kept_log_mass: list[float] = field(default_factory=list[float])
    """[T] log of the probability mass that top-p kept of the processed distribution when each token was drawn; empty for top_p = 1."""
    processor: LogitsProcessor | None = None
    wants: int | None = None
    """How many of the likeliest tokens are noted beside each sampled one; None for not even that one."""
    likely: list[list[Likely]] = field(default_factory=list[list[Likely]])
    """[T, 1 + wants]"""
    fault: str | None = None
    """With finish_reason `error`: why."""
    experts: list[list[list[int]]] = field(default_factory=list[list[list[int]]])
    """[T, L, K]: entry t is the routing of the forward pass that predicted token t (at the position before it)."""
    text: str = ""
    finish_reason: FinishReason | None = None
    stream: TextStream
    random: random.Random
    cached: int = 0
    """Tokens of prompt and completion whose keys and values are in the cache."""

    @property
    def newest(self) -> int:
        """The token that is fed next when it decodes."""
        return self.tokens[-1] if self.tokens else self.prompt[-1]


class Decoder:
    """Continuous batching over one policy."""

    def __init__(self, policy: Policy, *, max_rows: int = 16, chunk: int = 256, prompt_cache_bytes: int = 0) -> None:
        self.policy = policy
        self.max_rows = max_rows
        self._chunk = chunk
        self._cache = KeyValues(max_rows=max_rows)
        self._prompts = PromptCache(prompt_cache_bytes)
        self._recorder = ExpertRecorder(policy.model)
        self._waiting: deque[Generation] = deque()
        self._filling: Generation | None = None
        self._rows: list[Generation] = []
        """Decoding; row i of the cache is sequence i. The one being prefilled is the row after the last."""

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._rows or self._waiting or self._filling)

    @property
    def load(self) -> int:
        """Sequences submitted and not finished."""
        return len(self._rows) + len(self._waiting) + (self._filling is not None)

    def submit(
        self, prompt: Sequence[int], sampling: SamplingParams, *, likely: int | None = None, record_experts: bool = False,
        processor: LogitsProcessor | None = None,
    ) -> Generation:  # fmt: skip
        """Queue a completion of these prompt tokens. Raises `BadRequest` for parameters or lengths nothing can be sampled from."""
        _check(sampling)
        room = self.policy.context - len(prompt)
        if not prompt or room < 1:
            raise BadRequest(
                f"this model's maximum context length is {self.policy.context} tokens and the prompt has {len(prompt)}: "
                "shorten the conversation",
                param="messages", code="context_length_exceeded",
            )  # fmt: skip
        generation = Generation(
            prompt=list(prompt),
            sampling=sampling,
            wants=likely,
            record_experts=record_experts and self._recorder.records,
            processor=processor,
            max_tokens=min(sampling.max_tokens, room),
            stream=TextStream(self.policy.chat, stop=sampling.stop),
            random=random.Random(sampling.seed),
        )
        self._waiting.append(generation)
        return generation

    @torch.inference_mode()
    def cancel(self, generation: Generation, reason: FinishReason) -> None:
        """End a completion from outside (client gone, time over); its row is free for the next step. Harmless when it ended already."""
        if generation.finish_reason is not None:
            return
        self._finish(generation, reason)
        if generation in self._rows:
            self._leave(generation)
        elif generation is self._filling:
            self._filling = None
        else:
            self._waiting.remove(generation)

    @torch.inference_mode()
    def step(self) -> list[Generation]:
        """Advance: one token for every decoding row, a chunk of prompt for the one that joins. Returns those that got a token."""
        if not self.busy:
            return []
        rows = list(self._rows)
        hidden, experts = self._decode(rows) if rows else ([], [])
        for generation, hidden_1D, experts_1LK in self._prefill():
            rows.append(generation)
            hidden.append(hidden_1D)
            experts.append(experts_1LK)
        if rows:
            self._sample(rows, torch.cat(hidden), experts)
            for generation in [row for row in rows if row.finish_reason is not None]:
                self._leave(generation)
        if not self.busy:
            self._cache.release()
        return rows

    @torch.inference_mode()
    def score(self, prompt: Sequence[int], completion: Sequence[int], *, temperature: float, top_p: float) -> list[float]:
        """Log-probability [T] of each completion token, in one forward pass beside the cache. Raises `BadRequest` for what could not have
        been sampled here."""
        _check(SamplingParams(temperature=temperature, top_p=top_p))
        total, known = len(prompt) + len(completion), self.policy.vocabulary
        if not prompt or not completion or total > self.policy.context:
            raise BadRequest(
                f"{len(prompt)} prompt and {len(completion)} completion tokens cannot be scored: give at least one of each, and "
                f"{self.policy.context} in all at most", param="completion_tokens", code="context_length_exceeded",
            )  # fmt: skip
        if not all(0 <= token < known for token in (*prompt, *completion)):
            raise BadRequest(
                f"a token id is outside the model's vocabulary of {known}: these tokens are another model's", param="prompt_tokens"
            )
        logprobs = token_logprobs(self.policy.model, prompt, completion, temperature=temperature, top_p=top_p)
        self._recorder.take()  # the routes of this pass belong to no answer
        return logprobs.tolist()

    def close(self) -> None:
        """Detach from the model and drop the cache."""
        self._recorder.remove()
        self._cache.release()
        self._prompts.clear()

    # --- forward passes ---------------------------------------------------------------------------------------------------------

    def _decode(self, rows: list[Generation]) -> tuple[list[Tensor], list[Tensor | None]]:
        """One token per row; hidden states [n, D] and routes, each as a list with one entry per group of rows."""
        device = self.policy.model.device
        positions_n = torch.tensor([row.cached for row in rows], device=device)
        width = max(row.cached for row in rows) + 1
        self._cache.plan_decode(positions_n, width)
        mask = None
        if min(row.cached for row in rows) + 1 < width:
            mask = (torch.arange(width, device=device) <= positions_n[:, None])[:, None, None, :]
        hidden = self._forward(torch.tensor([[row.newest] for row in rows], device=device), positions_n[:, None], mask)
        experts = self._recorder.take()
        for row in rows:
            row.cached += 1
        return [hidden[:, -1]], [*experts] if experts is not None else [None] * len(rows)

    def _prefill(self) -> list[tuple[Generation, Tensor, Tensor | None]]:
        """Feed up to `chunk` prompt tokens; returns those whose prompt is complete, with the hidden state [1, D]
        that predicts their first token."""
        ready: list[tuple[Generation, Tensor, Tensor | None]] = []
        budget = self._chunk
        while budget > 0 and (self._filling or self._next()):
            generation = self._filling
            assert generation is not None
            count = min(budget, len(generation.prompt) - generation.cached)
            budget -= count
            hidden, experts = self._feed(generation, count)
            if generation.cached == len(generation.prompt):
                self._remember(generation)
                self._rows.append(generation)
                self._filling = None
                ready.append((generation, hidden[:, -1], experts[-1] if experts is not None else None))
        return ready

    def _next(self) -> bool:
        """Begin the next waiting prompt that has to be fed, if a row is free: from the longest beginning it shares with a resident one.

        One that is known but for its last token, from the prompt cache or a resident row, decodes at once: that token is fed beside the
        others' newest ones, where a forward pass of its own would cost as much as a step of all rows.
        """
        while self._waiting and len(self._rows) < self.max_rows:
            generation = self._waiting.popleft()
            self._begin(generation)
            if generation.cached < len(generation.prompt) - 1 or not generation.cached:
                self._filling = generation
                return True
            self._rows.append(generation)
        return False

    def _begin(self, generation: Generation) -> None:
        """Copy what is known of a prompt into the row after the last, but for its last token: that predicts the answer's first."""
        if (known := self._prompts.find(generation.prompt[:-1])) is not None:
            generation.cached = len(generation.prompt) - 1
            self._cache.put(len(self._rows), known)
            return
        shared = [_shared(generation.prompt, row.prompt) for row in self._rows]
        if shared and max(shared):
            generation.cached = max(shared)
            self._cache.copy(shared.index(max(shared)), len(self._rows), generation.cached)

    def _remember(self, generation: Generation) -> None:
        """Keep a prompt that was just fed (its row is the one after the last)."""
        beginning = generation.prompt[:-1]
        if beginning and self._prompts.wants(beginning):
            self._prompts.keep(beginning, self._cache.take(len(self._rows), len(beginning)))

    def _feed(self, generation: Generation, count: int) -> tuple[Tensor, Tensor | None]:
        """Feed `count` prompt tokens of the joining sequence; hidden states [1, count, D] and routes."""
        device = self.policy.model.device
        start, stop = generation.cached, generation.cached + count
        self._cache.plan_prefill(len(self._rows), start, stop)
        positions = torch.arange(start, stop, device=device)
        mask = (torch.arange(stop, device=device) <= positions[:, None])[None, None] if start else None
        hidden = self._forward(torch.tensor([generation.prompt[start:stop]], device=device), positions[None], mask)
        generation.cached = stop
        return hidden, self._recorder.take()

    def _forward(self, tokens: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        body = cast("Any", self.policy.model.base_model)
        return body(
            input_ids=tokens, position_ids=positions, attention_mask=mask, past_key_values=self._cache, use_cache=True
        ).last_hidden_state

    # --- tokens -----------------------------------------------------------------------------------------------------------------

    def _sample(self, rows: list[Generation], hidden_ND: Tensor, experts: list[Tensor | None]) -> None:
        """Draw one token per row; rows with the same temperature and top-p are drawn together."""
        head = cast("Any", self.policy.model.get_output_embeddings())
        plain_NV = head(hidden_ND).float()
        logits_NV, stuck = processed(plain_NV, [row.processor for row in rows])
        groups: dict[tuple[float, float], list[int]] = {}
        for index, row in enumerate(rows):
            if index in stuck:
                row.fault = "what the answer has to be leaves no token to draw, or takes too much work to follow"
                self._finish(row, FinishReason.ERROR)
            else:
                groups.setdefault((row.sampling.temperature, row.sampling.top_p), []).append(index)
        for (temperature, top_p), members in groups.items():
            logits = logits_NV if len(members) == len(rows) else logits_NV[members]
            logprobs = nucleus_logprobs(logits, temperature=temperature, top_p=top_p)
            uniform = torch.tensor([rows[index].random.random() for index in members], dtype=torch.float64, device=logits.device)
            tokens = draw(logprobs, uniform)
            drawn_N = logprobs.gather(1, tokens[:, None])[:, 0]
            if top_p < 1:
                whole_N = nucleus_logprobs(logits, temperature=temperature, top_p=1.0).gather(1, tokens[:, None])[:, 0]
                for index, kept in zip(members, (whole_N - drawn_N).tolist(), strict=True):
                    rows[index].kept_log_mass.append(kept)
            for place, (index, token, logprob) in enumerate(zip(members, tokens.tolist(), drawn_N.tolist(), strict=True)):
                if (wants := rows[index].wants) is not None:
                    rows[index].likely.append(self._likely(logprobs[place], token, logprob, wants))
                self._append(rows[index], token, logprob, experts[index])

    def _likely(self, logprobs_V: Tensor, token: int, logprob: float, count: int) -> list[Likely]:
        """The sampled token, then the likeliest of its place that could have been drawn."""
        best = logprobs_V.topk(min(count, len(logprobs_V)))
        found = [(other, value) for other, value in zip(best.indices.tolist(), best.values.tolist(), strict=True) if value > -math.inf]
        return [Likely(one, value, self.policy.grammars.piece(one)) for one, value in ((token, logprob), *found)]

    def _append(self, row: Generation, token: int, logprob: float, experts: Tensor | None) -> None:
        row.tokens.append(token)
        row.logprobs.append(logprob)
        if row.processor is not None:
            row.processor.accept(token)
        if row.record_experts and experts is not None:
            row.experts.append(experts.tolist())
        if token in self.policy.end_tokens:
            self._finish(row, FinishReason.STOP)
            return
        row.text += row.stream.push(token)
        if row.stream.stopped or (row.processor is not None and row.processor.is_done):
            self._finish(row, FinishReason.STOP)
        elif len(row.tokens) >= row.max_tokens:
            self._finish(row, FinishReason.LENGTH)

    def _finish(self, row: Generation, reason: FinishReason) -> None:
        row.text += row.stream.finish()
        row.finish_reason = reason

    def _leave(self, generation: Generation) -> None:
        """Free a decoding row: the last one takes its place, and the joining one moves up behind them."""
        index, last = self._rows.index(generation), len(self._rows) - 1
        self._rows[index] = self._rows[last]
        self._rows.pop()
        if index != last:
            self._cache.copy(last, index, self._rows[index].cached)
        if self._filling is not None:
            self._cache.copy(last + 1, last, self._filling.cached)


def sample(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams | Sequence[SamplingParams],
    *,
    shape: Shape | None = None,
    max_rows: int = 16,
    record_experts: bool = False,
    on_done: Callable[[int], None] | None = None,
) -> list[Generation]:
    """Sample one completion per prompt, in the order of the prompts; `on_done` hears how many are finished so far."""
    decoder = Decoder(policy, max_rows=max_rows)
    each = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else list(sampling)
    try:
        generations = [
            decoder.submit(prompt, params, record_experts=record_experts, processor=shape and Shaper.of(shape, policy))
            for prompt, params in zip(prompts, each, strict=True)
        ]
        done = 0
        while decoder.busy:
            finished = sum(generation.finish_reason is not None for generation in decoder.step())
            done += finished
            if finished and on_done is not None:
                on_done(done)
        return generations
    finally:
        decoder.close()


def _shared(prompt: list[int], other: list[int]) -> int:
    """Length of the beginning two prompts share, short of the whole prompt: its last token must be fed to predict the first one."""
    limit = min(len(prompt) - 1, len(other))
    if prompt[:limit] == other[:limit]:
        return limit
    return next(index for index in range(limit) if prompt[index] != other[index])


def _check(sampling: SamplingParams) -> None:
    """Raises `BadRequest` naming the parameter that is out of range."""
    if not 0 <= sampling.temperature <= 100:
        raise BadRequest(f"temperature is {sampling.temperature}: use 0 (most probable token) to 100", param="temperature")
    if not 0 < sampling.top_p <= 1:
        raise BadRequest(f"top_p is {sampling.top_p}: use a number above 0, at most 1", param="top_p")
    if sampling.max_tokens < 1:
        raise BadRequest(f"max_tokens is {sampling.max_tokens}: use at least 1", param="max_tokens")
