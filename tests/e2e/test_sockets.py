"""Every socket that a deployment listens on: this machine alone reaches it, and Ray asks for the token besides."""

import os
from pathlib import Path

import pytest

from tests.doors import doors, reachable_from_outside
from tests.e2e.running import deployment, eventually

pytestmark = [pytest.mark.e2e]


def test_no_socket_of_a_deployment_is_reached_from_another_machine_and_no_file_read_by_another_user(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with deployment(data) as up:
        # the training workers start last of all and listen more than all the others together
        eventually(lambda: any("raylet" in door.process for door in doors(up.family())), "Ray runs", within_s=240)
        eventually(lambda: "ready" in (data / "logs" / "loop.log").read_text(), "the loop has its workers", within_s=240)
        found = doors(up.family())
        assert not reachable_from_outside(up.supervisor.pid)
        for name in ("app.main", "tansu", "engine", "gcs_server", "raylet"):
            assert any(name in door.process for door in found), f"the scan did not see {name}: {found}"
        ray = next(process for process in up.family() if "gcs_server" in process.name())
        asked = ray.environ()
        assert asked["RAY_AUTH_MODE"] == "token"
        assert Path(asked["RAY_AUTH_TOKEN_PATH"]).is_relative_to(data)
        assert data.stat().st_mode & 0o077 == 0, "others may look into the data folder"
        kept = [path for path in data.rglob("*") if path.is_file() and (".db" in path.name or path.parent.name in ("secrets", "logs"))]
        assert len(kept) > 5
        assert not [path for path in kept if os.stat(path).st_mode & 0o077], "what is copied keeps its mode, what we make is ours alone"
