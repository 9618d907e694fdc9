"""A server of SGLang 0.5.23's shapes, as read in its wheel: what the adapter and the control side use of it.

Scripted by default: the same three tokens to everybody. With a snapshot it computes like a real one (`Brain`), and can be given the
defects that real ones have had.
"""

import json
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from app.domain.telemetry.turns import SamplingParams
from tests.fakes.servers.brain import SCRIPT, Brain, Token, spans
from tests.fakes.servers.server import FakeServer

KEPT = 0.5
"""Of the mass that top-p keeps, in a scripted answer."""


class FakeSglang(FakeServer):
    """`raw` as with SGLANG_RETURN_ORIGINAL_LOGPROB."""

    def __init__(self, base: str, *, folder: Path | None = None, raw: bool = False, stale_head: bool = False) -> None:
        super().__init__(base, folder=folder, raw=raw, stale_head=stale_head)
        self.incremental = False
        """--incremental-streaming-output."""
        self.ends: dict[str, Any] | None = None
        """How the next answers end, in place of what was scripted, after `cut_after` tokens: `finish_reason`."""
        self.app.get("/v1/models")(self._list)
        self.app.get("/model_info")(self._model_info)
        self.app.get("/metrics")(self._metrics)
        self.app.post("/generate")(self._generate)
        self.app.post("/v1/tokenize")(self._tokenize)
        self.app.post("/load_lora_adapter")(self._load)
        self.app.post("/unload_lora_adapter")(self._unload)
        self.app.post("/update_weights_from_disk")(self._update)
        for path in ("/pause_generation", "/continue_generation", "/update_weight_version"):
            self.app.post(path)(self._control)

    async def _metrics(self) -> Response:
        label = f'{{model_name="{self.base}",tp_rank="0"}}'
        named = {"sglang:num_running_reqs": 2.0, "sglang:num_queue_reqs": 1.0, "sglang:generation_tokens_total": 640.0}
        named |= {"sglang:spec_accept_rate": 0.75}
        return self._metrics_of(named, label)

    async def _list(self) -> dict[str, Any]:
        cards = [{"id": self.base, "object": "model", "root": self.base, "parent": None}]
        return {"object": "list", "data": [*cards, *({"id": name, "parent": self.base} for name in sorted(self.adapters))]}

    async def _model_info(self) -> dict[str, Any]:
        return {"model_path": self.base, "served_model_name": self.base, "weight_version": self.version, "is_generation": True}

    async def _control(self, request: Request) -> Response:
        path, body = request.url.path, json.loads(await request.body() or b"{}")
        self.calls.append(path + (f" {body['mode']}" if "mode" in body else ""))
        if path == "/update_weight_version":
            self.version = body["new_version"]
            return JSONResponse({"success": True, "message": "", "new_version": self.version})
        self.paused = path == "/pause_generation"
        return JSONResponse({"message": "done", "status": "ok"})

    async def _update(self, request: Request) -> Response:
        """The whole model from a folder; the server is called by that folder afterwards."""
        body = await request.json()
        self.calls += [request.url.path, f"update {body['weight_version'][:12]}"]
        folder = Path(body["model_path"])
        if not (folder / "READY").is_file():
            return JSONResponse({"success": False, "message": "Failed to get weights iterator", "num_paused_requests": 0}, 400)
        stale = self.brain if self.stale_head else None
        self.brain = None if self.brain is None else Brain(folder, head_of=stale)
        self.version, self.base = body["weight_version"], str(folder)
        return JSONResponse({"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0})

    async def _load(self, request: Request) -> Response:
        self._take_adapter(await request.json())
        return JSONResponse({"success": True, "error_message": None, "loaded_adapters": {}})

    async def _unload(self, request: Request) -> Response:
        if not self._drop_adapter(await request.json()):
            return JSONResponse({"success": False, "error_message": "not loaded", "loaded_adapters": {}}, 400)
        return JSONResponse({"success": True, "error_message": None, "loaded_adapters": {}})

    async def _tokenize(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        tokens = [7, 8, 9, 4, 5]
        if self.brain is not None:
            chat = self.brain.policy.chat
            tokens = chat.encode(body["prompt"]) if "prompt" in body else chat.prompt(body["messages"], tools=body.get("tools"))
        return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": 100})

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        adapter = body.get("lora_path")
        if adapter is not None and adapter not in self.adapters:
            return JSONResponse({"error": {"message": f"The following requested LoRA adapters are not loaded: {adapter}"}}, 400)
        if body.get("stream"):
            return StreamingResponse(self._stream(body), media_type="text/event-stream")
        tokens = self._sampled(body)
        return JSONResponse(self._event(body, tokens, len(tokens), ended={"type": "length", "length": len(tokens)}))

    def _brain(self, body: dict[str, Any]) -> Brain | None:
        return self.adapters.get(body.get("lora_path") or "", self.brain)

    def _sampled(self, body: dict[str, Any]) -> list[Token]:
        """With the log-probability after temperature and before top-p."""
        asked, brain = body["sampling_params"], self._brain(body)
        if brain is None:
            return list(SCRIPT)
        sampling = SamplingParams(
            temperature=asked["temperature"],
            top_p=asked["top_p"],
            max_tokens=asked["max_new_tokens"],
            seed=asked.get("sampling_seed"),
            top_k=max(0, asked["top_k"]),
        )
        return brain.draw(body["input_ids"], sampling, raw=self.raw)

    async def _stream(self, body: dict[str, Any]) -> AsyncIterator[str]:
        def said(event: dict[str, Any]) -> str:
            return f"data: {json.dumps(event)}\n\n"

        if self.aborts:
            self.aborts -= 1
            ended = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
            yield said(self._event(body, [], 0, ended=ended)) + "data: [DONE]\n\n"
            return
        tokens = self._sampled(body)
        for count in range(1, len(tokens[: self.cut_after]) + 1):
            ended = {"type": "stop", "matched": 2} if count == len(tokens) else None
            yield said(self._event(body, tokens, count, ended=ended))
        if self.ends is not None:
            yield said(self._event(body, tokens, self.cut_after or 0, ended=self.ends))
        if self.cut_after is None or self.ends is not None:
            yield "data: [DONE]\n\n"

    def _event(self, body: dict[str, Any], tokens: list[Token], count: int, *, ended: dict[str, Any] | None) -> dict[str, Any]:
        """An answer after `count` tokens: all of it anew, or what is new."""
        first = count - 1 if self.incremental and body.get("stream") and count else 0
        told: dict[str, Any] = {
            "id": "r", "finish_reason": ended, "prompt_tokens": len(body["input_ids"]), "completion_tokens": count,
            "weight_version": self.version, "weight_versions": spans((self.labels or [self.version] * len(tokens))[:count]),
        }  # fmt: skip
        shown, brain = tokens[first:count], self._brain(body)
        if body.get("return_logprob"):
            lost = math.log(KEPT) if body.get("return_sampling_mask") and brain is None else 0.0
            told["output_token_logprobs"] = [[logprob + lost, token, text] for text, token, logprob in shown]
            told["output_token_logprobs_length"] = count
            told["output_top_logprobs"] = self._tops(body, shown)
            told["input_token_logprobs"] = self._scored(body)
        if body.get("return_sampling_mask"):
            is_narrow = body["sampling_params"]["top_p"] < 0.01
            told["output_token_sampling_logprobs"] = [0.0 if is_narrow else logprob for _, _, logprob in shown]
            told["output_token_sampling_mask"] = [[token] for _, token, _ in shown]
        return {"text": "".join(text for text, _, _ in shown), "output_ids": [token for _, token, _ in shown], "meta_info": told}

    def _tops(self, body: dict[str, Any], shown: list[Token]) -> list[list[list[Any]]]:
        most, brain = body.get("top_logprobs_num") or 0, self._brain(body)
        if not most:
            return []
        if brain is None:
            return [[[-0.25, 13, "c"], [-2.0, 14, "d"]][:most] for _ in shown]
        best = brain.top(body["input_ids"], 1.0 if self.raw else body["sampling_params"]["temperature"], most)
        return [[[logprob, token, None] for token, logprob in best] for _ in shown]

    def _scored(self, body: dict[str, Any]) -> list[list[Any]]:
        if body.get("logprob_start_len") != 0:
            return []
        known, brain, tokens = {11: -0.5, 12: -1.5, 2: -0.25}, self._brain(body), body["input_ids"]
        logprobs = [known.get(token, -9.0) for token in tokens[1:]] if brain is None else brain.score(tokens)
        return [[None, tokens[0], None], *([logprob, token, None] for token, logprob in zip(tokens[1:], logprobs, strict=True))]
