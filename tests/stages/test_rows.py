"""Rows in memory-mapped shards: many of them, and what is no array."""

import resource
from pathlib import Path

import numpy as np
import pytest

from stages.rows import FactorRows, TokenRows, mapped


@pytest.fixture
def few_files():
    """As many open files as a process has by default on many machines."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, hard), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_shards_beyond_the_limit_of_open_files(tmp_path, few_files):
    """400 shards of three arrays, 256 files at once."""
    factors, tokens = shards_in(tmp_path)
    check_rows(FactorRows(factors, 2, renormalise=False), TokenRows(tokens))


def test_shards_beyond_the_limit_of_maps(tmp_path, monkeypatch):
    """A kernel grants a process 65,530: those used last are kept."""
    monkeypatch.setattr("stages.rows.MOST_MAPS", 7)
    factors, tokens = shards_in(tmp_path)
    before = num_maps(tmp_path)
    found = FactorRows(factors, 2, renormalise=False), TokenRows(tokens)
    check_rows(*found)
    assert before == 0 and num_maps(tmp_path) == 2 * 7
    assert found[0].num_rows == found[1].num_rows == 800


def num_maps(folder):
    return Path("/proc/self/maps").read_text().count(str(folder))


def shards_in(tmp_path):
    factors, tokens = [], []
    for number in range(400):
        names = [tmp_path / f"{number}.{name}.npy" for name in ("factors", "ids", "offsets")]
        np.save(names[0], np.full((2, 3), number, np.float16))
        np.save(names[1], np.array([number, number + 1, number + 2], np.uint16))
        np.save(names[2], np.array([0, 1, 3]))
        factors.append(names[0])
        tokens.append((names[1], names[2]))
    return factors, tokens


def check_rows(factors, tokens):
    rows = np.array([0, 1, 799, 400, 13])
    taken = factors.take(rows)
    np.testing.assert_array_equal(taken[:, 0], [0, 0, 399, 200, 6])
    ids = tokens.take(rows)
    assert [one.tolist() for one in ids] == [[0], [1, 2], [400, 401], [200], [7, 8]]


@pytest.mark.parametrize(
    "array",
    [np.zeros((0, 3), np.float16), np.array(3.5), np.arange(6, dtype=">i4").reshape(2, 3),
     np.arange(5, dtype=np.uint16)],
)  # fmt: skip
def test_a_map_is_the_array(tmp_path, array):
    np.save(tmp_path / "a.npy", array)
    found = mapped(tmp_path / "a.npy")
    np.testing.assert_array_equal(found, array)
    assert found.dtype == array.dtype and not found.flags.writeable


def test_what_is_no_whole_array(tmp_path):
    file = tmp_path / "a.npy"
    np.save(file, np.arange(100))
    whole = file.read_bytes()
    for data in (b"", b"nonsense", whole[:-1], whole + b"x", whole[:50]):
        file.write_bytes(data)
        with pytest.raises(ValueError):  # noqa: PT011 - numpy's own texts
            mapped(file)
    np.save(file, np.asfortranarray(np.ones((2, 3))))
    with pytest.raises(ValueError, match="not a whole array of numbers"):
        mapped(file)
