"""A Ray session: joined or started, and ended."""

import atexit
import fcntl
import logging
import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from pipeline.run.passed import take
from pipeline.run.scratch import own_scratch, remove_dead
from pipeline.run.stopping import signals_kept
from pipeline.store.copies import LIMIT
from stages import patience
from stages.encoder.hub import COMMITS
from stages.errors import UserError

SIOCGIFADDR = 0x8915  # netdevice(7): the address of an interface

# How long threads of torch spin before they sleep while one of them is late. The default (300,000)
# spends on a busy core what the late one needs: a training of two threads beside another process
# took 3.5 s a step instead of 0.5 or so, alone as long with either: docs/log.md.
SPIN_COUNT = "5000"


@contextmanager
def ray_session(
    address: str | None, out: Callable[[str], None] = lambda line: None
) -> Iterator[None]:
    """Joins the cluster at `address` (or the job's own), else starts Ray on this machine.

    Within a session another one is the same, and may not be of another cluster. Ray that was
    started is ended; a cluster that was joined is left by the end of the process
    (`stopping.end_process`), or by `ray.shutdown`.

    Args:
        out: told where Ray's dashboard is, where there is one.

    Raises:
        UserError: nothing answers at `address`, or this process is in a session elsewhere.
    """
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # read when Ray is imported
    import ray

    if ray.is_initialized():
        _check_same(address or "")
        yield
        return
    environment: dict[str, Any] = {
        "env_vars": {
            "TOKENIZERS_PARALLELISM": "false",
            "RAY_AIR_NEW_OUTPUT": "0",
            patience.KNOWN: "1",
            "GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", SPIN_COUNT),
        },
        "worker_process_setup_hook": "pipeline.run.session.set_up_worker",
    }
    for handed_on in (LIMIT, COMMITS, patience.VARIABLE):
        if handed_on in os.environ:
            environment["env_vars"][handed_on] = os.environ[handed_on]
    os.environ.setdefault("RAY_TRAIN_ENABLE_STATE_TRACKING", "0")
    address = address or os.environ.get("RAY_ADDRESS")
    if address is not None:
        _check_reachable(address)
    try:
        with _silent_stderr(), signals_kept():
            context = ray.init(
                address=address or "local",
                runtime_env=environment,
                logging_level=logging.ERROR,
                log_to_driver=False,
            )
    except (ConnectionError, ValueError, RuntimeError) as error:
        if address is None:
            raise
        raise UserError(
            f"--address {address}: no Ray cluster can be joined there ({error}). Check the address "
            "and, if the cluster asks for a token, RAY_AUTH_MODE and RAY_AUTH_TOKEN."
        ) from None
    if context.dashboard_url:
        out(f"Ray's dashboard: http://{context.dashboard_url}")
    try:
        with own_scratch():
            yield
    finally:
        if address is None:
            ray.shutdown()
            remove_dead()


def set_up_worker() -> None:
    """What every worker does as it starts, in the folder of its job's package."""
    take(Path.cwd())
    _meet_at_own_address()
    stack = ExitStack()
    stack.enter_context(own_scratch())
    atexit.register(stack.close)


def _meet_at_own_address() -> None:
    """Lets this process's gloo be found where Ray's node is.

    Gloo would take the address of the machine's name, which many a system says is 127.0.1.1, and
    workers of other machines would look for it on themselves. NCCL looks at the interfaces itself.
    """
    import ray

    address = ray.util.get_node_ip_address()
    for _, interface in socket.if_nameindex():
        if not address.startswith("127.") and _address_of(interface) == address:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def _address_of(interface: str) -> str:
    """The IPv4 address of a network interface; "" where it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        asked = struct.pack("256s", interface.encode()[:15])
        try:
            found = fcntl.ioctl(any_socket.fileno(), SIOCGIFADDR, asked)
        except OSError:
            return ""
    return socket.inet_ntoa(found[20:24])


def _check_reachable(address: str) -> None:
    """Raises UserError within seconds where `ray.init` would try for minutes."""
    host, port = _host_and_port(address)
    if not host:
        return
    try:
        socket.create_connection((host, port), timeout=10).close()
    except OSError as error:
        raise UserError(
            f"--address {address}: no Ray cluster can be joined there ({error}). Check the address "
            "and that the cluster runs."
        ) from None


def _check_same(address: str) -> None:
    """Raises UserError where this process is in a session of another cluster than it is to use."""
    import ray

    host, port = _host_and_port(address)
    if not host or address.startswith("ray://"):  # a proxy, which knows its cluster by itself
        return
    joined = ray.get_runtime_context().gcs_address  # by a name, where it was joined by that
    there, there_port = _host_and_port(joined)
    if (_number_of(host), port) != (_number_of(there), there_port):
        raise UserError(
            f"--address {address}: this process is in a Ray session of {joined} already. End that "
            "first (ray.shutdown()), or use its address."
        )


def _number_of(host: str) -> str:
    """Its IPv4 address as others see it; the name itself where nobody knows it."""
    import ray

    try:
        number = socket.gethostbyname(host)
    except OSError:
        return host
    return ray.util.get_node_ip_address() if number.startswith("127.") else number


def _host_and_port(address: str) -> tuple[str, int]:
    """("", 0) for what has none, such as `auto`."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    return (host, int(port)) if host and port.isdigit() else ("", 0)


@contextmanager
def _silent_stderr() -> Iterator[None]:
    """Ray's C++ core announces its log level on stderr at every start; Python errors still rise."""
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
