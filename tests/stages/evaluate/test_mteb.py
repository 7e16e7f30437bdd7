"""Tasks of MTEB, against MTEB's own way with sentence-transformers; none needs the hub."""

import importlib
import json
from types import SimpleNamespace

import numpy as np
import pytest

from stages.contract import EncoderLabel
from stages.encoder.config import normalizes
from stages.encoder.model import load_for_inference
from stages.encoder.settings import EncoderSettings
from stages.encoder.source import EncoderSource
from stages.errors import UserError
from stages.evaluate import base
from stages.evaluate.classification import ClassificationTest
from stages.evaluate.mteb_tasks import MtebTest
from stages.evaluate.settings import EvaluateSettings
from stages.evaluate.stage import Evaluate
from tests.support.models import make_sentences
from tests.support.pipelines import make_pipeline, pooling

mteb = pytest.importorskip("mteb")
TASKS = importlib.import_module("mteb.get_tasks")._TASKS_REGISTRY
SILENT = SimpleNamespace(say=lambda *_, **__: None)


def rows_of(split, count):
    """Sentences with made-up labels that a classifier can learn something of."""
    sentences = make_sentences(count, seed=len(split))
    return [(text, len(text.split()) % 3) for text in sentences]


SPLITS = {"train": rows_of("train", 120), "test": rows_of("test", 90)}


@pytest.fixture
def local_task(monkeypatch):
    """A classification task whose data are here."""
    from datasets import Dataset, DatasetDict
    from mteb.abstasks import AbsTaskClassification
    from mteb.abstasks.task_metadata import TaskMetadata

    class LocalClassification(AbsTaskClassification):
        metadata = TaskMetadata(
            name="LocalClassification", description="made up", type="Classification",
            dataset={"path": "nobody/nothing", "revision": "1"}, eval_langs=["eng-Latn"],
            main_score="accuracy",
        )  # fmt: skip

        def load_data(self, **_):
            self.dataset = DatasetDict({
                split: Dataset.from_dict(
                    {"text": [text for text, _ in rows], "label": [label for _, label in rows]}
                )
                for split, rows in SPLITS.items()
            })  # fmt: skip
            self.data_loaded = True

    monkeypatch.setitem(TASKS, "LocalClassification", LocalClassification)
    return "LocalClassification"


@pytest.fixture(params=["as pooled", "of length 1"])
def model(tmp_path, request):
    """A model folder whose vectors have any length, and one whose have length 1."""
    from sentence_transformers.models import Normalize

    more = [Normalize] * (request.param == "of length 1")
    return make_pipeline(tmp_path, pooling("mean"), *more)


def encoder_of(folder):
    settings = EncoderSettings(model=str(folder), pooling="auto", max_length=32, device="cpu")
    encoder = load_for_inference(settings)
    known = {"pooled": encoder.encode, "normalizes": normalizes(folder)}
    return base.Tested(encoder.encode_unit, encoder, **known)


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
