"""Ray nodes in network namespaces: addresses of their own, no shared disk where none is wanted.

They reach each other and the tests over a bridge, 10.77.N.0/24; the tests are .254. `/tmp/ray` and
every folder named `private` is each node's own. Ray runs with its dashboard and token
authentication, as a cluster of several machines would.
"""

import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.command import wait_until

# Written for whoever reads: a namespace, a bridge and addresses that nobody else uses.
NETWORK = "10.77.5"
HERE = f"{NETWORK}.254"


def need_namespaces() -> None:
    """Skips where this machine does not let tests make network namespaces."""
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip("no `ip` or `unshare`: the package iproute2 brings the first")
    tried = [
        _ip(*words.split(), check=False)
        for words in (
            "netns add sentray-try", "link add sentray-try type bridge",
            "link add sentray-try-b type veth peer name eth0 netns sentray-try",
            "link del sentray-try-b", "link del sentray-try", "netns del sentray-try",
        )
    ]  # fmt: skip
    if failed := [one for one in tried if one.returncode]:
        pytest.skip(f"no network namespaces here: {failed[0].stderr.strip()}")


class Nodes:
    """A Ray cluster, grown and shrunk by tests.

    Args:
        folder: for the token, logs and homes.
        private: folders of which every node sees an empty one of its own.
    """

    def __init__(self, folder: Path, private: Sequence[Path] = ()) -> None:
        self.folder = folder
        self.token = secrets.token_hex(16)
        self._private = [Path("/tmp/ray"), *private]
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        self._bridge = "sentray-br"
        _ip("link", "add", self._bridge, "type", "bridge", check=False)
        _ip("addr", "replace", f"{HERE}/24", "dev", self._bridge)
        # An address of its own: else a bridge takes the lowest of its interfaces', and when that
        # interface's node goes, others answer to an address that is gone, for 54 s to over 120 s.
        _ip("link", "set", self._bridge, "address", "02:53:65:6e:74:79", "up")

    @property
    def dashboard(self) -> str:
        return f"http://{NETWORK}.1:8265"

    def start_head(self, num_cpus: int = 1, **environment: str) -> None:
        self._start(1, ["--head", "--port=6379", "--dashboard-host=0.0.0.0"], num_cpus, environment)
        self._wait_for_dashboard()

    def add_network(self, number: int) -> str:
        """A namespace with address .number, in which nothing runs; its name."""
        name = self._name(number)
        # of a node that was killed: the system takes its time to forget its interface
        _ip("netns", "del", name, check=False)
        _ip("link", "del", f"{name}-b", check=False)
        _ip("netns", "add", name)
        _ip("link", "add", f"{name}-b", "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("link", "set", f"{name}-b", "master", self._bridge, "up")
        for command in (
            ("addr", "add", f"{NETWORK}.{number}/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"), ("link", "set", "lo", "up"),
        ):  # fmt: skip
            _ip("-n", name, *command)
        return name

    def start_worker(
        self,
        number: int,
        num_cpus: int = 1,
        options: Sequence[str] = (),
        small: Path | None = None,
        wait: bool = True,
        **environment: str,
    ) -> None:
        """Adds node `number`, from 2 on, and waits until the cluster knows it.

        Args:
            small: its folder for temporary files, on a disk of a megabyte; shared memory is small
                too.
            wait: False where what it is to be there for does not wait either.
        """
        if small is not None:
            environment["TMPDIR"] = str(small)
        join = [f"--address={NETWORK}.1:6379", *options]
        before = self.alive()  # one of this number that was killed counts as alive for a while
        self._start(number, join, num_cpus, environment, small)
        if not wait:
            return

        def joined() -> bool:
            new = self.alive().items() - before.items()
            return f"{NETWORK}.{number}" in dict(new).values()

        wait_until(joined, pause=0.5)

    def kill(self, number: int) -> None:
        """Takes a node away as a power cut does."""
        name = self._name(number)
        pids = _ip("netns", "pids", name, check=False).stdout.split()
        for pid in pids:
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue
        self._nodes.pop(name).wait()
        wait_until(lambda: not _ip("netns", "pids", name, check=False).stdout.split(), pause=0.2)
        _ip("netns", "del", name, check=False)

    def leave(self, number: int) -> None:
        """What a node does that is told that it will be taken away; then it is."""
        name = self._name(number)
        ray_options = {
            "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self.folder / name / "token"),
            "FQ_RAY_IP": f"{NETWORK}.1", "HOME": str(self.folder / name),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }  # fmt: skip
        # with the node's own /tmp/ray, where Ray looks for its sockets
        target = str(self._nodes[name].pid)
        subprocess.run(
            ["nsenter", f"--target={target}", "--net", "--mount", sys.executable, "-m",
             "cluster.drain", "ray-worker"],
            env=os.environ | ray_options, check=True, timeout=120, cwd=self.folder,
        )  # fmt: skip
        self.kill(number)

    def tidy(self) -> None:
        """Takes away what a test has added, and brings back the head that it took away."""
        for name in list(self._nodes):
            if name != self._name(1):
                self.kill(int(name.rpartition("-")[2]))
        if self._name(1) not in self._nodes:
            self.start_head()

    def stop(self) -> None:
        for name in list(self._nodes):
            self.kill(int(name.rpartition("-")[2]))
        _ip("link", "del", self._bridge, check=False)

    def alive(self) -> dict[str, str]:
        """Addresses of the nodes that the cluster counts as alive, by Ray's ids of them."""
        import requests

        found = requests.get(
            f"{self.dashboard}/nodes?view=summary",
            headers={"Authorization": f"Bearer {self.token}"}, timeout=(2, 20),
        ).json()  # fmt: skip
        summary = found["data"]["summary"]
        alive = [one for one in summary if one.get("raylet", {}).get("state") == "ALIVE"]
        return {one["raylet"]["nodeId"]: one.get("ip", "") for one in alive}

    def titles(self, number: int) -> list[str]:
        """What the processes of a node call themselves: `ray::...` for those that work."""
        pids = _ip("netns", "pids", self._name(number), check=False).stdout.split()
        found = []
        for pid in pids:
            try:
                raw = Path(f"/proc/{pid}/cmdline").read_bytes()
            except OSError:
                continue
            found.append(raw.replace(b"\0", b" ").decode(errors="replace").strip())
        return found

    def of_ray(self, number: int) -> Path:
        """A node's own /tmp/ray: logs, packages, sockets."""
        return Path(f"/proc/{self._nodes[self._name(number)].pid}/root/tmp/ray")

    def log(self, number: int) -> str:
        return (self.folder / f"{self._name(number)}.log").read_text(errors="replace")

    def _name(self, number: int) -> str:
        return f"sentray-{number}"

    def _start(
        self,
        number: int,
        options: list[str],
        num_cpus: int,
        environment: dict[str, str],
        small: Path | None = None,
    ) -> None:
        name, address = self.add_network(number), f"{NETWORK}.{number}"
        home = self.folder / name
        home.mkdir(exist_ok=True)
        (home / "token").write_text(self.token)
        (home / "token").chmod(0o600)
        for place in self._private:
            place.mkdir(parents=True, exist_ok=True)
        mounts = "; ".join(f"mount -t tmpfs tmpfs {place}" for place in self._private)
        if small is not None:
            mounts += f"; mount -t tmpfs -o size=1m tmpfs {small}"
            mounts += "; mount -t tmpfs -o size=64m tmpfs /dev/shm"
        ray = Path(sys.executable).with_name("ray")
        command = [
            str(ray), "start", "--block", f"--node-ip-address={address}", f"--num-cpus={num_cpus}",
            "--disable-usage-stats", "--object-store-memory=200000000", *options,
        ]  # fmt: skip
        own = {
            "HOME": str(home), "XDG_CACHE_HOME": str(home / "cache"),
            "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(home / "token"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "RAY_num_workers_soft_limit": "3", "RAY_health_check_period_ms": "1000",
        }  # fmt: skip
        inherited = {
            key: value for key, value in os.environ.items()
            if not key.startswith(("AWS_", "RAY_")) and key != "PYTHONPATH"
        }  # fmt: skip
        with open(self.folder / f"{name}.log", "wb") as log:
            self._nodes[name] = subprocess.Popen(
                ["ip", "netns", "exec", name, "unshare", "-m", "bash", "-c",
                 f'{mounts}; exec "$@"', "node", *command],
                env=inherited | own | environment, stdout=log, stderr=subprocess.STDOUT,
                cwd=home,
            )  # fmt: skip

    def _wait_for_dashboard(self) -> None:
        import requests

        def answers() -> bool:
            head = self._nodes[self._name(1)]
            assert head.poll() is None, self.log(1)
            try:
                return bool(self.alive())
            except (requests.RequestException, KeyError, ValueError):
                return False

        wait_until(answers, pause=0.5)


def _ip(*arguments: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
    found = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    assert not check or found.returncode == 0, f"ip {' '.join(arguments)}: {found.stderr}"
    return found
