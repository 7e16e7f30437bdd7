"""What Arrow's file systems lack: an object that is written only if there is none, and one that is
read in a single request.

S3, Google's store and most of their kin decide the first themselves (`If-None-Match`). The client
is obstore: Arrow has none (apache/arrow#44281).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from stages.patience import is_transient

if TYPE_CHECKING:
    from obstore.store import RetryConfig

# Few of the client's own, which say nothing: stages/patience.py makes requests again, and says so
RETRIES: "RetryConfig" = {"max_retries": 2}


class NoConditionalWrites(Exception):
    """The storage cannot, or what it needs for it is not set up; says why."""


def create_object(uri: str, name: str, data: bytes) -> bool:
    """Writes the object `name` below a root unless it is there.

    Returns:
        whether this call wrote it.

    Raises:
        NoConditionalWrites: the store does not know how, or refuses.
        OSError: it does not answer.
    """
    with _client() as obstore:
        try:
            obstore.put(_store(uri), f"{_prefix(uri)}{name}", data, mode="create")
        except obstore.exceptions.AlreadyExistsError:
            return False
    return True


def read_object(uri: str, name: str) -> bytes:
    """The object `name` below a root, as it is at one moment.

    Raises:
        FileNotFoundError: there is none.
        NoConditionalWrites: the store is not one of those that know how, or refuses.
        OSError: it does not answer.
    """
    with _client(FileNotFoundError) as obstore:
        return bytes(obstore.get(_store(uri), f"{_prefix(uri)}{name}").bytes())


@contextmanager
def _client(*expected: type[Exception]) -> Iterator[Any]:
    """obstore; what it cannot do is said, and what is expected passes."""
    try:
        import obstore
        import obstore.exceptions
    except ModuleNotFoundError:
        raise NoConditionalWrites("it needs pip install 'sentray[cluster]'") from None
    try:
        yield obstore
    except expected:
        raise
    except (obstore.exceptions.BaseError, NotImplementedError, OSError) as error:
        if is_transient(error):
            raise OSError(str(error)) from None
        line = (str(error).splitlines() or [type(error).__name__])[0]
        raise NoConditionalWrites(line[:200]) from None


def _prefix(uri: str) -> str:
    inside = urlsplit(uri).path.strip("/")
    return f"{inside}/" if inside else ""


@cache
def _store(uri: str) -> Any:
    """A client for the bucket of a root as Arrow spells it."""
    from obstore.store import GCSStore, S3Store

    parts = urlsplit(uri)
    options = {key: values[-1] for key, values in parse_qs(parts.query).items()}
    scheme, host = options.get("scheme", "https"), options.get("endpoint_override")
    more: dict[str, Any] = {"client_options": {"allow_http": scheme == "http"}}
    if parts.scheme == "s3":
        if host:
            more["endpoint"] = host if "://" in host else f"{scheme}://{host}"
        if "region" in options:
            more["region"] = options["region"]
        return S3Store(parts.netloc, retry_config=RETRIES, **more)
    if parts.scheme in ("gs", "gcs"):
        return GCSStore(parts.netloc, retry_config=RETRIES, **more)
    raise NoConditionalWrites(f"{parts.scheme}:// is not known to have them")
