"""The nodes of an evaluation: one for each encoder and test."""

import json
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from stages.contract import (
    EncoderLabel,
    Fingerprinted,
    Measurement,
    Resources,
    Stage,
    Work,
    measured,
)
from stages.encoder.config import described_in, is_on_hub
from stages.encoder.modules import normalizes
from stages.encoder.source import EncoderSource
from stages.evaluate.agreement import agreement_tests
from stages.evaluate.base import Encode, Evaluation, Tested
from stages.evaluate.baselines import BaselineSettings, WordsSource, WordVectors, whitened
from stages.evaluate.bm25 import Bm25
from stages.evaluate.mteb_tasks import MtebTest
from stages.evaluate.remembered import Remembered
from stages.evaluate.resampling import write_items
from stages.fingerprint import fingerprint
from stages.kinds import Kinds
from stages.planning import Graph, Inputs
from stages.teachers import encoding_teachers

if TYPE_CHECKING:
    import numpy as np

    from stages.encoder.model import Encoder
    from stages.encoder.pipeline import PipelineEncoder

E = TypeVar("E", bound="EncoderSource[Any] | WordsSource")


@dataclass(frozen=True)
class Evaluate(Stage):
    """One test of one encoder; all of an encoder that are missing share one loaded model, or those
    of each part do.

    max_length: tokens of a test sentence, for every encoder alike.
    corpus: input with the encoder's rank corpus, and `rank_weight` the share of rank similarities
        (1: Eq. 2, ranks alone); "" for plain cosines.
    documents: the encoder of the documents, where it is another one.
    whitening: dimensions that its vectors are whitened to; None: they are not.
    known_as: see `Tested`.
    """

    test: Evaluation
    encoder: EncoderSource[Any] | WordsSource
    label: EncoderLabel
    max_length: int
    corpus: str = ""
    rank_weight: float = 0.0
    documents: EncoderSource[Any] | None = None
    whitening: int | None = None
    part: int = 0
    known_as: tuple[str, str] | None = None

    kind = "evaluate"
    # 3: keeps what figures were computed from
    # 4: agreement keeps sentences to look at
    # 5: clustering and agreement over pairs keep items too; SentEval's and MTEB's procedures see
    #    vectors that are not scaled to length 1
    # 6: alignment and uniformity keep items
    # 7: clustering keeps where texts lie in the plane
    version = 7

    def identity(self, inputs: Mapping[str, Fingerprinted]) -> dict[str, Any]:
        found = self._identity(self.encoder, inputs, "encoder")
        found["encoder.max_length"] = self.max_length
        found["test"] = self.test.described()
        if self.corpus:
            found["ranks.inference_weight"] = self.rank_weight
        if self.documents is not None:
            found |= self._identity(self.documents, inputs, "documents")
        if self.whitening is not None:
            found["whitening"] = self.whitening
        if self.label.dimensions:
            found["dimensions"] = self.label.dimensions
        if self.test.reads_returned:
            if self.label.dimensions:
                found["returned"] = "cut"  # once scaled to length 1
            elif self._is_scaled_here():
                found["returned"] = "scaled"
        return found

    def _is_scaled_here(self) -> bool:
        """Whether its vectors would have another length if it were no student. A model of the hub
        is judged before it can be looked at."""
        if not self._is_student or isinstance(self.encoder, WordsSource):
            return False
        if self.encoder.training is not None:
            return False  # what is trained here normalizes
        settings = self.encoder.settings
        return is_on_hub(settings) or not normalizes(described_in(settings))

    @property
    def _is_student(self) -> bool:
        return self.label.role in ("before", "after")

    def _identity(
        self,
        encoder: EncoderSource[Any] | WordsSource,
        inputs: Mapping[str, Fingerprinted],
        place: str,
    ) -> dict[str, Any]:
        if isinstance(encoder, WordsSource):
            return encoder.identity(inputs)
        if not self.test.has_kinds:
            return encoder.identity(inputs, place=place)
        on_hub = encoder.training is None and not encoder.has_kinds and is_on_hub(encoder.settings)
        found = (encoder if on_hub else _with_kinds(encoder)).identity(inputs, place=place)
        # where sentences had no kinds figures were once without prompts. What a recipe makes, and
        # what is on the hub, is judged before it can be looked at
        if encoder.makes_kinds or (on_hub and encoder.settings.pooling in ("auto", "pipeline")):
            found[f"{place}.kind_prompts"] = "the model's"
        return found

    @property
    def packages(self) -> tuple[str, ...]:
        encoders = [self.encoder, *([self.documents] if self.documents else [])]
        found = [package for one in encoders for package in one.packages]
        return (*found, *self.test.packages, *(["scipy"] if self.corpus else []))

    def resources(self) -> Resources:
        return Resources(gpu=True)

    @property
    def measures(self) -> EncoderLabel:
        return self.label

    @property
    def shares(self) -> str:
        # the encoder as it is loaded: batch sizes and devices included
        encoders = [self.encoder, *([self.documents] if self.documents else [])]
        loaded = [(one.node, one.settings.model_dump()) for one in encoders]
        how = (self.max_length, self.corpus, self.rank_weight, self.whitening, self.part,
               self._is_student)  # fmt: skip
        return json.dumps((loaded, *how), default=str)

    def check(self) -> None:
        _with_kinds(self.encoder).check(self.max_length)
        self.test.check()

    def load(self, work: Work) -> Tested:
        model = self._loaded(self.encoder, work)
        if isinstance(model, Bm25):
            return Tested(model.encode_unit, model, model.encode_documents)
        pooled = Remembered(model.encode)
        encode: Encode = _unit(pooled)
        if self.corpus:
            from stages.ranks.similarity import RankAwareEncoder
            from stages.ranks.stage import corpus_arrays

            arrays = corpus_arrays(work.input(self.corpus))
            assert not isinstance(model, WordVectors)
            encode = RankAwareEncoder(model, *arrays, self.rank_weight).encode
        if self.whitening is not None:
            encode = whitened(pooled, self.whitening, work)
        if self.corpus or self.whitening is not None:
            return Tested(Remembered(encode), model)
        if self.documents is not None:
            teacher = self._loaded(self.documents, work)
            assert not isinstance(teacher, Bm25)
            return Tested(encode, model, _unit(Remembered(teacher.encode)))
        return Tested(encode, model, pooled=pooled, returned=None if self._scales(work) else pooled)

    def _scales(self, work: Work) -> bool:
        """Whether sentence-transformers scales its vectors to length 1; those of any student once
        it is exported."""
        if isinstance(self.encoder, WordsSource):
            return False
        if self._is_student or self.encoder.training is not None:
            return True
        return normalizes(described_in(self.encoder.located(work)))

    def _loaded(
        self, encoder: EncoderSource[Any] | WordsSource, work: Work
    ) -> "Encoder | PipelineEncoder | WordVectors | Bm25":
        if isinstance(encoder, WordsSource):
            return encoder.load()
        from stages.encoder.model import load_told

        settings = _with_kinds(encoder).located(work)
        return load_told(settings.model_copy(update={"max_length": self.max_length}), work)

    def make(self, work: Work, loaded: Tested) -> None:
        if width := self.label.dimensions:
            cut = _cut(loaded.as_pooled, width)
            # sentence-transformers' truncate_dim cuts what it has scaled
            returned = _cut(loaded.as_returned, width)
            loaded = replace(loaded, encode=_unit(cut), pooled=cut, returned=returned)
        result = self.test.score(replace(loaded, known_as=self.known_as), work)
        measurement = Measurement(self.label, result.figures)
        stats = measured([measurement], result.notes, **result.facts)
        stats["reads"] = [*self.test.reads]
        stats["test"] = fingerprint(self.test.described())  # identity names ${VARIABLES}
        with tempfile.TemporaryDirectory() as local:
            for name, data in result.files.items():
                Path(local, name).write_bytes(data)
            work.publish(stats | write_items(result.items, Path(local)), Path(local))


def _with_kinds(encoder: E) -> E:
    """With prompts of queries and documents, whatever the recipe's sentences are: some tests have
    both. Texts of no kind are read as before."""
    return replace(encoder, has_kinds=True) if isinstance(encoder, EncoderSource) else encoder


def _cut(encode: Encode, width: int) -> Encode:
    def cut(texts: Sequence[str], kinds: Kinds = None) -> "np.ndarray":
        return encode(texts, kinds)[:, :width]

    return cut


def _unit(encode: Encode) -> Encode:
    from stages.rows import unit_rows

    def unit(texts: Sequence[str], kinds: Kinds = None) -> "np.ndarray":
        return unit_rows(encode(texts, kinds))

    return unit


def tests_of(graph: Graph) -> list[Evaluation]:
    """What `evaluate` lists, and agreement where sentences are held out."""
    recipe = graph.recipe
    return [*recipe.evaluate.tests, *agreement_tests(graph)]


def _divided(graph: Graph) -> list[tuple[Evaluation, int]]:
    """Tests, and which of `evaluate.processes` makes each. Those that have a file in common stay
    together, as a process embeds each text once."""
    parts: dict[str, int] = {}
    found, num_groups = [], 0
    for test in tests_of(graph):
        files = [value for _, value in test.named()] or [test.title]
        known = [parts[file] for file in files if file in parts]
        part = known[0] if known else num_groups % graph.recipe.evaluate.processes
        num_groups += not known
        parts |= dict.fromkeys(files, part)
        found.append((test, part))
    return found


def plan(graph: Graph) -> None:
    """Student before, every teacher, student after; with what ranks add to rank teachers and to
    the student below each, an aligned student with its teacher's documents, and cut vectors."""
    recipe = graph.recipe
    student = graph.student()
    start: EncoderSource[Any] = replace(student, settings=student.settings.encoder())
    encoders = [(EncoderLabel("before", "before"), start, "student")]
    encoders += [
        (EncoderLabel("teacher", t.name), graph.encoder(t.encoder()), f"teachers[{number}]")
        for number, t in encoding_teachers(graph)
    ]
    seeds: list[int | None] = [None]
    if len(recipe.train.seeds) > 1:
        seeds = [*recipe.train.seeds]
    for training, seed in zip(graph.trainings, seeds, strict=True):
        label = EncoderLabel("after", "after", seed=seed)
        encoders.append((label, graph.trained_student(training), ""))
    for label, encoder, where in encoders:
        _plan_encoder(graph, label, encoder, where)
    if recipe.student.aligned:
        for _, teacher in encoding_teachers(graph):
            label = EncoderLabel("after", "after", documents=teacher.name)
            _plan_aligned(graph, label, graph.encoder(teacher.encoder()))
    for width in graph.trained_student().cut_widths(recipe.student.dimensions):
        label = EncoderLabel("after", "after", dimensions=width)
        for test, part in _divided(graph):
            if not test.reads_model:
                student = graph.trained_student()
                stage = Evaluate(test, student, label, recipe.evaluate.max_length, part=part)
                _add(graph, stage, [*student.inputs, *test.reads], recipe.name, f"+{width}d", "")
    for number, baseline in enumerate(recipe.evaluate.baselines):
        _plan_baseline(graph, baseline, f"evaluate.baselines[{number}]")


def _plan_encoder(
    graph: Graph, label: EncoderLabel, encoder: EncoderSource[Any], where: str
) -> None:
    recipe = graph.recipe
    title = label.name if label.role == "teacher" else recipe.name
    corpus = f"corpus:{label.name}"
    weight = 1.0  # Eq. 2: a rank teacher's ranks alone
    if label.role == "after":
        weight = (recipe.ranks.inference_weight if recipe.ranks else None) or 0.0
    further = label.role == "after" and encoder.node != graph.trainings[0]
    for ranks in [False, *[True] * (corpus in graph and not further)]:
        named = replace(label, ranks=ranks)
        for test, part in _divided(graph):
            if label.role == "teacher" and not test.of_teachers:
                continue
            stage = Evaluate(
                test, encoder, named, recipe.evaluate.max_length,
                corpus if ranks else "", weight if ranks else 0.0, part=part,
            )  # fmt: skip
            inputs: Inputs = [*([corpus] if ranks else []), *encoder.inputs, *test.reads]
            suffix = f"+seed-{label.seed}" if further else "+ranks" if ranks else ""
            _add(graph, stage, inputs, title, suffix, where)


def _plan_baseline(graph: Graph, baseline: BaselineSettings, where: str) -> None:
    label = EncoderLabel("baseline", baseline.name)
    encoder: EncoderSource[Any] | WordsSource = WordsSource(baseline)
    if baseline.model:
        encoder = graph.encoder(baseline.encoder())
    width = baseline.whitening
    reads = ["sentences"] * (width is not None)
    for test, part in _divided(graph):
        if baseline.takes(test):
            max_length = graph.recipe.evaluate.max_length
            stage = Evaluate(test, encoder, label, max_length, whitening=width, part=part)
            inputs: Inputs = dict.fromkeys([*encoder.inputs, *reads, *test.reads])
            title = f"{graph.recipe.name}-{slug(label.name) or 'baseline'}"
            _add(graph, stage, inputs, title, "", where)


def _plan_aligned(graph: Graph, label: EncoderLabel, teacher: EncoderSource[Any]) -> None:
    """The trained student's queries against its teacher's documents."""
    recipe, student = graph.recipe, graph.trained_student()
    for test, part in _divided(graph):
        if test.two_sided:
            stage = Evaluate(
                test, student, label, recipe.evaluate.max_length, documents=teacher, part=part
            )
            inputs: Inputs = [*student.inputs, *teacher.inputs, *test.reads]
            _add(graph, stage, inputs, recipe.name, f"+to-{label.documents}", "")


def _add(
    graph: Graph, stage: Evaluate, inputs: Inputs, title: str, suffix: str, where: str
) -> None:
    named_test = graph.recipe.unexpanded(stage.test.title)
    name = f"evaluate:{stage.label.name}{suffix}:{named_test}"
    title += suffix.replace("+", "-")
    called = f"{title}-before" if stage.label.role == "before" else title
    stage = known_to_mteb(stage, called, lambda one: graph.fingerprint(one, inputs))
    graph.add(name, stage, inputs, f"{title}-{slug(named_test) or 'test'}", where)


def slug(name: str) -> str:
    """A name as part of a folder's; "" where it has neither letters of a to z nor digits."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def known_to_mteb(stage: Evaluate, called: str, fingerprint: Callable[[Evaluate], str]) -> Evaluate:
    """The stage with its encoder's name and revision in MTEB's cache, where that is used. The
    revision is the fingerprint of no task: of all that decides vectors, and MTEB's version."""
    if not (isinstance(stage.test, MtebTest) and stage.test.cache):
        return stage
    whatever = replace(stage, test=MtebTest(task="any"))
    return replace(stage, known_as=(f"sentray/{called}", fingerprint(whatever)[:16]))
