"""A server that answers in the shapes vLLM documents: enough of its OpenAI and control endpoints for the adapter."""

import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse


class FakeVllm:
    """Says the same three tokens to everybody; `calls` remembers what the control side was asked, in order."""

    def __init__(self, *models: str) -> None:
        self.models = set(models)
        self.calls: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.failing: dict[str, int] = {}
        """Status by path."""
        self.cut_after: int | None = None
        """End the stream after so many events."""
        self.app = FastAPI()
        self.app.middleware("http")(self._fail)
        self.app.get("/v1/models")(self._list)
        self.app.get("/health")(self._control)
        self.app.post("/v1/chat/completions")(self._chat)
        self.app.post("/v1/completions")(self._complete)
        self.app.post("/tokenize")(self._tokenize)
        self.app.post("/v1/load_lora_adapter")(self._load)
        self.app.post("/v1/unload_lora_adapter")(self._unload)
        for path in ("/pause", "/start_weight_update", "/update_weights", "/finish_weight_update", "/resume"):
            self.app.post(path)(self._control)

    async def _fail(self, request: Request, call_next: Any) -> Response:
        path = request.url.path
        if path in self.failing:
            return JSONResponse({"error": {"message": f"failing at {path}"}}, self.failing[path], headers={"retry-after": "3"})
        return await call_next(request)

    async def _list(self) -> dict[str, Any]:
        return {"object": "list", "data": [{"id": name, "object": "model"} for name in sorted(self.models)]}

    async def _control(self, request: Request) -> dict[str, Any]:
        query = f"?{request.url.query}" if request.url.query else ""
        self.calls.append(request.url.path + query)
        return {}

    async def _load(self, request: Request) -> dict[str, Any]:
        body = await request.json()
        self.calls.append(f"load {body['lora_name']} {body['lora_path']}")
        self.models.add(body["lora_name"])
        return {}

    async def _unload(self, request: Request) -> dict[str, Any]:
        body = await request.json()
        self.calls.append(f"unload {body['lora_name']}")
        self.models.discard(body["lora_name"])
        return {}

    async def _tokenize(self, request: Request) -> dict[str, Any]:
        self.bodies.append(await request.json())
        return {"count": 5, "tokens": [1, 2, 3, 4, 5], "max_model_len": 100}

    async def _complete(self, request: Request) -> Response:
        """`prompt_logprobs`: none for the first token, then each token's own, keyed by its id as text."""
        body = await request.json()
        self.bodies.append(body)
        if body["model"] not in self.models:
            return JSONResponse({"error": {"message": f"The model `{body['model']}` does not exist."}}, 404)
        known = {11: -0.5, 12: -1.5, 2: -0.25}
        places = [{str(t): {"logprob": known.get(t, -9.0), "rank": 1, "decoded_token": "?"}} for t in body["prompt"][1:]]
        return JSONResponse({"choices": [{"index": 0, "text": "a", "finish_reason": "length", "prompt_logprobs": [None, *places]}]})

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        if body["model"] not in self.models:
            return JSONResponse({"error": {"message": f"The model `{body['model']}` does not exist."}}, 404)
        return StreamingResponse(self._stream(), media_type="text/event-stream")

    async def _stream(self) -> AsyncIterator[str]:
        def choice(**fields: Any) -> dict[str, Any]:
            return {"choices": [{"index": 0, "finish_reason": None, "logprobs": None, "delta": {}, **fields}]}

        def token(text: str, token_id: int, logprob: float, **fields: Any) -> dict[str, Any]:
            logprobs = {"content": [{"token": text, "logprob": logprob, "bytes": None, "top_logprobs": []}]}
            return choice(delta={"content": text}, logprobs=logprobs, token_ids=[token_id], **fields)

        events = [
            {"prompt_token_ids": [7, 8, 9], **choice(delta={"role": "assistant", "content": ""})},
            token("a", 11, -0.5),
            token(" b", 12, -1.5),
            token("", 2, -0.25, finish_reason="stop"),
        ]
        for event in events[: self.cut_after]:
            yield f"data: {json.dumps(event)}\n\n"
        if self.cut_after is None:
            yield "data: [DONE]\n\n"
