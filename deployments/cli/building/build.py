"""`manta build`: print Serve's config file for a configuration, or a KubeRay manifest that contains
it."""

import io
import sys
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.scalarstring import LiteralScalarString

from deployments.cli.target import read_target


def run(
    spec: str,
    kubernetes: bool = False,
    image: str = "",
    memory: list[str] | None = None,
    cache_claim: str = "",
) -> int:
    """Print Serve's config file, or a RayService manifest that contains it. Raises ConfigError.

    memory, cache_claim, image: as in `rayservice`, memory as texts such as "cpu=48Gi".
    """
    config = read_target(spec)  # before Ray is imported, which takes a second
    from deployments.app import serve_config
    from deployments.cli.building.kubernetes import IMAGE, memory_of, rayservice

    if kubernetes:
        built = rayservice(config, image or IMAGE, memory_of(memory or []), cache_claim)
        inner = _yaml(built["spec"]["serveConfigV2"])
        built["spec"]["serveConfigV2"] = LiteralScalarString(inner)
    else:
        built = serve_config(config)
    sys.stdout.write(_yaml(built))
    return 0


def _yaml(document: dict[str, Any]) -> str:
    yaml = YAML()
    yaml.default_flow_style = False
    yaml.width = 4096
    yaml.representer.ignore_aliases = lambda _: True
    text = io.StringIO()
    yaml.dump(document, text)
    return text.getvalue()
