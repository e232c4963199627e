"""The routes for trainers: weights, pauses, sleep, and rollouts of token ids (docs/rl.md)."""
