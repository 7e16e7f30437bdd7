"""A process is in one Ray session at a time."""

import socket
from types import SimpleNamespace

import pytest
import ray

from pipeline.run.session import ray_session
from stages.errors import UserError


def test_a_session_within_another_may_not_be_elsewhere(ray_cluster):
    port = int(ray_cluster.rpartition(":")[2])
    for same in (None, "auto", ray_cluster, f"127.0.0.1:{port}", f"localhost:{port}"):
        with ray_session(same):
            pass
    for other in (f"127.0.0.1:{port + 1}", f"192.0.2.77:{port}", f"nobody.invalid:{port}"):
        with (
            pytest.raises(UserError, match=f"{other}: .*in a Ray session of {ray_cluster} already"),
            ray_session(other),
        ):
            pass


def test_a_cluster_that_was_joined_by_a_name_is_the_same_by_name_and_number(
    ray_cluster, monkeypatch
):
    """Ray keeps a name as it was given, but for that of this machine."""
    numbers = {"head.example": "192.0.2.77", "192.0.2.77": "192.0.2.77", "other": "192.0.2.78"}
    monkeypatch.setattr(socket, "gethostbyname", numbers.__getitem__)
    joined = SimpleNamespace(gcs_address="head.example:6379")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: joined)
    for same in ("head.example:6379", "192.0.2.77:6379"):
        with ray_session(same):
            pass
    for other in ("other:6379", "head.example:6380"):
        with pytest.raises(UserError, match="in a Ray session of head"), ray_session(other):
            pass
