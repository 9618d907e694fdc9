"""The driver's side of training on Ray: who is asked what, who shares what, and which actors stay; with workers that only answer."""

import uuid
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import fsspec
import pytest

from app.domain.errors import Held, Unavailable
from app.domain.learning.training import AdamParams, Datum, ForwardBackward, LossSpec, StepOutcome
from app.policy.storage.snapshot import snapshot_digest
from pipelines.training.elsewhere.storage import Storage
from pipelines.training.numerics.state_files import digest_of
from pipelines.training.ray_actors import RayTrainer, RayTrainers, share_out
from pipelines.training.trainer import TrainerSetup


class Call:
    """A method of an actor."""

    def __init__(self, act: Callable[..., Any]) -> None:
        self.remote = act


class Actor:
    """Writes down what it is asked, and answers as it was told."""

    def __init__(self, node: str, answers: dict[str, Any]) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self._answers = {"node": node} | answers

    def __getattr__(self, name: str) -> Call:
        def act(*arguments: Any, **named: Any) -> Any:
            self.asked.append((name, *arguments, *named.values()))
            answer = self._answers.get(name)
            return answer(*arguments) if callable(answer) else answer

        return Call(act)

    def of(self, name: str) -> list[tuple[Any, ...]]:
        return [asked[1:] for asked in self.asked if asked[0] == name]


class Driver(RayTrainer):
    """A trainer whose workers are in this process, and at once."""

    def __init__(self, nodes: list[str], *, apart: bool = False, **answers: Any) -> None:
        self.workers, self.timeout_s, self.storage, self._apart, self._precision = len(nodes), 60.0, Storage(), apart, ""
        self.workers_ = [Actor(node, answers) for node in nodes]
        self.actors, self.nodes = list[Any](self.workers_), nodes
        self.ended = 0

    def _wait(self, calls: list[Any]) -> list[Any]:
        return calls

    def stop(self) -> None:
        self.ended += 1


def datum(length: int, *, first: int = 1, **more: Any) -> Datum:
    return Datum(tokens=tuple(range(length)), first_scored=first, **more)


def found(data: list[Datum], *_: Any) -> ForwardBackward:
    """A row of each datum's own length, everywhere."""
    rows = tuple((float(len(one.tokens)),) for one in data)
    return ForwardBackward(loss=float(len(data)), logprobs=rows, entropy=rows, kept_log_mass=rows, tokens=sum(len(d.tokens) for d in data))


@pytest.mark.parametrize(
    ("nodes", "address", "beside"),
    [(["a"], "", [1]), (["a", "a"], "file:///there", [2, 2]), (["a", "b", "a"], "file:///there", [2, 1, 2])],
    ids=["alone", "two of a machine", "three of two"],
)
def test_workers_meet_at_the_first_one_s_place_and_one_alone_makes_none(nodes: list[str], address: str, beside: list[int]) -> None:
    driver = Driver(nodes, address="file:///there")
    driver._join(3)
    assert [len(worker.of("address")) for worker in driver.workers_] == [int(len(nodes) > 1)] + [0] * (len(nodes) - 1)
    assert [worker.of("join") for worker in driver.workers_] == [[(address, 3, neighbours)] for neighbours in beside]


@pytest.mark.parametrize(
    ("lengths", "workers", "shares"),
    [
        ([4, 4, 4, 4], 2, [[4, 4], [4, 4]]), ([4], 2, [[], [4]]), ([9, 1], 2, [[9], [1]]), ([1, 9], 2, [[1], [9]]),
        ([2, 2, 2], 1, [[2, 2, 2]]),
        ([3, 3, 3], 3, [[3], [3], [3]]), ([1, 1, 1, 1, 1, 7], 3, [[1, 1, 1, 1], [1], [7]]), ([8, 1], 3, [[], [8], [1]]),
    ],
)  # fmt: skip
def test_the_tokens_are_shared_out_in_order(lengths: list[int], workers: int, shares: list[list[int]]) -> None:
    data = [datum(length) for length in lengths]
    found = share_out(data, workers)
    assert [[len(one.tokens) for one in share] for share in found] == shares
    assert [one for share in found for one in share] == data


def test_what_the_workers_found_is_put_together_in_order_and_added_up() -> None:
    driver = Driver(["a", "b"], forward=found, forward_backward=found)
    data, loss = [datum(2), datum(3), datum(4), datum(5)], LossSpec(normaliser=2.0)
    whole = driver.forward_backward(data, loss)
    assert whole == ForwardBackward(
        loss=4.0, logprobs=((2.0,), (3.0,), (4.0,), (5.0,)), entropy=((2.0,), (3.0,), (4.0,), (5.0,)),
        kept_log_mass=((2.0,), (3.0,), (4.0,), (5.0,)), tokens=14,
    )  # fmt: skip
    assert [worker.of("forward_backward") for worker in driver.workers_] == [[(data[:2], loss)], [(data[2:], loss)]]
    assert driver.forward(data) == whole
    assert driver.workers_[0].of("forward") == [(data[:2],)]


def test_who_has_no_share_joins_in_with_a_turn_that_weighs_nothing_and_counts_nowhere() -> None:
    driver = Driver(["a", "b"], forward_backward=found)
    only = datum(6, first=2, advantages=(1.0,) * 4, pull=0.5)
    whole = driver.forward_backward([only], LossSpec(normaliser=1.0))
    (((idle,), _),) = driver.workers_[0].of("forward_backward")
    assert (idle.tokens, idle.advantages, idle.pull) == (only.tokens, (0.0,) * 4, 0.0)
    assert (whole.loss, whole.tokens, whole.logprobs) == (1.0, 6, ((6.0,),))


def setup(*, snapshot: Path = Path("snapshot"), **more: Any) -> TrainerSetup:
    return TrainerSetup(snapshot=snapshot, scratch=Path("scratch"), **more)


def test_all_compute_in_what_the_first_one_resolves_and_find_the_snapshots_that_it_names() -> None:
    driver = Driver(["a", "b"], resolve="bfloat16")
    driver.open(setup(dtype="auto", base=Path("base")))
    assert [len(worker.of("resolve")) for worker in driver.workers_] == [1, 0]
    for worker in driver.workers_:
        ((opened, snapshot, base),) = worker.of("open")
        assert (opened.dtype, snapshot, base) == ("bfloat16", Path("snapshot"), Path("base"))
    driver.open(setup(dtype="float32"))
    assert driver.workers_[1].of("open")[1][2] is None
    assert driver.precision() == "bfloat16"


def test_of_what_every_worker_does_the_first_one_s_word_counts_and_of_what_they_wrote_everybody_s() -> None:
    driver = Driver(["a", "b"], optim_step=StepOutcome(grad_norm=1.0, applied=True), save_weights_for_sampler="digest", process_id=7)
    driver.workers_[0]._answers["save_state"], driver.workers_[1]._answers["save_state"] = {"one": "1"}, {"two": "2"}
    assert driver.optim_step(AdamParams(learning_rate=1.0)) == StepOutcome(grad_norm=1.0, applied=True)
    assert driver.save_state(Path("state")) == {"one": "1", "two": "2"}
    assert driver.save_weights_for_sampler(Path("made"), Path("like")) == "digest"
    assert (driver.process_ids(), driver.peak_memory_bytes()) == ([7, 7], [None, None])
    driver.load_state(Path("snapshot"))
    driver.load_state_with_optimizer(Path("state"))
    driver.retreat(0.5, Path("begun"))
    driver.close()
    for worker in driver.workers_:
        assert worker.of("load_state") == [(Path("snapshot"),)]
        assert worker.of("load_state_with_optimizer") == worker.of("save_state") == [(Path("state"),)]
        assert worker.of("retreat") == [(0.5, Path("begun"), False)], "as a folder of a state or of a snapshot: they look"
        assert worker.of("close") == [()]


@pytest.mark.parametrize(
    ("workers", "error", "ended"),
    [
        (1, None, 0), (1, Held("h", "held"), 0), (2, Held("h", "held"), 0), (1, Unavailable("lost"), 1), (2, Unavailable("lost"), 1),
        (1, ValueError("odd"), 0), (2, ValueError("odd"), 1),
    ],
)  # fmt: skip
def test_actors_stay_warm_unless_one_was_lost_or_left_the_others_waiting(workers: int, error: Exception | None, ended: int) -> None:
    driver, trainers = Driver(["a"] * workers, resolve="float32"), RayTrainers(Path("token"))
    trainers._warm = ((workers, 0), driver)

    def run() -> None:
        with trainers.opened(setup(), workers=workers, timeout_s=5.0) as trainer:
            assert trainer is driver
            if error is not None:
                raise error

    if error is None:
        run()
    else:
        with pytest.raises(type(error)):
            run()
    assert (driver.ended, trainers._warm is None, driver.timeout_s) == (ended, ended == 1, 5.0)
    assert len(driver.workers_[0].of("close")) == 1 - ended, "who was ended has nothing to close"
    trainers.stop()
    assert (driver.ended, trainers._warm) == (1, None)
    trainers.stop()
    assert driver.ended == 1


@pytest.mark.parametrize("error", [None, Held("h", "held")])
def test_a_worker_that_dies_when_its_work_is_done_costs_neither_that_run_nor_the_next(error: Held | None) -> None:
    def dies() -> None:
        raise Unavailable("lost")

    driver, trainers = Driver(["a"], resolve="float32", close=dies), RayTrainers(Path("token"))
    trainers._warm = ((1, 0), driver)
    with nullcontext() if error is None else pytest.raises(Held), trainers.opened(setup(), workers=1, timeout_s=5.0):
        if error is not None:
            raise error
    assert (driver.ended, trainers._warm) == (1, None), "the next run starts actors of its own"


def test_a_run_has_its_own_time_whichever_run_started_the_actors() -> None:
    driver, trainers = Driver(["a"]), RayTrainers(Path("token"))
    trainers._warm = ((1, 2), driver)
    trainers.warm(workers=1, threads=2, timeout_s=9.0)
    assert driver.timeout_s == 9.0


@pytest.mark.parametrize("damaged", [False, True])
def test_on_other_machines_snapshots_are_named_by_url_and_the_first_worker_s_comes_back_whole_or_not_at_all(
    tmp_path: Path, damaged: bool
) -> None:
    place = f"memory://ray-driver-{uuid.uuid4().hex}"
    (tmp_path / "like").mkdir()
    for name, content in {"model.safetensors": "like", "READY": "d" * 64, "config.json": "{}", "tokenizer.json": "{}"}.items():
        (tmp_path / "like" / name).write_text(content)
    (tmp_path / "sent").write_bytes(b"weights")
    files = fsspec.filesystem("memory")

    def hand_over(url: str, like: str) -> tuple[str, dict[str, str]]:
        files.pipe_file(f"{url}/model.safetensors", b"odd" if damaged else b"weights")
        return "digest", {"model.safetensors": digest_of(tmp_path / "sent")}

    driver = Driver(["a", "b"], apart=True, hand_over=lambda *_: ("another", {}), resolve="float32")
    driver.workers_[0]._answers["hand_over"] = hand_over
    driver.storage = Storage(weights=f"{place}/weights", states=f"{place}/states")
    driver.open(setup(snapshot=tmp_path / "like"))
    named = f"{place}/weights/{snapshot_digest(tmp_path / 'like')}"
    assert [worker.of("open")[0][1:] for worker in driver.workers_] == [(named, None)] * 2
    driver.retreat(0.5, tmp_path / "like")
    driver.retreat(0.5, f"{place}/states/x")
    assert [asked[1:] for asked in driver.workers_[1].of("retreat")] == [(named, True), (f"{place}/states/x", False)]
    made = tmp_path / "made"
    made.mkdir()
    (made / "left over").write_bytes(b"of an earlier attempt")
    if damaged:
        with pytest.raises(Unavailable, match="is not what a worker sent"):
            driver.save_weights_for_sampler(made, tmp_path / "like")
        return
    assert driver.save_weights_for_sampler(made, tmp_path / "like") == "digest"
    assert [(file.name, file.read_bytes()) for file in made.iterdir()] == [("model.safetensors", b"weights")]
    assert not files.find(f"{place}/states"), "what was handed over is not kept"
