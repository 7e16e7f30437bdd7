"""Back-translation: translations in two passes, and what the filters keep of them."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field, model_validator

from stages.contract import Artifact, Fingerprinted, Resources, RowWise, Shard, Work
from stages.encoder.config import model_config
from stages.encoder.files import model_folder
from stages.encoder.settings import ModelSettings
from stages.errors import UserError
from stages.fields import Seed
from stages.packages import need
from stages.rewrite.base import RewriteSource
from stages.rewrite.rewrites import Rewrite
from stages.rewrite.stage import Rewrites
from stages.samples import table_rows
from stages.sentences.build import parquet_bytes
from stages.sentences.texts import read_texts
from stages.settings import execution

if TYPE_CHECKING:
    from stages.planning import Graph
    from stages.rewrite.settings import PerturbSettings

TRANSLATIONS = pa.schema([("pivot", pa.string()), ("text", pa.string()), ("reason", pa.string())])


class TranslationModel(ModelSettings):
    prefix: str = Field(
        "",
        description="Text before every sentence: `>>fra<< ` for Marian models with several target "
        "languages, `translate English to German: ` for T5.",
    )


class BackTranslation(RewriteSource):
    """Back-translation: translate to a pivot language and back."""

    to_pivot: TranslationModel = Field(
        TranslationModel(model="Helsinki-NLP/opus-mt-en-zh", prefix=">>cmn_Hans<< "),
        description="Model that translates to the pivot language.",
    )
    from_pivot: TranslationModel = Field(
        TranslationModel(model="Helsinki-NLP/opus-mt-zh-en"),
        description="Model that translates back.",
    )
    engine: Literal["ctranslate2", "transformers"] = Field(
        "ctranslate2",
        description="ctranslate2: fast, for Marian and similar models. transformers: any model.",
    )
    precision: Literal["float32", "bfloat16", "float16", "int8"] = Field(
        "float32",
        description="Arithmetic of the forward pass; int8 needs ctranslate2. transformers takes "
        "float32 on a CPU without instructions for a 16-bit one.",
    )
    num_beams: int = Field(4, ge=1, description="Width of the beam search; 1: greedy.")
    temperature: float | None = Field(
        None,
        gt=0,
        description="Sample tokens at this temperature; null: beam search.",
    )
    top_k: int = Field(
        0, ge=0, description="Sample from this many most likely tokens; 0: from all."
    )
    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Sample from the most likely tokens that hold this probability.",
    )
    seed: Seed = Field(0, description="Seed of the sampling.")
    max_growth: float = Field(
        2.0,
        gt=0,
        description="Longest translation in tokens: this many times its source, plus 10.",
    )
    no_repeat_ngram: int = Field(
        4,
        ge=0,
        description="No sequence of this many tokens occurs twice in a translation; 0: no limit.",
    )
    max_length: int = Field(
        128, ge=3, description="Reject a sentence or pivot of more tokens; it is never cut."
    )
    tokens_per_batch: int = execution(
        2048, ge=1, description="Most tokens of one batch, padding included, beams not."
    )
    rows_per_unit: int = execution(
        256, ge=1, description="Sentences between two commits: what a kill can cost at most."
    )
    device: Literal["auto", "cpu", "cuda"] = execution(
        "auto", description="auto: the GPU that Ray assigned, if there is one."
    )

    @model_validator(mode="after")
    def _fits_together(self) -> "BackTranslation":
        if self.temperature is None and (self.top_k or self.top_p < 1):
            raise ValueError("top_k and top_p need a temperature: without one nothing is drawn")
        if self.temperature is not None and self.num_beams > 1:
            raise ValueError("temperature draws tokens and needs num_beams: 1")
        if self.precision == "int8" and self.engine != "ctranslate2":
            raise ValueError("precision int8 needs engine: ctranslate2")
        for model in (self.to_pivot, self.from_pivot):
            if model.recipe_file is not None:
                raise ValueError("a translation model cannot be a recipe's student")
        return self

    def plan(self, graph: "Graph", whole: "PerturbSettings", where: str) -> None:
        name, raw = whole.name, f"translate:{whole.name}"
        graph.add(raw, Translate(self, where), ["sentences"], name)
        graph.add(f"perturb:{name}", FilteredTranslations(whole, where), [raw, "sentences"], name)


def check_translation_model(model: ModelSettings, engine: str, model_type: str) -> None:
    """Looks at a model's files and for the packages that it needs on an engine.

    Raises:
        UserError: a local Marian folder lacks its vocabularies (transformers would make up an empty
            one), or a package is not installed.
    """
    folder = model_folder(model.model)
    needed = ["ctranslate2"] if engine == "ctranslate2" else []
    if model_type == "marian":
        needed += ["sentencepiece", "sacremoses"]
        files = ("source.spm", "target.spm", "vocab.json")
        missing = [name for name in files if folder and not (folder / name).is_file()]
        if missing:
            raise UserError(f"model '{model.model}': the folder lacks {', '.join(missing)}")
    if needed:
        need("translation", f"translating with model '{model.model}'", *needed)


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

    def identity(self, inputs: Mapping[str, Fingerprinted]) -> dict[str, Any]:
        whole = self.settings.identity(f"{self.where}.backtranslation")
        return {f"perturb.backtranslation.{key}": value for key, value in whole.items()}

    @property
    def packages(self) -> tuple[str, ...]:
        return ("ctranslate2",) if self.settings.engine == "ctranslate2" else ()

    def resources(self) -> Resources:
        # the first passes of several nodes could take all cores and wait for second passes that
        # never get one
        return Resources(gpu=True, exclusive="chained passes")

    def check(self) -> None:
        for key in ("to_pivot", "from_pivot"):
            model = getattr(self.settings, key)
            config = model_config(model)
            check_translation_model(model, self.settings.engine, config.get("model_type", ""))
            if not config.get("is_encoder_decoder"):
                raise UserError(
                    f"{self.where}.backtranslation.{key}: model '{model.model}' does not translate "
                    "(it is not sequence-to-sequence); use one such as Helsinki-NLP/opus-mt-en-zh"
                )

    def passes(self) -> Sequence[Callable[[Work], Callable[[int], Shard | None]]]:
        return [self._open_there, self.open]

    def _open_there(self, work: Work) -> Callable[[int], None]:
        there = _Pass(self.settings, False, work)

        def make(number: int) -> None:
            there(number)

        return make

    def open(self, work: Work) -> Callable[[int], Shard]:
        back = _Pass(self.settings, True, work)

        def make(number: int) -> Shard:
            rows = [
                {"pivot": pivot, "text": text, "reason": reason}
                for unit, file in back(number)
                for (pivot, _), (text, reason) in zip(
                    unit, json.loads(work.root.read(file)), strict=True
                )
            ]
            table = pa.Table.from_pylist(rows, TRANSLATIONS)
            return Shard({"translations.parquet": parquet_bytes(table)}, len(rows))

        return make

    @classmethod
    def sample(
        cls, artifact: Artifact, open_input: Callable[[str], Artifact], num_rows: int
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

    def __call__(self, number: int) -> list[tuple[list[list[str | None]], str]]:
        """Makes what is missing of a shard's units; what each was made from, and its file."""
        texts, root = read_texts(self._sentences, number), self._work.root
        scratch, size = self._work.scratch, self._settings.rows_per_unit
        units = []
        for start in range(0, len(texts), size):
            name = f"{number:05d}/{start}-{size}.json"
            pivot_file, back_file = (f"{scratch}/{folder}/{name}" for folder in ("pivot", "back"))
            unit = [[text, None] for text in texts[start : start + size]]
            if self._back:
                unit = json.loads(root.read(pivot_file))
            file = back_file if self._back else pivot_file
            if not root.exists(file):
                seed = (self._settings.seed, number, start, int(self._back))
                root.write(file, json.dumps(self._translated(unit, seed)).encode())
            units.append((unit, file))
        return units

    def _translated(
        self, unit: list[list[str | None]], seed: tuple[int, ...]
    ) -> list[list[str | None]]:
        """Rows of (text, reason); those that already have a reason stay as they are."""
        found = self._translate(["" if reason else text or "" for text, reason in unit], seed)
        out = []
        for (text, reason), one in zip(unit, found, strict=True):
            if reason is None:
                text = one.text or (text if one.reason else "")
                reason = one.reason or (None if text else "empty_translation")
            out.append([text, reason])
        return out


@dataclass(frozen=True)
class FilteredTranslations(Rewrites, RowWise):
    """Published translations as rewrites: another filter must not translate again."""

    def identity(self, inputs: Mapping[str, Fingerprinted]) -> dict[str, Any]:
        whole = super().identity(inputs)
        whole.pop("perturb.backtranslation")  # its translations are an input
        return whole

    def open(self, work: Work) -> Callable[[int], Shard]:
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
