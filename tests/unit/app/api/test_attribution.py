"""What a product has to show because of its base model's licence."""

from starlette.testclient import TestClient

from app.main import create_app
from tests.fakes.gateway import collaborators


def test_the_attribution_of_a_policy_names_its_licence_and_what_it_asks() -> None:
    client = TestClient(create_app(collaborators()))
    answer = client.get("/v1/policies/composer/attribution")
    assert answer.status_code == 200
    assert answer.json()["known"] is True
    assert answer.json()["licence"] == "Apache-2.0"
    assert answer.json()["texts"] == []


def test_an_unknown_policy_has_no_attribution() -> None:
    assert TestClient(create_app(collaborators())).get("/v1/policies/nobody/attribution").status_code == 404
