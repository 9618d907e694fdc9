"""What is kept on servers of other make, against fakes that sample and score with real (tiny) weights with the defects real ones had."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import cast

import httpx
import pytest
import torch
from fastapi.testclient import TestClient
from safetensors.torch import load_file

from app.domain.errors import Refused
from app.domain.ports import EngineState
from app.policy.scoring.fixed_probe import expected
from app.policy.storage.snapshot import ADAPTER, ADAPTER_CONFIG, WEIGHTS, write_snapshot
from app.policy.storage.store import LocalWeights
from app.serving.servers.control import Control, Pause
from app.serving.servers.residency import RETRY_S, Adapters, InPlace, KeptServer
from app.serving.servers.sglang_control import SglangControl
from app.serving.servers.vllm_control import VllmControl
from tests.fakes.engines import MemoryEngineLedger
from tests.fakes.servers.brain import Brain
from tests.fakes.servers.sglang import FakeSglang
from tests.fakes.servers.vllm import FakeVllm


@dataclass(frozen=True, kw_only=True)
class Make:
    """One make of servers, and what it is asked for."""

    fake: type[FakeVllm] | type[FakeSglang]
    control: Callable[..., Control]
    swap: tuple[str, ...]
    """The calls that replace weights, from pausing to going on."""
    updates: tuple[str, ...]
    """Those that may fail."""
    aborting: str
    cure: str

    @property
    def last_update(self) -> str:
        return self.updates[len(self.updates) // 2]


VLLM = Make(
    fake=FakeVllm, control=VllmControl, updates=("/start_weight_update", "/update_weights", "/finish_weight_update"),
    swap=("/pause?mode=keep", "/start_weight_update", "/update_weights", "/finish_weight_update", "/resume"),
    aborting="/pause?mode=abort", cure="processed_logprobs",
)  # fmt: skip
SGLANG = Make(
    fake=FakeSglang, control=SglangControl, updates=("/update_weights_from_disk",),
    swap=("/pause_generation retract", "/update_weights_from_disk", "/continue_generation"),
    aborting="/pause_generation abort", cure="without SGLANG_RETURN_ORIGINAL_LOGPROB",
)  # fmt: skip


class Room:
    """A store with versions of one model, a server that was started on the first of them, a ledger."""

    def __init__(self, folder: Path, base: Path, make: Make) -> None:
        self.folder, self.start, self.make = folder, base, make
        self.store = LocalWeights(folder / "store")
        self.base = self.store.publish(base)
        self.scheme = make.control("http://server").scheme
        self.ledger = MemoryEngineLedger(address=f"{self.scheme}http://server")
        self.now = 100.0

    def version(self, name: str, change: Callable[[dict[str, torch.Tensor]], None], *, adapter_on: str | None = None) -> str:
        """Publish the base with a change; with `adapter_on`, an adapter lies beside it as a trainer would have written it."""
        tensors = load_file(self.start / WEIGHTS)
        change(tensors)
        draft = self.folder / name
        write_snapshot(draft, tensors, like=self.start)
        if adapter_on is not None:
            (draft / ADAPTER).write_bytes(b"low rank")
            stated = {"base": adapter_on, "sha256": sha256(b"low rank").hexdigest()}
            (draft / ADAPTER_CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": 2, "ratchet": stated}))
        return self.store.publish(draft)

    def serve(self, **defects: bool) -> tuple[FakeVllm | FakeSglang, KeptServer]:
        fake = self.make.fake(self.base, folder=self.start, **defects)
        return fake, KeptServer(self.make.control("http://server", client=cast("httpx.Client", TestClient(fake.app))), self.store)

    def in_place(self, server: KeptServer, role: str = "champion") -> InPlace:
        return InPlace(server, self.ledger, policy="composer", role=role, linger_s=0.0, clock=lambda: self.now)

    def about_to_swap(self, new: str) -> tuple[FakeVllm | FakeSglang, InPlace]:
        """A server that holds the base, and whose next look replaces it by `new`."""
        fake, server = self.serve()
        residency = self.in_place(server)
        self.wants(champion=[self.base])
        residency.turn()
        self.wants(champion=[new], previous=[self.base])
        return fake, residency

    def wants(self, **roles: list[str]) -> None:
        self.ledger.by_role = roles
        self.ledger.wants = {("composer", digest) for digests in roles.values() for digest in digests}

    def state(self, digest: str) -> tuple[EngineState, str | None]:
        return self.ledger.states[("composer", digest)]


def linears(tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        tensors[name] = tensors[name] * 1.5


def embedding(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"] * -1.5


@pytest.fixture(params=[VLLM, SGLANG], ids=["vllm", "sglang"])
def room(request: pytest.FixtureRequest, tmp_path: Path, tied_model: Path) -> Room:
    return Room(tmp_path, tied_model, request.param)


def test_the_champions_server_takes_whole_weights_in_place_and_a_rollback_is_a_load_like_another(room: Room) -> None:
    new = room.version("new", linears)
    fake, server = room.serve()
    residency = room.in_place(server)
    room.wants(champion=[room.base])
    residency.turn()
    assert room.state(room.base) == (EngineState.READY, None)
    assert fake.version == room.base  # labelled, so that every token says so
    room.wants(champion=[new], previous=[room.base])
    residency.turn()
    assert [call for call in fake.calls if not call.startswith("update ")] == ["/update_weight_version", *room.make.swap]
    assert (fake.version, fake.paused) == (new, False)
    assert room.state(new) == (EngineState.READY, None)
    assert room.state(room.base)[0] is EngineState.DROPPED
    room.wants(champion=[room.base])
    residency.turn()
    assert fake.version == room.base
    assert room.state(room.base) == (EngineState.READY, None)


def test_a_version_leaves_the_ledger_before_its_weights_are_touched(room: Room) -> None:
    new = room.version("new", linears)
    _, residency = room.about_to_swap(new)
    residency.turn()
    assert room.ledger.history == [
        (room.base, EngineState.READY), (room.base, EngineState.DROPPED), (new, EngineState.LOADING), (new, EngineState.READY),
    ]  # fmt: skip


@pytest.mark.parametrize("step", [0, 1, 2])
def test_an_update_that_fails_leaves_the_server_with_what_it_had_and_says_why(room: Room, step: int) -> None:
    path = room.make.updates[min(step, len(room.make.updates) - 1)]
    new = room.version("new", linears)
    fake, residency = room.about_to_swap(new)
    fake.failing_once[path] = 500
    residency.turn()
    assert (fake.version, fake.paused) == (room.base, False)
    assert room.state(room.base) == (EngineState.READY, None)
    state, why = room.state(new)
    assert state is EngineState.FAILED
    assert "serves what it had" in str(why)
    room.now += RETRY_S
    residency.turn()
    assert room.state(new) == (EngineState.READY, None)


@pytest.mark.parametrize("unknown", [0, 1, -1])
def test_a_server_too_old_to_take_weights_in_place_is_told_the_cure_and_serves_what_it_had(room: Room, unknown: int) -> None:
    """One of another version lacks the endpoint that pauses it, or one that updates it, or the last."""
    new = room.version("new", linears)
    fake, residency = room.about_to_swap(new)
    fake.lacking.add(room.make.swap[unknown].partition("?")[0].partition(" ")[0])
    residency.turn()
    assert room.state(new)[0] is EngineState.FAILED
    assert "has no such endpoint: use" in str(room.state(new)[1])
    assert (fake.version, fake.paused) == (room.base, False)
    assert not any(call.startswith("/pause") for call in fake.calls), "nothing was touched"
    assert room.state(room.base) == (EngineState.READY, None)


def test_going_on_is_asked_for_once_more_where_it_got_lost(room: Room) -> None:
    new = room.version("new", linears)
    fake, server = room.serve()
    fake.failing_once[room.make.swap[-1]] = 504
    residency = room.in_place(server)
    room.wants(champion=[new])
    residency.turn()
    assert (fake.version, fake.paused) == (new, False)
    assert room.state(new) == (EngineState.READY, None)


def test_a_pause_whose_answer_got_lost_does_not_leave_the_server_paused(room: Room) -> None:
    new = room.version("new", linears)
    fake, residency = room.about_to_swap(new)
    fake.losing_once.add(room.make.swap[0].partition("?")[0].partition(" ")[0])
    residency.turn()
    assert (fake.version, fake.paused) == (room.base, False)
    assert room.state(new)[0] is EngineState.FAILED
    assert room.state(room.base) == (EngineState.READY, None)


def test_a_server_that_cannot_even_have_the_old_weights_again_stays_paused(room: Room) -> None:
    new = room.version("new", linears)
    fake, server = room.serve()
    fake.failing[room.make.last_update] = 500
    with pytest.raises(Refused, match="stays paused: restart"):
        server.control.replace_weights(new, room.store.path(new), back_to=(room.base, room.store.path(room.base)))
    assert fake.paused


def test_answers_may_be_aborted_instead_of_kept_and_never_hold_a_swap_up(room: Room) -> None:
    new = room.version("new", linears)
    fake, server = room.serve()
    server.control.replace_weights(new, room.store.path(new), back_to=None, pause=Pause.ABORT)
    assert fake.calls[0] == room.make.aborting
    assert set(Pause) == {"keep", "abort"}


def test_a_head_that_stayed_old_is_found_refused_and_put_back(room: Room) -> None:
    new = room.version("new", embedding)
    fake, server = room.serve(stale_head=True)
    residency = room.in_place(server)
    room.wants(champion=[room.base])
    residency.turn()
    room.wants(champion=[new], previous=[room.base])
    residency.turn()
    state, why = room.state(new)
    assert state is EngineState.FAILED
    assert "says it holds" in str(why)
    assert fake.version == room.base
    assert room.state(room.base)[0] is EngineState.READY


def test_a_damaged_snapshot_is_refused_with_nothing_touched(room: Room) -> None:
    new = room.version("new", linears)
    fake, server = room.serve()
    residency = room.in_place(server)
    room.wants(champion=[room.base])
    residency.turn()
    file = room.store.path(new) / WEIGHTS
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.unlink()
    file.write_bytes(data)
    room.wants(champion=[new], previous=[room.base])
    residency.turn()
    assert room.state(new)[0] is EngineState.FAILED
    assert "damaged" in str(room.state(new)[1])
    assert not any(call.startswith("/pause") for call in fake.calls)


def test_weights_of_another_architecture_are_refused_with_nothing_touched(room: Room) -> None:
    def smaller(tensors: dict[str, torch.Tensor]) -> None:
        tensors.pop("model.norm.weight")

    new = room.version("new", smaller)
    fake, server = room.serve()
    residency = room.in_place(server)
    room.wants(champion=[new])
    residency.turn()
    assert "model.norm.weight" in str(room.state(new)[1])
    assert "start a server of its own" in str(room.state(new)[1])
    assert not any(call.startswith("/pause") for call in fake.calls)


def test_a_server_with_raw_log_probabilities_serves_and_is_not_learned_from(room: Room) -> None:
    _, server = room.serve(raw=True)
    room.wants(champion=[room.base])
    room.in_place(server).turn()
    state, why = room.state(room.base)
    assert state is EngineState.READY
    assert room.make.cure in str(why)


def test_the_candidates_server_keeps_a_new_champion_until_another_server_has_it(room: Room) -> None:
    new = room.version("new", linears)
    fake, server = room.serve()
    residency = room.in_place(server, "candidate")
    room.wants(champion=[room.base], candidate=[new])
    residency.turn()
    assert fake.version == room.base  # the champion's server is not up yet: this one has what it was started on
    room.ledger.elsewhere = {room.base: [f"{room.scheme}http://other"]}
    residency.turn()
    assert fake.version == new
    room.wants(champion=[new], previous=[room.base])
    residency.turn()
    assert fake.version == new  # nobody else is ready with the champion
    room.ledger.elsewhere = {new: [f"{room.scheme}http://other"]}
    residency.turn()
    assert fake.version == room.base  # what a rollback would need


def test_champion_and_canary_are_adapters_side_by_side_on_one_server(room: Room) -> None:
    champion = room.version("champion", linears, adapter_on=room.base)
    canary = room.version("canary", lambda tensors: (linears(tensors), linears(tensors))[0], adapter_on=room.base)
    fake, server = room.serve()
    residency = Adapters(server, room.ledger)
    room.wants(champion=[champion], candidate=[canary], previous=[room.base])
    residency.turn()
    assert set(fake.adapters) == {champion, canary}
    assert {room.state(digest) for digest in (champion, canary, room.base)} == {(EngineState.READY, None)}
    room.wants(champion=[canary], previous=[champion])
    residency.turn()
    assert set(fake.adapters) == {champion, canary}
    room.wants(champion=[room.base])
    residency.turn()
    assert set(fake.adapters) == set()


def test_an_adapter_that_others_loaded_is_left_alone(room: Room) -> None:
    fake, server = room.serve()
    fake.adapters["theirs"] = None
    room.wants(champion=[room.base])
    Adapters(server, room.ledger).turn()
    assert set(fake.adapters) == {"theirs"}


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda room: room.version("whole", linears), "--in-place"),
        (lambda room: room.version("foreign", linears, adapter_on="f" * 64), "is an adapter on ffffffffffff"),
    ],
)
def test_a_version_the_server_cannot_have_as_an_adapter_is_refused_with_the_cure(room: Room, make: Callable[[Room], str], why: str) -> None:
    digest = make(room)
    fake, server = room.serve()
    room.wants(champion=[room.base], candidate=[digest])
    Adapters(server, room.ledger).turn()
    state, said = room.state(digest)
    assert state is EngineState.FAILED
    assert why in str(said)
    assert room.state(room.base)[0] is EngineState.READY
    assert fake.adapters == {}


def test_a_damaged_adapter_is_refused(room: Room) -> None:
    digest = room.version("bad", linears, adapter_on=room.base)
    file = room.store.path(digest) / ADAPTER
    file.unlink()
    file.write_bytes(b"high rank")
    _, server = room.serve()
    room.wants(champion=[digest])
    Adapters(server, room.ledger).turn()
    assert "damaged" in str(room.state(digest)[1])


def test_an_adapter_that_answers_with_other_weights_is_unloaded(room: Room) -> None:
    digest, other = room.version("one", linears, adapter_on=room.base), room.version("two", embedding)
    shutil.copy(room.store.path(other) / WEIGHTS, room.folder / "swapped")
    wrong = expected(room.store.path(other))
    fake, server = room.serve()
    server._expected[digest] = wrong
    room.wants(champion=[digest])
    Adapters(server, room.ledger).turn()
    assert room.state(digest)[0] is EngineState.FAILED
    assert fake.adapters == {}


def test_a_server_that_answers_otherwise_than_its_digest_says_is_given_the_weights_anew(room: Room) -> None:
    other = room.version("other", embedding)
    fake, server = room.serve()
    fake.brain = Brain(room.store.path(other))  # somebody replaced them behind our back
    residency = room.in_place(server)
    room.wants(champion=[room.base])
    residency.turn()
    assert room.state(room.base)[0] is EngineState.FAILED
    room.now += RETRY_S
    residency.turn()
    assert room.state(room.base) == (EngineState.READY, None)
