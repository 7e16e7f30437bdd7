"""What goes over the wire to an OpenAI-compatible endpoint, and how its messages are read."""

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

from stages.endpoint.credentials import filled
from stages.endpoint.settings import EndpointSettings

MOST_OF_A_MESSAGE = 300  # characters
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
        most = self._settings.most_answer_bytes
        try:
            async with self._session.post(self.url, json=sent, allow_redirects=False) as response:
                async for chunk in response.content.iter_chunked(1 << 16):
                    data += chunk
                    if len(data) > most:
                        raise aiohttp.ClientError(f"the answer is larger than {most >> 20} MiB")
        except TimeoutError:
            return Reply(0, f"no answer in {self._settings.timeout_seconds:g} s")
        except (aiohttp.ClientError, OSError) as error:
            connected = not isinstance(error, aiohttp.ClientConnectorError | aiohttp.InvalidURL)
            return Reply(0, f"{type(error).__name__}: {error}", connected=connected)
        wait = _seconds_from_now(response.headers.get("Retry-After", ""))
        return Reply(response.status, data.decode("utf-8", "replace"), wait)

    def hidden(self, text: str) -> str:
        """The text without secrets, in case the endpoint repeats them, as they are or in JSON."""
        for secret in [*([self._key] if self._key else []), *self._variables.values()]:
            plain = secret.get_secret_value()
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
