"""The control side of an SGLang server: adapters in and out, whole weights replaced in place, and what it is asked to see what it holds.

Replacing in place, SGLang's own sequence:

    /pause_generation {mode} ─▶ /update_weights_from_disk {model_path, weight_version, flush_cache} ─▶ /continue_generation

To keep answers, `retract`: they go back into the queue and are fed again with the new weights, because the cache is emptied (with
`in_place` it would stay, of the old weights). The tokens they have are labelled with the version that sampled them. `abort` ends them.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from app.domain.errors import Refused
from app.domain.telemetry.turns import SamplingParams
from app.serving.servers.control import HttpControl, Pause
from app.serving.servers.held import Held, Place, held_of
from app.serving.servers.sglang import NAME, NEEDS, SCHEME, generating_body, is_cut, scored_tokens, scoring_body

MODES = {Pause.KEEP: "retract", Pause.ABORT: "abort"}


class SglangControl(HttpControl):
    """Talks to one server; calls block. `api_key` is its admin key, where it has one."""

    name, scheme, needs = NAME, SCHEME, NEEDS
    cure = "start SGLang without SGLANG_RETURN_ORIGINAL_LOGPROB"
    swaps_by = ("/pause_generation", "/update_weights_from_disk", "/continue_generation")

    def held(self) -> Held:
        """What the server holds. Raises `Unavailable`."""
        told = self._call("GET", "/model_info").json()
        return held_of(self._call("GET", "/v1/models").json(), told.get("weight_version"), url=self.url)

    # --- adapters -------------------------------------------------------------------------------------------------------------------

    def load_adapter(self, digest: str, folder: Path) -> None:
        """Load a LoRA adapter under its digest; the server must see the same folder."""
        self._done("/load_lora_adapter", {"lora_name": digest, "lora_path": str(folder), "pinned": True})

    def unload_adapter(self, digest: str) -> None:
        """Unload it."""
        self._done("/unload_lora_adapter", {"lora_name": digest})

    # --- whole weights --------------------------------------------------------------------------------------------------------------

    def label(self, digest: str) -> None:
        """Have the server call the weights that it holds by their digest; answers being written go on."""
        self._done("/update_weight_version", {"new_version": digest, "abort_all_requests": False})

    def _update(self, digest: str, folder: Path) -> None:
        self._done("/update_weights_from_disk", {"model_path": str(folder), "weight_version": digest, "flush_cache": True})

    def _pause(self, pause: Pause) -> None:
        self._call("POST", "/pause_generation", {"mode": MODES[pause]})

    def _go_on(self) -> None:
        self._call("POST", "/continue_generation", {})

    def _leave_update(self) -> None:
        """SGLang says that it goes back by itself; the old weights are loaded again all the same, because then they are labelled so."""

    # --- questions ------------------------------------------------------------------------------------------------------------------

    def sample(self, place: Place, prompt: Sequence[int], sampling: SamplingParams, *, top: int = 0) -> list[dict[str, Any]]:
        """Sampled tokens as `{"token_id", "logprob", "top_logprobs": [the same, most probable first]}`."""
        body = generating_body(place, list(prompt), sampling, likely=top, ignore_eos=True)
        told: dict[str, Any] = self._call("POST", "/generate", body).json()["meta_info"]
        items: list[Sequence[Any]] = told["output_token_logprobs"]
        logprobs = told["output_token_sampling_logprobs"] if is_cut(sampling) else [item[0] for item in items]
        tops: list[list[Sequence[Any]]] = told.get("output_top_logprobs") or [[] for _ in items]
        return [
            {"token_id": item[1], "logprob": logprob, "top_logprobs": [{"token_id": other[1], "logprob": other[0]} for other in others]}
            for item, logprob, others in zip(items, logprobs, tops, strict=True)
        ]

    def score(self, place: Place, tokens: Sequence[int]) -> list[float]:
        """Log-probability of each token but the first, at temperature 1."""
        return scored_tokens(self._call("POST", "/generate", scoring_body(place.model if place.adapter else None, tokens)).json(), tokens)

    def tokenize(self, place: Place, text: str) -> list[int]:
        """Tokens of a text as it is."""
        return [int(token) for token in self._call("POST", "/v1/tokenize", {"prompt": text, "add_special_tokens": False}).json()["tokens"]]

    def _done(self, path: str, body: dict[str, Any]) -> None:
        """Raises `Refused` where the server says that it did not do it, in whichever status."""
        said: dict[str, Any] = self._call("POST", path, body).json()
        if not said.get("success", False):
            raise Refused(f"{self.url}{path}: {said.get('message') or said.get('error_message') or 'it did not say why'}")
