"""bench.scale_out with engines that count in place of a model: `python -m` with its options."""

import sys
from typing import Any

from deployments.app import as_config, assemble
from deployments.replica.deployment import ReplicaSettings
from engine.config.engine_config import EngineConfig

# As fast as a small model on a GPU. Its vocabulary is that of the workloads' token ids.
FAKE = "fake:vocab_size=32000,max_model_len=2048,step_seconds=0.01"


def _engine(settings: ReplicaSettings) -> EngineConfig:
    return EngineConfig(model=FAKE, max_num_seqs=settings.engine["max_num_seqs"])


def build(arguments: Any) -> Any:
    """Return the application that Serve builds in place of `deployments.app:build`."""
    return assemble(as_config(arguments), _engine)


def main() -> int:
    from bench import scale_out
    from deployments import app

    real = app.serve_config

    def counting(config: Any) -> dict[str, Any]:
        schema = real(config)
        (application,) = schema["applications"]
        application["import_path"] = f"{__spec__.name}:build"
        return schema

    app.serve_config = counting
    return scale_out.main()


if __name__ == "__main__":
    sys.exit(main())
