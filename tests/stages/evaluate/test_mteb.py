"""Tasks of MTEB, against MTEB's own way with sentence-transformers; none needs the hub."""

import importlib
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from pipeline.compare.models import evaluate_models
from pipeline.plan.graph import build_graph
from stages.contract import EncoderLabel
from stages.encoder.settings import EncoderSettings
from stages.encoder.source import EncoderSource
from stages.errors import UserError
from stages.evaluate import base
from stages.evaluate.classification import ClassificationTest
from stages.evaluate.mteb_tasks import MtebTest
from stages.evaluate.settings import EvaluateSettings
from stages.evaluate.stage import Evaluate
from stages.recipe import Recipe
from tests.support.models import make_sentences
from tests.support.pipelines import make_pipeline, pooling
from tests.support.tested import SILENT, encoder_of

mteb = pytest.importorskip("mteb")
TASKS = importlib.import_module("mteb.get_tasks")._TASKS_REGISTRY


def rows_of(split, count):
    """Sentences with made-up labels that a classifier can learn something of."""
    sentences = make_sentences(count, seed=len(split))
    return [(text, len(text.split()) % 3) for text in sentences]


SPLITS = {"train": rows_of("train", 120), "test": rows_of("test", 90)}


@pytest.fixture
def local_task(monkeypatch):
    """A classification task whose data are here."""
    return put_task(monkeypatch, "LocalClassification", {"default": SPLITS})


@pytest.fixture
def two_languages(monkeypatch):
    """Another one, with labels in Danish of which nothing can be learned."""
    danish = {split: [(text, row % 2) for row, (text, _) in enumerate(SPLITS[split])]
              for split in SPLITS}  # fmt: skip
    return put_task(monkeypatch, "LocalLanguages", {"eng": SPLITS, "dan": danish})


def put_task(monkeypatch, name, subsets):
    from datasets import Dataset, DatasetDict
    from mteb.abstasks import AbsTaskClassification
    from mteb.abstasks.task_metadata import TaskMetadata

    languages = {subset: [f"{subset}-Latn"] for subset in subsets}

    class LocalTask(AbsTaskClassification):
        metadata = TaskMetadata(
            name=name, description="made up", type="Classification",
            dataset={"path": "nobody/nothing", "revision": "1"},
            eval_langs=["eng-Latn"] if "default" in subsets else languages, main_score="accuracy",
        )  # fmt: skip

        def load_data(self, **_):
            found = {
                subset: DatasetDict({
                    split: Dataset.from_dict(
                        {"text": [text for text, _ in rows], "label": [label for _, label in rows]}
                    )
                    for split, rows in splits.items()
                })
                for subset, splits in subsets.items()
            }  # fmt: skip
            self.dataset = found.get("default", found)
            self.data_loaded = True

    monkeypatch.setitem(TASKS, name, LocalTask)
    return name


@pytest.fixture(params=["as pooled", "of length 1"])
def model(tmp_path, request):
    """A model folder whose vectors have any length, and one whose have length 1."""
    from sentence_transformers.models import Normalize

    more = [Normalize] * (request.param == "of length 1")
    return make_pipeline(tmp_path, pooling("mean"), *more)


def test_a_task_has_the_score_that_mteb_gives_sentence_transformers(local_task, model):
    from sentence_transformers import SentenceTransformer

    theirs = SentenceTransformer(str(model), device="cpu")
    theirs.max_seq_length = 32
    expected = mteb.evaluate(theirs, mteb.get_task(local_task), cache=None, co2_tracker=False)
    result = MtebTest(task=local_task).score(encoder_of(model), SILENT)
    (figure,) = result.figures
    assert figure.value == pytest.approx(100 * expected.task_results[0].get_score())
    assert 20 < figure.value < 100
    low, high = figure.interval  # over MTEB's draws
    assert low < figure.value < high
    assert 100 * result.items[local_task].figure() == pytest.approx(figure.value)
    whole = json.loads(result.files[f"{local_task}.json"])
    assert whole["task_name"] == local_task


def test_mtebs_result_file_is_in_the_artifact(local_task, model, tmp_path):
    source = EncoderSource(EncoderSettings(model=str(model), pooling="auto", max_length=32))
    stage = Evaluate(MtebTest(task=local_task), source, EncoderLabel("teacher", "t"), 32)
    kept = {}

    def publish(stats, folder):
        kept.update({file.name: file.read_text() for file in folder.glob("*.json")})

    work = SimpleNamespace(say=SILENT.say, publish=publish)
    stage.make(work, stage.load(work))
    assert json.loads(kept[f"{local_task}.json"])["task_name"] == local_task


def test_mtebs_cache_gives_and_gets_results(local_task, model, tmp_path, monkeypatch):
    """Of the same encoder; MTEB's own tools find them."""
    cache = str(tmp_path / "cache")
    cached = EvaluateSettings.model_validate({"mteb": [local_task], "mteb_cache": cache}).tests[-1]
    assert cached.described() == MtebTest(task=local_task).described()  # no other fingerprint
    tested = replace(encoder_of(model), known_as=("sentray/mine", "1"))
    (first,) = cached.score(tested, SILENT).figures
    results = mteb.ResultCache(cache).load_results(models=["sentray/mine"], tasks=[local_task])
    assert 100 * results.model_results[0].task_results[0].get_score() == pytest.approx(first.value)

    monkeypatch.setattr(TASKS[local_task], "load_data", lambda *_, **__: pytest.fail("was known"))
    refuses = replace(tested, encode=lambda *_: pytest.fail("was known"), pooled=None)
    (again,) = cached.score(refuses, SILENT).figures
    assert again.value == pytest.approx(first.value, abs=1e-3)  # as MTEB rounds
    assert again.interval == pytest.approx(first.interval, abs=1e-3)
    with pytest.raises(pytest.fail.Exception, match="was known"):
        cached.score(replace(tested, known_as=("sentray/mine", "2")), SILENT)


def test_encoders_that_have_no_name_there_share_nothing(local_task, tmp_path):
    """Variants of a student, say."""
    test = MtebTest(task=local_task, cache=str(tmp_path / "cache"))
    for value in (1.0, 2.0):
        asked = []

        def encode(texts, kinds=None, value=value, asked=asked):
            asked.append(len(texts))
            return np.full((len(texts), 2), value, dtype=np.float32)

        test.score(base.Tested(encode, None), SILENT)
        assert asked
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("trouble", ["a cut file", "a file for a folder"])
def test_a_cache_in_disorder_costs_no_figures(local_task, model, tmp_path, trouble):
    said, cache = [], tmp_path / "cache"
    test = MtebTest(task=local_task, cache=str(cache))
    tested = replace(encoder_of(model), known_as=("sentray/mine", "1"))
    work = SimpleNamespace(say=lambda text, important=False: said.append(text) if important else 0)
    if trouble == "a cut file":
        (first,) = test.score(tested, work).figures
        (file,) = cache.glob(f"results/sentray__mine/1/{local_task}.json")
        whole = file.read_text()
        file.write_text(whole[:100])
    else:
        (first,) = MtebTest(task=local_task).score(tested, work).figures
        cache.mkdir()
        (cache / "results").touch()
    (again,) = test.score(tested, work).figures
    assert again == first
    if trouble == "a cut file":
        assert json.loads(file.read_text()).keys() == json.loads(whole).keys()  # mended
        assert len(said) == 1 and "cannot be read" in said[0]
    else:
        assert said[-1].startswith("WARNING: not put into MTEB's cache")


def test_models_that_are_compared_have_their_own_results(local_task, tmp_path, monkeypatch):
    """Below their names; the same model is not asked again."""
    cache = tmp_path / "cache"
    tests = EvaluateSettings.model_validate(
        {"mteb": [local_task], "mteb_cache": str(cache), "max_length": 32}
    )
    models = [str(make_pipeline(tmp_path / name, pooling(name))) for name in ("mean", "cls")]

    def measured(storage, settings=tests):
        found = evaluate_models(models, settings, str(tmp_path / storage), lambda _: None)
        return [found.figures(label)[local_task].value for label in found.encoders]

    plain = measured("a", tests.model_copy(update={"mteb_cache": None}))
    assert plain[0] != plain[1]
    assert measured("b") == plain
    assert len(list(cache.glob(f"results/*/*/{local_task}.json"))) == 2
    monkeypatch.setattr(TASKS[local_task], "load_data", lambda *_, **__: pytest.fail("was known"))
    assert measured("c") == pytest.approx(plain, abs=1e-3)


def test_a_task_of_tasks(local_task, two_languages, model, monkeypatch):
    from mteb.abstasks.aggregate_task_metadata import AggregateTaskMetadata
    from mteb.abstasks.aggregated_task import AbsTaskAggregate

    parts = [TASKS[name]() for name in (local_task, two_languages)]

    class Both(AbsTaskAggregate):
        metadata = AggregateTaskMetadata(
            name="Both", description="made up", reference=None, tasks=parts,
            main_score="accuracy", type="Classification", eval_splits=["test"],
        )  # fmt: skip

    monkeypatch.setitem(TASKS, "Both", Both)
    tested = encoder_of(model)
    (figure,) = MtebTest(task="Both").score(tested, SILENT).figures
    each = [MtebTest(task=name).score(tested, SILENT).figures[0].value
            for name in (local_task, two_languages)]  # fmt: skip
    assert figure.value == pytest.approx(np.mean(each))


def test_a_cached_result_is_of_the_languages_that_are_asked_for(two_languages, model, tmp_path):
    def figure(**settings):
        known = replace(encoder_of(model), known_as=("sentray/mine", "1"))
        return MtebTest(task=two_languages, **settings).score(known, SILENT).figures[0].value

    assert not MtebTest(task=two_languages).score(encoder_of(model), SILENT).items
    english, both = figure(languages=["eng"]), figure()
    assert abs(english - both) > 1
    cache = str(tmp_path / "cache")
    assert figure(cache=cache) == pytest.approx(both)
    assert figure(cache=cache, languages=["eng"]) == pytest.approx(english, abs=1e-3)
    other = str(tmp_path / "other")
    assert figure(cache=other, languages=["eng"]) == pytest.approx(english)
    assert figure(cache=other) == pytest.approx(both, abs=1e-3)


def test_the_revision_is_of_all_that_decides_vectors(tiny_recipe, local_task, monkeypatch):
    """Not of the test: tasks of one encoder are below one name and revision."""

    def known(*changes):
        settings = [f"evaluate.mteb=[{local_task},STS12]", "evaluate.mteb_cache=cache", *changes]
        graph = build_graph(Recipe.model_validate(tiny_recipe(*settings)))
        found = {}
        for name, node in graph.nodes.items():
            if ":mteb-" in name:
                found.setdefault(name.partition(":mteb-")[0], set()).add(node.stage.known_as)
        assert all(len(several) == 1 for several in found.values())
        return {name: next(iter(several)) for name, several in found.items()}

    before = known()
    names = [name for name, _ in before.values()]
    assert len({*before.values()}) == len({*names}) == len(before) > 2
    assert known("evaluate.mteb_cache=other") == before
    longer = known("train.max_steps=3")
    assert {name for name in before if longer[name] != before[name]} == {"evaluate:after"}
    shorter = known("evaluate.max_length=31")
    assert not {*shorter.values()}.intersection(before.values())
    monkeypatch.setattr("stages.evaluate.mteb_tasks.metadata.version", lambda _: "0.1")
    assert not {*known().values()}.intersection(before.values())


def test_our_classification_is_mtebs(local_task, model, tmp_path):
    """The same rows from a file, without MTEB's package."""
    lines = [f"{text}\t{label}\t{split}" for split, rows in SPLITS.items() for text, label in rows]
    (tmp_path / "own.tsv").write_text("\n".join(["text\tlabel\tsplit", *lines]) + "\n")
    tested = encoder_of(model)
    own = ClassificationTest(name="own", path=str(tmp_path / "own.tsv")).score(tested, SILENT)
    theirs = MtebTest(task=local_task).score(tested, SILENT)
    assert own.figures[0].value == pytest.approx(theirs.figures[0].value)


def test_queries_and_documents_get_their_own_prompts(local_task):
    """What MTEB calls a query or a document is one for the encoder."""
    from stages.evaluate.mteb_tasks import _Model

    asked = []

    def encode(texts, kinds=None):
        asked.append((list(texts), kinds))
        return np.ones((len(texts), 2), dtype=np.float32)

    own = _Model(base.Tested(encode, None))
    for kind in ("query", "document", None):
        prompt_type = kind and mteb.types.PromptType(kind)
        own.encode([{"text": ["a", "b"]}, {"text": ["c"]}], prompt_type=prompt_type)
    assert asked == [(["a", "b", "c"], kind) for kind in ("query", "document", None)]


@pytest.mark.parametrize("cache", ["s3://bucket/folder", "{}/file", "{}/file/below"])
def test_a_cache_that_cannot_be_written(local_task, tmp_path, cache):
    (tmp_path / "file").touch()
    MtebTest(task=local_task, cache=str(tmp_path / "new" / "folder")).check()
    with pytest.raises(UserError, match="evaluate.mteb_cache .*: MTEB cannot write there"):
        MtebTest(task=local_task, cache=cache.format(tmp_path)).check()
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("task", "languages", "message"),
    [
        ("Banking77Clasification", [], "Did you mean: 'Banking77Classification'"),
        ("xyzzy", [], "not found and no similar keys"),
        ("Banking77Classification", ["dan"], "No subsets were found .* language code .'dan'"),
    ],
)
def test_tasks_that_mteb_does_not_have(task, languages, message):
    with pytest.raises(UserError, match=message):
        MtebTest(task=task, languages=languages).check()


def test_data_that_cannot_be_had(local_task, model, monkeypatch):
    def load_data(self, **_):
        raise ConnectionError("no network")

    monkeypatch.setattr(TASKS[local_task], "load_data", load_data)
    with pytest.raises(UserError, match=r"nobody/nothing cannot be had \(no network\)"):
        MtebTest(task=local_task).score(encoder_of(model), SILENT)


def test_without_the_package_the_command_that_installs_it_is_named(monkeypatch):
    monkeypatch.setattr("stages.packages.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'sentray\[mteb\]'"):
        MtebTest(task="STS12").check()


def test_tasks_are_named_in_a_line():
    found = EvaluateSettings.model_validate(
        {"mteb": ["STS12", {"task": "STS22", "languages": ["eng"]}]}
    )
    assert [test.title for test in found.tests] == ["size", "mteb-STS12", "mteb-STS22"]
