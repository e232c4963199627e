"""The routes for reinforcement-learning trainers: weights, pauses, sleep, and rollouts
(docs/rl.md)."""
