"""Variants of the exported student: what they keep, what the gate refuses, how they are told of."""

import json
import math
import re
import tempfile
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors import SafetensorError
from sentence_transformers import SentenceTransformer

from stages.contract import Figure
from stages.encoder.model import load_encoder
from stages.encoder.settings import EncoderSettings
from stages.encoder.tokenizer import load_tokenizer
from stages.evaluate.base import Result
from stages.evaluate.sets import StsSettings
from stages.evaluate.sts import StsTest
from stages.export import proving
from stages.export.convert import FILES
from stages.export.folder import export_student
from stages.export.proof import Proof, points_lost, refusal
from stages.export.proving import Reference, prove, write_variant
from stages.export.running import encode_with, rows_with, without_normalize
from stages.export.settings import GateSettings
from stages.export.variant import Variant
from stages.rows import unit_rows
from stages.train.student import save_encoder
from tests.support.data import write_sts
from tests.support.heads import FIRST
from tests.support.models import make_model, make_sentences

MODULES = {
    "onnx": ("onnx", "onnxscript", "onnxruntime"),
    "onnx-int8": ("onnx", "onnxscript", "onnxruntime"),
    "openvino": ("onnx", "onnxscript", "openvino"),
    "openvino-int8": ("onnx", "onnxscript", "openvino", "nncf"),
    "bf16": (),
}
# 8-bit products of a model of random weights: 0.968 where the processor adds them up in 16 bits
# (x86 without VNNI), so that they saturate.
LOWEST = {
    "onnx": 0.99999,
    "openvino": 0.999,
    "bf16": 0.999,
    "onnx-int8": 0.99,
    "openvino-int8": 0.95,
}
STUDENTS = {
    "Bert": {"pooling": "mean"},
    # with word weights, and a template and a final period in its tokenizer
    "Roberta": {"pooling": "mask", "template": FIRST, "final_period": "promptbert"},
}


class Silent:
    """A node's work, as far as tests of encoders look at it."""

    def say(self, text, important=False):
        pass


class Told:
    """A node's work that keeps what is said and published."""

    def __init__(self):
        self.lines, self.log, self.published = [], [], []

    def say(self, text, important=False):
        (self.lines if important else self.log).append(text)

    def publish(self, stats, folder=None):
        self.published.append((stats, folder))


def exported(folder, **settings):
    """The model in `model/` as a student."""
    settings = {"model": str(folder / "model"), "max_length": 24, "device": "cpu"} | settings
    encoder = load_encoder(EncoderSettings(**settings))
    weights = {name: x.contiguous() for name, x in encoder.backbone.state_dict().items()}
    save_encoder(encoder, weights, folder / "trained")
    ours = EncoderSettings(model=str(folder / "trained"), max_length=24)
    export_student(folder / "trained", load_tokenizer(ours), 24, "card", folder / "student")
    return folder / "student"


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """Exported students by kind, as float32 references; their graphs are made once."""
    folder = tmp_path_factory.mktemp("students")
    write_sts(folder / "sts.tsv")
    test = StsTest(sts=StsSettings(name="sts", path=str(folder / "sts.tsv")), num_bootstrap=0)
    found = {}
    for kind, settings in STUDENTS.items():
        make_model(folder / kind / "model", kind=kind, head="ForMaskedLM", seed=4)
        student = exported(folder / kind, **settings)
        texts = [*make_sentences(90, seed=1), " ".join(["red"] * 60), "a"]
        found[kind] = Reference(student, texts, make_sentences(40, seed=2), (test,), Silent())
    return found


@pytest.mark.parametrize("kind", STUDENTS)
@pytest.mark.parametrize("variant", MODULES)
def test_a_variant_gives_the_students_vectors(references, tmp_path, kind, variant):
    for name in MODULES[variant]:
        pytest.importorskip(name)
    reference = references[kind]
    plain = SentenceTransformer(str(reference.folder), device="cpu").encode(reference.compared)
    np.testing.assert_allclose(reference.vectors, plain, atol=1e-6)
    write_variant(variant, reference, tmp_path)
    assert (tmp_path / FILES[variant]).is_file()
    proof = prove(variant, reference, tmp_path, Silent())
    assert LOWEST[variant] < proof.lowest_cosine <= proof.cosine < 1.00001
    assert abs(proof.lost["sts"]) < 10
    if variant == "onnx":
        assert abs(proof.lost["sts"]) < 0.01
    assert proof.num_compared == 92
    assert proof.megabytes > 0
    assert 0 < proof.times_as_fast[1] <= proof.times_as_fast[0] <= proof.times_as_fast[2]
    assert refusal(GateSettings(cosine=LOWEST[variant]), proof) == ""


def test_graphs_beyond_protobufs_limit_have_their_weights_beside_them(
    references, tmp_path, monkeypatch
):
    """Every graph of a student counts as large here."""
    for name in MODULES["onnx-int8"]:
        pytest.importorskip(name)
    from torch.onnx._internal.exporter import _onnx_program

    monkeypatch.setattr(_onnx_program, "_LARGE_MODEL_THRESHOLD", 1)
    reference = replace(references["Bert"], temporary=tempfile.TemporaryDirectory())
    for variant in ("onnx", "onnx-int8"):
        target = tmp_path / variant
        write_variant(variant, reference, target)
        assert (target / f"{FILES[variant]}.data").stat().st_size > 10_000
        assert prove(variant, reference, target, Silent()).cosine > LOWEST[variant]


def test_a_template_is_in_a_tokenizer_that_optimums_transformers_4_knows(references):
    config = references["Roberta"].folder / "tokenizer_config.json"
    assert json.loads(config.read_text())["tokenizer_class"] == "PreTrainedTokenizerFast"


@pytest.mark.parametrize("kind", STUDENTS)
def test_transfer_tasks_see_a_variant_as_it_pools(references, kind):
    """Without the module that scales its vectors to length 1, and as Sentray's own encoder."""
    folder, texts = references[kind].folder, make_sentences(20)
    student = references[kind].student
    pooled = rows_with(without_normalize(student))(texts)
    settings = EncoderSettings(model=str(folder), pooling="auto", max_length=32)
    own = load_encoder(settings).encode(texts)
    np.testing.assert_allclose(pooled, own, atol=1e-4)
    assert abs(np.linalg.norm(pooled, axis=1) - 1).min() > 0.01
    np.testing.assert_allclose(unit_rows(pooled), encode_with(student)(texts), atol=1e-5)


def test_8_bits_are_smaller_and_not_the_same(references, tmp_path):
    """So that a variant is not measured by running the float32 graph, or torch."""
    pytest.importorskip("onnxruntime")
    reference = references["Bert"]
    write_variant("onnx-int8", reference, tmp_path)
    proof = prove("onnx-int8", reference, tmp_path, Silent())
    assert proof.lowest_cosine < 0.99999
    assert (tmp_path / FILES["onnx-int8"]).stat().st_size < reference.onnx.stat().st_size


def test_the_gate_refuses_a_damaged_variant(references, tmp_path):
    """Weights of its last layer are lost: it loads, encodes and is wrong."""
    from safetensors.torch import load_file, save_file

    reference = references["Bert"]
    write_variant("bf16", reference, tmp_path)
    file = tmp_path / FILES["bf16"]
    weights = load_file(file)
    damaged = {n: x * (0 if "layer.1.output.dense" in n else 1) for n, x in weights.items()}
    save_file(damaged, file, metadata={"format": "pt"})
    proof = prove("bf16", reference, tmp_path, Silent())
    assert proof.lowest_cosine < proof.cosine < 0.99
    missed = refusal(GateSettings(), proof)
    assert missed == f"cosine {proof.cosine:.4f} is under export.gate.cosine 0.99"


def test_a_variant_that_torch_cannot_trace_is_refused_with_a_line(tmp_path):
    """The run goes on: table, report and the student itself do not hang on it."""
    for name in MODULES["onnx"]:
        pytest.importorskip(name)
    make_model(tmp_path / "model", kind="Longformer", attention_window=[8, 8])
    texts = make_sentences(3)
    reference = Reference(exported(tmp_path, pooling="mean"), texts, texts, (), Silent())
    variant, work = Variant("onnx", GateSettings(), (), False), Told()
    variant.make(work, reference)
    (line,) = work.lines
    assert line.startswith("onnx is not published: it cannot be made of this model (Guard")
    assert "\n" not in line and "TorchExportError" in work.log[-1]
    ((stats, folder),) = work.published
    assert folder is None and stats["refused"] in line and stats["notes"] == [stats["refused"]]
    assert variant.student_part(SimpleNamespace(stats=stats)).refused == stats["refused"]


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        SafetensorError("Error while serializing: I/O error: File too large (os error 27)"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to"),
    ],
)
def test_a_full_disk_is_not_the_variants_fault(references, monkeypatch, error):
    """Nor is a lack of memory: on another day it may be made."""

    def full(*_):
        raise error

    monkeypatch.setattr("stages.export.convert.write_bfloat16", full)
    work = Told()
    with pytest.raises(type(error), match=re.escape(str(error))):
        Variant("bf16", GateSettings(), (), False).make(work, references["Bert"])
    assert work.published == []


def test_a_variant_whose_vectors_are_not_finite_is_refused(references, tmp_path):
    """Before the tests see them, which take no such vectors; and by a gate without limits too."""
    from safetensors.torch import load_file, save_file

    reference = references["Bert"]
    write_variant("bf16", reference, tmp_path)
    file = tmp_path / FILES["bf16"]
    weights = load_file(file)
    next(x for n, x in weights.items() if "layer.1.output.dense" in n).fill_(math.inf)
    save_file(weights, file, metadata={"format": "pt"})
    proof = prove("bf16", replace(reference, tests=(TakesFinite(),)), tmp_path, Silent())
    for gate in ({}, {"cosine": None}, {"cosine": None, "points": 1}):
        missed = refusal(GateSettings(**gate), proof)
        assert missed.startswith("some of its vectors are not finite numbers")
        assert "no test" not in missed
    assert "cosine to the float32 student nan" in proof.told()


@pytest.fixture
def proof():
    return Proof(
        cosine=0.995, lowest_cosine=0.96, num_compared=1000,
        figures=[Figure("sts", 80.0, percent=True)], lost={"sts": 0.5, "R@1": -0.2},
        times_as_fast=(2.0, 1.9, 2.2), sentences_per_second=500.0, threads=2, megabytes=17.7,
    )  # fmt: skip


def test_a_gate_holds_each_of_its_settings_against_the_figures(proof):
    def missed(**gate):
        return refusal(GateSettings(**gate), proof)

    assert missed() == missed(cosine=0.995, lowest_cosine=0.96, points=0.5) == ""
    assert missed(cosine=None) == ""
    assert missed(cosine=0.996) == "cosine 0.9950 is under export.gate.cosine 0.996"
    assert missed(lowest_cosine=0.97) == (
        "lowest_cosine 0.9600 is under export.gate.lowest_cosine 0.97"
    )
    close = replace(proof, lowest_cosine=0.99999)
    assert refusal(GateSettings(lowest_cosine=1), close).startswith("lowest_cosine 0.999990000 is")
    assert missed(points=0.4) == "sts loses 0.50 points, over export.gate.points 0.4"
    assert missed(cosine=0.999, points=0).count(";") == 1


def test_what_is_no_number_or_was_not_tested_passes_no_gate(proof):
    broken = replace(proof, cosine=math.nan, lowest_cosine=math.nan, lost={"sts": math.nan})
    assert "cosine nan" in refusal(GateSettings(), broken)
    assert "sts loses nan" in refusal(GateSettings(points=100), broken)
    assert "nan points lost (sts)" in broken.told()
    untested = replace(proof, figures=[], lost={})
    assert "no test of the recipe" in refusal(GateSettings(points=1), untested)


def test_points_are_lost_where_a_figure_in_percent_gets_worse():
    before = [
        Figure("sts", 80.0, percent=True),
        Figure("error", 10.0, "lower", percent=True),
        Figure("uniformity", -2.0, "lower"),
    ]
    after = [replace(one, value=one.value + 1) for one in before]
    assert points_lost(before, after) == {"sts": -1.0, "error": 1.0}


def test_what_is_said_of_a_variants_speed_and_size(references, tmp_path, monkeypatch):
    taken = {"float32": np.full(5, 4.0), "variant": np.full(5, 1.0)}
    monkeypatch.setattr(proving, "time_all", lambda encode, texts: taken)
    reference = references["Bert"]
    write_variant("bf16", reference, tmp_path)
    before = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
    (tmp_path / "more").write_bytes(b"0" * 2_000_000)
    proof = prove("bf16", reference, tmp_path, Silent())
    assert proof.times_as_fast == (4.0, 4.0, 4.0)
    assert proof.sentences_per_second == len(reference.compared)
    assert proof.megabytes == pytest.approx(2 + before / 1e6)


class TakesFinite:
    """A test that ends with vectors which are not finite, as many of the product's do."""

    reads_model = False

    def score(self, tested, work):
        assert np.isfinite(tested.encode(make_sentences(5))).all()
        return Result([])


class SeesLengths:
    """A test that keeps the lengths of the vectors it is handed as they are pooled."""

    reads_model = False
    num_bootstrap = 0
    name = "lengths"

    def score(self, tested, work):
        self.lengths = np.linalg.norm(tested.as_pooled(make_sentences(5)), axis=1)
        return Result([])


def test_a_variants_tests_are_handed_vectors_as_they_are_pooled(references):
    seen = SeesLengths()
    reference = replace(references["Bert"], tests=(seen,))
    reference.score(reference.student, Silent())
    assert abs(seen.lengths - 1).min() > 0.01
