"""The student's vocabulary: how often its texts use each token, the model cut to them, and what
that does to the recipe's tests. Whoever uses the student then begins from the cut model."""

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.contract import Artifact, Fingerprinted, RowWise, Shard, Stage, Work, measured
from stages.encoder.config import described_in
from stages.encoder.source import EncoderSource
from stages.evaluate.sets import StsSettings, load_sts
from stages.planning import Graph, Inputs
from stages.tokens.stage import tokenizer_identity
from stages.tokens.texts import Texts, texts_of
from stages.vocabulary.settings import VocabularySettings

if TYPE_CHECKING:
    from stages.train.student_settings import StudentSettings


def _whole_texts(
    student: EncoderSource["StudentSettings"], inputs: Mapping[str, Fingerprinted]
) -> dict[str, Any]:
    """What decides the tokens of texts that are not cut to a length."""
    found = tokenizer_identity(student, inputs)
    del found["encoder.max_length"]
    return found


@dataclass(frozen=True)
class TokenCounts(RowWise):
    """How often the whole texts of a shard have each token: `ids.npy` int32, `counts.npy` int64."""

    student: EncoderSource["StudentSettings"]
    texts: Texts

    kind = "counts"
    version = 1

    def identity(self, inputs: Mapping[str, Fingerprinted]) -> dict[str, Any]:
        return _whole_texts(self.student, inputs) | self.texts.identity()

    def check(self) -> None:
        self.student.check()

    def open(self, work: Work) -> Callable[[int], Shard]:
        from stages.rows import npy_bytes
        from stages.vocabulary.cutting import Counter

        counter = Counter(self.student.located(work))
        read = self.texts.open(work, self.student.has_kinds)

        def make(number: int) -> Shard:
            found = read(number)
            ids, counts = counter(found.texts, found.kinds)
            files = {"ids.npy": npy_bytes(ids), "counts.npy": npy_bytes(counts)}
            return Shard(files, len(found.texts))

        return make

    def expected_rows(self, source: Artifact) -> dict[int, int]:
        return self.texts.expected_rows(source) or super().expected_rows(source)


@dataclass(frozen=True)
class Vocabulary(Stage):
    """The student's model with fewer tokens: `model/`, and `kept.npy`, the old id (int32) of each.

    counts: inputs with the counts of tokens.
    """

    student: EncoderSource["StudentSettings"]
    settings: VocabularySettings
    counts: tuple[str, ...]

    kind = "vocabulary"
    version = 1

    def identity(self, inputs: Mapping[str, Fingerprinted]) -> dict[str, Any]:
        found = self.settings.identity("student.vocabulary")
        found = {f"student.vocabulary.{key}": value for key, value in found.items()}
        return found | _whole_texts(self.student, inputs)

    def check(self) -> None:
        from tokenizers import Tokenizer

        from stages.encoder.tokenizer import readable_errors
        from stages.vocabulary.tokenizer import WholeTokenizer

        self.student.check()
        if self.student.training is None:
            settings = self.student.settings
            file = described_in(settings) / "tokenizer.json"
            if file.is_file():  # in one of its older forms it is understood when it is loaded
                with readable_errors(settings.model):
                    text = Tokenizer.from_file(str(file)).to_str()
                WholeTokenizer(text, settings.model).check_size(self.settings)

    def output_config(self) -> dict[str, Any]:
        """What the cut model's config.json will say, but for its number of tokens."""
        return self.student.config()

    def output_width(self) -> int | None:
        return self.student.width()

    def make(self, work: Work, loaded: Any) -> None:
        import numpy as np

        from stages.vocabulary.cutting import cut_student

        settings = self.student.located(work)
        with tempfile.TemporaryDirectory() as local:
            target = Path(local)
            counts = [work.input(name) for name in self.counts]
            kept, found = cut_student(
                settings, self.settings, counts, work.input("sentences"), target / "model"
            )
            np.save(target / "kept.npy", kept)
            work.say(found.told(), important=True)
            notes = [f"{found.told()}."]
            if found.warning:
                notes.append(f"WARNING: {found.warning}")
                work.say(notes[-1], important=True)
            work.publish(measured([], notes, vocabulary=found.figures()), target)


@dataclass(frozen=True)
class Reading(Stage):
    """How sentences of the recipe's tests are read with the whole vocabulary and the cut one."""

    student: EncoderSource["StudentSettings"]
    sets: tuple[StsSettings, ...]

    kind = "reading"
    version = 1

    def identity(self, inputs: Mapping[str, Fingerprinted]) -> dict[str, Any]:
        sets = [one.identity("evaluate.sts") for one in self.sets]
        return _whole_texts(self.student, inputs) | {"sets": sets}

    def check(self) -> None:
        for one in self.sets:
            one.check()

    def make(self, work: Work, loaded: Any) -> None:
        from stages.vocabulary.cutting import Readers, view_tokenizer

        whole = self.student.whole
        assert whole is not None
        readers = Readers(*(view_tokenizer(one.located(work)) for one in (whole, self.student)))
        lines, figures = [], []
        for one in self.sets:
            pairs = load_sts(one)
            texts = list(dict.fromkeys(pairs.sentence1 + pairs.sentence2))
            found = readers.compare([texts])
            lines.append(f"{one.name} with the cut vocabulary: {found.told()}.")
            figures.append({"set": one.name} | found.figures())
            work.say(lines[-1], important=True)
        work.publish(measured([], lines, reading=figures))


def plan(graph: Graph) -> None:
    recipe, student = graph.recipe, graph.student()
    settings = recipe.student.vocabulary
    if settings is None:
        return
    counts = []
    for texts in texts_of(recipe):
        name = f"counts{texts.suffix}"
        inputs: Inputs = [*texts.inputs(student.has_kinds), *student.inputs]
        counts.append(graph.add(name, TokenCounts(student, texts), inputs, where="student"))
    stage = Vocabulary(student, settings, tuple(counts))
    graph.add("vocabulary", stage, ["sentences", *counts, *student.inputs], where="student")
    everyone = [*(recipe.train.dev.sts if recipe.train.dev else []), *recipe.evaluate.sts]
    sets = {json.dumps(one.identity("evaluate.sts"), default=str): one for one in everyone}
    if sets:
        cut = graph.student()
        reading = Reading(cut, tuple(sets.values()))
        graph.add("vocabulary:tests", reading, [*cut.inputs, *student.inputs], where="student")
