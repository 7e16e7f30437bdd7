"""Addresses behind which there is no cluster, or one that does not let us in."""

import socket
import ssl
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from cluster.server import JobServer, _unreachable
from cluster.settings import ClusterSettings
from stages.errors import UserError


@pytest.fixture
def answering():
    """A server that answers every request alike; returns its port."""
    servers = []

    def start(status, body, certificate=None):
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments):
                pass

        server = HTTPServer(("127.0.0.1", 0), Handler)
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*certificate)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return server.server_address[1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def message_of(address, **settings):
    with pytest.raises(UserError) as error:
        JobServer(ClusterSettings(address=address, storage="/", **settings))
    text = str(error.value)
    assert text.startswith(address)
    assert "\n" not in text
    return text


@pytest.fixture
def certificate(tmp_path):
    """A certificate for 127.0.0.1 that nobody has signed, and its key."""
    trustme = pytest.importorskip("trustme")
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "server.pem"))
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    return str(tmp_path / "server.pem"), str(tmp_path / "ca.pem")


def test_nothing_listens():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert "nothing listens there" in message_of(f"http://127.0.0.1:{port}")


def test_no_such_host():
    assert "there is no such host" in message_of("http://no-such-host.invalid:8265")


@pytest.mark.parametrize("body", [b"<html>", b"{}", b"[1]"])
def test_a_head_that_is_not_ray(answering, body):
    port = answering(200, body)
    assert "is not the dashboard of a Ray cluster" in message_of(f"http://127.0.0.1:{port}")


def test_a_page_that_is_not_there(answering):
    port = answering(404, b"not found")
    assert "is not the dashboard of a Ray cluster" in message_of(f"http://127.0.0.1:{port}")


def test_a_port_that_speaks_no_http():
    """As Ray's own port 6379 does."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            connection, _ = server.accept()
            connection.recv(100)
            connection.sendall(b"\x00\x00\x12\x04\x00\x00\x00\x00\x00")
            connection.close()

        threading.Thread(target=answer, daemon=True).start()
        port = server.getsockname()[1]
        assert "not in plain HTTP" in message_of(f"http://127.0.0.1:{port}")


def test_a_connection_that_breaks_does_not_speak_of_https_where_that_is_written():
    error = OSError("[Errno 104] Connection reset by peer")
    assert "write https://" in str(_unreachable("http://head:8265", error))
    assert "write https://" not in str(_unreachable("https://head:8265", error))


def test_tokens(answering, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    missing, wrong = answering(401, b"Unauthorized"), answering(403, b"Forbidden")
    assert "asks for a token; set RAY_AUTH_TOKEN" in message_of(f"http://127.0.0.1:{missing}")
    monkeypatch.setenv("LAB_TOKEN", "abc")
    text = message_of(f"http://127.0.0.1:{wrong}", token_variable="LAB_TOKEN")
    assert "this token is not the cluster's; check LAB_TOKEN" in text
    monkeypatch.delenv("LAB_TOKEN")
    with pytest.raises(UserError, match="LAB_TOKEN is not set"):
        JobServer(ClusterSettings(address="http://a:1", storage="/", token_variable="LAB_TOKEN"))


def test_tls_is_expected_or_not(answering, certificate):
    server, authority = certificate
    with_tls = answering(200, b'{"ray_version": "2.60.0"}', (server, server))
    without = answering(200, b'{"ray_version": "2.60.0"}')
    assert "write https://" in message_of(f"http://127.0.0.1:{with_tls}")
    assert "write http://" in message_of(f"https://127.0.0.1:{without}")
    address = f"https://127.0.0.1:{with_tls}"
    assert "its certificate is not trusted here" in message_of(address)
    trusted = ClusterSettings(address=address, storage="/", ca_file=authority)
    assert JobServer(trusted).ray_version == "2.60.0"


def test_a_cluster_that_only_manifests_are_made_for():
    with pytest.raises(UserError, match="the cluster's file names no address"):
        JobServer(ClusterSettings(storage="/"))


def test_the_address_that_was_asked_for_is_asked(answering, monkeypatch):
    """Ray's client would ask RAY_ADDRESS instead."""
    port = answering(200, b'{"ray_version": "2.60.0"}')
    monkeypatch.setenv("RAY_ADDRESS", "http://no-such-host.invalid:8265")
    assert JobServer(ClusterSettings(address=f"http://127.0.0.1:{port}", storage="/"))
