"""engine.speculation: our names and vLLM's, and clear refusals of what is not there."""

from typing import Any

import msgspec
import pytest

from engine.config.engine_config import EngineConfig
from engine.errors import ConfigError
from engine.speculation.settings import SpeculationSettings, check_speculation, read_speculation


@pytest.mark.parametrize("value", ["off", False])
def test_off(value: Any) -> None:
    """YAML 1.1 reads off as false, and it meant the default."""
    assert read_speculation(EngineConfig(model="x", speculation=value).speculation) is None


@pytest.mark.parametrize("value", ["auto", True, "lookup", {}, {"method": "suffix"}])
def test_on(value: Any) -> None:
    """A way to say the default that means something else."""
    settings = read_speculation(EngineConfig(model="x", speculation=value).speculation)
    assert settings is not None
    assert settings.explicit == (value not in ("auto", True))
    assert settings.lookup == SpeculationSettings().lookup and settings.tokens == 7


@pytest.mark.parametrize("method", ["mtp", "deepseek_mtp", "mimo_mtp", "qwen3_next_mtp"])
def test_layers_of_the_checkpoint(method: str) -> None:
    """Bugs: a name of vLLM's is refused, its number lost; the numbers of YAML become floats."""
    config = msgspec.convert(
        {"model": "x", "speculation": {"method": method, "num_speculative_tokens": 2}}, EngineConfig
    )
    settings = read_speculation(config.speculation)
    assert settings is not None and settings.by_model and settings.method == "mtp"
    assert settings.tokens == 2 and settings.explicit
    eagle = read_speculation({"method": "eagle3", "model": "org/x", "num_speculative_tokens": 5})
    assert eagle is not None and (eagle.method, eagle.model, eagle.tokens) == ("eagle3", "org/x", 5)


def test_names_of_vllm() -> None:
    """A configuration that moves here from vLLM was refused, or lost its numbers."""
    ngram = read_speculation(
        {
            "method": "ngram",
            "num_speculative_tokens": 5,
            "prompt_lookup_min": 2,
            "prompt_lookup_max": 4,
            "model": None,
        }
    )
    assert ngram is not None and ngram.tokens == 5
    assert (ngram.lookup.min_match, ngram.lookup.max_match) == (2, 4)
    assert ngram.lookup.shared_tokens == 0, "vLLM's ngram looks into the request's own text"
    suffix = read_speculation(
        {
            "method": "suffix",
            "suffix_decoding_max_tree_depth": 16,
            "suffix_decoding_max_spec_factor": 2,
            "suffix_decoding_min_token_prob": 0.2,
            "suffix_decoding_max_cached_requests": 100,
        }
    )
    assert suffix is not None
    options = suffix.lookup
    assert (options.max_match, options.factor, options.min_probability) == (16, 2, 0.2)
    assert options.shared_tokens == 100 * 256


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("eagle3", "method eagle3 needs model: the folder or hub name of the drafter"),
        ({"method": "mtp", "model": "draft"}, "model does not go with method mtp"),
        ({"method": "mtp", "draft_tensor_parallel_size": 2}, "one rank has the drafter whole"),
        ({"method": "mtp", "num_speculative_tokens": 0}, "tokens must be an integer in 1..16"),
        ({"method": "eagle3", "model": "draft", "factor": 2}, "factor does not go with method"),
        ({"method": "draft_model"}, "method draft_model needs model: the folder or hub name"),
        ("medusa", "method 'medusa' is not there; Manta drafts by look-up"),
        ({"model": "llama-1b", "num_speculative_tokens": 3}, "model 'llama-1b' is not there"),
        ({"method": "lokup"}, "method 'lokup' is not there; did you mean lookup? "),
        ({"token": 5}, "unknown key 'token'; did you mean tokens? the keys are"),
        ({"method": "mtp", "token": 5}, "; did you mean tokens?"),
        ({"method": "draft_model", "model": "x", "modle": "y"}, "; did you mean model?"),
        ({"tokens": 0}, "tokens must be an integer in 1..16, got '0'"),
        ({"tokens": True}, "tokens must be an integer"),
        ({"factor": "2"}, "factor must be a number"),
        ({"min_match": 5, "max_match": 4}, "min_match 5 exceeds max_match 4"),
        ({"num_speculative_tokens": 3, "tokens": 3}, "said twice"),
        ({"draft_tensor_parallel_size": 1}, "unknown key 'draft_tensor_parallel_size'; the keys"),
        (3, "speculation must be"),
        ({"tokens": [1]}, "speculation must be"),
    ],
)
def test_refusals_name_the_way_out(value: Any, words: str) -> None:
    """A method that is not there was ignored, and its user waited for its speed."""
    with pytest.raises(ConfigError) as caught:
        EngineConfig(model="x", speculation=value)
    assert caught.value.param == "speculation" and words in caught.value.message


def test_memory_is_bounded() -> None:
    """`manta plan` told less host memory than look-up takes, or more than there can be texts."""
    options = SpeculationSettings().lookup
    assert options.num_bytes(1024, 131_072) == (2**18 + 2**20) * 160
    assert options.num_bytes(2, 100) == (2**18 + 200) * 160


def test_who_never_speculates() -> None:
    """Bug: an engine that counts on one token a step verifies drafts."""
    able: dict[str, Any] = {
        "generates": True,
        "stages": 1,
        "admission": "sum",
        "most": 2,
    }
    asked, auto = read_speculation({"method": "lookup"}), read_speculation("auto")
    assert check_speculation(asked, **able) is asked and check_speculation(None, **able) is None
    assert check_speculation(asked, **able | {"generates": False}) is None
    for changes, word in (
        ({"stages": 2}, "stages"),
        ({"admission": "peak"}, "peak"),
        ({"most": 1}, "max_num_seqs"),
    ):
        assert check_speculation(auto, **able | changes) is None
        with pytest.raises(ConfigError, match=word):
            check_speculation(asked, **able | changes)
