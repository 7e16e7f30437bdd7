"""What Arrow's file systems lack: an object that is written only if there is none.

S3, Google's store and most of their kin decide that themselves (`If-None-Match`). The client is
obstore: Arrow has none (apache/arrow#44281).
"""

from functools import cache
from typing import Any
from urllib.parse import parse_qs, urlsplit


class NoConditionalWrites(Exception):
    """The storage cannot, or what it needs for it is not set up; says why."""


def create_object(uri: str, name: str, data: bytes) -> bool:
    """Writes the object `name` below a root unless it is there.

    Returns:
        whether this call wrote it.

    Raises:
        NoConditionalWrites: the store does not know how, or refuses.
    """
    try:
        import obstore
        from obstore.exceptions import AlreadyExistsError, BaseError
    except ModuleNotFoundError:
        raise NoConditionalWrites("it needs pip install 'sentray[cluster]'") from None
    try:
        obstore.put(_store(uri), f"{_prefix(uri)}{name}", data, mode="create")
    except AlreadyExistsError:
        return False
    except (BaseError, NotImplementedError, OSError) as error:
        line = (str(error).splitlines() or [type(error).__name__])[0]
        raise NoConditionalWrites(line[:200]) from None
    return True


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
        return S3Store(parts.netloc, **more)
    if parts.scheme in ("gs", "gcs"):
        return GCSStore(parts.netloc, **more)
    raise NoConditionalWrites(f"{parts.scheme}:// is not known to have them")
