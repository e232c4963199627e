"""TLS at the edge: what a certificate must be before anything starts, and the edge with it."""

import asyncio
import http.client
import ssl
import subprocess
from pathlib import Path

import pytest

from deployments.cli.serve import _connection, _url
from deployments.config.load import load_config, parse_config
from deployments.config.tls import check_certificate
from deployments.haproxy.settings import EdgeSettings
from engine.errors import ConfigError
from tests.deployments.haproxy.edge import running


def make(folder: Path, name: str = "edge") -> tuple[str, str]:
    """Write a self-signed certificate and its key; return their paths."""
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command, "-subj", f"/CN={name}"], check=True, capture_output=True)
    key.chmod(0o600)
    return str(certificate), str(key)


def test_what_is_wrong_is_said_before_the_start(tmp_path: Path) -> None:
    """Bug: a service that starts, and whose edge dies of its certificate again and again."""
    certificate, key = make(tmp_path)
    check_certificate(certificate, key)

    def wrong(certificate: str, key: str) -> str:
        with pytest.raises(ConfigError) as error:
            check_certificate(certificate, key)
        return f"{error.value.param}: {error.value.message}"

    other, other_key = make(tmp_path, "other")
    assert (
        wrong(certificate, other_key) == f"http.tls.certificate: {certificate}: is not of the key"
    )
    assert wrong(str(tmp_path / "no"), key).endswith(
        "no: cannot be read: No such file or directory"
    )
    assert "not valid PEM" in wrong(key, key)
    over = tmp_path / "over.pem"
    command = ["openssl", "x509", "-in", certificate, "-key", key, "-days", "-1", "-out", str(over)]
    subprocess.run(command, check=True, capture_output=True)
    assert "expired" in wrong(str(over), key)
    Path(other_key).chmod(0o644)
    assert wrong(other, other_key).startswith("http.tls.key: ") and "chmod 600" in wrong(
        other, other_key
    )
    locked = tmp_path / "locked.key"
    command = ["openssl", "pkcs8", "-topk8", "-in", key, "-out", locked, "-passout", "pass:x"]
    subprocess.run(command, check=True, capture_output=True)
    locked.chmod(0o600)
    assert "is encrypted" in wrong(certificate, str(locked))


def test_the_configuration_names_the_key(tmp_path: Path) -> None:
    """Bug: a file beside the configuration is not found, or half of the pair is taken."""
    make(tmp_path)
    path = tmp_path / "manta.yaml"
    path.write_text("http:\n  tls: {certificate: edge.pem, key: edge.key}\n")
    config = load_config(path, {})
    assert config.http.tls.key == str(tmp_path / "edge.key")
    assert _url(config) == "https://127.0.0.1:8000"
    path.write_text("http:\n  tls: {certificate: edge.pem}\n")
    with pytest.raises(ConfigError, match="certificate and key belong together"):
        load_config(path, {})
    path.write_text("http:\n  tls: {certificate: edge.pem, key: nothing.key}\n")
    with pytest.raises(ConfigError, match=r"http.tls.key: .*cannot be read"):
        load_config(path, {})


async def test_the_edge_speaks_tls_and_our_probe_knows_it(tmp_path: Path) -> None:
    """Bug: `manta serve` does not find its own service, or takes any other for it."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        writer.close()

    def ask(pair: tuple[str, str], port: int) -> bytes:
        tls = {"certificate": pair[0], "key": pair[1]}
        connection = _connection(parse_config({"http": {"tls": tls, "port": port}}, {}))
        connection.request("GET", "/ready")
        return connection.getresponse().read()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    pair, other = make(tmp_path), make(tmp_path, "other")
    with running(
        EdgeSettings(certificate=pair[0], key=pair[1]), [server.sockets[0].getsockname()[1]]
    ) as edge:
        assert (edge.folder / "edge.pem").stat().st_mode & 0o777 == 0o600
        assert await asyncio.to_thread(ask, pair, edge.port) == b"ok"
        with pytest.raises(ssl.SSLCertVerificationError):
            await asyncio.to_thread(ask, other, edge.port)
        plain = http.client.HTTPConnection("127.0.0.1", edge.port, timeout=5)
        with pytest.raises((http.client.HTTPException, ConnectionError)):
            await asyncio.to_thread(plain.request, "GET", "/")
            await asyncio.to_thread(plain.getresponse)
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
        old.maximum_version = ssl.TLSVersion.TLSv1_1
        old.set_ciphers("ALL:@SECLEVEL=0")
        with pytest.raises(ssl.SSLError):
            await asyncio.open_connection("127.0.0.1", edge.port, ssl=old)
    server.close()
