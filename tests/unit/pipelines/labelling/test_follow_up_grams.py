"""N-grams and their weights, by hand; and the threshold of punishing."""

import math

import msgspec
import numpy as np
import pytest

from pipelines.labelling.follow_up.classifier import model
from pipelines.labelling.follow_up.examples import is_unread
from pipelines.labelling.follow_up.fit import calibration_error, punish_from, wilson
from pipelines.labelling.follow_up.grams import grams, rarities, weighted


def test_grams_are_counted_in_the_users_own_words_only() -> None:
    counted = grams("No no! ```print(1)```")
    assert counted["word"] == {"no": 2, "!": 1, "no no": 1, "no !": 1}
    assert counted["opening"] == {
        " n": 2,
        "no": 2,
        "o ": 1,
        "o!": 1,
        "! ": 1,
        " no": 2,
        "no ": 1,
        "no!": 1,
        "o! ": 1,
        " no ": 1,
        " no!": 1,
        "no! ": 1,
    }
    assert counted["char"]["n"] == 2
    assert not any("print" in gram for block in counted.values() for gram in block)


def test_only_the_beginning_is_read() -> None:
    assert grams("a" * 150 + " wrong")["word"] == grams("a" * 150)["word"]


def test_what_is_in_every_message_is_the_least_rare() -> None:
    # three messages: "a" is in all (log(4/4) + 1 = 1), "b" in two (log(4/3) + 1), "c" in one and left out
    found = rarities([{"a": 1, "b": 5}, {"a": 2, "b": 1}, {"a": 1, "c": 1}], at_least=2)
    assert found == {"a": 1.0, "b": pytest.approx(math.log(4 / 3) + 1)}


def test_a_message_is_a_vector_of_length_one_over_what_is_known() -> None:
    # "a" twice: (1 + ln 2) · 1, "b" once: 1 · 2; "z" is not known
    found = dict(weighted({"a": 2, "b": 1, "z": 9}, {"a": 1.0, "b": 2.0}))
    length = math.hypot(1 + math.log(2), 2.0)
    assert found == {"a": pytest.approx((1 + math.log(2)) / length), "b": pytest.approx(2.0 / length)}
    assert dict(weighted({"z": 1}, {"a": 1.0})) == {}


def test_the_threshold_is_the_lowest_at_which_nine_in_ten_deserve_it() -> None:
    # at .60 ten are punished and eight deserve it; from .66 on the nine that are left do, but one
    probability = np.array([0.6, *([0.65] * 1), *([0.7] * 8)])
    deserved = np.array([False, False, *([True] * 8)])
    assert punish_from(probability, deserved) == pytest.approx(0.66)
    assert punish_from(probability, np.zeros(10, dtype=bool)) == 0.95


def test_intervals_and_calibration_by_hand() -> None:
    assert wilson(0, 0) == (0.0, 1.0)
    assert wilson(9, 10) == pytest.approx((0.5958, 0.9821), abs=1e-3)
    # two readings at .8 of which one is right: |.8 - .5| = .3
    assert calibration_error(np.array([[0.8, 0.2], [0.8, 0.2]]), np.array([0, 1])) == pytest.approx(0.3)


def test_parts_of_one_conversation_are_unread_together_and_a_quarter_is() -> None:
    shares = sum(is_unread(f"conversation-{number}") for number in range(4000)) / 4000
    assert shares == pytest.approx(0.25, abs=0.03)


def test_a_gram_without_a_weight_for_each_class_is_an_error_and_no_reading() -> None:
    whole = model()
    words = whole.blocks["word"]
    short = msgspec.structs.replace(words, weights=words.weights | {"wrong": words.weights["wrong"][:-1]})
    spoiled = msgspec.structs.replace(whole, blocks={**whole.blocks, "word": short})
    assert spoiled.probabilities("thanks", "an answer") == whole.probabilities("thanks", "an answer")
    with pytest.raises(ValueError, match="zip"):
        spoiled.probabilities("this is wrong", "an answer")
