"""Lines that show rows of an artifact, for `sentray show`."""

from pathlib import Path


def table_rows(title: str, path: Path, num_rows: int) -> list[str]:
    """The first rows of a Parquet file below a heading."""
    import pyarrow.parquet as pq

    rows = pq.read_table(path).slice(0, num_rows).to_pylist()
    return [f"  {title}"] + ["    " + "  |  ".join(map(str, row.values())) for row in rows]


def factor_rows(path: Path, num_rows: int) -> list[str]:
    """The first rows of a factor matrix."""
    import numpy as np

    factors = np.load(path, mmap_mode="r", allow_pickle=False)
    lines = [f"  sample    {factors.shape[1]} dimensions, {factors.dtype}"]
    with np.printoptions(precision=4, suppress=True, threshold=8, edgeitems=4):
        lines += [f"    {row}" for row in factors[:num_rows].astype(np.float32)]
    return lines
