"""A process is in one Ray session at a time."""

import pytest

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
