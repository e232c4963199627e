"""Ray Serve LLM's server in comparisons, with the high-throughput settings of its documentation.

    python -P bench/versus/ray_llm.py '{"llm_config": {...}, "port": 8000, "devices": {...}}'

The peer's interpreter runs this file as a script, without Manta's packages, so it imports none of
them. -P keeps this folder out of its path, where `import http` would find `bench.versus.http`.

SETTINGS are environment variables of every process of Ray. With them HAProxy asks an LLMRouter for
a replica, and forwards the request to this replica's own HTTP server, which is vLLM's. No
OpenAiIngress replica copies the tokens. All other limits are Ray's defaults: HAProxy accepts 4,096
connections, and a replica any number of requests.
"""

import json
import signal
import sys
from collections.abc import Mapping
from typing import Any

SETTINGS = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING": "1",
    "VLLM_USE_RAY_V2_EXECUTOR_BACKEND": "1",
}


def command_of(
    python: str, llm_config: Mapping[str, Any], port: int, devices: Mapping[str, Any]
) -> list[str]:
    """Return the command that serves a model with Ray Serve LLM.

    The process needs SETTINGS in its environment, which Ray's processes inherit.

    python: the interpreter of Ray Serve LLM's environment. llm_config: the fields of an LLMConfig.
    devices: `num_cpus` and `num_gpus` of its Ray.
    """
    options = {"llm_config": llm_config, "port": port, "devices": devices}
    return [python, "-P", __file__, json.dumps(options)]


def serve_until_signal(llm_config: dict[str, Any], port: int, devices: dict[str, Any]) -> None:
    """Serve a model with a Ray of its own until SIGINT."""
    import ray
    from ray import serve
    from ray.serve.llm import LLMConfig, build_openai_app

    ray.init("local", include_dashboard=False, log_to_driver=False, **devices)
    serve.start(http_options={"port": port})
    try:
        serve.run(build_openai_app({"llm_configs": [LLMConfig(**llm_config)]}), blocking=False)
        signal.pause()
    except RuntimeError:
        # The error of serve.run does not say why a replica failed.
        for deployment in serve.status().applications["default"].deployments.values():
            print(deployment.message, flush=True)
        raise
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    serve_until_signal(**json.loads(sys.argv[1]))
