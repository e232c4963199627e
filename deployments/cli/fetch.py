"""`python -m deployments.cli.fetch SPEC ...`: fetch and convert models before they are served."""

import sys

from deployments.checkpoints.resolve import resolve_model
from deployments.cli.console import model_progress
from engine.errors import ConfigError


def main() -> None:
    """Print the folder of each model named on the command line, with progress on stderr."""
    for spec in sys.argv[1:] or ["default"]:
        try:
            with model_progress() as progress:
                folder = resolve_model(spec, progress=progress)
        except ConfigError as error:
            sys.exit(f"error: {error}")
        print(folder)


if __name__ == "__main__":
    main()
