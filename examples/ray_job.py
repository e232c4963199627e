"""A job of the same Ray cluster that asks the served model: `python examples/ray_job.py`. Needs the
two environment variables that `manta serve` prints, and Manta where the job runs."""

import ray

from deployments.client import Client

ray.init(address="auto", log_to_driver=False)
client = Client.connect()
questions = ["What is a tide?", "What is a wave?"]
for question in questions:
    answer = client.chat([{"role": "user", "content": question}], max_tokens=40)
    print(question, answer.text, f"({answer.usage.completion_tokens} tokens)", sep="\n", end="\n\n")
for piece in client.stream("The sea is", max_tokens=20):
    print(piece.text, end="", flush=True)
print()
