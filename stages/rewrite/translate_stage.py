"""The nodes of back-translation: translations in two passes, and what the filters keep of them."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from stages.contract import Known, Opened, Resources, RowWise, Shard, Work
from stages.encoder.settings import model_folder
from stages.encoder.source import model_config
from stages.errors import UserError
from stages.rewrite.settings import (
    BackTranslation,
    check_translation_folder,
    check_translation_packages,
)
from stages.rewrite.stage import Rewrites
from stages.samples import table_rows
from stages.sentences.stage import read_texts


@dataclass(frozen=True)
class Translate(RowWise):
    """Sentences there and back: `translations.parquet` (pivot, text, reason) in each shard.

    The first pass lays down pivot texts, the second reads them. Both commit every few hundred
    sentences (`rows_per_unit`) and skip what is there.
    """

    settings: BackTranslation
    where: str

    kind = "translate"
    version = 1

    def identity(self, inputs: Mapping[str, Known]) -> dict[str, Any]:
        whole = self.settings.identity(f"{self.where}.backtranslation")
        return {f"perturb.backtranslation.{key}": value for key, value in whole.items()}

    def resources(self) -> Resources:
        # the first passes of several nodes could take all cores and wait for second passes that
        # never get one
        return Resources(gpu=True, exclusive="chained passes")

    def check(self) -> None:
        for key in ("to_pivot", "from_pivot"):
            model = getattr(self.settings, key)
            config = model_config(model)
            folder = model_folder(model.model)
            kind = config.get("model_type", "")
            check_translation_folder(model.model, folder, kind)
            check_translation_packages(model.model, self.settings.engine, kind)
            if not config.get("is_encoder_decoder"):
                raise UserError(
                    f"{self.where}.backtranslation.{key}: model '{model.model}' does not translate "
                    "(it is not sequence-to-sequence); use one such as Helsinki-NLP/opus-mt-en-zh"
                )

    def passes(self) -> Sequence[Callable[[Work], Callable[[int], Shard | None]]]:
        return [partial(_Pass, self.settings, back) for back in (False, True)]

    def open(self, work: Work) -> Callable[[int], Shard]:
        raise NotImplementedError("see passes")

    @classmethod
    def sample(
        cls, artifact: Opened, open_input: Callable[[str], Opened], num_rows: int
    ) -> list[str]:
        path = artifact.shard_path(artifact.shard_numbers[0], "translations.parquet")
        return table_rows("pivot, and back", path, num_rows)


class _Pass:
    """One of the two passes over single shards."""

    def __init__(self, settings: BackTranslation, back: bool, work: Work) -> None:
        from stages.rewrite.translate import Translator

        self._settings, self._back, self._work = settings, back, work
        self._sentences = work.input("sentences")
        model = settings.from_pivot if back else settings.to_pivot
        self._translate = Translator(model, settings)

    def __call__(self, number: int) -> Shard | None:
        """Makes the shard's units; after the second pass returns its translations."""
        import pyarrow as pa

        from stages.sentences.build import parquet_bytes

        texts, root = read_texts(self._sentences, number), self._work.root
        size = self._settings.rows_per_unit
        starts = range(0, len(texts), size)
        for start in starts:
            if root.exists(self._unit(number, start, self._back)):
                continue
            unit: list[list[str | None]] = [[text, None] for text in texts[start : start + size]]
            if self._back:
                unit = self._read(number, start, False)
            seed = (self._settings.seed, number, start, int(self._back))
            made = json.dumps(self._translated(unit, seed)).encode()
            root.write(self._unit(number, start, self._back), made)
        if not self._back:
            return None
        pivots, rows = (
            [row for start in starts for row in self._read(number, start, back)]
            for back in (False, True)
        )
        table = pa.table({
            "pivot": [text for text, _ in pivots],
            "text": [text for text, _ in rows],
            "reason": pa.array([reason for _, reason in rows], pa.string()),
        })  # fmt: skip
        return Shard({"translations.parquet": parquet_bytes(table)}, len(texts))

    def _read(self, number: int, start: int, back: bool) -> list[list[str | None]]:
        return list(json.loads(self._work.root.read(self._unit(number, start, back))))

    def _unit(self, number: int, start: int, back: bool) -> str:
        folder = "back" if back else "pivot"
        size = self._settings.rows_per_unit
        return f"{self._work.scratch}/{folder}/{number:05d}/{start}-{size}.json"

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


@dataclass(frozen=True)
class FilteredTranslations(Rewrites, RowWise):
    """Published translations as rewrites: another filter must not translate again."""

    def open(self, work: Work) -> Callable[[int], Shard]:
        import pyarrow.parquet as pq

        from stages.rewrite.rewrites import Rewrite

        translations, sentences = work.input(work.input_names[0]), work.input("sentences")

        def make(number: int) -> Shard:
            table = pq.read_table(translations.shard_path(number, "translations.parquet"))
            rewrites = [
                Rewrite(row, one["text"], reason=one["reason"])
                for row, one in enumerate(table.to_pylist())
            ]
            return self.kept(read_texts(sentences, number), rewrites)

        return make

    def finish(self, work: Work) -> None:
        self.publish(work)
