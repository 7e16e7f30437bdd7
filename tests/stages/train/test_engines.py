"""Plain PyTorch, and DeepSpeed with one and two workers and each ZeRO stage: the same numbers.

The workers are processes in one process group (gloo) that train one combination after the other.
"""

import io
import json
import multiprocessing
import os
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from stages.embed.embedder import Embedder
from stages.encoder.settings import EncoderSettings
from stages.evaluate.sets import StsSettings, load_sts
from stages.files import Root
from stages.ranks.corpus import Ranker
from stages.rows import OwnedRows
from stages.tokens.negation import Negator
from stages.train.checkpoint import Checkpoints
from stages.train.engine import DeepSpeedEngine, PlainEngine
from stages.train.loop import Training
from stages.train.settings import TrainSettings
from stages.train.student import build_student
from stages.train.student_settings import StudentSettings
from stages.train.views import TrainingData
from tests.support.data import open_factors, open_tokens, token_rows, write_shards, write_sts
from tests.support.models import make_model, make_sentences
from tests.support.training import train

ROWS_PER_SHARD = 50
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
# combinations of workers and ZeRO stage for each recipe below
LAYOUTS = {
    "two teachers": [(1, 0), (2, 0), (2, 1), (2, 2), (2, 3)],
    "every method": [(2, 0), (2, 3)],
    "vectors": [(2, 0), (2, 3)],
}
# Who trains the first half, and who goes on: ZeRO stages of two workers, or the plain engine
HANDED_ON = [
    (0, 0), (1, 1), (2, 2), (3, 3), (0, 3), (3, 1), (1, 2), (2, 0), ("plain", 0), ("plain", 1),
    ("plain", 3), (0, "plain"), (2, "plain"), (3, "plain"),
]  # fmt: skip
HALF = 3


def settings_of(case, folder, zero_stage=None, device="cpu"):
    """Student and training of a case; without a ZeRO stage they are the plain engine's."""
    train = dict(
        batch_size=16, log_every_steps=1, schedule="constant",
        dev={"sts": [{"name": "dev", "path": "unused"}], "every_steps": 2},
    )  # fmt: skip
    if zero_stage is not None:
        train |= dict(engine="deepspeed", zero_stage=zero_stage)
    if case != "every method":
        student = dict(model=str(folder / "student"), pooling="mean", max_length=16)
        objectives = {"infonce": {}, "consistency": {}, "listnet": {}}
        if case == "vectors":  # one view; the teacher is wider than the student, its twin is not
            objectives = {"vector_regression": {}}
            student |= dict(freeze_layers=1)
        train |= dict(objectives=objectives, max_steps=6, learning_rate=1e-3, weight_decay=0.1)
    else:
        student = dict(
            model=str(folder / "masked"), pooling="mask", max_length=24, head="batchnorm",
            template='The book : "{sentence}" means{mask}.', template_denoising=True,
            second_template="A red {sentence} means {mask}.", final_period="promptbert",
        )  # fmt: skip
        generator = {"model": str(folder / "generator")}
        objectives = {
            "infonce": {"hard_negatives": True}, "masked_language": {},
            "rank_regression": {"low": 0.0, "combine": "sum"}, "soft_negative": {"weight": 0.5},
            "denoising": {"layers": 1, "noise": 0.0, "dropout": 0.0, "target": "memory"},
            "replaced_token": {"weight": 0.1, "generator": generator},
        }  # fmt: skip
        train |= dict(objectives=objectives, max_steps=4, learning_rate=1e-4)
    return (
        StudentSettings(**student, dropout=0.0, device=device), TrainSettings.model_validate(train)
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models, and what each case reads: 150 sentences in three shards, rewrites of every second."""
    folder = tmp_path_factory.mktemp("engines")
    make_model(folder / "student", seed=2)
    make_model(folder / "masked", head="ForMaskedLM", seed=6, **QUIET)
    make_model(folder / "generator", head="ForMaskedLM", layers=1, seed=7, **QUIET)
    make_model(folder / "teacher", layers=3, width=48, seed=1)
    write_sts(folder / "sts.tsv")
    sentences = make_sentences(150)
    shards = [sentences[i : i + ROWS_PER_SHARD] for i in range(0, 150, ROWS_PER_SHARD)]
    vectors = {}
    for name, pooling in (("teacher", "mean"), ("student", "cls")):
        embed = Embedder(EncoderSettings(model=str(folder / name), pooling=pooling, max_length=32))
        made = [embed(texts) for texts in shards]
        write_shards(folder, name, made)
        vectors[name] = [np.load(io.BytesIO(files["factors.npy"])) for files in made]
    corpus = np.concatenate(vectors["teacher"])[::3].astype(np.float32)
    rank = Ranker(corpus, None)
    write_shards(folder, "ranks", [rank(rows.astype(np.float32)) for rows in vectors["teacher"]])
    rewrites, negatives = (make_sentences(75, seed=seed) for seed in (4, 5))
    negated = [Negator()(texts) for texts in shards]
    for case in LAYOUTS:
        student, _ = settings_of(case, folder)
        token_rows(folder, f"{case}-tokens", shards, student)
        token_rows(folder, f"{case}-negated", negated, student)
        token_rows(folder, f"{case}-rewrites", [rewrites], student)
        token_rows(folder, f"{case}-negatives", [negatives], student)
    return folder


def data_of(case, folder):
    """The training data of a case, opened anew: every worker does so by itself."""
    whole = dict(
        tokens=open_tokens(folder, f"{case}-tokens"),
        dev=[load_sts(StsSettings(name="dev", path=str(folder / "sts.tsv")))],
    )
    if case != "every method":
        names, weights = ("teacher", "student"), [1.0, 2.0]
    else:
        names, weights = ("ranks",), [1.0]
        owners = np.arange(0, 150, 2)
        whole |= dict(
            views={"negated": open_tokens(folder, f"{case}-negated")},
            rewrites=OwnedRows([(open_tokens(folder, f"{case}-rewrites"), owners)]),
            negatives=OwnedRows([(open_tokens(folder, f"{case}-negatives"), owners)]),
        )
    factors = [open_factors(folder, name, ROWS_PER_SHARD) for name in names]
    return TrainingData(factors=factors, teacher_weights=weights, **whole)


def trained(case, folder, engine_class, zero_stage=None, place=None, until=None, device="cpu"):
    """Metric rows and weights of a training on this worker.

    Args:
        place: of its checkpoints. until: the step after which it ends, with a checkpoint.
    """
    student, settings = settings_of(case, folder, zero_stage, device)
    data = data_of(case, folder)
    teachers = list(zip(data.factors, data.teacher_weights, strict=True))
    built = build_student(student, settings.objectives, settings.seed, False, teachers)
    engine = engine_class(built, settings)
    if place is None:
        result = train(engine, settings, data)
    else:
        checkpoints = Checkpoints(Root(str(place)), "work")
        training = Training(engine, settings, data, checkpoints)
        for row in training.rows():
            if row["step"] == until:
                training.save(checkpoints)
                return None
        result = training.trained
    return result.progress.history, result.weights


def keep(name, out, result):
    rows, weights = result
    save_file({k: x.contiguous() for k, x in weights.items()}, out / f"{name}.weights")
    (out / f"{name}.json").write_text(json.dumps(rows))


@contextmanager
def process_group(rank, num_workers, out):
    import deepspeed
    import torch

    torch.set_num_threads(1)
    deepspeed.init_distributed(
        dist_backend="gloo", auto_mpi_discovery=False, verbose=False, rank=rank,
        world_size=num_workers, init_method=f"file://{out}/rendezvous-{num_workers}",
    )  # fmt: skip
    yield
    torch.distributed.destroy_process_group()


def worker(rank, num_workers, folder, out):
    """Trains every combination of this many workers; the first one writes what came of it."""
    with process_group(rank, num_workers, out):
        train_layouts(rank, num_workers, folder, out)


def train_layouts(rank, num_workers, folder, out):
    for case, layouts in LAYOUTS.items():
        for workers, zero_stage in layouts:
            if workers != num_workers:
                continue
            result = trained(case, folder, DeepSpeedEngine, zero_stage)
            if rank == 0:
                keep(f"{case}-{workers}-{zero_stage}", out, result)
    for first, second in HANDED_ON if num_workers == 2 else ():
        place = out / f"{first}-{second}"
        if first != "plain":
            trained("two teachers", folder, DeepSpeedEngine, first, place, HALF)
        if second != "plain":
            result = trained("two teachers", folder, DeepSpeedEngine, second, place)
            if rank == 0:
                keep(place.name, out, result)


def half_worker(rank, num_workers, folder, out, until):
    """Trains to a step with every ZeRO stage, and from there where it is None."""
    with process_group(rank, num_workers, out):
        for stage in range(4):
            place = out / f"many-{stage}"
            result = trained("two teachers", folder, DeepSpeedEngine, stage, place, until)
            if rank == 0 and result is not None:
                keep(place.name, out, result)


def run_workers(target, *groups):
    """Processes of several groups at once: of each how many workers, and what they are told."""
    context = multiprocessing.get_context("spawn")
    with pytest.MonkeyPatch.context() as patch:
        # DeepSpeed compiles an operator at its first start and looks for ninja on the PATH
        patch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        patch.setenv("DS_ACCELERATOR", "cpu")
        patch.setenv("LOCAL_RANK", "0")
        processes = [
            context.Process(target=target, args=(rank, workers, *told))
            for workers, *told in groups
            for rank in range(workers)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    assert {process.exitcode for process in processes} == {0}


@pytest.fixture(scope="module")
def out(folder, tmp_path_factory):
    """A folder with the results of all combinations."""
    out = tmp_path_factory.mktemp("results")
    for first, second in HANDED_ON:
        if first == "plain":
            trained("two teachers", folder, PlainEngine, None, out / f"{first}-{second}", HALF)
    run_workers(worker, (1, folder, out), (2, folder, out))
    return out


@pytest.fixture(scope="module")
def plain(folder):
    return {case: trained(case, folder, PlainEngine) for case in LAYOUTS}


@pytest.mark.parametrize(
    ("case", "workers", "zero_stage"),
    [(case, *layout) for case, layouts in LAYOUTS.items() for layout in layouts],
)
def test_workers_and_zero_stages_agree_with_the_plain_engine(
    folder, out, plain, case, workers, zero_stage
):
    """Dropout off: same losses and their parts, gradient norms, dev scores and weights."""
    expected, expected_weights = plain[case]
    _, settings = settings_of(case, folder)
    parts = [name for name, one in settings.objectives if one is not None]
    keys = ("loss", "gradient_norm", "dev_spearman", "agreement", *parts)
    rows = json.loads((out / f"{case}-{workers}-{zero_stage}.json").read_text())
    figures, expected_figures = (
        [row[key] for row in found for key in keys if key in row] for found in (rows, expected)
    )
    tolerance, atol = (2e-4, 2e-5) if case == "every method" else (1e-5, 1e-5)
    assert len(figures) > len(rows) * len(parts)
    np.testing.assert_allclose(figures, expected_figures, rtol=tolerance, atol=tolerance)
    weights = load_file(out / f"{case}-{workers}-{zero_stage}.weights")
    assert_weights(weights, expected_weights, atol)


@pytest.mark.parametrize(("first", "second"), HANDED_ON)
def test_a_training_goes_on_with_others(folder, out, plain, first, second):
    """Half by one, half by another: as by the second alone, bit for bit where both are alike."""
    name = f"{first}-{second}"
    if second == "plain":
        keep(name, out, trained("two teachers", folder, PlainEngine, None, out / name))
    rows, weights = (
        json.loads((out / f"{name}.json").read_text()),
        load_file(out / f"{name}.weights"),
    )
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    if first == second:
        undisturbed = load_file(out / f"two teachers-2-{second}.weights")
        assert all(np.array_equal(weights[key], undisturbed[key]) for key in undisturbed)
        return
    assert_near(rows, weights, plain["two teachers"])


def assert_near(rows, weights, plain):
    expected, expected_weights = plain
    for key in ("loss", "gradient_norm"):
        figures, wanted = ([row[key] for row in found] for found in (rows, expected))
        np.testing.assert_allclose(figures, wanted, rtol=1e-5, atol=1e-5)
    assert_weights(weights, expected_weights)


def assert_weights(weights, expected, near=1e-5):
    """All but one in a thousand are near, and those within a tenth of a step of 1e-3.

    AdamW divides by the gradients' own size, so where these are small their rounding is not: one
    weight of 2,048 was 2.7e-5 away on one processor, and none on another. Attention does not
    depend on key biases: all of their gradient is rounding.
    """
    assert weights.keys() == expected.keys()
    names = [name for name in expected if not name.endswith("key.bias")]
    away = np.concatenate([abs(weights[name] - expected[name]).numpy().ravel() for name in names])
    assert (away > near).mean() < 1e-3
    assert away.max() < 1e-4


@pytest.mark.thorough
def test_four_workers_go_on_where_eight_were(folder, plain, tmp_path):
    """With each ZeRO stage, as one worker does alone."""
    run_workers(half_worker, (8, folder, tmp_path, HALF))
    run_workers(half_worker, (4, folder, tmp_path, None))
    for stage in range(4):
        rows = json.loads((tmp_path / f"many-{stage}.json").read_text())
        assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
        assert_near(rows, load_file(tmp_path / f"many-{stage}.weights"), plain["two teachers"])
