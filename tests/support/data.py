"""What training reads, made by the stages themselves and opened as training opens it."""

from collections.abc import Sequence
from pathlib import Path

from stages.rows import FactorRows, TokenRows
from stages.tokens.tokeniser import Tokeniser
from stages.train.student_settings import StudentSettings
from tests.support.models import make_sentences


def write_sts(file: Path, count: int = 40) -> None:
    """Pairs whose score is the share of words they have in common, times 5."""
    sentences = make_sentences(2 * count, seed=9)
    lines = ["subset\tscore\tsentence1\tsentence2\tsplit"]
    for i, (left, right) in enumerate(zip(sentences[::2], sentences[1::2], strict=True)):
        a, b = set(left.lower().split()), set(right.lower().split())
        score = 5 * len(a & b) / len(a | b)
        lines.append(f"{'odd' if i % 2 else 'even'}\t{score:.3f}\t{left}\t{right}\ttest")
    file.write_text("\n".join(lines) + "\n")


def write_shards(folder: Path, name: str, shards: Sequence[dict[str, bytes]]) -> None:
    """Files of row-wise stages, shard by shard, as `<name>-<shard>-<file>`."""
    folder.mkdir(exist_ok=True)
    for number, files in enumerate(shards):
        for file, content in files.items():
            (folder / f"{name}-{number}-{file}").write_bytes(content)


def open_tokens(folder: Path, name: str) -> TokenRows:
    ids, offsets = (sorted(folder.glob(f"{name}-*-{file}.npy")) for file in ("ids", "offsets"))
    return TokenRows(list(zip(ids, offsets, strict=True)))


def open_factors(folder: Path, name: str, rows_per_shard: int) -> FactorRows:
    return FactorRows(sorted(folder.glob(f"{name}-*-factors.npy")), rows_per_shard)


def token_rows(
    folder: Path, name: str, texts_by_shard: Sequence[Sequence[str]], settings: StudentSettings
) -> TokenRows:
    """Tokens of texts as a student with these settings reads them."""
    tokenise = Tokeniser(settings.view_settings())
    write_shards(folder, name, [tokenise(texts) for texts in texts_by_shard])
    return open_tokens(folder, name)
