"""Rows of Hugging Face data sets, streamed."""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from stages.encoder.hub import MAIN, commit_of, data_set
from stages.errors import UserError
from stages.packages import need
from stages.plain import shortened


def load_hub_dataset(
    name: str, split: str, config: str | None = None, file: str | None = None
) -> Iterator[dict[str, Any]]:
    """Rows of a Hugging Face data set (hub id or local folder), streamed.

    Raises:
        UserError: the extra is not installed, or the data set cannot be loaded or read.
    """
    with _hub(name) as datasets:
        yield from datasets.load_dataset(
            name, config, data_files=file, split=split, streaming=True, revision=_revision(name)
        )


def hub_splits(name: str, config: str | None = None) -> list[str]:
    """Splits that a Hugging Face data set has.

    Raises:
        UserError: as `load_hub_dataset`.
    """
    with _hub(name) as datasets:
        return list(datasets.get_dataset_split_names(name, config, revision=_revision(name)))


def _revision(name: str) -> str | None:
    """The commit that the run has settled on; None for a local folder."""
    return None if Path(name).is_dir() else commit_of(data_set(name), MAIN)


@contextmanager
def _hub(name: str) -> Iterator[Any]:
    need("hub", f"data set '{name}'")
    import datasets

    # RuntimeError: a script, and (NotImplementedError) a compression that it does not know
    expected: tuple[type[Exception], ...] = (
        OSError,
        ValueError,
        EOFError,
        zlib.error,
        RuntimeError,
    )
    with suppress(ImportError):  # some builds of Python lack it
        import lzma

        expected = (*expected, lzma.LZMAError)
    try:
        yield datasets
    except expected as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"data set '{name}': cannot be read ({shortened(reason)})") from error
