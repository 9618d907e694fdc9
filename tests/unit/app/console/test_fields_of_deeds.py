"""What is typed into the form of a deed: taken as it is meant, or refused with what it may be."""

from typing import cast

import pytest

from app.console.deeds.asking import Hands, number, one_of_policies, policy_field, text
from app.domain.errors import Refused


class Declared:
    """Hands of which only the policies are looked at."""

    policies = ("tab", "composer")


HANDS = cast(Hands, Declared())


def test_a_text_is_trimmed_and_bounded() -> None:
    assert text({"reason": "  why \n"}, "reason") == "why"
    assert (text({}, "reason"), text({"reason": "x" * 200}, "reason")) == ("", "x" * 200)
    with pytest.raises(Refused, match="rate per s has 3 characters at most"):
        text({"rate_per_s": "1234"}, "rate_per_s", most=3)
    with pytest.raises(Refused, match="and no NUL"):
        text({"reason": "a\x00b"}, "reason")


@pytest.mark.parametrize(("typed", "value"), [("", None), (" ", None), ("0.5", 0.5), ("100", 100.0), ("1e2", 100.0)])
def test_a_number_is_one_or_is_left_out(typed: str, value: float | None) -> None:
    assert number({"rate": typed}, "rate", most=100) == value


@pytest.mark.parametrize("typed", ["0", "-1", "100.1", "nan", "inf", "ten", "1,5"])
def test_what_is_no_number_of_use_is_refused_with_its_bounds(typed: str) -> None:
    with pytest.raises(Refused, match=rf"rate is '{typed}': a number above 0 and at most 100, or nothing"):
        number({"rate": typed}, "rate", most=100)


def test_a_policy_is_a_declared_one_or_all_of_them() -> None:
    assert (one_of_policies({"for_policy": "tab"}, HANDS), one_of_policies({}, HANDS)) == ("tab", None)
    with pytest.raises(Refused, match=r"no policy is named 'tabs' \(declared: composer, tab\)"):
        one_of_policies({"for_policy": "tabs"}, HANDS)
    field = policy_field(HANDS, "tab")
    assert (field.value, list(field.choices)) == ("tab", [("", "all policies"), ("composer", "composer"), ("tab", "tab")])
    assert policy_field(HANDS, None).value == ""
