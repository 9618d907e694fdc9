"""vLLM behind the same ports: an adapter to its OpenAI server, and the control side that keeps versions on it.

What was run: everything here against a small fake server (`tests/fakes/vllm.py`) that answers in the shapes vLLM documents; no part
of it against a real vLLM, which needs a GPU. The fields and endpoints are those of vLLM 0.18 to 0.32:

- `return_token_ids` on `/v1/chat/completions` (vLLM PR 22587): `prompt_token_ids` on the first chunk, `choices[].token_ids` per chunk;
- `logprobs` are of the distribution actually sampled only with `--logprobs-mode processed_logprobs`: start the server with it;
- adapters: `POST /v1/load_lora_adapter`, `/v1/unload_lora_adapter`, with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True;
- scoring: `prompt_logprobs` on `/v1/completions`, `choices[].prompt_logprobs` per prompt token, which are of the unprocessed model;
- weights: `/pause`, `/start_weight_update`, `/update_weights`, `/finish_weight_update`, `/resume`, with VLLM_SERVER_DEV_MODE=1.

A version is a model name: the base is served with `--served-model-name DIGEST`, an adapter is loaded under its digest. Do not give the
server a tool-call parser: with one, streamed token ids go missing (vllm-project/vllm#27482); the gateway parses calls itself.
Not covered: routed experts (their wire format on the chat endpoint is not documented).
"""

import logging
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import httpx
import msgspec

from app.domain.errors import BadRequest, Overloaded, RatchetError, Refused, Unavailable
from app.domain.ports import EngineLedger, EngineState, WeightStore
from app.domain.serving import GenerateRequest, GenerationChunk, ScoreRequest
from app.domain.turns import FinishReason
from app.serving.refusals import require_one_healthy, worst

log = logging.getLogger(__name__)

FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORTED}


class VllmEngines:
    """The `Engines` port over vLLM's OpenAI servers, tried in turn."""

    def __init__(
        self, urls: Sequence[str], *, api_key: str | None = None, client: httpx.AsyncClient | None = None, timeout_s: float = 120.0
    ) -> None:
        self._urls = [url.rstrip("/") for url in urls]
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = client or httpx.AsyncClient(timeout=httpx.Timeout(timeout_s, connect=2.0), trust_env=False)
        self._turn = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def ping(self) -> None:
        """Raise `Unavailable` when no server answers."""
        await require_one_healthy(self._client, self._urls, kind="vLLM server", cure="start one, or correct RATCHET_ENGINES")

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerationChunk]:
        """Sample one completion. Raises `Unavailable`, `Overloaded`, `BadRequest`, all before the first chunk only."""
        response = await self._first_willing(request)
        prompt: list[int] | None = None
        reason: str | None = None
        try:
            async for event in _events(response):
                prompt = event.get("prompt_token_ids") or prompt
                for choice in event.get("choices", []):
                    reason = choice.get("finish_reason") or reason
                    if chunk := _chunk(choice):
                        yield chunk
        except (httpx.HTTPError, msgspec.DecodeError) as error:
            yield _last(FinishReason.ERROR, prompt, f"vLLM went away while answering ({type(error).__name__})")
            return
        finally:
            await response.aclose()
        if reason is None:
            yield _last(FinishReason.ERROR, prompt, "vLLM ended its answer too early")
        else:
            yield _last(FINISH.get(reason, FinishReason.STOP), prompt, None)

    async def count_tokens(self, request: GenerateRequest) -> int:
        """Length of the prompt as the server would feed it (`POST /tokenize`)."""
        body = {"model": request.digest, "messages": request.messages, "tools": request.tools, "add_generation_prompt": True}
        return int((await self._ask("/tokenize", body, digest=request.digest))["count"])

    async def score(self, request: ScoreRequest) -> list[float]:
        """Log-probability of each completion token, from `prompt_logprobs` of `/v1/completions`.

        vLLM gives those of the model itself, before temperature and top-p, so anything but 1 and 1 is refused with `BadRequest`.
        """
        if (request.temperature, request.top_p) != (1.0, 1.0):
            raise BadRequest("vLLM scores given tokens at temperature 1 and top_p 1 only: such turns cannot be judged off policy")
        tokens = [*request.prompt_tokens, *request.completion_tokens]
        body = {"model": request.digest, "prompt": tokens, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        answer = await self._ask("/v1/completions", body, digest=request.digest)
        places: list[dict[str, Any] | None] = answer["choices"][0].get("prompt_logprobs") or []
        if len(places) != len(tokens):
            raise BadRequest(f"vLLM gave {len(places)} prompt log-probabilities for {len(tokens)} tokens: it cannot score here")
        scored = list(zip(places, tokens, strict=True))[len(request.prompt_tokens) :]
        return [float((place or {})[str(token)]["logprob"]) for place, token in scored]

    async def _ask(self, path: str, body: dict[str, Any], *, digest: str) -> dict[str, Any]:
        """The first willing server's answer."""
        refusals: list[RatchetError] = []
        for url in self._in_turn():
            try:
                response = await self._client.post(url + path, json=body, headers=self._headers)
            except httpx.HTTPError as error:
                refusals.append(_gone(url, error))
                continue
            if response.status_code == 200:
                return response.json()
            refusals.append(_refusal(response.status_code, response.content, response.headers))
        raise _worst(refusals, digest)

    async def _first_willing(self, request: GenerateRequest) -> httpx.Response:
        refusals: list[RatchetError] = []
        for url in self._in_turn():
            sent = self._client.build_request("POST", f"{url}/v1/chat/completions", json=chat_body(request), headers=self._headers)
            try:
                response = await self._client.send(sent, stream=True)
            except httpx.HTTPError as error:
                refusals.append(_gone(url, error))
                continue
            if response.status_code == 200:
                return response
            refusals.append(_refusal(response.status_code, await response.aread(), response.headers))
            await response.aclose()
        raise _worst(refusals, request.digest)

    def _in_turn(self) -> list[str]:
        self._turn += 1
        first = self._turn % len(self._urls) if self._urls else 0
        return self._urls[first:] + self._urls[:first]


def chat_body(request: GenerateRequest) -> dict[str, Any]:
    """The request as vLLM's chat endpoint takes it: token ids and log-probabilities asked for, everything that would bend the
    distribution beyond temperature and top-p switched off (vLLM else takes it from the model's generation_config.json)."""
    sampling = request.sampling
    body: dict[str, Any] = {
        "model": request.digest, "messages": request.messages, "stream": True, "logprobs": True, "return_token_ids": True,
        "temperature": sampling.temperature, "top_p": sampling.top_p, "max_tokens": sampling.max_tokens, "stop": list(sampling.stop),
        "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
    }  # fmt: skip
    if sampling.seed is not None:
        body["seed"] = sampling.seed
    if request.tools:
        # "none" keeps the server from parsing calls; the tools are still part of the prompt
        body |= {"tools": request.tools, "tool_choice": "none"}
    return body


def _chunk(choice: Mapping[str, Any]) -> GenerationChunk | None:
    """One streamed choice; None when it carries nothing. Where counts differ, both are passed on: the gateway then marks the turn as
    one without log-probabilities rather than guess which belong together."""
    tokens = [int(token) for token in choice.get("token_ids") or []]
    logprobs = [float(item["logprob"]) for item in (choice.get("logprobs") or {}).get("content") or []]
    text = (choice.get("delta") or {}).get("content") or ""
    return GenerationChunk(text=text, tokens=tokens, logprobs=logprobs) if tokens or logprobs or text else None


def _last(reason: FinishReason, prompt: list[int] | None, message: str | None) -> GenerationChunk:
    return GenerationChunk(text="", tokens=[], logprobs=[], finish_reason=reason, prompt_tokens=prompt, message=message)


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The JSON of server-sent events, to `[DONE]`."""
    async for line in response.aiter_lines():
        data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
        if data == "[DONE]":
            return
        if data:
            yield msgspec.json.decode(data, type=dict[str, Any])


def _worst(refusals: list[RatchetError], digest: str) -> RatchetError:
    return worst(refusals, otherwise=f"no vLLM server holds the weights {digest[:12]}")


def _gone(url: str, error: Exception) -> Unavailable:
    return Unavailable(f"vLLM at {url} does not answer ({type(error).__name__}): start it, or correct RATCHET_ENGINES")


def _refusal(status: int, content: bytes, headers: Mapping[str, str]) -> RatchetError:
    try:
        body = msgspec.json.decode(content, type=dict[str, Any])
        message = str((body.get("error") or body).get("message") or body)
    except (msgspec.DecodeError, AttributeError):
        message = f"vLLM answered {status}"
    if status == 429:
        return Overloaded(message, retry_after_s=float(headers.get("retry-after", "1")))
    if status in (400, 422):
        return BadRequest(message, code="context_length_exceeded" if "context length" in message else "invalid_request")
    return Unavailable(message)


class VllmControl:
    """The control side of one vLLM server: adapters come and go, weights are replaced between requests."""

    def __init__(self, url: str, *, api_key: str | None = None, client: httpx.Client | None = None) -> None:
        self.url = url.rstrip("/")
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = client or httpx.Client(timeout=httpx.Timeout(300.0, connect=2.0), trust_env=False)
        self._client.headers.update(headers)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def held(self) -> set[str]:
        """Model names the server answers to: digests, where it was started as the module docstring says."""
        return {str(model["id"]) for model in self._call("GET", "/v1/models").json()["data"]}

    def load_adapter(self, digest: str, folder: Path) -> None:
        """Load a LoRA adapter under its digest; the server must see the same folder."""
        self._call("POST", "/v1/load_lora_adapter", {"lora_name": digest, "lora_path": str(folder)})

    def unload_adapter(self, digest: str) -> None:
        """Unload it."""
        self._call("POST", "/v1/unload_lora_adapter", {"lora_name": digest})

    def replace_weights(self, update_info: Mapping[str, Any]) -> None:
        """Replace the base's weights in place, between requests.

        `wait` lets running requests finish on the old weights: with vLLM's `keep` they would go on with the new ones, and a request
        must never see mixed weights. When a step fails the server stays paused, because what it holds then is neither version.
        """
        self._call("POST", "/pause?mode=wait&clear_cache=true")
        try:
            self._call("POST", "/start_weight_update", {"is_checkpoint_format": True})
            self._call("POST", "/update_weights", {"update_info": dict(update_info)})
            self._call("POST", "/finish_weight_update", {})
        except RatchetError as error:
            raise Refused(f"the weights on {self.url} are half replaced and it stays paused: restart that server ({error})") from error
        self._call("POST", "/resume")

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        try:
            response = self._client.request(method, self.url + path, json=body)
        except httpx.HTTPError as error:
            raise _gone(self.url, error) from error
        if response.status_code >= 400:
            raise _refusal(response.status_code, response.content, response.headers)
        return response


class VllmResidency:
    """Keeps the adapters that are wanted on one server and reports what it holds; call `turn` every second."""

    def __init__(self, control: VllmControl, ledger: EngineLedger, weights: WeightStore) -> None:
        self._control = control
        self._ledger = ledger
        self._weights = weights
        self._loaded: set[str] = set()
        """Adapters loaded by us; what the server was started with is never unloaded."""

    def turn(self) -> None:
        """One round: load what is missing, unload what nobody wants, report. Raises `Unavailable` while the server does not answer."""
        wanted, held = self._ledger.wanted(), self._control.held()
        for policy, digest in sorted(wanted):
            if digest in held or self._bring(policy, digest):
                self._ledger.report(policy, digest, EngineState.READY)
        for digest in sorted(self._loaded - {digest for _, digest in wanted}):
            self._control.unload_adapter(digest)
            self._loaded.discard(digest)

    def _bring(self, policy: str, digest: str) -> bool:
        """Load one adapter; whether it is there now."""
        try:
            folder = self._weights.path(digest)
            if not (folder / "adapter_config.json").is_file():
                raise Refused(f"{digest[:12]} is a whole model: start a vLLM server with --served-model-name {digest} on {folder}")
            self._control.load_adapter(digest, folder)
        except RatchetError as error:
            log.error("version failed to load digest=%s error=%s", digest, error)
            self._ledger.report(policy, digest, EngineState.FAILED, str(error))
            return False
        self._loaded.add(digest)
        return True


def keep_versions(url: str, ledger: EngineLedger, weights: WeightStore, *, stop: threading.Event, every_s: float = 1.0) -> None:
    """Keep one server's adapters as the ledger wants them until `stop` is set; a server or database that is away is waited for."""
    control = VllmControl(url)
    residency = VllmResidency(control, ledger, weights)
    log.info("engine ready address=%s kind=vllm", url)
    while not stop.is_set():
        try:
            residency.turn()
        except RatchetError as error:
            log.warning("residency waits error=%s", error)
        stop.wait(every_s)
    control.close()
