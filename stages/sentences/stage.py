"""The sentences of a recipe: the root of its graph. A rerun reads again: the shuffle is global."""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.contract import Artifact, Fingerprinted, Shard, Stage, Work
from stages.packages import need
from stages.planning import Graph
from stages.samples import table_rows
from stages.sentences.settings import SentencesSettings


@dataclass(frozen=True)
class Sentences(Stage):
    """Text to cleaned, distinct, shuffled sentences: `rows.parquet` (id, text, maybe kind) in each
    shard."""

    settings: SentencesSettings

    kind = "sentences"
    version = 1

    def identity(self, inputs: Mapping[str, Fingerprinted]) -> dict[str, Any]:
        found = self.settings.identity("sentences")
        return {f"sentences.{key}": value for key, value in found.items()}

    @property
    def packages(self) -> tuple[str, ...]:
        settings = self.settings
        cuts = settings.split_sentences or settings.source == "python-docs"
        reads_hub = settings.dataset is not None
        return (*(["datasets"] if reads_hub else []), *(["sentencex"] if cuts else []))

    def check(self) -> None:
        if self.settings.dataset is not None:
            need("hub", "sentences.dataset")

    def make(self, work: Work, loaded: Any) -> None:
        from stages.sentences.build import build_sentences

        size = self.settings.rows_per_shard
        rows: dict[int, int] = {}
        with tempfile.TemporaryDirectory() as local:

            def emit_file(name: str, data: bytes) -> None:
                (Path(local) / name).write_bytes(data)

            def emit_shard(number: int, files: dict[str, bytes], num_rows: int) -> None:
                work.put_shard(number, Shard(files, num_rows))
                rows[number] = num_rows
                work.say(f"{number * size + num_rows:,} sentences")

            stats = build_sentences(self.settings, emit_shard, emit_file)
            work.publish(stats, Path(local), rows)

    def report(self, artifact: Artifact) -> dict[str, str | list[dict[str, Any]]]:
        stats = artifact.stats
        dropped = ", ".join(f"{count:,} {reason}" for reason, count in stats["rejected"].items())
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in stats.get("kinds", {}).items())
        return {
            "Sentences": f"{stats['kept']:,} sentences{f' ({kinds})' if kinds else ''} from "
            f"{stats['read']:,} texts. Dropped: {dropped or 'none'}."
        }

    @classmethod
    def sample(
        cls, artifact: Artifact, open_input: Callable[[str], Artifact], num_rows: int
    ) -> list[str]:
        first = artifact.shard_numbers[0]
        lines = table_rows("sample", artifact.shard_path(first, "rows.parquet"), num_rows)
        for name in ("holdout.parquet", "rejects.parquet"):
            if name in artifact.files:
                title = name.removesuffix(".parquet")
                lines += table_rows(title, artifact.file_path(name), num_rows)
        return lines


def plan(graph: Graph) -> None:
    graph.add("sentences", Sentences(graph.recipe.sentences), [])
