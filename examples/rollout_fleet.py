"""A GRPO loop whose rollouts come from served replicas, on CPUs: `python examples/rollout_fleet.py
[STEPS] [FOLDER]`. Needs `transformers` and the two environment variables that `manta serve` prints.

FOLDER is the served model's folder, by default that of the default model. Serve that one with
`engine.quantization: none`, as a trainer has no blocks of a .gguf file. The reward is
the share of even token ids, so it begins near 0.5 and rises.

After each step the trainer writes the weights to a folder that all replicas read. A request's seed
follows from step and prompt. So with `engine.deterministic: true` two runs write the same rollouts,
whichever replicas die."""

import shutil
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ray
import torch
from transformers import AutoModelForCausalLM

from deployments.checkpoints.resolve import resolve_model
from deployments.client import Client, Completion

PROMPTS = [[504, 3526, 314], [19, 2017, 284], [8, 260, 1052], [5, 30, 77]]
Rollouts = list[list[tuple[int, ...]]]  # of each prompt, the tokens of each choice


def main(
    client: Client,
    folder: Path,
    work: Path,
    steps: int,
    *,
    choices: int = 8,
    length: int = 16,
    rate: float = 2e-4,
    on_step: Callable[[int, Rollouts, float], None] = lambda step, rollouts, reward: None,
) -> list[float]:
    """Train for some steps; return the mean reward of each.

    work: a folder that all replicas can read. The last checkpoint in it has to stay, for replicas
        that start later.
    choices, length: answers of each prompt, and their tokens. on_step: is told of each step.
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    prompts = [[token % model.config.vocab_size for token in prompt] for prompt in PROMPTS]
    rewards = []
    client.update_weights(str(folder))  # a loop before this one may have left others
    with ThreadPoolExecutor(len(prompts)) as pool:
        for step in range(steps):

            def answer(number: int, step: int = step) -> Completion:
                return client.generate(
                    prompts[number],
                    n=choices,
                    max_tokens=length,
                    seed=step * len(prompts) + number,
                    # All of the policy's distribution, which generation_config.json may narrow.
                    temperature=1.0,
                    top_p=1.0,
                    top_k=0,
                    repetition_penalty=1.0,
                    ignore_eos=True,
                    return_token_ids=True,
                )

            rollouts: Rollouts = []
            losses, means = [], []
            for prompt, whole in zip(prompts, pool.map(answer, range(len(prompts))), strict=True):
                rollouts.append([choice.token_ids or () for choice in whole.choices])
                outputs = torch.tensor(rollouts[-1])
                reward = (outputs % 2 == 0).float().mean(1)
                advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
                ids = torch.cat([torch.tensor([prompt] * choices), outputs], 1)
                logits = model(ids).logits[:, len(prompt) - 1 : -1]
                chosen = logits.log_softmax(-1).gather(2, outputs[..., None])[..., 0]
                losses.append(-(chosen * advantage[:, None]).mean())
                means.append(float(reward.mean()))
            optimizer.zero_grad()
            torch.stack(losses).mean().backward()
            optimizer.step()
            checkpoint = work / str(step)
            model.save_pretrained(checkpoint)
            client.update_weights(str(checkpoint), f"step {step}")
            shutil.rmtree(work / str(step - 1), ignore_errors=True)
            rewards.append(sum(means) / len(means))
            on_step(step, rollouts, rewards[-1])
    return rewards


if __name__ == "__main__":
    ray.init(address="auto", log_to_driver=False)
    main(
        Client.connect(),
        resolve_model(sys.argv[2] if len(sys.argv) > 2 else "default"),
        Path(tempfile.mkdtemp(prefix="rollout-")),
        int(sys.argv[1]) if len(sys.argv) > 1 else 20,
        on_step=lambda step, _, reward: print(f"step {step}: reward {reward:.2f}", flush=True),
    )
