"""Shadow traffic: a share of the requests is asked of another version too, and its answers are counted and thrown away.

Nobody sees them, no exposure and no turn is written of them, so no gate hears of them and nothing learns from them. They run beside the
answer that is shown, a few at a time: when those are under way, when an engine is full or does not hold the version, the shadow is given up
and counted. Off unless a policy's `shadow.share` is set (`ShadowConfig`).
"""

import asyncio
import logging
import time
from collections import Counter

import msgspec

from app.api.chat.request import ChatRequest
from app.api.metrics import Metrics
from app.domain.errors import BadRequest, Overloaded, RatchetError
from app.domain.policies import PolicyConfig
from app.domain.ports import Engines, Routes
from app.domain.release.assignment import PINNED, Arm, unit_interval
from app.domain.telemetry.events import is_rollout
from app.domain.telemetry.serving import GenerateRequest

log = logging.getLogger("ratchet.api")


class Shadows:
    """Casts them. Belongs to one event loop."""

    def __init__(self, engines: Engines, routes: Routes, metrics: Metrics) -> None:
        self._engines = engines
        self._routes = routes
        self._metrics = metrics
        self._under_way: set[asyncio.Task[None]] = set()
        self._by_policy: Counter[str] = Counter()

    def cast(self, request: ChatRequest, shown: Arm, config: PolicyConfig, asked: GenerateRequest) -> None:
        """Ask the shadow version what was asked, beside it, where this request is one of the share; returns at once."""
        share = config.shadow.share
        if share <= 0 or request.dryrun or is_rollout(request.source) or shown.arm == PINNED:
            return
        if unit_interval(request.policy, "shadow", request.inference_id) >= share:
            return
        digest = self._version(config, request.policy)
        if digest is None or digest == shown.digest:
            return
        if self._by_policy[request.policy] >= config.shadow.max_concurrent:
            self._count(request.policy, digest, "skipped")
            return
        self._by_policy[request.policy] += 1
        other = msgspec.structs.replace(asked, digest=digest, stream=False, likely=None, record_experts=False)
        task = asyncio.ensure_future(self._answered(request, other, config.engine_timeout_s))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def close(self) -> None:
        """End those under way."""
        for task in self._under_way:
            task.cancel()
        if self._under_way:
            await asyncio.wait(set(self._under_way))

    def _version(self, config: PolicyConfig, policy: str) -> str | None:
        try:
            route = self._routes.route(policy)
        except RatchetError:  # it was there a moment ago, and this is nobody's answer
            return None
        digest = route.coming if config.shadow.version == "candidate" else config.shadow.version
        return None if digest in route.quarantined else digest

    async def _answered(self, request: ChatRequest, asked: GenerateRequest, timeout_s: float) -> None:
        """Sample one to its end and count how it ended; whatever happens to it happens to nobody else."""
        began, tokens, outcome = time.monotonic(), 0, "cut_off"
        try:
            async with asyncio.timeout(timeout_s):
                async for chunk in self._engines.generate(asked):
                    tokens += len(chunk.tokens)
                    outcome = chunk.finish_reason.value if chunk.finish_reason is not None else outcome
        except TimeoutError:
            outcome = "timeout"
        except (BadRequest, Overloaded) as error:
            outcome = "full" if isinstance(error, Overloaded) else "refused"
        except RatchetError as error:
            outcome = "unavailable"
            log.warning("shadow_not_answered version=%s error=%s", asked.digest[:12], error)
        except Exception:
            outcome = "bug"
            log.exception("shadow_not_answered version=%s", asked.digest[:12])
        finally:
            self._by_policy[request.policy] -= 1
        seconds = time.monotonic() - began
        self._count(request.policy, asked.digest, outcome)
        self._metrics.shadow_s.labels(request.policy).observe(seconds)
        self._metrics.shadow_tokens.labels(request.policy, asked.digest[:12]).inc(tokens)
        log.info(
            "shadow_answered inference_id=%s policy=%s version=%s outcome=%s tokens=%d seconds=%.2f",
            request.inference_id, request.policy, asked.digest[:12], outcome, tokens, seconds,
        )  # fmt: skip

    def _count(self, policy: str, digest: str, outcome: str) -> None:
        self._metrics.shadows.labels(policy, digest[:12], outcome).inc()
