"""What goes over the wire to an OpenAI-compatible chat endpoint, and how its messages are read."""

import email.utils
import json
import time
import urllib.request
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from pydantic import SecretStr

from stages.rewrite.chat import Answer, payload
from stages.rewrite.credentials import filled
from stages.rewrite.rewriting import Rewriting

MAX_ANSWER_BYTES = 1 << 20


@dataclass(frozen=True)
class Reply:
    """What came back for a request.

    status: of HTTP; 0 where nothing came back, and `text` says why. connected: whether the endpoint
    was reached. retry_after_seconds: how long it asks to wait.
    """

    status: int
    text: str
    retry_after_seconds: float | None = None
    connected: bool = True


class Endpoint:
    """A chat endpoint. Send requests while it is `opened`.

    Args:
        variables: what ${VARIABLES} in the settings' `extra` stand for.
    """

    def __init__(
        self, settings: Rewriting, key: SecretStr | None, variables: Mapping[str, SecretStr]
    ) -> None:
        self._settings, self._key, self._variables = settings, key, variables
        self.url = settings.base_url.rstrip("/") + "/chat/completions"

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Keeps connections open."""
        headers = {"Authorization": f"Bearer {self._key.get_secret_value()}"} if self._key else {}
        async with aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=self._settings.timeout_seconds),
            connector=aiohttp.TCPConnector(limit=self._settings.concurrency),
            headers=headers,
            proxy=self._proxy(),
        ) as self._session:
            yield

    def _proxy(self) -> str | None:
        """The environment's proxy for the endpoint; aiohttp's own look also reads ~/.netrc."""
        address = urlsplit(self.url)
        if urllib.request.proxy_bypass(address.hostname or ""):
            return None
        return urllib.request.getproxies().get(address.scheme)

    async def post(self, body: dict[str, Any]) -> Reply:
        """Sends a request; a `${...}` in a sentence stays as it is."""
        extra = {key: body[key] for key in self._settings.extra if key in body}
        sent, data = body | filled(extra, self._variables), bytearray()
        try:
            async with self._session.post(self.url, json=sent, allow_redirects=False) as response:
                async for chunk in response.content.iter_chunked(1 << 16):
                    data += chunk
                    if len(data) > MAX_ANSWER_BYTES:
                        raise aiohttp.ClientError("the answer is larger than 1 MiB")
        except TimeoutError:
            return Reply(0, f"no answer in {self._settings.timeout_seconds:g} s")
        except (aiohttp.ClientError, OSError) as error:
            connected = not isinstance(error, aiohttp.ClientConnectorError | aiohttp.InvalidURL)
            return Reply(0, f"{type(error).__name__}: {error}", connected=connected)
        wait = _seconds_from_now(response.headers.get("Retry-After", ""))
        return Reply(response.status, data.decode("utf-8", "replace"), wait)

    async def works(self) -> bool:
        """Whether it answers a tiny request that has nothing to do with any sentence."""
        body = payload(self._settings, "Yes.", []) | {"max_tokens": 4}
        return read_completion(await self.post(body), body) is not None

    def hidden(self, text: str) -> str:
        """The text without secrets, in case the endpoint repeats them."""
        for secret in [*([self._key] if self._key else []), *self._variables.values()]:
            text = text.replace(secret.get_secret_value(), "***")
        return text


def estimated_tokens(body: dict[str, Any]) -> int:
    """Prompt tokens, rather too many: three bytes each, and some around every message."""
    texts = [message["content"] for message in body["messages"]]
    return sum(len(text.encode("utf-8", "surrogatepass")) // 3 + 8 for text in texts) + 8


def read_completion(reply: Reply, body: dict[str, Any]) -> Answer | None:
    """The answer in a chat completion to the request `body`; None where it is none.

    Tokens that it does not count are estimated, three bytes each: a budget must hold.
    """
    if reply.status != 200:
        return None
    try:
        whole = json.loads(reply.text)
        choice = whole["choices"][0]
        usage = whole.get("usage") or {}
        content = str(choice["message"].get("content") or "")
        prompt, made = usage.get("prompt_tokens"), usage.get("completion_tokens")
        return Answer(
            content,
            str(choice.get("finish_reason") or ""),
            estimated_tokens(body) if prompt is None else int(prompt),
            len(content.encode("utf-8", "replace")) // 3 + 1 if made is None else int(made),
        )
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        return None


def error_message(text: str) -> str:
    """An error body's message, shortened."""
    try:
        whole = json.loads(text)
        error = whole["error"] if "error" in whole else whole["detail"]
        text = error["message"] if isinstance(error, dict) else str(error)
    except (ValueError, KeyError, TypeError):
        pass
    return " ".join(str(text).split())[:300]


def _seconds_from_now(retry_after: str) -> float | None:
    """Retry-After, a number or an HTTP date."""
    with suppress(ValueError):
        return max(0.0, float(retry_after))
    with suppress(ValueError):
        return max(0.0, email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time())
    return None
