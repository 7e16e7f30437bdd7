"""What every source of rewrites has in common: the node that publishes what the filters keep."""

import json
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from stages.contract import Artifact, Fingerprinted, Shard, Stage, Work
from stages.errors import UserError
from stages.rewrite.rewrites import Rewrite, added, shard_files
from stages.samples import table_rows
from stages.sentences.build import parquet_bytes
from stages.sentences.texts import read_texts

if TYPE_CHECKING:  # sources import this, the recipe imports them, and the graph imports the recipe
    from stages.planning import Graph
    from stages.rewrite.settings import PerturbSettings

# of one sentence: enough to see how much they differ
MAX_REWRITES_SHOWN = 3


@dataclass(frozen=True)
class Rewrites(Stage):
    """Rewrites of the sentences, filtered: `rewrites.parquet`, `rejects.parquet`, `stats.json`."""

    settings: "PerturbSettings"
    where: str

    kind = "perturb"
    version = 2
    row_wise = True

    def identity(self, inputs: Mapping[str, Fingerprinted]) -> dict[str, Any]:
        whole = self.settings.identity(self.where)
        whole.pop("name")
        return {f"perturb.{key}": value for key, value in whole.items() if value is not None}

    @property
    def packages(self) -> tuple[str, ...]:
        return self.settings.filters.packages

    def check(self) -> None:
        self.settings.filters.check_packages(f"{self.where}.filters")

    def kept(self, texts: list[str], rewrites: Iterable[Rewrite]) -> Shard:
        """One shard: what the filters keep of the rewrites of its sentences."""
        self.settings.filters.check_packages("filtering rewrites")
        return Shard(shard_files(texts, rewrites, self.settings.filters), len(texts))

    def publish(
        self,
        work: Work,
        rejects: list[dict[str, str]] | None = None,
        more: dict[str, int] | None = None,
    ) -> None:
        """Publishes the node with its counts.

        Args:
            rejects: rows of the source that belong to no sentence.
            more: counts that are no shard's.

        Raises:
            UserError: not one rewrite was kept, or a shard is missing.
        """
        stats = added(json.loads(raw) for raw in work.read_shard_file("stats.json"))
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in stats["rejected"].items())
        if not stats["rewrites"]:
            work.begin_again()
            raise UserError(
                f"{work.name}: not one rewrite was kept ({reasons}). Look at the source, or change "
                f"{self.where}.filters."
            )
        work.say(
            f"{stats['rewrites']:,} rewrites of {stats['sentences_with_rewrite']:,} sentences; "
            f"rejected: {reasons or 'none'}",
            important=True,
        )
        with tempfile.TemporaryDirectory() as local:
            if rejects:
                table = parquet_bytes(pa.Table.from_pylist(rejects))
                (Path(local) / "rejects.parquet").write_bytes(table)
            work.publish(stats | (more or {}), Path(local))

    @classmethod
    def sample(
        cls, artifact: Artifact, open_input: Callable[[str], Artifact], num_rows: int
    ) -> list[str]:
        """Sentences with the rewrites below them, and what was rejected, from the first shard."""

        first = artifact.shard_numbers[0]
        texts = read_texts(open_input("sentences"), first)
        kept = pq.read_table(artifact.shard_path(first, "rewrites.parquet"))
        rows = kept.slice(0, 10_000).to_pylist()
        lines = ["  rewrites"]
        for place in list(dict.fromkeys(one["row"] for one in rows))[:num_rows]:
            lines.append(f"    {texts[place]}")
            for one in [one for one in rows if one["row"] == place][:MAX_REWRITES_SHOWN]:
                lines.append(f"      -> {one['text']}")
                if one["negative"] is not None:
                    lines.append(f"      != {one['negative']}")
        lines.append("  rejected")
        rejects = pq.read_table(artifact.shard_path(first, "rejects.parquet")).slice(0, num_rows)
        for one in rejects.to_pylist():
            lines += [f"    {texts[one['row']]}", f"      {one['reason']}: {one['text']}"]
        if "rejects.parquet" in artifact.files:  # rows of a pair file that belong to no sentence
            lines += table_rows("rejects", artifact.file_path("rejects.parquet"), num_rows)
        return lines


def plan(graph: "Graph") -> None:
    for number, whole in enumerate(graph.recipe.perturb):
        whole.source.plan(graph, whole, f"perturb[{number}]")
