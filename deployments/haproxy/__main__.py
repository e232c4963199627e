"""HAProxy with our configuration, for Serve to start: `python -m deployments.haproxy ARGUMENTS`.

`python -m deployments.haproxy --install FILE` writes the launcher for RAY_SERVE_HAPROXY_BINARY_PATH
and prints its path.
"""

import sys

from deployments.haproxy.launch import install, launch

if __name__ == "__main__":
    if sys.argv[1:2] == ["--install"] and len(sys.argv) == 3:
        print(install(sys.argv[2]))
    else:
        launch(sys.argv[1:])
