"""What goes over the wire to an OpenAI-compatible endpoint, and how its messages are read."""

import asyncio
import base64
import email.utils
import json
import time
import urllib.request
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import SplitResult, unquote, urlsplit

import aiohttp
from pydantic import SecretStr

from stages.endpoint.credentials import filled
from stages.endpoint.settings import EndpointSettings

T = TypeVar("T")

MOST_OF_A_MESSAGE = 300  # characters
# An answer is waited for in turns; one that ends so late is not the last (`_within`).
SECONDS_OF_A_TURN, SECONDS_LATE = 1.0, 0.1
# The endpoint was not asked: what such a request would have cost need not be counted.
NOT_REACHED = (aiohttp.ClientConnectorError, aiohttp.ClientHttpProxyError, aiohttp.InvalidURL)
UNPAID = "insufficient_quota"


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
    """An endpoint. Send requests while it is `opened`.

    Args:
        variables: what ${VARIABLES} in the settings' `extra` stand for.
    """

    def __init__(
        self,
        settings: EndpointSettings,
        key: SecretStr | None,
        variables: Mapping[str, SecretStr],
    ) -> None:
        self._settings, self._key, self._variables = settings, key, variables
        self.url = settings.base_url.rstrip("/") + settings.route
        self._proxy, self._login, self._password = _proxy_for(urlsplit(self.url))

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Keeps connections open."""
        async with aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None),  # `_within` has another clock
            connector=aiohttp.TCPConnector(limit=self._settings.concurrency),
        ) as self._session:
            yield

    async def post(self, body: dict[str, Any]) -> Reply:
        """Sends a request; a `${...}` in a sentence stays as it is."""
        extra = {key: body[key] for key in self._settings.extra if key in body}
        sent, seconds = body | filled(extra, self._variables), self._settings.timeout_seconds
        try:
            return await _within(seconds, self._exchange(sent))
        except TimeoutError:
            return Reply(0, f"no answer in {seconds:g} s")
        except (aiohttp.ClientError, OSError) as error:
            connected = not isinstance(error, NOT_REACHED)
            return Reply(0, f"{type(error).__name__}: {error}", connected=connected)

    async def _exchange(self, sent: dict[str, Any]) -> Reply:
        data, most = bytearray(), self._settings.most_answer_bytes
        headers = {"Authorization": f"Bearer {self._key.get_secret_value()}"} if self._key else {}
        if not self.url.startswith("https:"):  # else the proxy is asked for a tunnel first
            headers |= self._login
        # a session's own headers would go to the proxy too, with the key
        async with self._session.post(
            self.url, json=sent, allow_redirects=False, headers=headers, proxy=self._proxy,
            proxy_headers=self._login,
        ) as response:  # fmt: skip
            async for chunk in response.content.iter_chunked(1 << 16):
                data += chunk
                if len(data) > most:
                    raise aiohttp.ClientError(f"the answer is larger than {most >> 20} MiB")
        wait = _seconds_from_now(response.headers.get("Retry-After", ""))
        return Reply(response.status, data.decode("utf-8", "replace"), wait)

    def hidden(self, text: str) -> str:
        """The text without secrets, in case the endpoint or a proxy repeats them, as they are or in
        JSON."""
        for secret in (self._key, self._password, *self._variables.values()):
            plain = secret.get_secret_value() if secret else ""
            if not plain:
                continue
            in_json = (json.dumps(plain, ensure_ascii=ascii)[1:-1] for ascii in (True, False))
            for form in (plain, *in_json):
                text = text.replace(form, "***")
        return text

    def message(self, text: str) -> str:
        """An error body's message, without secrets, shortened."""
        error = _error_in(text)
        said = error.get("message", error) if isinstance(error, dict) else error
        whole = text
        with suppress(RecursionError):
            whole = said if isinstance(said, str) else json.dumps(said, ensure_ascii=False)
        return " ".join(self.hidden(whole).split())[:MOST_OF_A_MESSAGE]


async def _within(seconds: float, work: Coroutine[Any, Any, T]) -> T:
    """The result of what is awaited, if it comes in that time.

    Time in which nobody could listen counts as one turn, and is not the end: the event loop stands
    still while whoever takes the results stores a shard, for minutes where an object store is
    silent. What had been answered meanwhile would be given up, and paid again.

    Raises:
        TimeoutError: it does not.
    """
    clock, task = asyncio.get_running_loop().time, asyncio.ensure_future(work)
    try:
        left = seconds
        while left > 0:
            turn, begun = min(left, SECONDS_OF_A_TURN), clock()
            done, _ = await asyncio.wait({task}, timeout=turn)
            if done:
                return task.result()
            left -= turn
            if left <= 0 and clock() - begun > turn + SECONDS_LATE:
                left = SECONDS_OF_A_TURN
    finally:
        if task.cancel():
            await asyncio.wait({task})  # its connection is closed
    raise TimeoutError


def _proxy_for(address: SplitResult) -> tuple[str | None, dict[str, str], SecretStr | None]:
    """The environment's proxy for an endpoint, without user and password, which errors would show;
    a header of these; the password. (aiohttp's own look also reads ~/.netrc.)"""
    proxy = urllib.request.getproxies().get(address.scheme)
    if not proxy or urllib.request.proxy_bypass(address.hostname or ""):
        return None, {}, None
    parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    bare = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    if parts.username is None:
        return bare, {}, None
    password = unquote(parts.password or "")
    login = base64.b64encode(f"{unquote(parts.username)}:{password}".encode()).decode()
    return bare, {"Proxy-Authorization": f"Basic {login}"}, SecretStr(password)


def bytes_as_tokens(text: str) -> int:
    """Tokens of a text that nobody has counted, rather too many: three bytes each."""
    return len(text.encode("utf-8", "surrogatepass")) // 3


def parsed(text: str) -> Any:
    """JSON; None where it is none, or is nested deeper than Python reads."""
    with suppress(ValueError, RecursionError):
        return json.loads(text)
    return None


def counted(whole: dict[str, Any], field: str, estimate: int) -> int:
    """Tokens by an answer's `usage`. A budget must hold: what is no count is estimated."""
    usage = whole.get("usage")
    tokens = usage.get(field) if isinstance(usage, dict) else None
    return tokens if type(tokens) is int and 0 <= tokens < 1 << 63 else estimate


def is_unpaid(reply: Reply) -> bool:
    """Whether it is an account without credit, which OpenAI's API answers with 429 as well."""
    error = _error_in(reply.text)
    return isinstance(error, dict) and UNPAID in (error.get("code"), error.get("type"))


def _error_in(text: str) -> Any:
    """What an error body says went wrong, or all of it."""
    whole = parsed(text)
    with suppress(KeyError, TypeError):
        return whole["error"] if "error" in whole else whole["detail"]
    return text


def _seconds_from_now(retry_after: str) -> float | None:
    """Retry-After, a number or an HTTP date."""
    with suppress(ValueError):
        return max(0.0, float(retry_after))
    with suppress(ValueError):
        return max(0.0, email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time())
    return None
