"""Sampling: a batch that sequences join and leave between steps, every sampled token with its log-probability.

    submit ──▶ waiting ──▶ prefill (a chunk of prompts per step) ──▶ decode (a token per step or more, all rows at once) ──▶ done

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
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import cast

import torch
from torch import Tensor, nn

from app.domain.errors import BadRequest
from app.domain.telemetry.serving import Likely
from app.domain.telemetry.turns import FinishReason, SamplingParams, Shape
from app.policy.decoding.body import body_of
from app.policy.decoding.drafting import Drafting
from app.policy.decoding.drawing import Drawn, draw_all
from app.policy.decoding.generation import Generation, check
from app.policy.decoding.joining import joins, shared
from app.policy.decoding.keyvalues import Fed
from app.policy.decoding.logits import LogitsProcessor, processed
from app.policy.decoding.lookup import PromptLookup
from app.policy.decoding.prompt_cache import PromptCache
from app.policy.decoding.scores import read, require_scorable, scores
from app.policy.decoding.shaping import Shaper
from app.policy.decoding.textstream import TextStream
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
        self._cache = self._body.cache(max_rows=max_rows)
        self._prompts = PromptCache(prompt_cache_bytes)
        self._recorder = ExpertRecorder(policy.model)
        self._waiting: deque[Generation] = deque()
        self._filling: list[Generation] = []
        self._rows: list[Generation] = []
        """Decoding; row i of the cache is sequence i. Those being prefilled are the rows after the last, one alone between steps."""

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
        return len(self._rows) + len(self._waiting) + len(self._filling)

    def submit(
        self, prompt: Sequence[int], sampling: SamplingParams, *, likely: int | None = None, record_experts: bool = False,
        processor: LogitsProcessor | None = None,
    ) -> Generation:  # fmt: skip
        """Queue a completion of these prompt tokens. Raises `BadRequest` for parameters or lengths nothing can be sampled from."""
        check(sampling)
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
        elif generation in self._filling:
            self._filling.remove(generation)
        else:
            self._waiting.remove(generation)

    @torch.inference_mode()
    def step(self) -> list[Generation]:
        """Advance: one token for every decoding row, a chunk of prompt for the one that joins. Returns those that got a token."""
        if not self.busy:
            return []
        rows, prompted, budget = list(self._rows), self.prompted, self._chunk
        drafts = self.drafting.drafts(rows)
        hidden, experts = list[Tensor](), list[Tensor | None]()
        decoding = [self._newest(rows, drafts)] if rows else []
        while parts := [*decoding, *self._prompts_beside(budget)]:
            found = self._run(parts)
            if decoding:
                hidden, experts = self._decoded(rows, drafts, *found.pop(0))
            for states, routes in found:
                budget -= states.shape[0] * states.shape[1]
                for generation, hidden_1D in self._prompted(states):
                    rows.append(generation)
                    drafts.append([])
                    hidden.append(hidden_1D)
                    experts.append(None if routes is None else routes[-1])
            decoding = []
        if rows:
            self._sample(rows, drafts, torch.cat(hidden), experts)
            for generation in [row for row in rows if row.finish_reason is not None]:
                self._leave(generation)
        if not self.busy:
            self._cache.release()
        self.drafting.stepped(alone=prompted == self.prompted)
        return rows

    def score(self, prompt: Sequence[int], completion: Sequence[int], *, temperature: float, top_p: float, top_k: int = 0) -> list[float]:
        """Log-probability [T] of each completion token, beside the cache. Raises `BadRequest` for what could not have been sampled here."""
        return [*chain.from_iterable(self.scored(prompt, completion, temperature=temperature, top_p=top_p, top_k=top_k))]

    @torch.inference_mode()
    def scored(
        self, prompt: Sequence[int], completion: Sequence[int], *, temperature: float, top_p: float, top_k: int = 0
    ) -> Iterator[list[float]]:
        """The same a piece at a time, with steps between as one likes: a pass reads as many tokens as a step feeds of prompts."""
        check(SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k))
        require_scorable(prompt, completion, context=self.policy.context, known=self.policy.vocabulary)
        pieces = read(self._body, [*prompt, *completion[:-1]], most=self._chunk, device=self.policy.model.device)
        before = len(prompt) - 1
        for found in scores(self._head, pieces, completion, before=before, temperature=temperature, top_p=top_p, top_k=top_k):
            self._recorder.take()  # the routes of this pass belong to no answer
            yield found

    @torch.inference_mode()
    def read(self, tokens: Sequence[int]) -> Tensor:
        """Hidden states [T, D] of a text, beside the cache, by the same body that samples, in one pass."""
        return next(read(self._body, tokens, most=len(tokens), device=self.policy.model.device))

    def close(self) -> None:
        """Detach from the model and drop the cache."""
        self._recorder.remove()
        self._cache.release()
        self._prompts.clear()

    # --- forward passes ---------------------------------------------------------------------------------------------------------

    def _run(self, parts: list[Fed]) -> list[tuple[Tensor, Tensor | None]]:
        """Hidden states [n, Q, D] of each part, and its routes [tokens, L, K]: in one pass, where no routes have to be told apart."""
        if self._recorder.records:
            return [(self._body([part], self._cache)[0], self._recorder.take()) for part in parts]
        return [(states, None) for states in self._body(parts, self._cache)]

    def _newest(self, rows: list[Generation], drafts: list[list[int]]) -> Fed:
        """The newest token and the draft of each decoding row."""
        device, new = self.policy.model.device, 1 + max(map(len, drafts))
        tokens = [[row.newest, *draft, *[0] * (new - 1 - len(draft))] for row, draft in zip(rows, drafts, strict=True)]
        positions_nQ = torch.tensor([row.cached for row in rows], device=device)[:, None] + torch.arange(new, device=device)
        width = max(row.cached for row in rows) + new
        return Fed(tokens_nQ=torch.tensor(tokens, device=device), positions_nQ=positions_nQ, width=width)

    def _decoded(
        self, rows: list[Generation], drafts: list[list[int]], states_nQD: Tensor, routes: Tensor | None
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """Hidden states [1 + drafted, D] row by row, and routes per row."""
        self.fed += states_nQD.shape[0] * states_nQD.shape[1]
        for row in rows:
            row.cached += 1
        hidden = [states[: 1 + len(draft)] for states, draft in zip(states_nQD, drafts, strict=True)]
        return hidden, [*routes] if routes is not None else [None] * len(rows)

    def _prompts_beside(self, budget: int) -> list[Fed]:
        """The prompts that are fed next, in one part of at most `budget` tokens: those that join, or a chunk of one. Empty without any."""
        if budget < 1 or not (self._filling or self._next()):
            return []
        self._join(budget)
        device, count = self.policy.model.device, min(budget, max(one.unfed for one in self._filling))
        tokens = [[*one.prompt[one.cached : one.cached + count], *[0] * (count - one.unfed)] for one in self._filling]
        positions_nQ = torch.tensor([one.cached for one in self._filling], device=device)[:, None] + torch.arange(count, device=device)
        width = max(one.cached for one in self._filling) + count
        return [Fed(first=len(self._rows), tokens_nQ=torch.tensor(tokens, device=device), positions_nQ=positions_nQ, width=width)]

    def _prompted(self, states_nQD: Tensor) -> Iterator[tuple[Generation, Tensor]]:
        """Those whose prompt is complete now, with the hidden state [1, D] that predicts their first token; they are rows from now on."""
        self.fed += states_nQD.shape[0] * states_nQD.shape[1]
        filling, self._filling = self._filling, []
        for generation, states_QD in zip(filling, states_nQD, strict=True):
            count = min(len(states_QD), generation.unfed)
            generation.cached += count
            self.prompted += count
            if generation.unfed:
                self._filling.append(generation)
                continue
            self._remember(generation)
            self._rows.append(generation)
            yield generation, states_QD[count - 1 : count]

    def _next(self) -> bool:
        """Begin the next waiting prompt that has to be fed, if a row is free: from the longest beginning it shares with a resident one.

        One that is known but for its last token, from the prompt cache or a resident row, decodes at once: that token is fed beside the
        others' newest ones, where a forward pass of its own would cost as much as a step of all rows.
        """
        while self._waiting and len(self._rows) < self.max_rows:
            generation = self._waiting.popleft()
            self._begin(generation)
            if generation.cached < len(generation.prompt) - 1 or not generation.cached:
                self._filling.append(generation)
                return True
            self._rows.append(generation)
        return False

    def _join(self, budget: int) -> None:
        """Begin those waiting prompts that are fed in one pass with the one that joins, in their order."""
        while self._waiting and len(self._rows) + len(self._filling) < self.max_rows and not self._recorder.records:
            prompt = self._waiting[0].prompt
            known, _ = self._resident(prompt)
            if prompt[:-1] in self._prompts or not joins(prompt, known=known, filling=self._filling, budget=budget):
                return
            generation = self._waiting.popleft()
            self._begin(generation)
            self._filling.append(generation)

    def _begin(self, generation: Generation) -> None:
        """Copy what is known of a prompt into the row after the last, but for its last token: that predicts the answer's first."""
        row = len(self._rows) + len(self._filling)
        if (known := self._prompts.find(generation.prompt[:-1])) is not None:
            generation.cached = len(generation.prompt) - 1
            self._cache.put(row, known)
            return
        generation.cached, source = self._resident(generation.prompt)
        self._cache.copy(source, row, generation.cached)

    def _resident(self, prompt: list[int]) -> tuple[int, int]:
        """The longest beginning that a row shares with a prompt and has keys and values of, and the row."""
        found = [min(shared(prompt, one.prompt), one.cached) for one in self._rows]
        return (max(found), found.index(max(found))) if found else (0, 0)

    def _remember(self, generation: Generation) -> None:
        """Keep a prompt that was just fed (its row is the one after the last)."""
        beginning = generation.prompt[:-1]
        if beginning and self._prompts.wants(beginning):
            self._prompts.keep(beginning, self._cache.take(len(self._rows), len(beginning)))

    # --- tokens -----------------------------------------------------------------------------------------------------------------

    def _sample(self, rows: list[Generation], drafts: list[list[int]], hidden_ND: Tensor, experts: list[Tensor | None]) -> None:
        """Draw the token of every position, and take each row's as far as they are what was fed."""
        plain_NV = self._head(hidden_ND).float()
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
        if self._filling:
            self._cache.copy(last + 1, last, self._filling[0].cached)
        self._cache.trim(max((row.cached for row in (*self._rows, *self._filling)), default=0))


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
