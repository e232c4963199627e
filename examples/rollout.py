"""A tiny GRPO loop on a CPU: `python examples/rollout.py [STEPS]`, with a random model of 0.1 MB.

The engine writes the rollouts, the trainer changes the weights, and the engine loads them in place.
The reward is the share of even token ids, so it begins near 0.5 and rises.

A scorer computes the trainer's log-probabilities by the engine's own kernels. In deterministic mode
they differ from the rollouts' by exactly 0, so each importance ratio is 1 at the first update of a
batch. Gradients are those of the trainer's model."""

import sys
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine import LLM, SamplingParams, Scorer

PROMPTS, CHOICES, LENGTH, CLIP = [[3, 5, 8], [4, 1, 7], [9, 9, 2]], 8, 8, 0.2


def main(steps: int) -> tuple[list[float], list[float]]:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=100, max_position_embeddings=64, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    params = SamplingParams(
        n=CHOICES,
        max_tokens=LENGTH,
        ignore_eos=True,
        logprobs=0,
        logprobs_mode="processed_logprobs",
    )
    fields = {"device": "cpu", "dtype": "float32", "num_threads": 1, "max_model_len": 64}
    rewards, mismatches = [], []
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        scorer = Scorer(folder, **fields)
        with LLM(folder, deterministic=True, **fields) as llm:
            for step in range(1, steps + 1):
                losses, means, mismatch = [], [], 0.0
                for answer in llm.generate(PROMPTS, params):
                    prompt = answer.prompt_token_ids
                    outputs = torch.tensor([choice.token_ids for choice in answer.outputs])
                    reward = (outputs % 2 == 0).float().mean(1)
                    advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
                    ids = torch.cat([torch.tensor([prompt] * CHOICES), outputs], 1)
                    logits = model(ids).logits[:, len(prompt) - 1 : -1]
                    chosen = logits.log_softmax(-1).gather(2, outputs[..., None])[..., 0]
                    rollout = torch.tensor(
                        [[t.logprob for t in c.logprobs] for c in answer.outputs]
                    )
                    exact = torch.stack([scorer.logprobs(prompt, row, params) for row in outputs])
                    mismatch = max(mismatch, float((exact - rollout).abs().max()))
                    # the scorer's value, with the gradient of the trainer's model
                    ratio = (exact - rollout + (chosen - chosen.detach())).exp()
                    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
                    gain = torch.minimum(ratio * advantage[:, None], clipped * advantage[:, None])
                    losses.append(-gain.mean())
                    means.append(float(reward.mean()))
                optimizer.zero_grad()
                torch.stack(losses).mean().backward()
                optimizer.step()
                llm.update_weights(model.state_dict().items(), version=f"step {step}")
                scorer.update_weights(model.state_dict().items())
                rewards.append(sum(means) / len(means))
                mismatches.append(mismatch)
                print(f"step {step}: reward {rewards[-1]:.2f}, mismatch {mismatch}", flush=True)
    return rewards, mismatches


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 30)
