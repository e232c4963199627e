"""The bound on what the engine process of a plain text model imports until it is ready."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[3]
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "hidden_act": "silu",
}  # fmt: skip
START = """
import sys
import engine.process.main
from engine.config.engine_config import EngineConfig
from engine.factory import build

config = EngineConfig(model=sys.argv[1], load_format="dummy", device="cpu", max_model_len=64)
build(config)[0].close()
if sys.argv[2]:
    import kernels.cuda
print(*sys.modules)
"""
# Packages of which such a start needs no module, and our modules of other models and settings.
OTHERS = (
    *("jinja2", "PIL", "ray", "torch._dynamo", "torch._inductor", "transformers"),
    *("triton.experimental",),
    *("engine.config.towers.", "engine.images.families.kimi", "engine.images.resize"),
    *("engine.models.drafters.build", "engine.models.vision.block", "engine.models.vision.tiles"),
    *("engine.runner.caches.disk_files", "engine.text.tokenizer"),
    *("kernels.attention.latent.decode", "kernels.attention.whole_texts", "kernels.lora"),
    *("kernels.experts.fragments", "kernels.experts.grouped", "kernels.experts.topk"),
    *("kernels.recurrent.delta_rule_cuda", "kernels.recurrent.mamba2_cuda"),
)
MOST = 412  # modules of engine and kernels


def test_a_text_model_imports_little(tmp_path: Path) -> None:
    """Bug: each start of each engine imports towers of all vision models and kernels of all
    architectures, a tenth of a second with bytecode and half a second without."""
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    with_triton = "" if find_spec("triton") is None else "1"
    done = subprocess.run(
        [sys.executable, "-c", START, str(tmp_path), with_triton],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    modules = done.stdout.split()
    assert not [name for name in modules if name.startswith(OTHERS)]
    ours = [name for name in modules if name.startswith(("engine.", "kernels."))]
    assert len(ours) <= MOST, len(ours)
