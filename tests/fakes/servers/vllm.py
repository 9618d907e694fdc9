"""A server of vLLM 0.32's shapes, as read in its wheel and met in `make test-real`: what the adapter and the control side use of it.

Scripted by default: the same three tokens to everybody. With a snapshot it computes like a real one (`Brain`), and can be given the
defects that real ones have had.
"""

import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from app.domain.telemetry.turns import FinishReason, SamplingParams
from tests.fakes.servers.brain import SCRIPT, Brain, Token, spans
from tests.fakes.servers.server import FakeServer


class FakeVllm(FakeServer):
    """`raw` is vLLM's default."""

    def __init__(self, base: str, *, folder: Path | None = None, raw: bool = False, stale_head: bool = False) -> None:
        super().__init__(base, folder=folder, raw=raw, stale_head=stale_head)
        self.updating: tuple[str, Brain | None] | None = None
        self.is_open = False
        """Whether an update was started and not finished: no other begins meanwhile."""
        self.app.get("/v1/models")(self._list)
        self.app.get("/weight_info")(self._weight_info)
        self.app.get("/metrics")(self._metrics)
        self.app.post("/inference/v1/generate")(self._generate)
        self.app.post("/v1/completions")(self._complete)
        self.app.post("/tokenize")(self._tokenize)
        self.app.post("/v1/load_lora_adapter")(self._load)
        self.app.post("/v1/unload_lora_adapter")(self._unload)
        for path in ("/pause", "/resume", "/start_weight_update", "/update_weights", "/finish_weight_update", "/update_weight_version"):
            self.app.post(path)(self._control)

    async def _metrics(self) -> Response:
        """As vLLM 0.32 writes them."""
        label = f'{{engine="0",model_name="{self.base}"}}'
        named = {"vllm:num_requests_running": 2.0, "vllm:num_requests_waiting": 1.0, "vllm:generation_tokens_total": 640.0}
        named |= {"vllm:spec_decode_num_draft_tokens_total": 40.0, "vllm:spec_decode_num_accepted_tokens_total": 30.0}
        return self._metrics_of(named, label)

    async def _list(self) -> dict[str, Any]:
        cards = [{"id": self.base, "object": "model", "parent": None}]
        return {
            "object": "list",
            "data": [*cards, *({"id": name, "object": "model", "parent": self.base} for name in sorted(self.adapters))],
        }

    async def _weight_info(self) -> dict[str, Any]:
        return {"weight_version": self.version}

    async def _control(self, request: Request) -> Response:
        path, body = request.url.path, json.loads(await request.body() or b"{}")
        self.calls.append(path + (f"?{request.url.query}" if request.url.query else ""))
        if path == "/pause":
            self.paused = True
        elif path == "/resume":
            self.paused = False
        elif path == "/start_weight_update":
            if self.is_open:
                return JSONResponse({"error": {"message": "start_weight_update called while a weight update is in progress."}}, 500)
            self.is_open = True
        elif path == "/update_weights":
            return self._update(body["update_info"])
        elif path == "/finish_weight_update":
            return self._finish(body.get("weight_version"))
        elif path == "/update_weight_version":
            self.version = body["new_version"]
        return JSONResponse({"message": "done"})

    def _update(self, info: dict[str, Any]) -> Response:
        folder = Path(info["folder"])
        if not (folder / "READY").is_file() or (folder / "READY").read_text().strip() != info["digest"]:
            return JSONResponse({"error": {"message": f"{folder} holds something else"}}, 500)
        self.calls.append(f"update {info['digest'][:12]}")
        stale = self.brain if self.stale_head else None
        self.updating = (info["digest"], None if self.brain is None else Brain(folder, head_of=stale))
        return JSONResponse({"message": "Weights updated"})

    def _finish(self, version: str | None) -> Response:
        if not self.is_open:
            return JSONResponse({"error": {"message": "finish_weight_update called without a matching start_weight_update."}}, 500)
        self.is_open = False
        if self.updating is not None:
            (_, self.brain), self.updating = self.updating, None
            self.version = version or self.version
        return JSONResponse({"message": "Weight update finished"})

    async def _load(self, request: Request) -> Response:
        self._take_adapter(await request.json())
        return Response()

    async def _unload(self, request: Request) -> Response:
        self._drop_adapter(await request.json())
        return Response()

    async def _tokenize(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        if refused := self._unknown(body):
            return refused
        brain, tokens = self._brain(body), [7, 8, 9, 4, 5]
        if brain is not None:
            chat = brain.policy.chat
            tokens = chat.encode(body["prompt"]) if "prompt" in body else chat.prompt(body["messages"], tools=body.get("tools"))
        return JSONResponse({"count": len(tokens), "tokens": tokens, "max_model_len": 100, "token_strs": None})

    async def _complete(self, request: Request) -> Response:
        """`prompt_logprobs`: none for the first token, then each token's own, keyed by its id as text."""
        body = await request.json()
        self.bodies.append(body)
        if refused := self._unknown(body):
            return refused
        known = {11: -0.5, 12: -1.5, 2: -0.25}
        brain, tokens = self._brain(body), body["prompt"]
        logprobs = [known.get(token, -9.0) for token in tokens[1:]] if brain is None else brain.score(tokens)
        places = [{str(t): {"logprob": logprob, "rank": 1, "decoded_token": "?"}} for t, logprob in zip(tokens[1:], logprobs, strict=True)]
        return JSONResponse({"choices": [{"index": 0, "text": "a", "finish_reason": "length", "prompt_logprobs": [None, *places]}]})

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        if refused := self._unknown(body):
            return refused
        if body.get("stream"):
            return StreamingResponse(self._stream(body), media_type="text/event-stream")
        asked, brain = body["sampling_params"], self._brain(body)
        tops = [] if brain is None else brain.top(body["token_ids"], 1.0 if self.raw else asked["temperature"], asked["logprobs"])
        content = [
            {"token_id": token, "logprob": logprob, "rank": 1, "top_logprobs": _named((token, logprob), tops)}
            for _, token, logprob in self._sampled(body)
        ]
        return JSONResponse({"choices": [{"index": 0, "finish_reason": "length", "logprobs": {"content": content}}]})

    def _unknown(self, body: dict[str, Any]) -> Response | None:
        if body.get("model") in (None, self.base, *self.adapters):
            return None
        return JSONResponse({"error": {"message": f"The model `{body['model']}` does not exist.", "code": 404}}, 404)

    def _brain(self, body: dict[str, Any]) -> Brain | None:
        return self.adapters.get(body.get("model", ""), self.brain)

    def _sampled(self, body: dict[str, Any]) -> list[Token]:
        asked, brain = body["sampling_params"], self._brain(body)
        if brain is None:
            return list(SCRIPT)
        sampling = SamplingParams(
            temperature=asked["temperature"],
            top_p=asked["top_p"],
            max_tokens=asked["max_tokens"],
            seed=asked.get("seed"),
            top_k=max(0, asked["top_k"]),
        )
        return brain.draw(body["token_ids"], sampling, raw=self.raw)

    async def _stream(self, body: dict[str, Any]) -> AsyncIterator[str]:
        def event(**fields: Any) -> str:
            return f"data: {json.dumps({'request_id': 'r', 'choices': [{'index': 0, 'finish_reason': None, 'text': '', **fields}]})}\n\n"

        if self.aborts:
            self.aborts -= 1
            yield event(finish_reason="abort", token_ids=[]) + "data: [DONE]\n\n"
            return
        tokens = self._sampled(body)
        labels = self.labels or [self.version] * len(tokens)
        for place, (text, token, logprob) in enumerate(tokens[: self.cut_after]):
            logprobs = {"content": [{"token": text, "logprob": logprob, "bytes": None, "top_logprobs": []}]}
            end: dict[str, Any] = {}
            if place == len(tokens) - 1:
                end = {"finish_reason": FinishReason.STOP.value, "weight_versions": spans(labels)}
            yield event(text=text, token_ids=[token], logprobs=logprobs, **end)
        if self.cut_after is None:
            yield "data: [DONE]\n\n"


def _named(sampled: tuple[int, float], tops: Sequence[tuple[int, float]]) -> list[dict[str, Any]]:
    """As many as were asked for: the sampled token, even where it is none of the most probable ones, and the best of the others."""
    named = [sampled, *(top for top in tops if top[0] != sampled[0])][: len(tops)]
    return [{"token_id": token, "logprob": logprob} for token, logprob in named]
