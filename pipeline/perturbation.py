"""The perturb nodes, in whatever process they run: read sentences, call the source, store rewrites.

Units of commit are smaller than a shard: translations are laid down a few hundred sentences at a
time, and every answer of a chat model goes to the journal (`answers/`), which all recipes share.
"""

import json
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.job import Job, Say, missing_shards, read_texts, row_source
from stages.errors import UserError
from stages.perturb.filters import QualityFilter
from stages.perturb.rewrites import Rewrite, added, shard_files
from stages.perturb.settings import PerturbSettings
from stages.sentences import parquet_bytes

ANSWERS = "answers"  # folder of the journal of chat models' answers, shared by all recipes


def source_of(job: Job) -> tuple[PerturbSettings, str]:
    """Settings of the node's source of rewrites, and where the recipe has them."""
    names = [source.name for source in job.recipe.perturb]
    number = names.index(job.who)
    return job.recipe.perturb[number], f"perturb[{number}]"


class RewriteStore:
    """Filters and stores the rewrites of whole shards."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._judge = QualityFilter(source_of(job)[0].filters)

    def put(self, number: int, rewrites: Iterable[Rewrite]) -> None:
        texts = read_texts(self._job.input("sentences"), number)
        files = shard_files(texts, rewrites, self._judge)
        self._job.store.put_shard(self._job.folder, number, files, len(texts))


def publish_rewrites(
    job: Job,
    say: Say,
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
    store = job.store
    shards = job.whole_shards()
    stats = added(
        json.loads(store.root.read(f"{job.folder}/{shard.files['stats.json'].path}"))
        for shard in shards
    )
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in stats["rejected"].items())
    summary = (
        f"{stats['rewrites']:,} rewrites of {stats['sentences_with_rewrite']:,} sentences; "
        f"rejected: {reasons or 'none'}"
    )
    if not stats["rewrites"]:
        store.forget(job.folder)
        raise UserError(
            f"{job.node.name}: not one rewrite was kept ({reasons}). Look at the source, or change "
            f"{source_of(job)[1]}.filters."
        )
    say(summary, important=True)
    with tempfile.TemporaryDirectory() as local:
        if rejects:
            table = parquet_bytes(pa.Table.from_pylist(rejects))
            (Path(local) / "rejects.parquet").write_bytes(table)
        job.publish(stats | (more or {}), store.put_files(job.folder, Path(local)))


def make_pairs(job: Job, say: Say) -> None:
    """Joins the user's own pairs to the sentences, all shards in one go."""
    from stages.perturb.pairs import PairFile

    source, where = source_of(job)
    assert source.pairs is not None
    sentences = job.input("sentences")
    texts = (read_texts(sentences, shard.number) for shard in sentences.shards)
    pairs = PairFile(source.pairs, texts, job.recipe.sentences.unicode, f"{where}.pairs")
    store = RewriteStore(job)
    for number, rewrites in enumerate(pairs.shards()):
        store.put(number, rewrites)
    if pairs.num_unknown:
        say(f"{pairs.num_unknown:,} rows of {where}.pairs.path were left out", important=True)
    publish_rewrites(job, say, pairs.unknown, {"rows_left_out": pairs.num_unknown})


class TranslationWorker:
    """One of the two passes of back-translation over single shards.

    The first lays down pivot texts, the second reads them and stores the shard's translations.
    Both commit every few hundred sentences and skip what is there.
    """

    def __init__(self, job: Job, back: bool) -> None:
        from stages.perturb.translate import Translator

        self._job, self._back = job, back
        source, _ = source_of(job)
        assert source.backtranslation is not None
        self._settings = source.backtranslation
        model = self._settings.from_pivot if back else self._settings.to_pivot
        self._translate = Translator(model, self._settings)

    def __call__(self, number: int) -> int:
        """Makes the shard's units; returns its number of sentences."""
        texts = read_texts(self._job.input("sentences"), number)
        size = self._settings.rows_per_unit
        starts = range(0, len(texts), size)
        for start in starts:
            if self._root.exists(self._unit(number, start, self._back)):
                continue
            unit: list[list[str | None]] = [[text, None] for text in texts[start : start + size]]
            if self._back:
                unit = self._read(number, start, False)
            seed = (self._settings.seed, number, start, int(self._back))
            made = json.dumps(self._translated(unit, seed)).encode()
            self._root.write(self._unit(number, start, self._back), made)
        if self._back:
            pivots, rows = (
                [row for start in starts for row in self._read(number, start, back)]
                for back in (False, True)
            )
            table = pa.table({
                "pivot": [text for text, _ in pivots],
                "text": [text for text, _ in rows],
                "reason": pa.array([reason for _, reason in rows], pa.string()),
            })  # fmt: skip
            files = {"translations.parquet": parquet_bytes(table)}
            self._job.store.put_shard(self._job.folder, number, files, len(texts))
            for folder in ("pivot", "back"):
                self._root.delete(f"{self._job.work_folder}/{folder}/{number:05d}")
        return len(texts)

    @property
    def _root(self) -> Any:
        return self._job.store.root

    def _read(self, number: int, start: int, back: bool) -> list[list[str | None]]:
        unit = json.loads(self._root.read(self._unit(number, start, back)))
        return list(unit)

    def _unit(self, number: int, start: int, back: bool) -> str:
        folder = "back" if back else "pivot"
        size = self._settings.rows_per_unit
        return f"{self._job.work_folder}/{folder}/{number:05d}/{start}-{size}.json"

    def _translated(
        self, unit: list[list[str | None]], seed: tuple[int, ...]
    ) -> list[list[str | None]]:
        """Rows of (text, reason); those that already have a reason stay as they are."""
        todo = [place for place, (_, reason) in enumerate(unit) if reason is None]
        found = self._translate([unit[place][0] or "" for place in todo], seed)
        out = list(unit)
        for place, one in zip(todo, found, strict=True):
            text = one.text or unit[place][0] if one.reason else one.text
            out[place] = [text, one.reason or (None if text else "empty_translation")]
        return out


class TranslationFilter:
    """Published translations of single shards as rewrites."""

    def __init__(self, job: Job) -> None:
        self._source = row_source(job)
        self._store = RewriteStore(job)

    def __call__(self, number: int) -> int:
        """Filters one shard; returns its number of sentences."""
        table = pq.read_table(self._source.shard_path(number, "translations.parquet")).to_pylist()
        self._store.put(
            number,
            [Rewrite(row, one["text"], reason=one["reason"]) for row, one in enumerate(table)],
        )
        return len(table)


@dataclass
class _OpenShard:
    left: int
    rewrites: list[Rewrite] = field(default_factory=list)


class OpenShards:
    """Shards whose sentences are out for rewriting; each is stored when its last one is back."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._store = RewriteStore(job)
        self._open: dict[int, _OpenShard] = {}

    def sentences(self) -> Iterator[tuple[tuple[int, int], str]]:
        """((shard, place), sentence) of everything that is missing."""
        for number in missing_shards(self._job)[0]:
            texts = read_texts(self._job.input("sentences"), number)
            self._open[number] = _OpenShard(len(texts))
            for place, text in enumerate(texts):
                yield (number, place), text

    def add_all(self, outcomes: Iterator[tuple[tuple[int, int], Any]]) -> None:
        """Takes the outcome (stages.perturb.chat.Outcome) of every sentence, in any order."""
        for (number, place), found in outcomes:
            shard = self._open[number]
            shard.rewrites.append(Rewrite(place, found.text, found.negative, found.reason))
            shard.left -= 1
            if not shard.left:
                self._store.put(number, shard.rewrites)
                del self._open[number]


def make_rewriting(job: Job, say: Say, key: Any, variables: Any) -> None:
    """Asks a chat endpoint. One process is enough: it waits, and its limits hold for the stage.

    Args:
        key: the endpoint's key (stages.perturb.endpoint.Secret) or None.
        variables: what ${VARIABLES} of `extra` stand for, as Secrets.
    """
    from stages.perturb.client import ChatClient
    from stages.perturb.journal import Journal

    source, _ = source_of(job)
    assert source.rewriting is not None
    journal = Journal(job.store.root, ANSWERS, job.node.fingerprint[:16])
    shards = OpenShards(job)
    client: ChatClient[tuple[int, int]] = ChatClient(
        source.rewriting, key, journal, say, variables=variables
    )
    shards.add_all(client.run(shards.sentences()))
    publish_rewrites(job, say)


def make_offline_rewriting(job: Job, say: Say) -> None:
    """Asks a model that vLLM runs on the cluster's GPUs; the driver stores what comes back."""
    from pipeline.offline import rewritten_offline
    from stages.perturb.journal import Journal

    source, _ = source_of(job)
    assert source.rewriting is not None
    journal = Journal(job.store.root, ANSWERS, job.node.fingerprint[:16])
    shards = OpenShards(job)
    shards.add_all(rewritten_offline(job, source.rewriting, journal, shards.sentences()))
    journal.flush()
    publish_rewrites(job, say)
