"""The files of SentEval's task folders, as its get_transfer_data.bash leaves them."""

from collections.abc import Iterator
from pathlib import Path

from stages.errors import UserError
from stages.evaluate.tables import Row

# Sentences of either label, a file each, latin-1: what SentEval calls positive, and negative.
BINARY = {
    "rt-polarity.pos": "rt-polarity.neg",  # MR
    "custrev.pos": "custrev.neg",  # CR
    "subj.objective": "subj.subjective",  # SUBJ
    "mpqa.pos": "mpqa.neg",  # MPQA
}


def sts_rows(folder: Path) -> list[Row]:
    """Pairs with scores: `STS.input.X.txt` with `STS.gs.X.txt`, `sts-SPLIT.csv`, `SICK_*.txt`."""
    rows: list[Row] = []
    for pairs in sorted(folder.glob("STS.input.*.txt")):
        name = pairs.name.removeprefix("STS.input.").removesuffix(".txt")
        gold = folder / f"STS.gs.{name}.txt"
        if not gold.is_file():
            raise UserError(f"{pairs}: its gold scores {gold.name} are missing")
        lines = pairs.read_text(encoding="utf-8").splitlines()
        scores = gold.read_text(encoding="utf-8").splitlines()
        if len(lines) != len(scores):
            raise UserError(f"{pairs}: {len(lines)} pairs, but {gold.name} has {len(scores)}")
        for line, score in zip(lines, scores, strict=True):
            left, right, *_ = [*line.split("\t"), ""]
            rows.append(
                dict(sentence1=left, sentence2=right, score=score, subset=name, split="test")
            )
    for file in sorted(folder.glob("sts-*.csv")):
        split = file.stem.removeprefix("sts-")
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
            parts = _columns(line, 7, file, number)
            rows.append(
                dict(sentence1=parts[5], sentence2=parts[6], score=parts[4], subset="", split=split)
            )
    for file in sorted(folder.glob("SICK_*.txt")):
        split = {"train": "train", "trial": "dev"}.get(file.stem.split("_")[1], "test")
        lines = file.read_text(encoding="utf-8").splitlines()[1:]
        for number, line in enumerate(lines, start=2):
            parts = _columns(line, 4, file, number)
            rows.append(
                dict(sentence1=parts[1], sentence2=parts[2], score=parts[3], subset="", split=split)
            )
    if not rows:
        raise UserError(f"{folder}: no SentEval STS files (STS.input.*.txt, sts-*.csv, SICK_*.txt)")
    return rows


def _columns(line: str, least: int, file: Path, number: int) -> list[str]:
    cells = line.split("\t")
    if len(cells) < least:
        raise UserError(f"{file}, line {number}: there are fewer than {least} columns")
    return cells


def transfer_rows(folder: Path) -> list[Row]:
    """Examples with labels, in the order of the files: MR, CR, SUBJ, MPQA, SST/binary, TREC, MRPC.

    Raises:
        UserError: the folder holds none of these, or one of two files is missing.
    """
    for positive, negative in BINARY.items():
        if (folder / positive).is_file():
            files = (folder / positive, "1"), (_there(folder / negative), "0")
            return [_row(line, label) for file, label in files for line in _lines(file, "latin-1")]
    found: list[Row] = []
    for file in sorted(folder.glob("sentiment-*")):  # SST/binary
        for line in _lines(file, "utf-8"):
            text, _, label = line.rpartition("\t")
            found.append(_row(text, label, split=file.name.removeprefix("sentiment-")))
    for name, split in (("train_5500.label", "train"), ("TREC_10.label", "test")):
        if (folder / name).is_file():
            for line in _lines(folder / name, "latin-1"):
                label, _, text = line.partition(" ")
                found.append(_row(text, label.partition(":")[0], split=split))
    for split in ("train", "test"):
        file = folder / f"msr_paraphrase_{split}.txt"
        lines = list(_lines(file, "utf-8-sig"))[1:] if file.is_file() else []
        for number, line in enumerate(lines, start=2):
            cells = _columns(line, 5, file, number)
            found.append(dict(sentence1=cells[3], sentence2=cells[4], label=cells[0], split=split))
    if not found:
        raise UserError(f"{folder}: none of SentEval's transfer tasks (MR, CR, SUBJ, MPQA, "
                        "SST/binary, TREC, MRPC) is here")  # fmt: skip
    return found


def _row(text: str, label: str, **more: str) -> Row:
    # SentEval reads an empty line, of which CR has four, as a period
    return {"text": text if text.strip() else ".", "label": label, **more}


def _there(file: Path) -> Path:
    if not file.is_file():
        raise UserError(f"{file}: missing; the other label's file is there")
    return file


def _lines(file: Path, encoding: str) -> Iterator[str]:
    # not splitlines(), which cuts at characters that latin-1 text has in its middle
    yield from file.read_text(encoding=encoding).removesuffix("\n").split("\n")
