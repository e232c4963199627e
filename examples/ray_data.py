"""A dataset whose prompts the served model answers, after all other requests:
`python examples/ray_data.py`. Needs the two environment variables that `manta serve` prints, and
`pip install 'ray[data]'`."""

import ray
from ray.data.llm import ServeDeploymentProcessorConfig, build_processor

# Ray's stage uses handles outside of an event loop.
loop = {"RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "1"}
ray.init(address="auto", log_to_driver=False, runtime_env={"env_vars": loop})
config = ServeDeploymentProcessorConfig(
    deployment_name="router",
    app_name="manta",
    batch_size=64,
    concurrency=4,
    should_continue_on_error=True,
)
processor = build_processor(
    config,
    preprocess=lambda row: {
        "method": "chat",
        "request_kwargs": {
            "messages": [
                {"role": "user", "content": f"What is {row['number']} + {row['number']}?"}
            ],
            "max_tokens": 16,
        },
    },
    # The answer's fields, such as "id", overwrite columns of the same name.
    postprocess=lambda row: {
        "number": row["number"],
        "answer": row["choices"][0]["message"]["content"],
    },
    # Replicas may have reserved all cores, and these tasks only send. A dataset from files is read
    # by tasks that need one.
    preprocess_map_kwargs={"num_cpus": 0},
    postprocess_map_kwargs={"num_cpus": 0},
)
processor.get_stage_by_name("ServeDeploymentStage").map_batches_kwargs["num_cpus"] = 0
questions = ray.data.from_items([{"number": number} for number in range(100)])
rows = processor(questions).take_all()
failed = [row for row in rows if row["__inference_error__"]]
print(f"{len(rows) - len(failed)} answers, {len(failed)} errors; the last: {rows[-1]}")
