"""The control side of a vLLM server: adapters in and out, whole weights replaced in place, and what it is asked to see what it holds.

Replacing in place, vLLM's own sequence:

    /pause?mode=keep ─▶ /start_weight_update ─▶ /update_weights {folder, digest} ─▶ /finish_weight_update {weight_version} ─▶ /resume

`keep` freezes answers between two tokens and lets them go on afterwards, with a cache and a beginning of the old weights: vLLM labels each
token. `abort` ends them instead.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from app.domain.errors import RatchetError
from app.domain.telemetry.turns import SamplingParams
from app.serving.servers.control import Pause, half_replaced, http_client, not_taken
from app.serving.servers.held import Held, Place, held_of
from app.serving.servers.vllm import NAME, NEEDS, SCHEME, sampling_body, scored_tokens, scoring_body
from app.serving.servers.wire import gone, refusal


class VllmControl:
    """Talks to one server; calls block."""

    name, scheme, cure = NAME, SCHEME, "start vLLM with --logprobs-mode processed_logprobs"

    def __init__(self, url: str, *, api_key: str | None = None, client: httpx.Client | None = None) -> None:
        self.url = url.rstrip("/")
        self._client = http_client(api_key, client)

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
            raise not_taken(self.url, digest, error) from error
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
        raise half_replaced(self.url, error) from error

    # --- questions ------------------------------------------------------------------------------------------------------------------

    def sample(self, place: Place, prompt: Sequence[int], sampling: SamplingParams, *, top: int = 0) -> list[dict[str, Any]]:
        """Sampled tokens as `{"token_id", "logprob", "top_logprobs": [the same, most probable first]}`."""
        body = {"model": place.model, "token_ids": list(prompt), "sampling_params": sampling_body(sampling, logprobs=top, ignore_eos=True)}
        answer = self._call("POST", "/inference/v1/generate", body).json()
        return list(answer["choices"][0]["logprobs"]["content"])

    def score(self, place: Place, tokens: Sequence[int]) -> list[float]:
        """Log-probability of each token but the first, at temperature 1."""
        return scored_tokens(self._call("POST", "/v1/completions", scoring_body(place.model, tokens)).json(), tokens)

    def tokenize(self, place: Place, text: str) -> list[int]:
        """Tokens of a text as it is."""
        answer = self._call("POST", "/tokenize", {"model": place.model, "prompt": text, "add_special_tokens": False}).json()
        return [int(token) for token in answer["tokens"]]

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        response = self._send(method, path, body)
        if response.status_code >= 400:
            raise refusal(NAME, self.url, response.status_code, response.content, response.headers, needs=NEEDS)
        return response

    def _send(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        try:
            return self._client.request(method, self.url + path, json=body)
        except httpx.HTTPError as error:
            raise gone(NAME, self.url, error) from error
