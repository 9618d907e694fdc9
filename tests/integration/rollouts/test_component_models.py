"""A second policy for one step of the harness, from its turns to its release, beside the policy that it helps: two lines, one gateway."""

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import torch
from sqlalchemy import Engine

from app import wiring
from app.db.ingestion.streams import SqlEffects
from app.db.learning.labels import SqlLabels
from app.db.learning.rollouts import SqlRollouts
from app.db.release.pointer import SqlRoutes
from app.domain.ids import utc_now
from app.domain.learning.cycles import CycleStatus
from app.domain.policies import PolicyConfig
from app.domain.release.gates import GateName
from app.domain.release.releases import ReleaseState
from app.domain.release.versions import Version, VersionKind
from app.domain.telemetry.serving import GenerateRequest, GenerationChunk
from app.domain.telemetry.streams import EffectBatch
from app.main import create_app
from app.policy.decoding.sampling import sample
from app.policy.model import Policy, load_policy
from app.settings import Settings, from_environment
from pipelines.config import loop_config
from pipelines.cycle import CyclePorts, run_cycle
from pipelines.labelling.labeller import label_due
from pipelines.labelling.rule_set import parse_rule_set
from pipelines.rollouts.harness import CodingAgent
from pipelines.rollouts.searching import Search
from pipelines.rollouts.tasks import TaskData
from pipelines.training.ports import TrainingPorts
from tests.fakes.gateway import collaborators, policy_config, serving
from tests.fakes.inbox import MemoryInbox
from tests.fakes.learning import FakeRegistry, LocalTrainers
from tests.fakes.releases import ADA, BOB, answer
from tests.fakes.served import applied
from tests.fakes.streaming import MemorySegments
from tests.integration.rollouts.practising import Practice
from tests.integration.rollouts.test_practised_to_trained import EVEN, GRADED
from tests.integration.training.test_served_to_trained import RULES

POLICIES = ("composer", "scout")
DECLARED = policy_config(held_out_share=0.0, max_context_tokens=1200, max_tokens=200)
TASKS = [
    TaskData(
        taskset="even", key=key, instruction=f"Say something of an even length about {key}.",
        files={"answer.txt": "one\ntwo\n", "other.txt": "three\nfour\n", "more.txt": "five\nsix\n"}, answer_file="answer.txt",
        editable=("answer.txt",), tests={"hidden/test_it.py": EVEN}, expected=("hidden/test_it.py::test_it",), gold={"answer.txt": "ab"},
        most_turns=1, most_tokens=2000, deadline_s=120,
    )
    for key in ("cats", "dogs")
]  # fmt: skip
CONFIG = loop_config({
    "batching": {"min_turns": 8, "rollout_share": 1.0},
    "training": {
        "dtype": "float32", "estimator": "group_mean", "turns_per_step": 16, "learning_rate": 1e-3, "threads": 1, "kl_beta": 0.0,
        "guards": {"min_turns": 8, "max_kl_champion": 50.0, "max_kl_anchor": 50.0, "max_mismatch_p99": 2.0},
    },
})  # fmt: skip


@dataclass
class Lines:
    """Serves each version with its own weights."""

    settings: Settings
    served: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """Policy and digest of each answer."""

    def __post_init__(self) -> None:
        self.policy = cache(self._load)

    def _load(self, digest: str) -> Policy:
        return replace(load_policy(wiring.open_weights(self.settings).path(digest), dtype=torch.float32), context=1200)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerationChunk]:
        self.served.append((request.policy, request.digest))
        policy = self.policy(request.digest)
        prompt = policy.chat.prompt(request.messages, tools=request.tools)
        (made,) = sample(policy, [prompt], request.sampling, shape=request.shape)
        yield GenerationChunk(
            text=made.text, tokens=made.tokens, logprobs=made.logprobs, finish_reason=made.finish_reason, prompt_tokens=prompt
        )

    async def count_tokens(self, request: GenerateRequest) -> int:
        return len(self.policy(request.digest).chat.prompt(request.messages))

    async def score(self, request: Any) -> list[float]:
        return []


class Deployment(Practice):
    """One gateway over two policies, each with its own champion in a real database."""

    def __init__(self, engine: Engine, url: str, model: Path, folder: Path) -> None:
        self.settings = from_environment({"RATCHET_DATA": str(folder / "data"), "RATCHET_DATABASE_URL": url})
        self.settings.data.mkdir()
        self.engine, digest = engine, wiring.open_weights(self.settings).publish(model)
        for policy in POLICIES:
            base = Version(
                digest=digest, policy=policy, name=f"{policy}-base", kind=VersionKind.BASE, parent=None, step=0, run_id=None,
                created_at=utc_now(), base_model="ratchet/tiny-random", licence="Apache-2.0",
            )  # fmt: skip
            wiring.version_book(self.settings).add(base)
            wiring.release_desk(self.settings).bootstrap(base, actor="system:loop")
        self.inbox, self.engines = MemoryInbox(), Lines(self.settings)
        self.app = create_app(
            collaborators(inbox=self.inbox, routes=SqlRoutes(engine), policies=dict.fromkeys(POLICIES, DECLARED), engines=self.engines)
        )
        self.book, self.folder, self.harness = SqlRollouts(engine), folder, CodingAgent(search_model="scout")
        self.serving = serving(self.app)
        self.url = self.serving.__enter__()

    def champion(self, policy: str) -> str:
        return wiring.release_desk(self.settings).pointer(policy).digest

    def learn(self, policy: str, segments: MemorySegments) -> None:
        """One slot of a policy's own loop, from labels to a candidate before the gates."""
        training = TrainingPorts(
            trajectories=segments, weights=wiring.open_weights(self.settings), runs=wiring.run_store(self.settings),
            progress=wiring.progress_log(self.settings), folder=self.settings.data / f"training-{policy}", trainers=LocalTrainers(),
        )  # fmt: skip
        book = wiring.cycle_book(self.settings)
        cycle = book.elect(policy, 0, owner="replica", now=utc_now(), lease=timedelta(seconds=60))
        assert cycle is not None
        passing = {
            gate: lambda case, gate=gate: answer(gate, case.candidate.digest) for gate in (GateName.TRAINING_HEALTH, GateName.OFFLINE)
        }
        run_cycle(cycle, policy=DECLARED, config=CONFIG, ports=CyclePorts(
            cycles=book, batches=wiring.batch_store(self.settings), versions=wiring.version_book(self.settings), weights=training.weights,
            releases=wiring.release_desk(self.settings), registry=FakeRegistry(), training=training, progress=training.progress,
            judges=passing, pretrained=lambda _: None, clock=lambda: utc_now() + timedelta(minutes=10),  # after the labels
        ))  # fmt: skip
        ended = book.find(policy, 0)
        assert ended.status is CycleStatus.DONE, ended.reason

    def release(self, policy: str) -> str:
        """Let the policy's candidate out; returns its digest."""
        desk = wiring.release_desk(self.settings)
        (queued,) = [r for r in wiring.release_ledger(self.settings).list(policy=policy) if r.state is ReleaseState.QUEUED]
        ready = desk.mark_ready(desk.start_canary(queued.id).id, answer(GateName.CANARY, queued.digest))
        for person in (ADA, BOB)[: ready.approvals_needed]:
            ready = desk.approve(ready.id, approver=person, evidence=ready.evidence_digest or "")
        return desk.promote(desk.begin_promotion(ready.id).id).digest


def ingested(deployment: Deployment) -> MemorySegments:
    """Apply what the gateway wrote, and label it for both policies."""
    turns, said, segments = deployment.turns(), deployment.said(), MemorySegments()
    store = SqlEffects(deployment.engine, rules=lambda: RULES, segments=segments)
    end = max(turn.finished_at for turn in turns) + timedelta(minutes=1)
    store.apply(EffectBatch(events=tuple(applied(effect, offset=place) for place, effect in enumerate([*turns, *said]))), now=end)
    config = PolicyConfig(model="m", base_name="b", base_model="B")
    for policy in POLICIES:
        label_due(
            SqlLabels(deployment.engine), policy=policy, config=config, rule_set=parse_rule_set(GRADED), now=end + timedelta(minutes=5),
            limit=1000, learn_from_rollouts=True,
        )  # fmt: skip
    return segments


def test_the_search_of_a_second_policy_is_practised_paid_trained_and_released_beside_the_first(
    sqlite_engine: Engine, sqlite_url: str, tiny_model: Path, tmp_path: Path
) -> None:
    deployment = Deployment(sqlite_engine, sqlite_url, tiny_model, tmp_path)
    try:
        dispatch = deployment.dispatch(*TASKS, config={"group_size": 8, "slots": 2})
        dispatch.workplace.search = Search(policy="scout")
        counted = dispatch.run(groups=2)
        assert sum(counted.values()) == 16
        assert set(counted) == {"solved", "failed"}
        turns, said = deployment.turns(), deployment.said()
        by_policy = {policy: [turn for turn in turns if turn.policy == policy] for policy in POLICIES}
        assert {turn.episode_id for turn in by_policy["scout"]} == {turn.episode_id for turn in by_policy["composer"]}
        assert len(by_policy["scout"]) == 2 * len(by_policy["composer"]) == 32, "what to look for, and what matters"
        assert {turn.source for turn in turns} == {"rollout:even"}
        paid = {policy: {one.episode_id: one.value for one in said if one.policy == policy} for policy in POLICIES}
        assert [len(found) for found in paid.values()] == [16, 16]
        assert set(paid["composer"].values()) == {0.0, 1.0}
        assert len(set(paid["scout"].values())) > 2, "paid for what it found and how long that took, whatever became of the task"

        segments, base = ingested(deployment), {policy: deployment.champion(policy) for policy in POLICIES}
        for policy in POLICIES:
            deployment.learn(policy, segments)
        released = {policy: deployment.release(policy) for policy in POLICIES}
        assert len({*released.values(), *base.values()}) == 3, "two lines from one base"
        runs = {run.policy: run for policy in POLICIES for run in [wiring.run_store(deployment.settings).get(f"{policy}-0")] if run}
        assert {policy: run.metrics["turns"] for policy, run in runs.items()} == {"composer": 16, "scout": 32}
        assert all(run.metrics["mismatch"] < 1e-5 for run in runs.values()), "forms and all, scored as it was sampled"
        for policy in POLICIES:
            asked = {"model": policy, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
            deadline = time.monotonic() + 30
            while True:  # a gateway looks at its routes anew from time to time
                assert httpx.post(f"{deployment.url}/v1/chat/completions", json=asked).status_code == 200
                if deployment.engines.served[-1] == (policy, released[policy]) or time.monotonic() > deadline:
                    break
            assert deployment.engines.served[-1] == (policy, released[policy])
    finally:
        deployment.close()


def test_a_key_that_is_bound_to_one_policy_samples_no_other(sqlite_engine: Engine, tmp_path: Path) -> None:
    """The search is asked for with the episode's key, whose policy is its parent's."""
    practice = Practice(sqlite_engine, tmp_path, lambda request: "Done.", harness=CodingAgent(search_model="scout"))
    try:
        dispatch = practice.dispatch(*TASKS, config={"group_size": 2})
        dispatch.workplace.search = Search(policy="scout")
        assert dispatch.run(groups=1) == {"gateway_failed": 2}, "nothing of that name is declared here"
    finally:
        practice.close()
