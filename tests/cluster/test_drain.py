"""What a head does before it ends, against a job server that is a stand-in.

Machines that leave a real head: test_loss.py.
"""

import json
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import pytest
import ray

from cluster import drain


@pytest.fixture
def dashboard(monkeypatch):
    """A job server with a job that ends some time after it was stopped, and one that has ended."""
    jobs = {"running": "RUNNING", "ended": "SUCCEEDED"}
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def _answer(self, body):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def do_GET(self):
            asked.append(self.path)
            if self.path == "/api/version":
                self._answer({"ray_version": "2.60.0", "version": "4"})
            elif self.path == "/api/jobs/":
                self._answer([self._job(job_id) for job_id in jobs])
            else:
                if asked.count(self.path) > 1 and "stopping" in asked:
                    jobs["running"] = "STOPPED"
                self._answer(self._job(self.path.rpartition("/")[2]))

        def do_POST(self):
            asked.append(self.path)
            asked.append("stopping")
            self._answer({"stopped": True})

        def _job(self, job_id):
            return {
                "type": "SUBMISSION", "submission_id": job_id, "status": jobs[job_id],
                "entrypoint": "python start.py", "metadata": {},
            }  # fmt: skip

        def log_message(self, *arguments):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(drain, "DASHBOARD", f"http://127.0.0.1:{server.server_port}")
    yield asked
    server.shutdown()
    server.server_close()


def test_the_head_ends_its_jobs_and_waits_for_them(dashboard):
    assert drain.main(["ray-head"]) == 0
    assert "/api/jobs/running/stop" in dashboard
    assert "/api/jobs/ended/stop" not in dashboard
    assert dashboard.count("/api/jobs/running") == 2


def test_a_machine_asks_again_until_the_head_has_heard(monkeypatch):
    """A busy head refuses the first time; then one stage still has to be put away."""
    codes, at_work, answers = [1, 0], [True, False], [True] * 9
    monkeypatch.setenv("FQ_RAY_IP", "head")
    monkeypatch.setattr(ray, "init", lambda **_: None)
    node = SimpleNamespace(get_node_id=lambda: "42")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: node)
    monkeypatch.setattr(drain, "_answers", lambda head: answers.pop())
    monkeypatch.setattr(drain, "_is_at_work", lambda node: at_work.pop(0))

    def ray_command(command, check):
        assert "--address=head:6379" in command and "--node-id=42" in command
        return SimpleNamespace(returncode=codes.pop(0))

    monkeypatch.setattr(subprocess, "run", ray_command)
    assert drain.main(["ray-worker"]) == 0
    assert not codes and not at_work
