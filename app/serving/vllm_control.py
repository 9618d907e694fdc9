"""The control side of one vLLM server: what it holds, adapters in and out, whole weights replaced in place, and a probe of what it says.

Replacing in place, vLLM's own sequence:

    /pause?mode=keep ─▶ /start_weight_update ─▶ /update_weights {folder, digest} ─▶ /finish_weight_update {weight_version} ─▶ /resume

`keep` freezes answers between two tokens and lets them go on afterwards, with a cache and a beginning of the old weights: vLLM labels each
token, and such a turn is not trained on. `abort` ends them instead; the gateway sends those again that had no token yet. `wait` is not
offered: one long answer would hold every other.
"""

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

import httpx

from app.domain.errors import RatchetError, Refused
from app.domain.telemetry.turns import SamplingParams
from app.serving.vllm import scored_tokens
from app.serving.vllm_wire import Held, gone, held_of, refusal, sampling_body

TIMEOUT_S = 300.0


class Pause(StrEnum):
    """What happens to answers being written while weights are replaced."""

    KEEP = "keep"
    ABORT = "abort"


class VllmControl:
    """Talks to one server; calls block."""

    def __init__(self, url: str, *, api_key: str | None = None, client: httpx.Client | None = None) -> None:
        self.url = url.rstrip("/")
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        # vLLM closes a connection after an answer of 500: a next question on it would be lost just when the old weights have to come back
        limits = httpx.Limits(max_keepalive_connections=0)
        self._client = client or httpx.Client(timeout=httpx.Timeout(TIMEOUT_S, connect=2.0), limits=limits, trust_env=False)
        self._client.headers.update(headers)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def held(self) -> Held:
        """What the server holds. Raises `Unavailable`."""
        label = self._send("GET", "/weight_info")
        version = label.json()["weight_version"] if label.status_code == 200 else None
        return held_of(self._call("GET", "/v1/models").json(), version, url=self.url)

    # --- adapters -------------------------------------------------------------------------------------------------------------------

    def load_adapter(self, digest: str, folder: Path) -> None:
        """Load a LoRA adapter under its digest; the server must see the same folder."""
        self._call("POST", "/v1/load_lora_adapter", {"lora_name": digest, "lora_path": str(folder)})

    def unload_adapter(self, digest: str) -> None:
        """Unload it."""
        self._call("POST", "/v1/unload_lora_adapter", {"lora_name": digest})

    # --- whole weights --------------------------------------------------------------------------------------------------------------

    def label(self, digest: str) -> None:
        """Have the server call the weights that it holds by their digest."""
        self._call("POST", "/update_weight_version", {"new_version": digest})

    def replace_weights(self, digest: str, folder: Path, *, back_to: tuple[str, Path] | None, pause: Pause = Pause.KEEP) -> None:
        """Replace the base's weights by a snapshot. Raises `Refused` when that failed and the server has `back_to` again; where not even
        that could be loaded it stays paused, because what it holds is no version at all."""
        self._call("POST", f"/pause?mode={pause}")
        try:
            self._update(digest, folder)
        except RatchetError as error:
            self._restore(back_to, error)
            raise Refused(f"{self.url} did not take the weights {digest[:12]} and serves what it had ({error})") from error
        self._call("POST", "/resume")

    def _update(self, digest: str, folder: Path) -> None:
        self._call("POST", "/start_weight_update", {})
        self._call("POST", "/update_weights", {"update_info": {"folder": str(folder), "digest": digest}})
        self._call("POST", "/finish_weight_update", {"weight_version": digest})

    def _restore(self, back_to: tuple[str, Path] | None, error: RatchetError) -> None:
        if back_to is not None:
            try:
                self._send("POST", "/finish_weight_update", {})  # vLLM begins no update while one is open
                self._update(*back_to)
                self._call("POST", "/resume")
            except RatchetError as worse:
                error = worse
            else:
                return
        raise Refused(f"the weights on {self.url} are half replaced and it stays paused: restart that server ({error})") from error

    # --- questions ------------------------------------------------------------------------------------------------------------------

    def sample(self, model: str, prompt: Sequence[int], sampling: SamplingParams, *, top: int = 0) -> list[dict[str, Any]]:
        """Sampled tokens as `{"token_id", "logprob", "top_logprobs": [the same, most probable first]}`."""
        body = {"model": model, "token_ids": list(prompt), "sampling_params": sampling_body(sampling, logprobs=top, ignore_eos=True)}
        answer = self._call("POST", "/inference/v1/generate", body).json()
        return list(answer["choices"][0]["logprobs"]["content"])

    def score(self, model: str, tokens: Sequence[int]) -> list[float]:
        """Log-probability of each token but the first, at temperature 1."""
        body = {"model": model, "prompt": list(tokens), "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        return scored_tokens(self._call("POST", "/v1/completions", body).json(), tokens)

    def tokenize(self, model: str, text: str) -> list[int]:
        """Tokens of a text as it is."""
        answer = self._call("POST", "/tokenize", {"model": model, "prompt": text, "add_special_tokens": False}).json()
        return [int(token) for token in answer["tokens"]]

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        response = self._send(method, path, body)
        if response.status_code >= 400:
            raise refusal(self.url, response.status_code, response.content, response.headers)
        return response

    def _send(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        try:
            return self._client.request(method, self.url + path, json=body)
        except httpx.HTTPError as error:
            raise gone(self.url, error) from error
