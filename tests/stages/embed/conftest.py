"""Embedding servers of a test."""

import pytest

from tests.support.embedding_server import EmbeddingServer


@pytest.fixture
def serve():
    servers = []

    def start(*behave, **options):
        servers.append(EmbeddingServer(*behave, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()
