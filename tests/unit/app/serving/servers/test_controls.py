"""What the control sides of both makes send: adapters, labels, pauses and questions, and how weights that were not taken are put back."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.domain.errors import NotFound, RatchetError, Refused, Unavailable
from app.domain.telemetry.turns import SamplingParams
from app.serving.servers.control import HttpControl, Pause
from app.serving.servers.held import Place
from app.serving.servers.sglang_control import SglangControl
from app.serving.servers.vllm_control import VllmControl

OLD, NEW = "a" * 64, "b" * 64
FOLDER = Path("/weights/new")
BASE, ADAPTER = Place(url="http://s", model="base", label=OLD), Place(url="http://s", model=NEW, label=OLD, adapter=True)
Make = Callable[..., HttpControl]
MAKES: list[Any] = [pytest.param(VllmControl, id="vllm"), pytest.param(SglangControl, id="sglang")]


class Server:
    """Answers every request, `said` by path; a path in `fails` answers 500 as often as it says."""

    def __init__(self, **said: Any) -> None:
        self.said: dict[str, Any] = said
        self.fails: dict[str, int] = {}
        self.asked: list[tuple[str, str, Any]] = []
        self.keys: set[str | None] = set()

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.raw_path.decode()
        self.keys.add(request.headers.get("authorization"))
        if request.method != "OPTIONS":
            self.asked.append((request.method, path, json.loads(request.content) if request.content else None))
            if self.fails.get(path, 0):
                self.fails[path] -= 1
                return httpx.Response(500, json={"error": {"message": "no memory"}})
        return httpx.Response(200, json=self.said.get(path, {"success": True}))

    def control(self, make: Make, **options: Any) -> Any:
        return make("http://s/", client=httpx.Client(transport=httpx.MockTransport(self)), **options)

    @property
    def paths(self) -> list[str]:
        return [path for _, path, _ in self.asked]


@pytest.mark.parametrize("make", MAKES)
def test_an_adapter_is_loaded_under_its_digest_from_the_folder_that_both_see_and_unloaded_by_it(make: Make) -> None:
    server = Server()
    control = server.control(make, api_key="secret")
    control.load_adapter(NEW, FOLDER)
    control.unload_adapter(NEW)
    (_, loading, loaded), (_, unloading, unloaded) = server.asked
    prefix = "/v1" if make is VllmControl else ""
    pinned = {} if make is VllmControl else {"pinned": True}  # SGLang would drop it for another one
    assert (loading, loaded) == (f"{prefix}/load_lora_adapter", {"lora_name": NEW, "lora_path": str(FOLDER), **pinned})
    assert (unloading, unloaded) == (f"{prefix}/unload_lora_adapter", {"lora_name": NEW})
    assert (server.keys, control.url) == ({"Bearer secret"}, "http://s")
    bare = Server()
    bare.control(make).unload_adapter(NEW)
    assert bare.keys == {None}


@pytest.mark.parametrize("make", MAKES)
def test_the_weights_that_a_server_has_are_called_by_their_digest(make: Make) -> None:
    server = Server()
    server.control(make).label(NEW)
    [(method, path, body)] = server.asked
    assert (method, path, body["new_version"]) == ("POST", "/update_weight_version", NEW)
    assert body.get("abort_all_requests", False) is False, "answers being written go on"


VLLM_SWAP = ["/pause?mode=keep", "/start_weight_update", "/update_weights", "/finish_weight_update", "/resume"]
SGLANG_SWAP = ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]


@pytest.mark.parametrize(("make", "swap"), [(VllmControl, VLLM_SWAP), (SglangControl, SGLANG_SWAP)])
def test_weights_are_replaced_in_a_pause_that_ends(make: Make, swap: list[str]) -> None:
    server = Server()
    server.control(make).replace_weights(NEW, FOLDER, back_to=None)
    assert server.paths == swap
    told = json.dumps([body for _, _, body in server.asked])
    assert str(FOLDER) in told
    assert NEW in told


@pytest.mark.parametrize(("make", "swap"), [(VllmControl, VLLM_SWAP), (SglangControl, SGLANG_SWAP)])
def test_weights_that_were_not_taken_are_put_back_and_answers_go_on(make: Make, swap: list[str]) -> None:
    server = Server()
    update = next(path for path in swap if path.startswith("/update"))
    server.fails[update] = 1
    with pytest.raises(Refused, match=f"http://s did not take the weights {NEW[:12]} and serves what it had .*no memory"):
        server.control(make).replace_weights(NEW, FOLDER, back_to=(OLD, Path("/weights/old")))
    assert (server.paths.count(update), server.paths[-1]) == (2, swap[-1])
    assert "/weights/old" in json.dumps([body for _, path, body in server.asked if path == update][1])


@pytest.mark.parametrize(("make", "swap"), [(VllmControl, VLLM_SWAP), (SglangControl, SGLANG_SWAP)])
@pytest.mark.parametrize("back_to", [None, (OLD, Path("/weights/old"))])
def test_a_server_that_holds_no_version_any_more_stays_paused(make: Make, swap: list[str], back_to: tuple[str, Path] | None) -> None:
    server = Server()
    server.fails[next(path for path in swap if path.startswith("/update"))] = 9
    with pytest.raises(Refused, match="the weights on http://s are half replaced and it stays paused: restart that server"):
        server.control(make).replace_weights(NEW, FOLDER, back_to=back_to)
    assert swap[-1] not in server.paths


@pytest.mark.parametrize(("make", "swap"), [(VllmControl, VLLM_SWAP), (SglangControl, SGLANG_SWAP)])
@pytest.mark.parametrize(("lost", "goes_on"), [(1, True), (2, False)])
def test_a_pause_is_ended_once_more_where_that_got_lost(make: Make, swap: list[str], lost: int, goes_on: bool) -> None:
    server = Server()
    server.fails[swap[-1]] = lost
    if goes_on:
        server.control(make).replace_weights(NEW, FOLDER, back_to=None)
    else:
        with pytest.raises(RatchetError, match="no memory"):
            server.control(make).replace_weights(NEW, FOLDER, back_to=None)
    assert server.paths.count(swap[-1]) == 2


@pytest.mark.parametrize(("make", "swap"), [(VllmControl, VLLM_SWAP), (SglangControl, SGLANG_SWAP)])
def test_a_pause_that_may_have_been_made_is_ended_and_nothing_is_replaced(make: Make, swap: list[str]) -> None:
    server = Server()
    server.fails[swap[0]] = 1
    with pytest.raises(RatchetError, match="no memory"):
        server.control(make).replace_weights(NEW, FOLDER, back_to=None)
    assert server.paths == [swap[0], swap[-1]]


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("pause", list(Pause))
def test_answers_that_are_written_are_kept_or_ended_as_it_is_said(make: Make, pause: Pause) -> None:
    server = Server()
    server.control(make).replace_weights(NEW, FOLDER, back_to=None, pause=pause)
    _, path, body = server.asked[0]
    told = path if make is VllmControl else json.dumps(body)
    assert ("abort" in told) is (pause is Pause.ABORT)


@pytest.mark.parametrize("make", MAKES)
def test_a_server_without_the_endpoints_is_touched_by_nothing(make: Make) -> None:
    touched: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.method != "OPTIONS":
            touched.append(request.url.path)
        return httpx.Response(404, json={"detail": "Not Found"})

    control: Any = make("http://s", client=httpx.Client(transport=httpx.MockTransport(answer)))
    with pytest.raises(NotFound, match="has no such endpoint: use "):
        control.replace_weights(NEW, FOLDER, back_to=None)
    assert touched == []


@pytest.mark.parametrize("make", MAKES)
def test_a_server_that_is_gone_is_told_with_its_make(make: Make) -> None:
    def gone(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    control: Any = make("http://s", client=httpx.Client(transport=httpx.MockTransport(gone)))
    with pytest.raises(Unavailable, match=f"{control.name} at http://s does not answer \\(ConnectError\\)"):
        control.load_adapter(NEW, FOLDER)


@pytest.mark.parametrize(("make", "path"), [(VllmControl, "/tokenize"), (SglangControl, "/v1/tokenize")])
def test_a_text_is_tokenised_as_it_is(make: Make, path: str) -> None:
    server = Server(**{path: {"tokens": [5, 6]}})
    assert server.control(make).tokenize(BASE, "a text") == [5, 6]
    [(_, _, body)] = server.asked
    assert (body["prompt"], body["add_special_tokens"]) == ("a text", False)


def test_vllm_samples_given_tokens_to_their_full_number_with_as_many_of_the_likeliest_as_are_asked_for() -> None:
    said = [{"token_id": 7, "logprob": -0.5, "top_logprobs": []}]
    server = Server(**{"/inference/v1/generate": {"choices": [{"logprobs": {"content": said}}]}})
    control = server.control(VllmControl)
    assert control.sample(BASE, (1, 2), SamplingParams(max_tokens=3, seed=0), top=4) == said
    [(_, _, body)] = server.asked
    assert (body["model"], body["token_ids"]) == ("base", [1, 2])
    asked = body["sampling_params"]
    assert (asked["logprobs"], asked["ignore_eos"], asked["max_tokens"], asked["seed"]) == (4, True, 3, 0)


def test_vllm_scores_each_token_but_the_first() -> None:
    scored = [None, {"6": {"logprob": -0.25}}, {"7": {"logprob": -1.0}, "8": {"logprob": -9.0}}]
    server = Server(**{"/v1/completions": {"choices": [{"prompt_logprobs": scored}]}})
    assert server.control(VllmControl).score(ADAPTER, [5, 6, 7]) == [-0.25, -1.0]
    assert server.asked[0][2]["model"] == NEW


@pytest.mark.parametrize("said", [{"success": False, "message": "no room"}, {"success": False, "error_message": "no room"}, {}])
def test_sglang_says_in_any_status_whether_it_did_it(said: dict[str, Any]) -> None:
    server = Server(**{"/load_lora_adapter": said})
    with pytest.raises(Refused, match=f"http://s/load_lora_adapter: {'no room' if said else 'it did not say why'}"):
        server.control(SglangControl).load_adapter(NEW, FOLDER)


def test_sglang_samples_with_the_log_probabilities_of_what_was_drawn_from() -> None:
    told = {"output_token_logprobs": [[-0.5, 7, None]], "output_token_sampling_logprobs": [-0.25],
            "output_top_logprobs": [[[-0.5, 7, None], [-1.0, 8, None]]]}  # fmt: skip
    server = Server(**{"/generate": {"meta_info": told}})
    top = [{"token_id": 7, "logprob": -0.5}, {"token_id": 8, "logprob": -1.0}]
    control = server.control(SglangControl)
    assert control.sample(BASE, (1, 2), SamplingParams(), top=2) == [{"token_id": 7, "logprob": -0.5, "top_logprobs": top}]
    assert control.sample(BASE, (1, 2), SamplingParams(top_p=0.5), top=2)[0]["logprob"] == -0.25
    assert all(body["sampling_params"]["ignore_eos"] for _, _, body in server.asked), "to the full number of tokens"
    bare = Server(**{"/generate": {"meta_info": {"output_token_logprobs": [[-0.5, 7, None]]}}})
    assert bare.control(SglangControl).sample(BASE, (1, 2), SamplingParams())[0]["top_logprobs"] == []


def test_a_server_says_what_it_holds() -> None:
    cards = {"data": [{"id": OLD}, {"id": NEW, "parent": OLD}]}
    vllm = Server(**{"/v1/models": cards, "/weight_info": {"weight_version": OLD}}).control(VllmControl).held()
    sglang = Server(**{"/v1/models": cards, "/model_info": {"weight_version": OLD}}).control(SglangControl).held()
    assert vllm == sglang
    assert (vllm.base, vllm.version, vllm.adapters) == (OLD, OLD, frozenset({NEW}))
