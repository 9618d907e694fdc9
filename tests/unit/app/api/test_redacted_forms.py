"""The shortest that is found and what just is not, for every form of secret, address and number."""

import pytest

from app.api.telemetry.redaction import Redactor, _without_overlaps, luhn, spans_in
from tests.unit.app.api.test_redaction import check_digit

A = "a" * 80


def found(text: str) -> list[tuple[str, str]]:
    """What is found where somebody wrote it: its kind, and its words."""
    whole = f"see {text} there"
    return [(kind, whole[start:end]) for start, end, kind in spans_in(whole)]


TOKENS = [
    *((f"{kind}{sep}", 16, "9") for kind in ("sk", "pk", "rk") for sep in "-_"), *((f"gh{kind}_", 30, "") for kind in "pousr"),
    ("github_pat_", 30, ""), ("glpat-", 20, ""), ("AIza", 35, ""), *((f"xox{kind}-", 10, "") for kind in "abprs"), ("hf_", 30, ""),
    ("npm_", 36, ""), ("pypi-", 16, ""), ("dop_v1_", 64, ""), (f"SG.{A[:16]}.", 16, ""), (f"eyJ{A[:8]}.eyJ", 8, ""),
]  # fmt: skip


@pytest.mark.parametrize(("begins", "chars", "digit"), TOKENS, ids=[begins[:12] for begins, _, _ in TOKENS])
def test_a_token_is_found_from_its_shortest_on_and_nowhere_inside_a_word(begins: str, chars: int, digit: str) -> None:
    ends = ".x" if begins.startswith("eyJ") else ""
    shortest = begins + A[: chars - len(digit)] + digit + ends
    assert found(shortest) == [("SECRET", shortest)]
    assert found(begins + A[: chars - 1 - len(digit)] + digit + ends) == []
    assert found("x" + shortest) == []


def test_what_looks_like_a_key_and_has_no_digit_is_a_name() -> None:
    assert found("sk-" + A) == []
    assert found("sk-" + A[:60] + "1")[0][0] == "SECRET"


@pytest.mark.parametrize("begins", ["AKIA", "ASIA"])
def test_a_key_of_a_fixed_length_is_no_part_of_a_longer_word(begins: str) -> None:
    assert found(begins + "A1" * 8) == [("SECRET", begins + "A1" * 8)]
    assert found(begins + "A1" * 7 + "A") == []
    assert found(begins + "A1" * 8 + "A") == []
    assert found(begins + "a1" * 8) == []


def test_what_stands_before_the_dots_of_a_token_has_its_length_too() -> None:
    for short in (f"SG.{A[:15]}.{A[:16]}", f"eyJ{A[:7]}.eyJ{A[:8]}.x", f"eyJ{A[:8]}.eyJ{A[:8]}.", f"eyJ{A[:8]}.{A[:8]}.x"):
        assert found(short) == []


@pytest.mark.parametrize(
    "name", ["api_key", "API-KEY", "apikey", "secret", "access_token", "auth-token", "authtoken", "Password", "passwd"]
)
@pytest.mark.parametrize("between", ["=", ": ", '": "', " = '"])
def test_what_is_named_a_secret_is_one_from_eight_characters_on(name: str, between: str) -> None:
    assert found(f"{name}{between}hunter-2") == [("SECRET", "hunter-2")]
    assert found(f"{name}{between}hunter2") == []
    assert found(f"my{name}{between}hunter-2") == []
    assert found(f"{name} hunter-2") == [], "it is said, and not given"
    assert found(f"{name}{between}hunter-2;x") == [("SECRET", "hunter-2")]


def test_a_private_key_goes_to_its_end_or_to_the_text_s() -> None:
    begins, ends = "-----BEGIN EC PRIVATE KEY-----", "-----END EC PRIVATE KEY-----"
    assert Redactor().text(f"a {begins}\nMIIE\n{ends} b") == "a [SECRET] b"
    assert Redactor().text(f"a {begins}\nMIIE\nb") == "a [SECRET]"
    assert Redactor().text("a -----BEGIN PUBLIC KEY-----\nMIIE\nb") == "a -----BEGIN PUBLIC KEY-----\nMIIE\nb"


@pytest.mark.parametrize(
    ("address", "is_one"),
    [
        (f"{A[:64]}@b.co", True), (f"{A[:64]}a@b.co", False), (f"a@{A[:63]}.co", True), (f"a@{A[:64]}.co", False),
        ("a@1.2.3.4.5.6.7.8.co", True), ("a@1.2.3.4.5.6.7.8.9.co", False), ("a@b.c", False), (f"a@b.{A[:24]}", True),
        (f"a@b.{A[:25]}", False), ("a@b", False), ("@b.co", False), ("a@-b.co", False), ("a@b-.co", False), ("a@b-c.co", True),
        ("o'b%x+y_z-1.2@b.co", True), ("a@b.co1", False),
    ],
)  # fmt: skip
def test_an_address_has_the_lengths_of_its_parts(address: str, is_one: bool) -> None:
    assert found(address) == ([("EMAIL", address)] if is_one else [])


def carded(digits: int, first: str = "4") -> str:
    body = first + "0" * (digits - 2)
    return body + check_digit(body)


@pytest.mark.parametrize(("digits", "is_one"), [(12, False), (13, True), (16, True), (19, True), (20, False)])
def test_a_card_has_thirteen_to_nineteen_digits(digits: int, is_one: bool) -> None:
    assert [kind for kind, _ in found(carded(digits))].count("CARD") == is_one


def test_a_card_begins_with_two_to_six_and_stands_alone() -> None:
    assert [luhn(carded(16, str(first))) for first in range(10)] == [2 <= first <= 6 for first in range(10)]
    number = carded(16)
    for beside in (f"x{number}", f"-{number}", f".{number}", f"{number}x", f"{number}-", f"{number}.5"):
        assert "CARD" not in {kind for kind, _ in found(beside)}
    assert Redactor().text(f"({number}).") == "([CARD])."
    grouped = "-".join(number[at : at + 4] for at in range(0, 16, 4))
    assert found(grouped)[0] == ("CARD", grouped)
    assert "CARD" not in {kind for kind, _ in found(grouped.replace("-", "--"))}


@pytest.mark.parametrize(
    ("address", "is_one"),
    [
        ("1.2.3.4", True), ("255.255.255.255", True), ("255.255.255.256", False), ("1.2.3", False), ("1.2.3.4.5", False),
        ("v1.2.3.4", False), ("1.2.3.4x", False), ("1.2.3.1234", False), ("::1", True), ("1::", True), ("::", False), ("a::b::c", False),
        ("1:2:3:4:5:6:7:8", True), ("1:2:3:4:5:6:7", False), ("1:2:3:4:5:6:7:8:9", False),
        ("12:34:56", False), ("std::vector", False), ("fe80::12345", False),
    ],
)  # fmt: skip
def test_an_address_of_a_machine_is_one_that_a_machine_can_have(address: str, is_one: bool) -> None:
    assert [one for one in found(address) if one[0] == "IP"] == ([("IP", address)] if is_one else [])


@pytest.mark.parametrize(
    ("number", "is_one"),
    [("650-253-0000", True), ("6502530000", True), ("020 7031 3001", True), ("2530000", False), ("650-253", False), ("12-34-56", False)],
)
def test_a_number_that_is_all_digits_is_a_phone_s_from_ten_on(number: str, is_one: bool) -> None:
    assert found(number) == ([("PHONE", number)] if is_one else [])


def test_of_two_finds_that_overlap_the_longer_one_counts_and_of_equals_the_first() -> None:
    spans = [(0, 4, "A"), (4, 6, "B"), (5, 9, "C"), (6, 10, "D"), (20, 22, "E"), (21, 23, "F")]
    assert _without_overlaps(iter(reversed(spans))) == [(0, 4, "A"), (5, 9, "C"), (20, 22, "E")]
