"""What an engine measures of itself, worked out when it is scraped, so that sampling pays nothing for it."""

from collections import Counter

import torch

from app.domain.ports import EngineState
from app.serving.residency import Residency
from app.serving.worker import Worker
from app.telemetry.instruments import Instruments


def measured(own: Instruments, worker: Worker, residency: Residency) -> Instruments:
    """`own`, with the gauges of this worker and residency."""
    own.ready = True
    own.sampled("ratchet_engine_load", lambda: {(): float(worker.load)})
    own.sampled("ratchet_engine_capacity", lambda: {(): float(worker.capacity)})
    own.sampled("ratchet_engine_sampled_tokens_total", lambda: {(): float(worker.sampled_tokens)})
    own.sampled("ratchet_engine_versions", lambda: _by_state(residency))
    own.sampled("ratchet_control_plane_silent_seconds", residency.contact.seconds)
    own.sampled("ratchet_engine_mismatched_versions", lambda: {(): float(_mismatched(residency))})
    own.sampled("ratchet_engine_gpu_memory_bytes", gpu_memory)
    return own


def _by_state(residency: Residency) -> dict[tuple[str, ...], float]:
    counted = Counter(state.value for state, _ in residency.states().values())
    return {(state,): float(count) for state, count in sorted(counted.items())}


def _mismatched(residency: Residency) -> int:
    return sum(state is EngineState.READY and detail is not None for state, detail in residency.states().values())


def gpu_memory() -> dict[tuple[str, ...], float]:
    """Bytes by (device, `used` or `total`), of every process on it; empty without a GPU."""
    found: dict[tuple[str, ...], float] = {}
    for device in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(device)
        found |= {(str(device), "used"): float(total - free), (str(device), "total"): float(total)}
    return found
