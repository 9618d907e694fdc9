"""Workers that share no folder with their driver: through storage they end with the same weights, whoever of them dies.

Storage is a folder that everybody reaches by a URL only, and the cluster one node; two nodes are in `tests/real/test_ray_cluster.py`.
"""

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from app.domain.errors import BadConfig, DamagedState, Unavailable
from app.domain.release.versions import RunStatus, Version
from app.policy.storage.remote import RemoteWeights
from pipelines.training import TrainingPorts, train
from pipelines.training.elsewhere.states import RemoteStates
from pipelines.training.elsewhere.storage import Storage
from pipelines.training.ray_actors import RayTrainers
from pipelines.training.ray_cluster import join_cluster
from tests import ray_manners
from tests.fakes.learning import FakeProgress, fake_ports, make_batch, random_prompts, sample_turns, small_snapshot, version_of
from tests.fakes.updating import CONFIG, low_tokens

pytestmark = [pytest.mark.timeout(1800), pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning")]

TWO = msgspec.structs.replace(CONFIG, workers=2)


@pytest.fixture(scope="module", autouse=True)
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a running one, which is named in the environment as another machine's would be; its node has a folder of its own."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RATCHET_DATA", str(tmp_path_factory.mktemp("node")))
        join_cluster(workers=2, token_file=ray_manners.TOKEN)
        import ray

        address = str(ray.get_runtime_context().gcs_address)
        environment.setenv("RAY_ADDRESS", address)
        yield address
        ray.shutdown()


@pytest.fixture
def trainers(tmp_path: Path) -> Iterator[RayTrainers]:
    """They know what everybody reaches."""
    made = RayTrainers(ray_manners.TOKEN, Storage(weights=f"local://{tmp_path}/store/weights", states=f"local://{tmp_path}/store/states"))
    yield made
    made.stop()


@pytest.fixture
def ports(tmp_path: Path, trainers: RayTrainers) -> TrainingPorts:
    """The real stores, of a driver with a folder of its own."""
    weights = RemoteWeights(f"local://{tmp_path}/store/weights", cache=tmp_path / "driver" / "weights-cache")
    states = RemoteStates(f"local://{tmp_path}/store/states")
    return replace(fake_ports(tmp_path / "driver"), weights=weights, states_elsewhere=states, trainers=trainers)


def first(ports: TrainingPorts, folder: Path) -> Version:
    digest = small_snapshot(folder)
    assert ports.weights.publish(folder) == digest
    return version_of(digest)


def test_what_is_damaged_or_lost_on_the_way_costs_an_attempt_and_no_bit(
    tmp_path: Path, ports: TrainingPorts, trainers: RayTrainers
) -> None:
    parent = first(ports, tmp_path / "made")
    turns = sample_turns(ports.weights.path(parent.digest), random_prompts(32), version=parent.digest, length=5)
    batch = make_batch(ports, turns, [low_tokens(turn) for turn in turns], champion=parent.digest)
    assert isinstance(ports.progress, FakeProgress)
    progress: FakeProgress = ports.progress

    def make(name: str) -> str:
        made = train(batch, run_id=name, parent=parent, anchor=parent, config=TWO, ports=ports)
        assert made.candidate is not None, made.message
        assert made.metrics["optimizer_uri"].startswith(f"local://{tmp_path}/store/states/optimizer/composer/")
        return made.candidate

    whole = make("whole")
    told = len(progress.reports)
    assert told == 4

    def kill(count: int) -> None:
        if count == told + 3:  # in the third of four steps, of one pass each
            assert trainers._warm is not None
            os.kill(trainers._warm[1].process_ids()[1], signal.SIGKILL)

    progress.on_report = kill
    with pytest.raises(Unavailable, match="was lost"):
        make("cut")
    progress.on_report = lambda count: None
    failed = ports.runs.get("cut")
    assert failed is not None
    assert failed.status is RunStatus.FAILED
    newest = ports.states.newest_checkpoint("cut")
    spoilt = Path(str(newest.folder).removeprefix("local://")) / "weights-00002-of-00002.safetensors"
    spoilt.write_bytes(b"something else")
    with pytest.raises(DamagedState, match="weights-00002-of-00002"):
        make("cut")
    assert make("cut") == whole
    resumed = ports.runs.get("cut")
    assert resumed is not None
    assert resumed.metrics["damaged_checkpoints"] == [f"{newest.folder}/DAMAGED"]
    left = sorted(
        path.relative_to(tmp_path / "store" / "states").parts[0] for path in (tmp_path / "store" / "states").rglob("*.safetensors")
    )
    assert set(left) == {"optimizer"}, "checkpoints and candidates on their way are gone"


def test_machines_of_others_are_refused_without_object_storage(cluster: str) -> None:
    """A node with an address that is none of this machine's; what is asked of Ray's list is asked before any worker is."""
    lacking = Storage(weights="local:///somewhere")
    assert not join_cluster(workers=1, token_file=ray_manners.TOKEN, storage=lacking), "a cluster of this machine alone reads its folders"
    with pytest.raises(BadConfig, match=r"\(192\.0\.2\.7\), which do not see the folder of this one that RATCHET_STATES names"):
        lacking.require(cluster, ["192.0.2.7"])
