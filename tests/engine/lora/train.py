"""Two small adapters for a model, trained on text that lies in this repository.

    python -m tests.engine.lora.train MODEL OUT

writes OUT/prose and OUT/code: rank 8 on the attention, a few steps on two cores, under 5 MB each.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[3]
TEXTS = {"prose": ["LICENSE"], "code": ["engine/scheduling/scheduler.py"]}  # prose: never edited
STEPS, LENGTH, RATE = 5, 80, 2e-3


def text_of(name: str) -> str:
    return "\n".join((ROOT / path).read_text() for path in TEXTS[name])


def train(model_folder: Path, out: Path, names: list[str]) -> dict[str, tuple[float, float]]:
    """Train the adapters, and return name -> mean loss of the first and of the last two steps."""
    from peft import LoraConfig, get_peft_model

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    losses = {}
    for name in names:
        torch.manual_seed(0)
        targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
        config = LoraConfig(r=8, lora_alpha=16, target_modules=targets, task_type="CAUSAL_LM")
        adapted = get_peft_model(model, config)
        trained = [p for p in adapted.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=RATE)
        ids = tokenizer(text_of(name), return_tensors="pt").input_ids[0]
        history = []
        for step in range(STEPS):
            chunk = ids[step * LENGTH : (step + 1) * LENGTH][None]
            loss = adapted(input_ids=chunk, labels=chunk).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            history.append(float(loss.detach()))
        adapted.save_pretrained(out / name)
        model = adapted.unload()
        losses[name] = (sum(history[:2]) / 2, sum(history[-2:]) / 2)
    return losses


if __name__ == "__main__":
    for name, (before, after) in train(Path(sys.argv[1]), Path(sys.argv[2]), list(TEXTS)).items():
        print(f"{name}: loss {before:.3f} -> {after:.3f}")
