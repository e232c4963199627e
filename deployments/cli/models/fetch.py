"""Download and convert models before they are served.

`python -m deployments.cli.models.fetch [--quantization NAME] SPEC ...`
"""

import argparse
import sys

from deployments.checkpoints.resolve import resolve_model
from deployments.cli.console import model_progress
from deployments.config.load import parse_config
from deployments.environment import gpus_here
from engine.errors import ConfigError


def main() -> None:
    """Print the folder of each model named on the command line, with progress on stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m deployments.cli.models.fetch", description=main.__doc__
    )
    parser.add_argument("models", nargs="*", default=["default"], metavar="SPEC")
    what = "as in a configuration: auto (the default), gguf for a file's blocks, none for 16 bits"
    parser.add_argument("--quantization", default="auto", metavar="NAME", help=what)
    options = parser.parse_args()
    for spec in options.models:
        try:
            engine = {"quantization": options.quantization}
            config = parse_config({"model": spec, "engine": engine}, {})
            (blocks,) = config.kept_blocks(gpus_here())
            with model_progress() as progress:
                folder = resolve_model(spec, progress=progress, blocks=blocks)
        except ConfigError as error:
            sys.exit(f"error: {error}")
        print(folder)


if __name__ == "__main__":
    main()
