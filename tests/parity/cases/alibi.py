"""Decoders with ALiBi: slopes on the scores."""

from tests.parity.cases.case import Case
from tests.parity.cases.rewriting import baichuan, with_alibi
from tests.parity.cases.settings import BLOOM, GPT, SHORT

_SLOPES = [2 ** (-8 * (h + 1) / 32) for h in range(32)] + [
    2 ** (-8 * (h + 0.5) / 32) for h in range(8)
]
ALIBI: dict[str, Case] = {
    # Its eager path adds the slopes twice.
    "falcon rw": Case(
        "falcon",
        {"multi_query": False, "parallel_attn": False, "bias": True, "alibi": True},
        drop=GPT,
        attention="sdpa",
    ),
    "bloom": Case("bloom", {"n_layer": 3, "n_head": 6, "hidden_size": 60}, drop=BLOOM),
    "mpt": Case("mpt", {"d_model": 60, "n_layers": 3, "n_heads": 6, "max_seq_len": 64}, drop=SHORT),
    "baichuan 13b": Case(
        "llama",
        {
            "hidden_size": 160,
            "num_attention_heads": 40,
            "num_key_value_heads": 40,
            "num_hidden_layers": 2,
        },
        architecture="BaichuanForCausalLM",
        rewrite=baichuan,
        logits=with_alibi(_SLOPES),
    ),
}
