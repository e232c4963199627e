"""Checks of the proxy's TLS certificate before a start, and an SSL context for clients that trust
it."""

import ssl
from pathlib import Path

from engine.errors import ConfigError


def check_certificate(certificate: str, key: str) -> None:
    """Check that a server can use a certificate and key, and that clients would accept them today.

    Host names and issuers are not checked. Raises ConfigError (param http.tls.certificate or .key).

    certificate, key: PEM files.
    """
    for name, path in (("certificate", certificate), ("key", key)):
        param = f"http.tls.{name}"
        try:
            with open(path, "rb") as file:
                file.read(1)
            if name == "key" and Path(path).stat().st_mode & 0o007:
                raise ConfigError(f"{path}: every user may read it; chmod 600 {path}", param=param)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}", param=param) from None

    def no_password() -> str:
        raise ConfigError(f"{key}: is encrypted; the edge cannot ask", param="http.tls.key")

    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        server.load_cert_chain(certificate, key, no_password)
    except ssl.SSLError as error:
        mismatch = error.reason == "KEY_VALUES_MISMATCH"
        reason = "is not of the key" if mismatch else "or the key is not valid PEM"
        raise ConfigError(f"{certificate}: {reason}", param="http.tls.certificate") from None
    try:
        _shake_hands(server, client_context(certificate))
    except ssl.SSLError as error:
        reason = getattr(error, "verify_message", None) or error.reason
        raise ConfigError(f"{certificate}: {reason}", param="http.tls.certificate") from None


def client_context(certificate: str) -> ssl.SSLContext:
    """Return an SSL context that trusts a server with this certificate, under any name, and no
    other.

    Raises ssl.SSLError, OSError.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    # The certificate need not be a root certificate.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(certificate)
    return context


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> None:
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(to_client, to_server),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    for _ in range(3):  # enough flights for TLS 1.3 and 1.2
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
