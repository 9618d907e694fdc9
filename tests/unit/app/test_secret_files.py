"""Secrets that a deployment makes for itself."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from app import wiring
from app.db.migrate import upgrade
from app.domain.errors import BadConfig
from app.secret_files import SecretReader, data_folder, read_secrets, rotate, secret_file
from app.settings import from_environment
from tests.architecture.sources import ROOT


def test_two_deployments_have_different_secrets_and_one_keeps_its_own(tmp_path: Path) -> None:
    def salt(folder: str) -> str:
        return wiring.actor_salt(from_environment({"RATCHET_DATA": str(tmp_path / folder)}))

    assert salt("a") == salt("a") != salt("b")
    assert len(salt("a")) == 64


def test_the_salt_and_the_session_secret_are_two(tmp_path: Path) -> None:
    settings = from_environment({"RATCHET_DATA": str(tmp_path)})
    assert wiring.actor_salt(settings) not in wiring.session_secrets(settings)()


def test_its_owner_alone_reads_a_secret(tmp_path: Path) -> None:
    path = secret_file(tmp_path / "secrets", "name")
    rotate(tmp_path / "secrets", "name")
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert [file.name for file in path.parent.iterdir()] == ["name"], "nothing is left lying about"


def test_a_data_folder_is_closed_where_it_is_made_or_empty_and_somebody_s_folder_keeps_its_mode(tmp_path: Path) -> None:
    empty, shared = tmp_path / "empty", tmp_path / "shared"
    empty.mkdir()
    shared.mkdir()
    (shared / "mine.txt").write_text("mine")
    for folder in (empty, shared):
        folder.chmod(0o1777)
    found = [data_folder(folder).stat().st_mode & 0o7777 for folder in (tmp_path / "new", empty, shared, shared)]
    assert found == [0o700, 0o700, 0o1777, 0o1777]


def test_a_rotation_keeps_the_one_before_and_is_seen_at_once(tmp_path: Path) -> None:
    settings = from_environment({"RATCHET_DATA": str(tmp_path)})
    with pytest.raises(BadConfig, match="ratchet db upgrade"):
        wiring.rotate_session_secret(settings, by="os:root")  # where it cannot be written down, nothing is done
    assert not (settings.secrets / "session_secret").exists()
    wiring.upgrade_schema(settings)
    read = wiring.session_secrets(settings)
    assert isinstance(read, SecretReader)
    (first,) = read()
    wiring.rotate_session_secret(settings, by="os:root")
    second = read()
    assert second[1:] == (first,)
    wiring.rotate_session_secret(settings, by="os:root")
    assert first not in read()
    assert len(read()) == 2


def test_processes_that_start_together_agree(tmp_path: Path) -> None:
    found: list[tuple[str, ...]] = []
    together = threading.Barrier(8)

    def ask() -> None:
        together.wait()
        found.append(read_secrets(secret_file(tmp_path / "secrets", "name")))

    askers = [threading.Thread(target=ask) for _ in range(8)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    assert len(set(found)) == 1


def test_a_deployment_from_before_keeps_the_salt_its_people_are_stored_under(tmp_path: Path) -> None:
    settings = from_environment({"RATCHET_DATA": str(tmp_path)})
    upgrade(settings.database_url, "0002_bound_costs")
    wiring.upgrade_schema(settings)
    assert wiring.actor_salt(settings) == "ratchet-embedded"
    fresh = from_environment({"RATCHET_DATA": str(tmp_path / "fresh")})
    fresh.data.mkdir()
    wiring.upgrade_schema(fresh)
    wiring.upgrade_schema(fresh)
    assert wiring.actor_salt(fresh) != "ratchet-embedded"


@pytest.mark.parametrize("begin", ["app.main", "pipelines.__main__"])
def test_what_a_process_makes_is_its_owner_s_whatever_it_was_started_with(tmp_path: Path, begin: str) -> None:
    code = (
        f"import sys\nfrom {begin} import main\nsys.argv = ['it', '--version']\ntry:\n    main()\nfinally:\n    open('made', 'w').close()"
    )
    wrong = os.environ | {"RATCHET_PORT": "no number", "PYTHONPATH": str(ROOT)}  # the service ends with that
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=wrong, umask=0, capture_output=True, check=False)
    assert (tmp_path / "made").stat().st_mode & 0o777 == 0o600
