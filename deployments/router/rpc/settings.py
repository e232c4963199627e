"""GrpcSettings: the address and the certificate of the gRPC server."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GrpcSettings:
    """The settings of a gRPC server.

    certificate, key: PEM files; "": no TLS.
    stop_seconds: time for running streams to end when the server stops.
    """

    host: str
    port: int
    certificate: str = ""
    key: str = ""
    stop_seconds: float = 3600.0
