"""Sampling: a batch that sequences join and leave between steps, every sampled token with its log-probability.

    submit ──▶ waiting ──▶ prefill (a chunk of the prompt per step) ──▶ decode (a token per step or more, all rows at once) ──▶ done

| part    | consumes                       | waits for                          | unblocked by                      |
|---------|--------------------------------|------------------------------------|-----------------------------------|
| waiting | `submit`                       | a free row, the prompt before it   | a sequence that leaves            |
| prefill | at most `chunk` tokens a step  | nothing: decoding rows go on       | the end of its prompt             |
| decode  | one token per row and step     | nothing                            | end token, stop string, length    |

**Speculation.** Where few rows decode, tokens that may follow are fed along with a row's newest one (`app.policy.decoding.drafting`), and
the sampler is replayed over them: each position's token is drawn from the target's own distribution with the uniform number that is its
turn, and the next position counts as long as the drawn token is the one that was fed. Nothing is accepted or rejected: what is emitted is
what would have been drawn without, whatever the drafts are.

A `Decoder` belongs to one `Policy`, so a batch never mixes weights, and to one thread.
Shapes: n decoding rows, Q tokens fed to each, N positions a token is drawn for, D hidden size, V vocabulary, L layers, K experts a token.
"""

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from app.domain.errors import BadRequest
from app.domain.telemetry.serving import Likely
from app.domain.telemetry.turns import FinishReason, SamplingParams, Shape
from app.policy.decoding.body import body_of, product
from app.policy.decoding.drafting import Drafting
from app.policy.decoding.drawing import Drawn, draw_all
from app.policy.decoding.generation import Generation
from app.policy.decoding.keyvalues import KeyValues
from app.policy.decoding.logits import LogitsProcessor, processed
from app.policy.decoding.lookup import PromptLookup
from app.policy.decoding.prompt_cache import PromptCache
from app.policy.decoding.shaping import Shaper
from app.policy.decoding.textstream import TextStream
from app.policy.distribution import nucleus_logprobs
from app.policy.experts import ExpertRecorder
from app.policy.model import Policy

DRAFT_ROWS = 4
"""Rows up to which drafts are made. Feeding 4 tokens costs 1.3 of one token's time at one row, 1.9 at eight, 2.1 at thirty-two."""


class Decoder:
    """Continuous batching over one policy."""

    def __init__(
        self, policy: Policy, *, max_rows: int = 16, chunk: int = 256, prompt_cache_bytes: int = 0, draft_rows: int = DRAFT_ROWS
    ) -> None:
        self.policy = policy
        self._body = body_of(policy.model)
        self.drafting = Drafting(rows=draft_rows, context=policy.context)
        self.fed = self.prompted = 0
        """Tokens that went through the model, prompts' included; those of prompts."""
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
    def _head(self) -> nn.Module:
        return cast("nn.Module", self.policy.model.get_output_embeddings())

    @property
    def drafted(self) -> int:
        """Tokens that were fed ahead."""
        return self.drafting.by_lookup.drafted + self.drafting.by_head.drafted

    @property
    def accepted(self) -> int:
        """Those of them that were drawn."""
        return self.drafting.by_lookup.accepted + self.drafting.by_head.accepted

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
            lookup=PromptLookup(prompt) if self.drafting.rows and processor is None and not self._recorder.records else None,
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
        rows, prompted = list(self._rows), self.prompted
        drafts = self.drafting.drafts(rows)
        hidden, experts = self._decode(rows, drafts) if rows else ([], [])
        for generation, hidden_1D, experts_1LK in self._prefill():
            rows.append(generation)
            drafts.append([])
            hidden.append(hidden_1D)
            experts.append(experts_1LK)
        if rows:
            self._sample(rows, drafts, torch.cat(hidden), experts)
            for generation in [row for row in rows if row.finish_reason is not None]:
                self._leave(generation)
        if not self.busy:
            self._cache.release()
        self.drafting.stepped(alone=prompted == self.prompted)
        return rows

    @torch.inference_mode()
    def score(
        self, prompt: Sequence[int], completion: Sequence[int], *, temperature: float, top_p: float, top_k: int = 0
    ) -> list[float]:  # fmt: skip
        """Log-probability [T] of each completion token, in one forward pass beside the cache. Raises `BadRequest` for what could not have
        been sampled here."""
        _check(SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k))
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
        hidden_TD = self.read([*prompt, *completion[:-1]])[len(prompt) - 1 :]
        self._recorder.take()  # the routes of this pass belong to no answer
        logits_TV = product(self._head, hidden_TD).float()
        logprobs_TV = nucleus_logprobs(logits_TV, temperature=temperature, top_p=top_p, top_k=top_k)
        return logprobs_TV.gather(1, torch.tensor(completion, device=logits_TV.device)[:, None])[:, 0].tolist()

    @torch.inference_mode()
    def read(self, tokens: Sequence[int]) -> Tensor:
        """Hidden states [T, D] of a text, beside the cache, by the same body that samples."""
        device, length, beside = self.policy.model.device, len(tokens), KeyValues(max_rows=1)
        beside.plan_prefill(0, 0, length)
        return self._body(torch.tensor([list(tokens)], device=device), torch.arange(length, device=device)[None], beside, width=length)[0]

    def close(self) -> None:
        """Detach from the model and drop the cache."""
        self._recorder.remove()
        self._cache.release()
        self._prompts.clear()

    # --- forward passes ---------------------------------------------------------------------------------------------------------

    def _decode(self, rows: list[Generation], drafts: list[list[int]]) -> tuple[list[Tensor], list[Tensor | None]]:
        """The newest token and the draft of each row; hidden states [1 + drafted, D] row by row, and routes per row."""
        device, new = self.policy.model.device, 1 + max(map(len, drafts))
        fed = [[row.newest, *draft, *[0] * (new - 1 - len(draft))] for row, draft in zip(rows, drafts, strict=True)]
        positions_nQ = torch.tensor([row.cached for row in rows], device=device)[:, None] + torch.arange(new, device=device)
        width = max(row.cached for row in rows) + new
        self._cache.plan_decode(positions_nQ, width)
        hidden_nQD = self._body(torch.tensor(fed, device=device), positions_nQ, self._cache, width=width)
        experts = self._recorder.take()
        self.fed += positions_nQ.numel()
        for row in rows:
            row.cached += 1
        hidden = [states[: 1 + len(draft)] for states, draft in zip(hidden_nQD, drafts, strict=True)]
        return hidden, [*experts] if experts is not None else [None] * len(rows)

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
        tokens, positions = torch.tensor([generation.prompt[start:stop]], device=device), torch.arange(start, stop, device=device)[None]
        hidden = self._body(tokens, positions, self._cache, width=stop)
        generation.cached = stop
        self.fed, self.prompted = self.fed + count, self.prompted + count
        return hidden, self._recorder.take()

    # --- tokens -----------------------------------------------------------------------------------------------------------------

    def _sample(self, rows: list[Generation], drafts: list[list[int]], hidden_ND: Tensor, experts: list[Tensor | None]) -> None:
        """Draw the token of every position, and take each row's as far as they are what was fed."""
        plain_NV = product(self._head, hidden_ND).float()
        owners = [index for index, draft in enumerate(drafts) for _ in range(1 + len(draft))]
        logits_NV, stuck = processed(plain_NV, [rows[owner].processor for owner in owners])
        uniforms = [number for row, draft in zip(rows, drafts, strict=True) for number in row.upcoming(1 + len(draft))]
        drawn = draw_all(logits_NV, uniforms, [rows[owner].sampling for owner in owners])
        at = 0
        for index, (row, draft) in enumerate(zip(rows, drafts, strict=True)):
            if at in stuck:
                row.fault = "what the answer has to be leaves no token to draw, or takes too much work to follow"
                self._finish(row, FinishReason.ERROR)
            else:
                self._replay(row, draft, drawn[at : at + 1 + len(draft)], hidden_ND[at:], experts[index])
            at += 1 + len(draft)

    def _replay(self, row: Generation, draft: list[int], drawn: Sequence[Drawn], hidden_ND: Tensor, experts: Tensor | None) -> None:
        """Emit what was drawn, up to the first token that is not the one that was fed after it."""
        emitted = 0
        for place, each in enumerate(drawn):
            if each.kept_log_mass is not None:
                row.kept_log_mass.append(each.kept_log_mass)
            if row.wants is not None:
                row.likely.append(self._likely(each.spread_V, each.token, each.logprob, row.wants))
            self._append(row, each.token, each.logprob, experts)
            emitted += 1
            if row.finish_reason is not None or draft[place : place + 1] != [each.token]:
                break
        del row.uniforms[:emitted]
        row.cached += emitted - 1
        self.drafting.replayed(row, drafted=len(draft), emitted=emitted, state_D=hidden_ND[emitted - 1])

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
        left = [*self._rows, self._filling] if self._filling is not None else self._rows
        self._cache.trim(max((row.cached for row in left), default=0))


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
    if (sampling.top_k or 0) < 0:
        raise BadRequest(f"top_k is {sampling.top_k}: use the number of tokens to draw from, or 0 for all", param="top_k")
    if sampling.max_tokens < 1:
        raise BadRequest(f"max_tokens is {sampling.max_tokens}: use at least 1", param="max_tokens")
