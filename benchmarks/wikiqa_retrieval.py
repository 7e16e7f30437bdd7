"""Retrieval in a domain of its own: who asks a question of Bing finds the sentence that answers it.

    SENTRAY_DATA=/path/to/data python benchmarks/wikiqa_retrieval.py --seeds 1 2 3

WikiQA's 3,047 questions and 29,258 candidate sentences, 1,473 of which answer theirs. Per seed 500
questions with an answer are held out, each with its answer; three layers of MiniLM (0, 2, 5) learn
from the rest, without knowing which sentence belongs to which question, and look for the answer of
each held-out question among 500. Settings are the quickstart's but for layers, steps and lengths,
not tuned. Prints each encoder's figures x 100, mean and standard deviation over the seeds, and the
student's share of the teacher's MRR@10.
"""

import argparse
import csv
import json
import os
import statistics
from pathlib import Path

from measured import figures_of
from spread import over_seeds

from pipeline.recipe.read import load_recipe
from pipeline.run.runner import run

SETTINGS = [
    "name=wikiqa", "sentences.source=null", "sentences.packages=null", "sentences.min_chars=10",
    "sentences.split_sentences=false", "sentences.max_chars=300", "sentences.limit=null",
    "sentences.holdout=null", "sentences.holdout_pairs=500",
    "sentences.columns={query: query, document: candidate}", "teachers.0.max_length=128",
    "student.layers=3", "student.freeze_layers=1", "student.max_length=64",
    "train.max_steps=1000", "train.checkpoint_every_steps=500", "train.dev.every_steps=250",
    "evaluate={retrieval: {kind: columns, num_pairs: 500}, speed: false}",
]  # fmt: skip


def write_table(target: Path) -> None:
    """Rows of a question and its answer, and of a question or a candidate that is not in one."""
    path = Path(os.environ["SENTRAY_DATA"]) / "rerank/WIKIQA.tsv"
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    pairs = [(row["query"], row["candidate"]) for row in rows if row["label"] == "1"]
    answered = {query for query, _ in pairs}
    pairs += [("", row["candidate"]) for row in rows if row["label"] != "1"]
    pairs += [(query, "") for query in {row["query"]: 0 for row in rows} if query not in answered]
    lines = [json.dumps({"query": query, "candidate": text}) + "\n" for query, text in pairs]
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--storage", type=Path, default=Path("runs"))
    options = parser.parse_args()
    table = options.storage / "wikiqa.jsonl"
    write_table(table)
    rows: dict[str, list[dict[str, float]]] = {}
    for seed in options.seeds:
        places = [f"sentences.path={table}", f"storage={options.storage}"]
        seeds = [f"sentences.seed={seed}", f"train.seed={seed}"]
        recipe = load_recipe("recipes/quickstart.yaml", [*SETTINGS, *places, *seeds])
        run(recipe)
        for title, figures in figures_of(recipe).items():
            rows.setdefault(title, []).append(figures)
    for title, found in rows.items():
        print(f"{title:<15}{over_seeds(found)}")
    pairs = zip(rows["student after"], rows["minilm"], strict=True)
    shares = [100 * after["MRR@10"] / teacher["MRR@10"] for after, teacher in pairs]
    print(f"of the teacher's MRR@10: {statistics.mean(shares):.1f}% ({min(shares):.1f} to "
          f"{max(shares):.1f})")  # fmt: skip


if __name__ == "__main__":
    main()
