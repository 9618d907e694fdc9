"""When a service starts: who may reach it, with which keys and secrets."""

from pathlib import Path

import pytest

from app.domain.errors import BadConfig
from app.main import refuse_open_door
from app.settings import from_environment

BEHIND_A_PROXY = [
    {"RATCHET_HOSTS": "ratchet.example.com"}, {"RATCHET_HOSTS": "*"}, {"RATCHET_HOSTS": "localhost,10.0.0.7"},
    {"RATCHET_PUBLIC_URL": "https://ratchet.example.com"}, {"RATCHET_ORIGINS": "https://app.example.com"},
]  # fmt: skip


@pytest.mark.parametrize("named", BEHIND_A_PROXY)
def test_a_service_on_loopback_that_has_a_name_elsewhere_is_one_that_others_reach(named: dict[str, str], tmp_path: Path) -> None:
    """A proxy on the same machine: it is not open, and its secrets are not weak."""
    given = {"RATCHET_HOST": "127.0.0.1", "RATCHET_DATA": str(tmp_path)} | named
    settings = from_environment(given)
    for ever in (False, True):
        with pytest.raises(BadConfig, match=next(iter(named))):
            refuse_open_door(settings, keyed=False, ever=ever)
    refuse_open_door(settings, keyed=True, ever=True)
    with pytest.raises(BadConfig, match="RATCHET_SESSION_SECRETS"):
        refuse_open_door(from_environment(given | {"RATCHET_SESSION_SECRETS": "short"}), keyed=True, ever=True)


@pytest.mark.parametrize("named", [
    {"RATCHET_HOSTS": "localhost,127.0.0.1"}, {"RATCHET_PUBLIC_URL": "http://127.0.0.1:8400"}, {"RATCHET_ORIGINS": "http://localhost:3000"},
    {"RATCHET_PUBLIC_URL": "http://[::1]:8400"},
])  # fmt: skip
def test_names_of_this_machine_leave_a_service_to_it(named: dict[str, str], tmp_path: Path) -> None:
    settings = from_environment({"RATCHET_HOST": "localhost", "RATCHET_DATA": str(tmp_path)} | named)
    assert settings.reached_by is None
    refuse_open_door(settings, keyed=False, ever=False)


@pytest.mark.parametrize(("host", "keyed", "ever", "starts"), [
    ("0.0.0.0", True, True, True), ("::", True, True, True), ("203.0.113.7", True, True, True),
    ("0.0.0.0", False, False, False), ("0.0.0.0", False, True, False),
    ("127.0.0.1", False, False, True), ("127.0.0.1", False, True, True), ("127.0.0.1", True, True, True),
])  # fmt: skip
def test_an_outside_address_needs_a_good_key_and_is_served_with_one(
    host: str, keyed: bool, ever: bool, starts: bool, tmp_path: Path
) -> None:
    settings = from_environment({"RATCHET_HOST": host, "RATCHET_DATA": str(tmp_path)})
    if starts:
        refuse_open_door(settings, keyed=keyed, ever=ever)
    else:
        with pytest.raises(BadConfig, match="ratchet keys create"):
            refuse_open_door(settings, keyed=keyed, ever=ever)


@pytest.mark.parametrize("name", ["RATCHET_ACTOR_SALT", "RATCHET_SESSION_SECRETS"])
@pytest.mark.parametrize("value", ["ratchet-embedded", "short"])
def test_a_secret_that_can_be_known_is_refused_on_an_address_that_others_reach(name: str, value: str, tmp_path: Path) -> None:
    given = {"RATCHET_DATA": str(tmp_path), name: value}
    with pytest.raises(BadConfig, match=name):
        refuse_open_door(from_environment(given | {"RATCHET_HOST": "0.0.0.0"}), keyed=True, ever=True)
    refuse_open_door(from_environment(given | {"RATCHET_HOST": "127.0.0.1"}), keyed=True, ever=True)


@pytest.mark.parametrize("name", ["RATCHET_SESSION_SECRETS", "RATCHET_WEBHOOK_KEYS"])
def test_every_secret_of_a_list_is_looked_at_because_every_one_is_honoured(name: str, tmp_path: Path) -> None:
    given = {"RATCHET_DATA": str(tmp_path), "RATCHET_HOST": "0.0.0.0", name: f"{'x' * 40},old"}
    with pytest.raises(BadConfig, match=name):
        refuse_open_door(from_environment(given), keyed=True, ever=True)
    refuse_open_door(from_environment(given | {name: f"{'x' * 40},{'y' * 40}"}), keyed=True, ever=True)
