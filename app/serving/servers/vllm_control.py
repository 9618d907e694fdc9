"""The control side of a vLLM server: adapters in and out, whole weights replaced in place, and what it is asked to see what it holds.

Replacing in place, vLLM's own sequence:

    /pause?mode=keep ─▶ /start_weight_update ─▶ /update_weights {folder, digest} ─▶ /finish_weight_update {weight_version} ─▶ /resume

`keep` freezes answers between two tokens and lets them go on afterwards, with a cache and a beginning of the old weights: vLLM labels each
token. `abort` ends them instead.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from app.domain.telemetry.turns import SamplingParams
from app.serving.servers.control import HttpControl, Pause
from app.serving.servers.held import Held, Place, held_of
from app.serving.servers.vllm import NAME, NEEDS, SCHEME, sampling_body, scored_tokens, scoring_body


class VllmControl(HttpControl):
    """Talks to one server; calls block."""

    name, scheme, needs = NAME, SCHEME, NEEDS
    cure = "start vLLM with --logprobs-mode processed_logprobs"
    swaps_by = ("/pause", "/start_weight_update", "/update_weights", "/finish_weight_update", "/resume")

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

    def _update(self, digest: str, folder: Path) -> None:
        self._call("POST", "/start_weight_update", {})
        self._call("POST", "/update_weights", {"update_info": {"folder": str(folder), "digest": digest}})
        self._call("POST", "/finish_weight_update", {"weight_version": digest})

    def _pause(self, pause: Pause) -> None:
        self._call("POST", f"/pause?mode={pause}")

    def _go_on(self) -> None:
        self._call("POST", "/resume")

    def _leave_update(self) -> None:
        self._send("POST", "/finish_weight_update", {})  # vLLM begins no update while one is open

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
