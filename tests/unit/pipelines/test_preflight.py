"""What cannot work is refused in one sentence that names the cure."""

import os
from pathlib import Path

import pytest

from app.domain.errors import BadConfig
from app.domain.policies import PolicyConfig
from pipelines.preflight import require_policies, require_space, require_writable


def policy(model: Path) -> PolicyConfig:
    return PolicyConfig(model=str(model), base_name="m", base_model="somebody/m")


def test_a_configuration_without_policies_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match=r"add a table \[policies.NAME\]"):
        require_policies({}, config=tmp_path / "ratchet.toml")


def test_a_missing_model_is_refused_with_the_command_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="run `make model`"):
        require_policies({"composer": policy(tmp_path / "nothing")}, config=None)


def test_a_finished_model_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "READY").write_text("digest\n")
    require_policies({"composer": policy(tmp_path)}, config=None)


def test_a_full_disk_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="GiB free"):
        require_space(tmp_path / "not" / "there", needed=1 << 60)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadConfig, match="cannot write"):
        require_writable(tmp_path / "file" / "data")


def test_a_volume_of_somebody_elses_is_written_to_and_keeps_its_mode(tmp_path: Path) -> None:
    """As Kubernetes mounts one: root's, writable by the pod's group. Nobody but its owner may change its mode."""
    volume = tmp_path / "data"
    volume.mkdir()
    volume.chmod(0o777)
    child = os.fork()
    if child == 0:
        os.chdir(volume)  # what lies above is closed to others
        if os.geteuid() == 0:
            os.setuid(65534)
        try:
            require_writable(Path("."))
        except BadConfig:
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert volume.stat().st_mode & 0o777 == (0o777 if os.geteuid() == 0 else 0o700)
