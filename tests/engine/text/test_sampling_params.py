"""SamplingParams: what is refused when it is made, and in which words."""

from typing import Any, get_type_hints

import msgspec
import pytest

from engine.errors import InvalidRequest
from engine.sampling_params import SamplingParams

WRONG: list[Any] = [b"x", object(), 1j, [None], {"a": 1}, ["a", 5], [True], [[1]], {1}, range(2)]


def refusal(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**fields)
    return caught.value


def test_one_string_is_a_list_of_one() -> None:
    """A string was taken for a list of its letters: "at most 4 strings", or nothing was said and
    the engine failed."""
    assert SamplingParams(stop=".") == SamplingParams(stop=(".",)) == SamplingParams(stop=["."])
    params = SamplingParams(stop="abcde", stop_token_ids=[1, 2])
    assert (params.stop, params.stop_token_ids) == (("abcde",), (1, 2))
    raw = msgspec.msgpack.encode(params)
    assert msgspec.msgpack.decode(raw, type=SamplingParams) == params
    assert refusal(stop="").message == "each stop string must have 1 to 256 bytes"
    assert refusal(stop=["a"] * 129).message == "stop takes at most 128 strings"


@pytest.mark.parametrize("name", SamplingParams.__struct_fields__)
def test_a_value_of_the_wrong_type_is_refused(name: str) -> None:
    """`ignore_eos="yes"` was true, `stop_token_ids=5` a TypeError; others came to light in the
    engine's process, as text of a library."""
    for value in WRONG:
        if name == "bad_words_ids" and value == [[1]]:
            continue  # its own type
        error = refusal(**{name: value})
        assert (error.param, error.code) == (name, "invalid_type"), value
        assert error.message.startswith(f"{name} must be ")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stop": 5}, "stop must be a string or a list of strings"),
        ({"stop": ["a", 5]}, "stop must be a string or a list of strings"),
        ({"stop_token_ids": 5}, "stop_token_ids must be a list of integers"),
        ({"stop_token_ids": "12"}, "stop_token_ids must be a list of integers"),
        ({"ignore_eos": "yes"}, "ignore_eos must be true or false"),
        ({"skip_special_tokens": 1}, "skip_special_tokens must be true or false"),
        ({"logit_bias": [1]}, "logit_bias must be a mapping from integers to numbers"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias must be a mapping from integers to numbers"),
        ({"max_tokens": "5"}, "max_tokens must be an integer"),
        ({"n": True}, "n must be an integer"),
        ({"n": None}, "n must be an integer"),
        ({"temperature": "hot"}, "temperature must be a number"),
    ],
)
def test_the_type_is_told(fields: dict[str, Any], message: str) -> None:
    """An error that names neither the field nor what it takes."""
    assert refusal(**fields).message == message


def test_a_long_list_is_not_walked_through() -> None:
    """Millions of stop strings in one request hold up everybody's tokens."""

    class Counting(list[Any]):
        read = 0

        def __iter__(self) -> Any:
            for item in super().__iter__():
                self.read += 1
                yield item

    for name, what in (("stop", "128 strings"), ("stop_token_ids", "128 ids")):
        many = Counting([1] * 1000)
        assert refusal(**{name: many}).message == f"{name} takes at most {what}"
        assert many.read == 0


@pytest.mark.parametrize(
    "value",
    [10**309, -(10**309), 10**5000, float("nan"), float("inf")],
    ids=["310 digits", "negative", "5001 digits", "nan", "inf"],
)
@pytest.mark.parametrize(
    "name",
    [n for n, kind in get_type_hints(SamplingParams).items() if kind is float],
)
def test_a_number_that_no_float_holds_is_refused(name: str, value: float) -> None:
    """An integer of 309 digits raised OverflowError in the check itself: a 500, sent again by every
    client. Of 4,301 digits Python prints none either."""
    error = refusal(**{name: value})
    assert (error.param, error.code) == (name, "invalid_value") and len(error.message) < 100
    assert refusal(logit_bias={5: value}).param == "logit_bias"


def test_integers_out_of_any_range_are_refused() -> None:
    """The message itself cannot be made of an integer that Python does not print."""
    for name in ("n", "max_tokens", "min_tokens", "top_k", "seed", "logprobs", "prompt_logprobs"):
        assert refusal(**{name: 10**5000}).param == name
    assert refusal(stop_token_ids=[10**5000]).param == "stop_token_ids"


@pytest.mark.parametrize("penalty", [5e-324, 1e-300, 1e-38, 0.0099])
def test_a_penalty_that_makes_logits_infinite_is_refused(penalty: float) -> None:
    """Logits divided by 1e-38 are infinite: the request ended with numerical_error."""
    assert refusal(repetition_penalty=penalty).param == "repetition_penalty"
    assert SamplingParams(repetition_penalty=0.01).repetition_penalty == 0.01
