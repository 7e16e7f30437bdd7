"""How a process ends. On request: a first signal lets work be put away, a second one ends at once.

Ctrl-C, a terminal that is closed, a job that is stopped, a machine that is about to be taken away:
all of them ask by a signal. Trainings then save a checkpoint and row-wise stages finish their open
shards.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Ended(KeyboardInterrupt):
    """The run ends at once, by this signal."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.exit_code = 128 + number


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Signals raise `Ended` in the main thread, so that nothing temporary is left behind."""

    def end(number: int, frame: FrameType | None) -> None:
        raise Ended(number)

    with _handled(end), _raised_again():
        yield


@contextmanager
def _raised_again() -> Iterator[None]:
    """An `Ended` that came where nothing can be raised, as in a weak reference's callback, is
    raised a moment later: Python would print it and go on."""
    before = sys.unraisablehook

    def hook(told: "sys.UnraisableHookArgs") -> None:
        if isinstance(told.exc_value, Ended):
            number = told.exc_value.exit_code - 128
            # by another thread: this one would be in the middle of the same callback; but to this
            # one: what it waits for is only interrupted by a signal of its own
            main = threading.main_thread().ident
            threading.Timer(0.01, signal.pthread_kill, [main, number]).start()
        else:
            before(told)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before


@contextmanager
def asked_by_signals(asked: threading.Event, say: Callable[[str], None]) -> Iterator[None]:
    """The first signal sets `asked` and is told to `say`; the next one raises `Ended`."""

    def ask(number: int, frame: FrameType | None) -> None:
        if asked.is_set():
            raise Ended(number)
        asked.set()
        say(
            f"{signal.Signals(number).name}: putting work away; once more ends at once "
            "(finished shards and checkpoints are kept)"
        )

    with _handled(ask):
        yield


@contextmanager
def signals_kept() -> Iterator[None]:
    """Who handles signals stays who it was. Ray takes SIGTERM for itself when it starts, and then
    ends without a word, its number for an exit code; one that comes meanwhile raises `Ended`."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Ray does not either
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    except SystemExit as ended:
        if ended.code == signal.SIGTERM:
            raise Ended(signal.SIGTERM) from None
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_process(exit_code: int) -> NoReturn:
    """Ends this process, and with it whatever it has on a Ray cluster that it joined.

    Without Ray's own way of leaving: its worker may still hold actors of machines that were lost,
    and answers for them after its server is gone (2.60: null pointer in ServerCall::SendReply). Two
    of about a hundred jobs that had lost machines, and had made everything, failed with code 139.
    """
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
    sys.exit(exit_code)


@contextmanager
def _handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # Python hands signals to the main thread only
        return
    # who ignores one means it: nohup
    heard = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in heard}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
