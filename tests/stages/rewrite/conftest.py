"""Chat servers of a test, and a translation model whose weights are random."""

from pathlib import Path

import pytest

from tests.support.chat_server import ChatServer
from tests.support.marian import make_pair


@pytest.fixture
def serve():
    servers = []

    def start(behave):
        servers.append(ChatServer(behave))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture(scope="package")
def random_marian(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pair(tmp_path_factory.mktemp("random-marian"))[0]
