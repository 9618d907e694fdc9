"""A weight transfer backend for vLLM that reads a snapshot from a folder: `--weight-transfer-config '{"backend": "ratchet"}'`.

Installed into vLLM's own environment (`pip install infra/vllm`), where vLLM finds it as a plugin; Ratchet itself is not needed there.
vLLM's own backends all push from a trainer's GPU. Here the server pulls from the store that versions lie in, so that whoever publishes
needs no connection to it, and a rollback is the same load as an update.

    POST /start_weight_update    → nothing yet: what can be refused is refused while the old weights are whole
    POST /update_weights         → {"update_info": {"folder": F, "digest": D}}: read, compared with the model, loaded layer by layer
    POST /finish_weight_update   → {"weight_version": D}: from here on vLLM says D of every token

vLLM 0.32 keeps a repacked copy of a tied output head on processors and does not renew it (answers then come from neither version), so
heads are repacked here. Written for vLLM 0.32; the probe that Ratchet asks after every load says whether it still holds for another one.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import layerwise
from vllm.platforms import current_platform

WEIGHTS = "model.safetensors"
BACKEND = "ratchet"


@dataclass
class NoInit(WeightTransferInitInfo):
    """There is nothing to agree on before the first update."""


@dataclass
class Snapshot(WeightTransferUpdateInfo):
    """Which snapshot to load."""

    folder: str
    """As this server sees it: a whole checkpoint."""
    digest: str
    """What READY in the folder has to say."""


class FolderTransfer(WeightTransferEngine[NoInit, Snapshot]):
    """Loads a whole snapshot in place."""

    init_info_cls = NoInit
    update_info_cls = Snapshot

    def init_transfer_engine(self, init_info: NoInit) -> None:
        """Nothing to connect."""

    def start_weight_update(self) -> None:
        """Nothing yet, see the module's docstring."""

    def finish_weight_update(self) -> None:
        """Everything was done in `receive_weights`."""

    def shutdown(self) -> None:
        """Nothing is held."""

    def receive_weights(self, update_info: Snapshot) -> None:
        """Load the snapshot. Raises `ValueError` for one that is not what was asked for, with the old weights whole."""
        folder = Path(update_info.folder)
        file = folder / WEIGHTS
        if not file.is_file():
            raise ValueError(f"there is no {file} on this server: mount the weight store under the same path as at the publisher")
        found = (folder / "READY").read_text().strip() if (folder / "READY").is_file() else "nothing"
        if found != update_info.digest:
            raise ValueError(f"{folder} holds {found[:12]}, not {update_info.digest[:12]}: publish the version again")
        try:
            layerwise.initialize_layerwise_reload(self.model)
            self.model.load_weights(_tensors(file, self.device))
            layerwise.finalize_layerwise_reload(self.model, self.model_config)
        except BaseException:
            self._close_layers()
            raise
        self._repack_heads()

    def _close_layers(self) -> None:
        """After a failure: each layer is one version or the other again, none is on its way; the publisher loads the old one anew."""
        for layer in self.model.modules():
            info = layerwise.get_layerwise_info(layer)
            if info.can_load():
                layerwise._place_kernel_tensors(layer, info)
            info.reset()

    def _repack_heads(self) -> None:
        if not current_platform.is_cpu():
            return
        for module in self.model.modules():
            if type(module).__name__ == "ParallelLMHead":
                module.quant_method.process_weights_after_loading(module)


def _tensors(file: Path, device: torch.device) -> Any:  # noqa: ANN401 - an iterator of names and tensors
    with safe_open(file, framework="pt", device=str(device) if device.index is not None else device.type) as opened:
        for name in opened.keys():  # noqa: SIM118 - not a dict
            yield name, opened.get_tensor(name)


def register() -> None:
    """vLLM's entry point; called in each of its processes, and more than once in some."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, FolderTransfer)
