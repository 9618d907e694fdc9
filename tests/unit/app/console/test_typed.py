"""What is typed into the console's forms: how long it may be, and what of it reaches the desk."""

from collections.abc import Callable, Mapping
from typing import Any, cast

import pytest

from app.console.acts import ActPages, signing
from app.console.deeds.asking import number, text
from app.console.live import MOST_REMEMBERED, Shared
from app.console.sheets import MOST, Sheet, cell, defused
from app.console.views.asked import Asked
from app.domain.errors import BadRequest, DoneAlready, NotFound, Refused
from app.domain.people import Role, Visitor, actions_of
from app.domain.views.pages import Sight
from app.release.basis import Basis


def test_a_field_has_two_hundred_characters_or_as_many_as_it_says() -> None:
    assert text({"a": f" {'x' * 200} "}, "a") == "x" * 200
    assert (text({}, "a"), text({"a": "abc"}, "a", most=3)) == ("", "abc")
    for form, most in (({"a": "x" * 201}, 200), ({"a": "abcd"}, 3), ({"a": "\x00"}, 200)):
        with pytest.raises(Refused, match="a has"):
            text(form, "a", most=most)


@pytest.mark.parametrize(("said", "value"), [("", None), (" ", None), ("10", 10.0), ("0.5", 0.5), ("1e-3", 0.001)])
def test_a_number_is_above_zero_and_at_most_what_it_may_be(said: str, value: float | None) -> None:
    assert number({"a_b": said}, "a_b", most=10) == value


@pytest.mark.parametrize("said", ["0", "-1", "10.5", "nan", "inf", "ten", "1,5"])
def test_what_is_no_such_number_is_refused_by_the_name_of_its_field(said: str) -> None:
    with pytest.raises(Refused, match=r"a b is .*a number above 0 and at most 10"):
        number({"a_b": said}, "a_b", most=10)


def visitor(actor: str = "user:ada", *roles: Role, policy: str | None = None) -> Visitor:
    return Visitor(actor=actor, actions=actions_of(roles or (Role.ADMIN,)), policy=policy)


def asked(viewer: Visitor | None = None, **query: str) -> Asked:
    return Asked(sight=cast("Sight", None), viewer=viewer or visitor(), policy="tab", query=query)


@pytest.mark.parametrize(
    ("actor", "who", "signs"),
    [
        ("user:ada", "bob", "user:ada"), ("anonymous", " bob ", "user:bob"), ("anonymous", "user:bob", "user:bob"),
        ("anonymous", "b" * 151, "user:" + "b" * 150),
    ],
)  # fmt: skip
def test_who_is_known_signs_and_whom_nothing_proves_says_who(actor: str, who: str, signs: str) -> None:
    assert signing(asked(visitor(actor)), {"who": who}) == signs


@pytest.mark.parametrize("who", ["", "  ", "user:"])
def test_an_act_of_nobody_is_refused(who: str) -> None:
    with pytest.raises(Refused, match="nobody is named"):
        signing(asked(visitor("anonymous")), {"who": who})


class Desk:
    """Writes down what it is told to do, and on what."""

    def __init__(self, *, again: bool = False) -> None:
        self.again = again
        self.basis: Basis | None = None
        self.done: list[tuple[str, tuple[Any, ...], Mapping[str, Any]]] = []

    def on(self, basis: Basis) -> "Desk":
        self.basis = basis
        return self

    def __getattr__(self, act: str) -> Callable[..., None]:
        def do(*words: Any, **named: Any) -> None:
            if self.again:
                raise DoneAlready("it was")
            self.done.append((act, words, named))

        return do


def done(act: str, form: dict[str, str], *, viewer: Visitor | None = None, subject: str = "r1") -> Desk:
    desk = Desk()
    assert ActPages(None, cast("Any", desk)).do(asked(viewer), act, subject, {"reason": "so"} | form) is False
    return desk


WHO = {"actor": "user:ada", "reason": "so"}


@pytest.mark.parametrize(
    ("act", "form", "words", "named"),
    [
        ("approve", {"evidence": "e"}, ("r1",), {"approver": "user:ada", "evidence": "e", "reason": "so"}),
        ("reject", {}, ("r1",), {"approver": "user:ada", "reason": "so"}), ("abort", {}, ("r1",), WHO),
        ("roll_back", {"to": "t" * 65}, ("r1",), WHO | {"to": "t" * 64}), ("roll_back", {}, ("r1",), WHO | {"to": None}),
        ("renew_anchor", {}, ("tab",), WHO), ("unfreeze", {}, ("tab",), {"actor": "user:ada"}), ("pin", {}, ("tab", "r1"), WHO),
        ("unpin", {}, ("tab", "r1"), WHO), ("lift", {}, ("tab", "r1"), WHO),
        ("abort", {"reason": f" {'x' * 1901}"}, ("r1",), {"actor": "user:ada", "reason": "x" * 1900}),
    ],
)  # fmt: skip
def test_an_act_reaches_the_desk_as_it_was_filled_in(act: str, form: dict[str, str], words: tuple[str, ...], named: dict[str, Any]) -> None:
    assert done(act, form).done == [(act, words, named)]


def test_an_act_rests_on_what_was_shown() -> None:
    shown = {"generation": "9" * 12, "release_generation": "0", "evidence": "e", "request_id": "q" * 101}
    assert done("abort", shown).basis == Basis(
        actor="user:ada", proven=True, act="abort", subject="r1", generation=10**12 - 1, release_generation=0, evidence="e",
        request_id="q" * 100,
    )  # fmt: skip
    bare = done("abort", {"who": "bob"}, viewer=visitor("anonymous", *Role)).basis
    assert bare == Basis(
        actor="user:bob", proven=False, act="abort", subject="r1", generation=None, release_generation=None, evidence=None, request_id=None
    )


@pytest.mark.parametrize("name", ["generation", "release_generation"])
@pytest.mark.parametrize("said", ["1" * 13, "-1", "x", "1.0"])
def test_a_generation_that_is_no_number_sends_one_back_to_the_form(name: str, said: str) -> None:
    with pytest.raises(BadRequest, match="open the form again") as refused:
        done("abort", {name: said})
    assert refused.value.param == name


def test_without_the_right_a_reason_or_an_act_nothing_is_done_and_twice_is_once() -> None:
    with pytest.raises(Refused, match="vic may not do this: admin, operator may"):
        done("approve", {}, viewer=visitor("user:vic", Role.VIEWER))
    with pytest.raises(Refused, match="may not do this"):
        done("approve", {}, viewer=visitor("user:ada", policy="composer"))
    with pytest.raises(Refused, match="it needs a reason"):
        done("approve", {"reason": "  "})
    with pytest.raises(NotFound, match="there is no act"):
        done("promote", {})
    assert ActPages(None, cast("Any", Desk(again=True))).do(asked(), "abort", "r1", {"reason": "so"}) is True


@pytest.mark.parametrize(
    ("act", "to"),
    [("approve", "/console/releases/s?policy=tab"), ("pin", "/console/versions/s?policy=tab"), ("unpin", "/console/versions/s?policy=tab"),
     ("lift", "/console/versions?policy=tab"), ("unfreeze", "/console?policy=tab"), ("renew_anchor", "/console?policy=tab")],
)  # fmt: skip
def test_afterwards_one_is_led_to_what_the_act_was_about(act: str, to: str) -> None:
    assert ActPages(None, cast("Any", Desk())).back(asked(), act, "s") == to


def test_a_word_of_an_address_has_two_hundred_characters_and_blanks_are_none() -> None:
    assert asked(q=" x ").word("q") == "x"
    assert asked(q="x" * 201).word("q") == "x" * 200
    assert (asked(q="  ").word("q"), asked().word("q")) == (None, None)
    assert asked().link("/a", b="c d") == "/console/a?policy=tab&b=c+d"


def test_a_cell_is_cut_where_it_is_too_long_for_a_page() -> None:
    assert cell("x" * MOST).short == "x" * 2_000
    assert cell("x" * (MOST + 1)).short == "x" * 2_000 + " …"


@pytest.mark.parametrize(
    ("value", "shown", "kind", "plain"),
    [
        (None, "–", "", ""), (True, "yes", "", "true"), (False, "no", "", "false"), (1234567, "1,234,567", "n", "1234567"),
        (0.123456, "0.1235", "n", "0.123456"), (12345.6, "1.235e+04", "n", "12345.6"), ("x", "x", "", "x"),
    ],
)  # fmt: skip
def test_a_value_is_shown_short_and_kept_whole(value: object, shown: str, kind: str, plain: str) -> None:
    made = cell(value)
    assert (made.text, made.kind, defused(made)) == (shown, kind, plain)
    assert cell(value, kind="code").kind == "code"


def test_what_is_not_there_is_null_and_what_has_no_value_its_text() -> None:
    sheet = Sheet(name="s", title="S", columns=("a", "b", "c"), rows=[(cell(None), cell("é"), cell(False))])
    assert sheet.json() == '[{"a": null, "b": "é", "c": false}]'
    assert sheet.csv() == "\ufeffa,b,c\r\n,é,false\r\n"


def test_an_answer_is_asked_for_once_until_something_changes_or_there_are_too_many() -> None:
    shared, asks = Shared(), list[int]()

    def get(key: int) -> int:
        def ask() -> int:
            asks.append(key)
            return key

        return cast("int", shared.get(key, ask))

    assert [get(1), get(1)] == [1, 1]
    shared.forget()
    assert (get(1), asks) == (1, [1, 1])
    for key in range(2, MOST_REMEMBERED + 1):
        get(key)
    get(1)
    assert len(asks) == MOST_REMEMBERED + 1, "two thousand are remembered"
    get(0)
    get(1)
    assert asks[-2:] == [0, 1]
