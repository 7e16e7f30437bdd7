"""A chat endpoint on loopback that misbehaves as it is told, and remembers what it saw."""

import asyncio
import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class Reply:
    """What the server does with a request: answers `text`, or fails in some way.

    hold: waits for this event first. drop: breaks the connection.
    """

    text: str = ""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    hold: threading.Event | None = None
    drop: bool = False
    finish_reason: str = "stop"
    raw: bytes | None = None


def rewrite_of(sentence: str) -> str:
    """A good answer about a sentence."""
    found = {"sentence1": f"In other words, {sentence}", "sentence2": f"Never that {sentence}"}
    return json.dumps(found)


class ChatServer:
    """Serves until `stop`.

    Args:
        behave: takes the sentence, which of its requests this is (from 1) and the number of all
            requests so far, and returns what to do.
    """

    def __init__(self, behave: Callable[[str, int, int], Reply]) -> None:
        self.behave = behave
        self.arrivals: list[float] = []
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.answered: Counter[str] = Counter()
        self.in_flight: list[int] = []
        self._now = 0
        self._seen: Counter[str] = Counter()
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(ready,), daemon=True)
        self._thread.start()
        ready.wait()

    def _serve(self, ready: threading.Event) -> None:
        async def main() -> None:
            app = web.Application(client_max_size=1 << 24)
            app.router.add_post("/v1/chat/completions", self._handle)
            runner = web.AppRunner(app, shutdown_timeout=0.1)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            port = runner.addresses[0][1]
            self.url = f"http://127.0.0.1:{port}/v1"
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

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if body["max_tokens"] == 4:  # not about a sentence: does the endpoint work?
            return self._respond(body, self.behave("", 1, len(self.bodies)))
        self.arrivals.append(self._loop.time())
        self.bodies.append(body)
        self.keys.append(request.headers.get("Authorization", ""))
        sentence = re.search(r"Sentence: (.*)", body["messages"][0]["content"]).group(1)  # type: ignore[union-attr]
        self._seen[sentence] += 1
        self._now += 1
        self.in_flight.append(self._now)
        try:
            reply = self.behave(sentence, self._seen[sentence], len(self.bodies))
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
        if reply.status != 200:
            error = {"error": {"message": reply.text}}
            return web.json_response(error, status=reply.status, headers=reply.headers)
        if reply.raw is not None:
            return web.Response(body=reply.raw)
        if body["max_tokens"] > 4:
            self.answered[digest(body)] += 1
        return web.json_response({
            "choices": [{"message": {"role": "assistant", "content": reply.text},
                         "finish_reason": reply.finish_reason}],
            "usage": {"prompt_tokens": 50, "completion_tokens": 20},
        })  # fmt: skip


def digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
