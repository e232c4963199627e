"""`manta build`: Serve's config file of a configuration."""

import io
import sys

from ruamel.yaml import YAML

from deployments.cli.target import read_target


def run(spec: str) -> int:
    """Print Serve's config file. Raises ConfigError."""
    config = read_target(spec)  # before Ray is imported, which takes a second
    from deployments.app import serve_config

    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]  # typed as None
    text = io.StringIO()
    yaml.dump(serve_config(config), text)
    sys.stdout.write(text.getvalue())
    return 0
