"""Endpoints on loopback that misbehave as they are told, and remember what they saw.

tests/support/chat_server.py is one for chat, tests/support/embedding_server.py one for embeddings.
"""

import asyncio
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class Reply:
    """What the server does with a request: answers (of chat: `text`), or fails in some way.

    hold: waits for this event first. drop: breaks the connection. raw: the body of its answer.
    change: takes a good answer, and alters it or gives another.
    """

    text: str = ""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    hold: threading.Event | None = None
    drop: bool = False
    finish_reason: str = "stop"
    raw: bytes | None = None
    change: Callable[[dict[str, Any]], Any] | None = None


class EndpointServer(ABC):
    """Serves until `stop`.

    answered: how often each thing was answered that is paid for.

    Args:
        behave: takes what a request is about (`about`; something false: nothing, it is a probe),
            which of the requests about that it is (from 1) and the number of all requests so far,
            and returns what to do.
        address: where it listens.
    """

    route: str

    def __init__(
        self, behave: Callable[[Any, int, int], Reply], address: str = "127.0.0.1"
    ) -> None:
        self.behave, self._address = behave, address
        self.arrivals: list[float] = []
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.answered: Counter[str] = Counter()
        self.in_flight: list[int] = []
        self._now = 0
        self._seen: Counter[Hashable] = Counter()
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(ready,), daemon=True)
        self._thread.start()
        ready.wait()

    def _serve(self, ready: threading.Event) -> None:
        async def main() -> None:
            app = web.Application(client_max_size=1 << 24)
            app.router.add_post(f"/v1{self.route}", self._handle)
            runner = web.AppRunner(app, shutdown_timeout=0.1)
            await runner.setup()
            site = web.TCPSite(runner, self._address, 0)
            await site.start()
            port = runner.addresses[0][1]
            self.url = f"http://{self._address}:{port}/v1"
            ready.set()
            await self._stopping.wait()
            await runner.cleanup()

        self._loop.run_until_complete(main())

    @property
    def in_flight_now(self) -> int:
        """Requests whose sender is still there and waits."""
        return self._now

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()

    @abstractmethod
    def about(self, body: dict[str, Any]) -> Any:
        """What a request is about; something false of a probe, which is about nothing."""

    @abstractmethod
    def answer(self, body: dict[str, Any], reply: Reply) -> dict[str, Any]:
        """A good answer."""

    @abstractmethod
    def paid(self, body: dict[str, Any]) -> list[str]:
        """What is paid for when a request is answered."""

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        about = self.about(body)
        if not about:
            return self._respond(body, self.behave(about, 1, len(self.bodies)))
        self.arrivals.append(self._loop.time())
        self.bodies.append(body)
        self.keys.append(request.headers.get("Authorization", ""))
        self._seen[about] += 1
        self._now += 1
        self.in_flight.append(self._now)
        try:
            reply = self.behave(about, self._seen[about], len(self.bodies))
            while reply.hold is not None and not reply.hold.is_set():
                if request.transport is None or request.transport.is_closing():
                    break
                await asyncio.sleep(0.002)
            if request.transport is None or request.transport.is_closing():
                return web.Response()  # who asked has gone: nobody gets this answer
            if reply.drop:
                request.transport.close()
                return web.Response()
            return self._respond(body, reply)
        finally:
            self._now -= 1

    def _respond(self, body: dict[str, Any], reply: Reply) -> web.Response:
        if reply.raw is not None:
            return web.Response(body=reply.raw, status=reply.status)
        if reply.status != 200:
            error = {"error": {"message": reply.text}}
            return web.json_response(error, status=reply.status, headers=reply.headers)
        if self.about(body):
            self.answered.update(self.paid(body))
        answer = self.answer(body, reply)
        return web.json_response(reply.change(answer) if reply.change else answer)
