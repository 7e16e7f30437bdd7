"""Variants of an exported student, loaded by sentence-transformers' own backends (Optimum).

    SENTRAY_DATA=/path/to/data python benchmarks/backends.py runs/students/NAME onnx
    SENTRAY_DATA=/path/to/data python benchmarks/backends.py runs/students/NAME openvino

Runs where sentence-transformers and Optimum are, which have limits of their own on transformers,
so it imports nothing of Sentray. Prints mean and lowest cosine of vectors of 1,000 Wikipedia
sentences to those of the float32 student, loaded by the same library.
"""

import argparse
import gzip
import os
from itertools import islice
from pathlib import Path

import numpy as np
import transformers
from sentence_transformers import SentenceTransformer, __version__

DATA = Path(os.environ["SENTRAY_DATA"])
ENDINGS = {"onnx": ".onnx", "openvino": ".xml"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("student", type=Path)
    parser.add_argument("backend", choices=ENDINGS)
    options = parser.parse_args()
    with gzip.open(DATA / "wiki" / "wiki1m_sentences.txt.gz", "rt") as file:
        sentences = [line.strip() for line in islice(file, 1000)]
    print(f"sentence-transformers {__version__}, transformers {transformers.__version__}")
    wanted = SentenceTransformer(str(options.student), device="cpu").encode(sentences)
    files = sorted((options.student / options.backend).glob(f"*{ENDINGS[options.backend]}"))
    for file in files:
        name = str(file.relative_to(options.student))
        model = SentenceTransformer(
            str(options.student),
            device="cpu",
            backend=options.backend,
            model_kwargs={"file_name": name},
        )
        found = model.encode(sentences)
        lengths = np.linalg.norm(found, axis=1) * np.linalg.norm(wanted, axis=1)
        cosines = (found * wanted).sum(axis=1) / lengths
        print(f"{name:<40} cosine {cosines.mean():.5f}, lowest {cosines.min():.5f}")


if __name__ == "__main__":
    main()
