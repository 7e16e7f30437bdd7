"""The loop without Ray: order, exact resume, teachers from cache, bad input."""

import json
import threading
import tracemalloc
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from scipy.stats import spearmanr
from sklearn.metrics.pairwise import cosine_similarity

from stages.embed.embedder import Embedder
from stages.encoder.model import layer_stack, load_encoder
from stages.encoder.settings import EncoderSettings
from stages.encoder.tokenizer import pad
from stages.errors import StorageError, UserError
from stages.evaluate.classifiers import FAST
from stages.evaluate.geometry import score_geometry
from stages.evaluate.sets import StsSettings, load_sts
from stages.evaluate.transfer import dev_accuracy, learned
from stages.files import Root
from stages.rows import FactorRows, TokenRows, unit_rows
from stages.tokens.tokeniser import Tokeniser
from stages.train.checkpoint import Checkpoints, Saved
from stages.train.dev import Agreement, DevSets
from stages.train.engine import PlainEngine
from stages.train.loop import Training
from stages.train.order import BatchOrder
from stages.train.settings import DevSettings, DevTransfer, Objectives, TrainSettings
from stages.train.student import build_student, step_seed
from stages.train.student_settings import StudentSettings
from stages.train.views import TrainingData
from tests.support.data import write_sts
from tests.support.models import make_model, make_sentences
from tests.support.training import train

ROWS_PER_SHARD = 40
OBJECTIVES = {"infonce": {}, "consistency": {}, "listnet": {}}


@pytest.fixture(scope="module")
def data(tmp_path_factory, teacher_folder, student_folder):
    folder = tmp_path_factory.mktemp("data")
    sentences = make_sentences(150)
    embed = Embedder(EncoderSettings(model=str(teacher_folder), pooling="mean", max_length=32))
    tokenise = Tokeniser(
        [EncoderSettings(model=str(student_folder), pooling="mean", max_length=16)]
    )
    factors, tokens = [], []
    for shard in range(0, len(sentences), ROWS_PER_SHARD):
        texts = sentences[shard : shard + ROWS_PER_SHARD]
        for name, content in (embed(texts) | tokenise(texts)).items():
            (folder / f"{shard}.{name}").write_bytes(content)
        factors.append(folder / f"{shard}.factors.npy")
        tokens.append((folder / f"{shard}.ids.npy", folder / f"{shard}.offsets.npy"))
    write_sts(folder / "sts.tsv")
    return TrainingData(
        tokens=TokenRows(tokens),
        factors=[FactorRows(factors, ROWS_PER_SHARD)],
        teacher_weights=[1.0],
        dev=[load_sts(StsSettings(name="dev", path=str(folder / "sts.tsv")))],
    )


def settings_of(data_dev=True, **changes):
    dev = {"sts": [{"name": "dev", "path": "unused"}], "every_steps": 5} if data_dev else None
    base = dict(
        objectives=OBJECTIVES, batch_size=16, max_steps=20, learning_rate=1e-3, dev=dev,
        checkpoint_every_steps=4, log_every_steps=1,
    )  # fmt: skip
    return TrainSettings.model_validate(base | changes)


def run(data, student_folder, settings, checkpoints=None, on_metrics=lambda row: None, **student):
    chosen = StudentSettings(
        model=str(student_folder), pooling="mean", max_length=16, device="cpu", **student
    )
    autocast = settings.precision == "bfloat16"
    built = build_student(chosen, settings.objectives, settings.seed, autocast)
    return train(PlainEngine(built, settings), settings, data, checkpoints, on_metrics)


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_second_view_that_would_be_the_first_changes_nothing(data, student_folder):
    chosen = StudentSettings(
        model=str(student_folder), pooling="mean", max_length=16, device="cpu", dropout=0.0
    )
    settings = settings_of(data_dev=False, max_steps=5)
    losses, tokens = [], []
    for twice in (False, True):
        built = build_student(chosen, settings.objectives, 0, False, rewritten=twice)
        training = Training(PlainEngine(built, settings), settings, data)
        losses.append([row["loss"] for row in training.rows()])
        tokens.append(training.tokens)
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)
    assert tokens[1] == 2 * tokens[0]


@pytest.mark.parametrize(
    ("frozen", "stay"),
    [
        (dict(freeze_embeddings=True), ("embeddings.word_embeddings.",)),
        (dict(freeze_layers=1), ("embeddings.", "encoder.layer.0.")),
    ],
)
def test_what_is_frozen_stays(data, student_folder, frozen, stay):
    before = load_file(student_folder / "model.safetensors")
    changed = [
        {name for name, x in weights.items() if not torch.equal(x, before[name])}
        for options in ({}, frozen)
        for weights in [run(data, student_folder, settings_of(max_steps=3), **options).weights]
    ]
    assert changed[1] == {name for name in changed[0] if not name.startswith(stay)} != changed[0]


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("DistilBert", {}), ("MPNet", {}), ("ModernBert", {}),
        ("Qwen3", {"num_key_value_heads": 1, "head_dim": 16}),
    ],
)  # fmt: skip
def test_no_gradient_runs_through_frozen_layers(tmp_path, kind, config):
    folder = make_model(tmp_path, kind=kind, **config)
    settings = StudentSettings(
        model=str(folder), pooling="mean", device="cpu", freeze_layers=1, head="none", dropout=0.0
    )
    objectives = Objectives.model_validate({"infonce": {}})
    student = build_student(settings, objectives, 0, autocast=False)
    parent, name = layer_stack(student.encoder.backbone)
    seen = []
    for layer in getattr(parent, name):
        layer.register_forward_pre_hook(lambda layer, x: seen.append(x[0].requires_grad))
    ids = torch.ones(2, 3, dtype=torch.int64)
    student(ids, ids, {})[0].sum().backward()
    assert seen == [False, False]
    trained = {name for name, x in student.named_parameters() if x.grad is not None}
    assert trained and not any("embed" in name for name in trained)


class Killed(Exception):
    pass


@pytest.mark.parametrize("killed_at", [3, 4, 9, 19])
def test_a_killed_training_resumes_to_the_same_weights(data, student_folder, tmp_path, killed_at):
    """With dropout on, a head, and a best checkpoint that may lie before the kill."""
    settings = settings_of()
    undisturbed = run(data, student_folder, settings)
    checkpoints = Checkpoints(Root(str(tmp_path)), "work")

    def kill(row):
        if row["step"] == killed_at:
            raise Killed

    with pytest.raises(Killed):
        run(data, student_folder, settings, checkpoints, kill)
    steps = []
    resumed = run(
        data, student_folder, settings, checkpoints, lambda row: steps.append(row["step"])
    )
    assert steps[0] == 4 * ((killed_at - 1) // 4) + 1  # at most the steps since the checkpoint
    assert same(undisturbed.weights, resumed.weights)
    assert resumed.progress.best_step == undisturbed.progress.best_step
    losses = [[row["loss"] for row in r.progress.history] for r in (undisturbed, resumed)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("layers", [None, 0])
def test_a_student_that_may_be_cut_resumes_to_the_same_weights(
    data, student_folder, tmp_path, layers
):
    """Turned to principal directions, with a projection that turns it back."""
    student = StudentSettings(
        model=str(student_folder), pooling="mean", max_length=16, head="none", device="cpu",
        layers=layers, dimensions=[16],
    )  # fmt: skip
    changes = {"objectives": {"vector_regression": {}}, "max_steps": 10}
    settings = settings_of(data_dev=False, **changes)
    as_wide = unit_rows(data.factors[0].take(np.arange(150))[:, :32]).astype(np.float16)
    np.save(tmp_path / "factors.npy", as_wide)
    data = replace(data, factors=[FactorRows([tmp_path / "factors.npy"], 150)])

    def trained(*more):
        built = build_student(student, settings.objectives, 42, False, [(data.factors[0], 1.0)])
        return train(PlainEngine(built, settings), settings, data, *more)

    def kill(row):
        if row["step"] == 6:
            raise Killed

    undisturbed, checkpoints = trained(), Checkpoints(Root(str(tmp_path)), "work")
    with pytest.raises(Killed):
        trained(checkpoints, kill)
    resumed = trained(checkpoints)
    assert same(undisturbed.weights, resumed.weights)
    losses = [[row["loss"] for row in r.progress.history] for r in (undisturbed, resumed)]
    assert losses[0] == losses[1]


def test_a_checkpoint_is_of_its_step_however_late_it_is_written(
    data, student_folder, tmp_path, monkeypatch
):
    """Training goes on meanwhile, and finds another best evaluation."""
    settings, late = settings_of(), threading.Event()
    undisturbed = run(data, student_folder, settings)
    save = Checkpoints.save
    monkeypatch.setattr(Checkpoints, "save", lambda *given: late.wait(60) and save(*given))
    checkpoints = Checkpoints(Root(str(tmp_path)), "work")

    def kill(row):
        if row["step"] == 7:  # three steps after a checkpoint, and two after an evaluation
            late.set()
            raise Killed

    with pytest.raises(Killed):
        run(data, student_folder, settings, checkpoints, kill)
    assert checkpoints.newest() == Saved(4, 0)
    resumed = run(data, student_folder, settings, checkpoints)
    assert same(undisturbed.weights, resumed.weights)
    losses = [[row["loss"] for row in r.progress.history] for r in (undisturbed, resumed)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(("seconds", "saved"), [(1e-9, [16, 18]), (3600.0, [])])
def test_checkpoints_are_taken_by_the_clock_at_rows_of_metrics(
    data, student_folder, tmp_path, seconds, saved
):
    settings = settings_of(
        checkpoint_every_steps=None, checkpoint_every_seconds=seconds, log_every_steps=2,
        data_dev=False,
    )  # fmt: skip
    checkpoints = Checkpoints(Root(str(tmp_path)), "work")
    run(data, student_folder, settings, checkpoints)
    assert [one.step for one in checkpoints._complete()] == saved


def test_the_best_weights_are_written_once_and_go_with_the_last_that_has_them(tmp_path):
    root, written = Root(str(tmp_path)), []
    checkpoints = Checkpoints(root, "work", "0a0a0a0a")

    def save(step, best_step):
        best = {"w": torch.full((3,), float(best_step))}
        state = {"step": step, "layout": {"engine": "plain"}}
        checkpoints.save(step, lambda folder: (folder / "w").touch(), state, (best_step, best))
        files = tmp_path.glob("work/best-*/weights.safetensors")
        written.append({int(file.parent.name[5:11]): file.stat().st_mtime_ns for file in files})

    for step, best_step in ((4, 4), (8, 4), (12, 12), (16, 12), (20, 12)):
        save(step, best_step)
    assert [sorted(one) for one in written] == [[4], [4], [4, 12], [12], [12]]
    assert written[0] == written[1] and written[3] == written[4]
    other = Checkpoints(root, "work", "0b0b0b0b")  # whoever goes on
    newest = other.newest()
    with other.opened(newest) as found:
        assert found.best["w"].tolist() == [12.0] * 3
    for step in (24, 28):
        other.save(step, lambda folder: None, {}, (12, found.best))
    assert root.list("work") == [
        "best-000012-0a0a0a0a",  # whoever was thought dead may still save with it
        "best-000012-0b0b0b0b", "step-000024-0b0b0b0b", "step-000028-0b0b0b0b",
    ]  # fmt: skip


def test_a_checkpoint_that_cannot_be_written_ends_the_training(
    data, student_folder, tmp_path, monkeypatch
):
    def full(tensors, file):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("stages.train.checkpoint.save_file", full)
    checkpoints, rows = Checkpoints(Root(str(tmp_path)), "work"), []
    with pytest.raises(StorageError, match="the disk is full"):
        run(data, student_folder, settings_of(), checkpoints, rows.append)
    assert len(rows) == 8  # by the next one at the latest
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_checkpoint_without_its_marker_does_not_exist(data, student_folder, tmp_path):
    settings = settings_of(max_steps=10)
    checkpoints = Checkpoints(Root(str(tmp_path)), "work")
    run(data, student_folder, settings, checkpoints)
    (tmp_path / "work" / "step-000008" / "complete.json").unlink()
    newest = checkpoints.newest()
    assert newest == Saved(4, 0)
    with checkpoints.opened(newest) as found:
        assert found.state["step"] == 4


@pytest.mark.parametrize("name", ["state.safetensors", "complete.json", "weights.safetensors"])
@pytest.mark.parametrize("how", ["one byte", "cut", "gone"])
def test_a_damaged_checkpoint_is_not_used_and_that_is_said(
    data, student_folder, tmp_path, name, how
):
    """The older one is; without it the training begins again."""
    if (name, how) == ("complete.json", "gone"):
        return  # see above
    settings = settings_of(max_steps=18)
    undisturbed = run(data, student_folder, settings).progress.history

    def kill(row):
        if row["step"] == 14:  # checkpoints of 8 and 12
            raise Killed

    def fresh():
        return Checkpoints(Root(str(tmp_path)), "work")

    with pytest.raises(Killed):
        run(data, student_folder, settings, fresh(), kill)

    def damage(step):
        folder = tmp_path / "work" / f"step-{step:06d}"
        if name.startswith("weights"):
            folder = tmp_path / "work" / json.loads((folder / "complete.json").read_text())["best"]
        content = bytearray((folder / name).read_bytes())
        content[len(content) // 2] ^= 1
        (folder / name).unlink()
        if how != "gone":
            whole = len(content) if how == "one byte" else len(content) // 2
            (folder / name).write_bytes(content[:whole])

    both = name.startswith("weights")  # they have the same best weights
    for step, damaged, begins in ((12, [12], 8), (8, [12, 8], 0))[both:]:
        damage(step)
        chosen = StudentSettings(
            model=str(student_folder), pooling="mean", max_length=16, device="cpu"
        )
        built = build_student(chosen, settings.objectives, settings.seed, False)
        training = Training(PlainEngine(built, settings), settings, data, fresh())
        assert training.damaged == damaged
        assert (training.continued or [0])[0] == begins
    rows = training.rows()
    for row in rows:
        assert row["loss"] == undisturbed[row["step"] - 1]["loss"]
        if row["step"] == 6:  # killed again, with a new checkpoint of 4
            break
    rows.close()
    training.finish_saving()
    again = Training(PlainEngine(built, settings), settings, data, fresh())
    assert again.damaged == damaged and again.continued[0] == 4


def test_attempts_keep_their_files_apart_and_go_on_from_each_other(tmp_path):
    """One that was thought dead still writes; nothing of it gets into another's checkpoint."""
    root = Root(str(tmp_path))
    first, second = (Checkpoints(root, "work", attempt) for attempt in ("0a0a0a0a", "0b0b0b0b"))

    def save(checkpoints, step, text):
        def write(folder):
            (folder / "w.txt").write_text(text)

        state = {"step": step, "layout": {"engine": "plain"}}
        checkpoints.save(step, write, state)

    save(first, 4, "of the first")
    assert second.newest() == Saved(4, 0x0A0A0A0A)
    save(second, 8, "of the second")
    save(first, 8, "of the first, late")
    found = []
    for saved in (Saved(8, 0x0A0A0A0A), Saved(8, 0x0B0B0B0B)):
        with second.opened(saved) as opened:
            found.append((opened.folder / "w.txt").read_text())
    assert found == ["of the first, late", "of the second"]
    assert len(root.list("work")) == 2


def test_checkpoints_hold_nothing_that_needs_unpickling(data, student_folder, tmp_path):
    run(data, student_folder, settings_of(), Checkpoints(Root(str(tmp_path)), "work"))
    suffixes = {path.suffix for path in tmp_path.rglob("*") if path.is_file()}
    assert suffixes == {".json", ".safetensors"}
    file = next(tmp_path.rglob("state.safetensors"))
    assert any(name.startswith("adamw.") for name in load_file(file))


def test_training_brings_the_student_to_its_teacher(data, student_folder):
    listnet = {"listnet": {"student_temperature": 0.1, "teacher_temperature": 0.02}}
    settings = settings_of(max_steps=120, learning_rate=5e-3, objectives=listnet)
    history = run(data, student_folder, settings, dropout=0.0, head="none").progress.history
    first, last = (np.mean([r["loss"] for r in part]) for part in (history[:10], history[-10:]))
    assert last < first - 0.15


def test_seed_and_nothing_else_decides(data, student_folder):
    first, second = (run(data, student_folder, settings_of(data_dev=False)) for _ in range(2))
    other = run(data, student_folder, settings_of(data_dev=False, seed=7))
    assert same(first.weights, second.weights)
    assert not same(first.weights, other.weights)


def test_best_weights_are_those_of_the_best_evaluation(data, student_folder):
    settings = settings_of(learning_rate=0.5, max_steps=20)  # ruins the student at once
    result = run(data, student_folder, settings)
    scores = {r["step"]: r["dev_spearman"] for r in result.progress.history if "dev_spearman" in r}
    assert scores[result.progress.best_step] == max(scores.values()) == result.progress.best_score


def test_early_stopping_counts_evaluations_without_a_better_one(data, student_folder):
    dev = {"sts": [{"name": "dev", "path": "unused"}], "every_steps": 1, "patience": 2}
    result = run(data, student_folder, settings_of(learning_rate=0.5, max_steps=50, dev=dev))
    assert result.progress.step == result.progress.best_step + 2 < 50


def test_a_loss_that_becomes_nan_stops_with_one_message(data, student_folder, tmp_path):
    checkpoints = Checkpoints(Root(str(tmp_path)), "work")
    # the logged window (3 steps) ends at the checkpoint, so a NaN is seen before it is saved
    settings = settings_of(learning_rate=1e30, log_every_steps=3, data_dev=False)
    with pytest.raises(UserError, match="became nan .* Lower train.learning_rate"):
        run(data, student_folder, settings, checkpoints)
    assert not list(tmp_path.rglob("complete.json"))


def test_a_batch_larger_than_the_corpus_is_refused(data, student_folder):
    with pytest.raises(UserError, match="only 150 sentences"):
        run(data, student_folder, settings_of(batch_size=512))


def test_bfloat16_stays_near_float32(data, student_folder):
    losses = [
        run(data, student_folder, settings_of(precision=p, max_steps=3), dropout=0.0)
        .progress.history[0]["loss"]
        for p in ("float32", "bfloat16")
    ]  # fmt: skip
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.05)


def test_every_epoch_is_a_permutation_and_pure():
    order = BatchOrder(num_rows=103, batch_size=10, seed=3)
    epochs = [[order.rows(step) for step in range(e * 10, e * 10 + 10)] for e in range(2)]
    for batches in epochs:
        rows = np.concatenate(batches)
        assert len(set(rows)) == 100
        assert rows.max() < 103
    assert not np.array_equal(epochs[0], epochs[1])
    jumped = BatchOrder(num_rows=103, batch_size=10, seed=3)
    np.testing.assert_array_equal(jumped.rows(17), epochs[1][7])
    # pinned: a library update that changed the order would break every resumed run
    np.testing.assert_array_equal(BatchOrder(8, 4, 0).rows(0), [0, 2, 1, 5])


def test_an_order_takes_the_memory_that_it_says():
    num_rows = 1_000_000
    tracemalloc.start()
    try:
        order = BatchOrder(num_rows, 100, seed=0)
        for epoch in range(2):
            order.rows(epoch * num_rows // 100)
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 4.1 * num_rows and peak < 20.1 * num_rows


def test_rows_are_found_over_shard_borders(data):
    rows = np.array([149, 0, 40, 39, 0])
    whole = data.factors[0].take(np.arange(150))
    np.testing.assert_array_equal(data.factors[0].take(rows), whole[rows])
    np.testing.assert_allclose(np.linalg.norm(whole, axis=1), 1, atol=5e-4)  # fp16
    ids = data.tokens.take(np.arange(150))
    for got, row in zip(data.tokens.take(rows), rows, strict=True):
        np.testing.assert_array_equal(got, ids[row])


def test_every_step_and_worker_draws_its_own_dropout():
    """The same masks in every step would train a fixed sub-network."""
    seeds = {
        step_seed(seed, step, rank) for seed in (1, 2) for step in range(50) for rank in (0, 3)
    }
    assert len(seeds) == 200


def test_warm_up_and_decay():
    settings = settings_of(warmup_ratio=0.1, learning_rate=1.0, max_steps=100)
    rates = [settings.learning_rate_at(step, 100) for step in range(100)]
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert rates[10] == 1.0
    assert rates[99] == pytest.approx(1 / 90)
    assert settings_of(warmup_ratio=0.0, learning_rate=1.0).learning_rate_at(0, 10) == 1.0


def scored(monkeypatch, *means):
    """Dev scores as given, evaluation by evaluation."""
    left = iter(means)
    monkeypatch.setattr(DevSets, "scores", lambda _: {"dev": next(left)})


NAN = float("nan")


def test_a_dev_score_that_is_no_number_never_wins(data, student_folder, monkeypatch):
    """Nor before the best, nor after it; and it is an evaluation without a better one."""
    steady = dict(learning_rate=1e-3, schedule="constant", warmup_ratio=0.0)
    weights = {}
    for last in (10, 15):
        scored(monkeypatch, 1.0, 2.0, 3.0)
        weights[last] = run(data, student_folder, settings_of(max_steps=last, **steady)).weights
    scored(monkeypatch, NAN, 75.0, NAN, NAN)
    settings = settings_of(max_steps=20, **steady)
    result = run(data, student_folder, settings)
    assert (result.progress.best_score, result.progress.best_step) == (75.0, 10)
    assert result.progress.evaluations_since_best == 2
    assert same(result.weights, weights[10]) and not same(result.weights, weights[15])
    dev = {"sts": [{"name": "dev", "path": "unused"}], "every_steps": 5, "patience": 2}
    scored(monkeypatch, 75.0, NAN, NAN, 80.0)
    assert run(data, student_folder, settings_of(dev=dev)).progress.step == 15


def test_alignment_and_uniformity_are_measured_as_it_trains(data, student_folder):
    """They are what the finished student has; and weights are as without."""
    dev = {"sts": [{"name": "dev", "path": "unused"}], "every_steps": 5, "positives_above": 0.5}
    settings = settings_of(dev=dev, schedule="constant")
    chosen = StudentSettings(model=str(student_folder), pooling="mean", max_length=16, device="cpu")
    built = build_student(chosen, settings.objectives, settings.seed, False)
    rows = list(Training(PlainEngine(built, settings), settings, data).rows())
    looks = [row for row in rows if "dev_spearman" in row]
    assert [row["step"] for row in looks] == [5, 10, 15, 20]
    built.eval()  # at the last step
    found = score_geometry(data.dev[0], 0.5, built.encoder.encode_unit)
    for figure in found.figures:
        assert looks[-1][f"{figure.name}/dev"] == pytest.approx(figure.value, abs=1e-3)
        assert len({row[f"{figure.name}/dev"] for row in looks}) == 4
    without = run(data, student_folder, settings_of(schedule="constant")).progress.history
    assert [row["loss"] for row in without] == [row["loss"] for row in rows]
    assert not any("alignment/dev" in row for row in without)


@pytest.fixture
def tasks(tmp_path):
    """Two transfer tasks whose label some words tell: with nested folds, and with a split train."""
    sentences = make_sentences(120, seed=9)
    labels = [int(len(text) > 30) for text in sentences]
    assert 20 < sum(labels) < 100
    whole = [f"{label}\t{text}" for label, text in zip(labels, sentences, strict=True)]
    (tmp_path / "whole.tsv").write_text("\n".join(["label\ttext", *whole]) + "\n")
    split = [f"{line}\t{'train' if row < 90 else 'test'}" for row, line in enumerate(whole)]
    (tmp_path / "split.tsv").write_text("\n".join(["label\ttext\tsplit", *split]) + "\n")
    return [{"name": name, "path": str(tmp_path / f"{name}.tsv")} for name in ("whole", "split")]


def test_checkpoints_are_chosen_by_transfer_tasks(data, student_folder, tasks):
    """By their mean, of what the student's encoder then gives; training is as without."""
    settings = settings_of(dev={"transfer": tasks, "every_steps": 5}, schedule="constant")
    chosen = StudentSettings(model=str(student_folder), pooling="mean", max_length=16, device="cpu")
    built = build_student(chosen, settings.objectives, settings.seed, False)
    data = replace(data, dev=[], transfer=settings.dev.transfer)
    rows, expected = [], []
    training = Training(PlainEngine(built, settings), settings, data)
    for row in training.rows():
        rows.append(row)
        if "dev_spearman" in row:
            built.eval()
            expected.append(
                {f"dev/{one.name}": dev_accuracy(learned(one.load()), built.encoder.encode, FAST)
                 for one in settings.dev.transfer}
            )  # fmt: skip
    looks = [row for row in rows if "dev_spearman" in row]
    found = [{name: row[name] for name in expected[0]} for row in looks]
    assert found == [pytest.approx(one, abs=1e-3) for one in expected]
    means = [sum(one.values()) / 2 for one in expected]
    assert [row["dev_spearman"] for row in looks] == pytest.approx(means, abs=1e-3)
    best = int(np.argmax(means))
    assert len(set(means)) > 1 and training.progress.best_step == 5 * (best + 1)
    without = run(data, student_folder, settings_of(data_dev=False, schedule="constant"))
    assert [row["loss"] for row in without.progress.history] == [row["loss"] for row in rows]


def test_a_table_that_is_only_to_be_tested_on_chooses_no_checkpoint(tmp_path):
    rows = [f"{row % 2}\ttext {row}\ttest" for row in range(60)]
    (tmp_path / "task.tsv").write_text("\n".join(["label\ttext\tsplit", *rows]) + "\n")
    dev = DevSettings(transfer=[DevTransfer(name="x", path=str(tmp_path / "task.tsv"))])
    with pytest.raises(UserError, match="no split train to choose checkpoints by"):
        dev.check()
    # nor need there be rows that nothing here reads
    for there in (["train"], ["train", "dev"]):
        rows = [f"{row % 2}\ttext {row}\t{there[row % 3 % len(there)]}" for row in range(90)]
        (tmp_path / "task.tsv").write_text("\n".join(["label\ttext\tsplit", *rows]) + "\n")
        dev.check()
        assert {*dev.transfer[0].load()} == {*there}
    (tmp_path / "task.tsv").write_text("label\ttext\tsplit\n0\tone\tdev\n1\ttwo\tdev\n")
    with pytest.raises(UserError, match="a split dev and no train"):
        dev.check()
    (tmp_path / "task.tsv").write_text("label\ttext\tsplit\n0\tone\tall\n1\ttwo\tall\n")
    with pytest.raises(UserError, match="no rows with split 'test'; there are: all"):
        dev.check()


def test_workers_share_transfer_tasks_and_their_accuracies(data, student_folder, tasks):
    """So that all choose the same checkpoint, and stop at the same step."""
    settings = settings_of(dev={"transfer": tasks})
    chosen = StudentSettings(model=str(student_folder), pooling="mean", max_length=16, device="cpu")
    student = build_student(chosen, settings.objectives, 0, False)
    data = replace(data, dev=[], transfer=settings.dev.transfer)
    alone = DevSets(PlainEngine(student, settings), data).scores()

    class Second(PlainEngine):
        rank, num_workers = 1, 2
        of_the_first = ()

        def sum_over_workers(self, x):
            return x + self.of_the_first if len(x) == len(tasks) else self.vectors

    engine = Second(student, settings)
    engine.of_the_first = torch.tensor([alone["whole"], 0.0], dtype=torch.float64)
    second = DevSets(engine, data)
    plain = DevSets(PlainEngine(student, settings), data)._vectors()
    engine.vectors = torch.from_numpy(plain)
    assert second.scores() == alone


def test_without_any_dev_score_the_last_step_is_the_result_and_that_is_said(
    data, student_folder, monkeypatch
):
    settings = settings_of(max_steps=10)
    undisturbed = run(data, student_folder, settings_of(max_steps=10, data_dev=False))
    scored(monkeypatch, NAN, NAN)
    chosen = StudentSettings(model=str(student_folder), pooling="mean", max_length=16, device="cpu")
    built = build_student(chosen, settings.objectives, settings.seed, False)
    training = Training(PlainEngine(built, settings), settings, data)
    assert training.warning is None
    assert len(list(training.rows())) == 10
    result = training.trained
    assert (result.progress.best_score, result.progress.best_step) == (None, 10)
    assert same(result.weights, undisturbed.weights)
    assert training.warning and "no evaluation gave a number" in training.warning


def test_teachers_are_weighted_where_agreement_is_measured(data, student_folder):
    other = data.factors[0].take(np.arange(150))[::-1]
    second = SimpleNamespace(num_rows=150, take=lambda rows: other[rows])
    weighted = replace(
        data, factors=[data.factors[0], second], teacher_weights=[0.9, 0.1], num_held_out=150
    )
    settings = settings_of(data_dev=False)
    chosen = StudentSettings(model=str(student_folder), pooling="mean", max_length=16, device="cpu")
    engine = PlainEngine(build_student(chosen, settings.objectives, 1, autocast=False), settings)
    found = Agreement(engine, weighted)._teachers
    pairs, first = np.triu_indices(150, 1), weighted.factors[0].take(np.arange(150))
    expected = 0.9 * (first @ first.T)[pairs] + 0.1 * (other @ other.T)[pairs]
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_dev_sentences_are_not_cut_to_the_training_length(data, student_folder):
    """And pairs with a score of just `positives_above` do not mean the same."""
    texts = [*make_sentences(6, seed=2), " ".join(["red"] * 30), " ".join(["red"] * 60)]
    gold = np.array([0.1, 0.5, 0.7, 0.9])
    one = replace(data.dev[0], sentence1=texts[:4], sentence2=texts[4:], gold=gold)
    settings = settings_of()
    chosen = StudentSettings(model=str(student_folder), pooling="mean", max_length=8, device="cpu")
    engine = PlainEngine(build_student(chosen, settings.objectives, 1, autocast=False), settings)
    dev = DevSets(engine, replace(data, dev=[one]), positives_above=0.5)
    (score,) = dev.scores().values()
    settings = EncoderSettings(model=str(student_folder), pooling="mean", max_length=64)
    encode = load_encoder(settings).encode_unit
    cosines = (encode(texts[:4]) * encode(texts[4:])).sum(1)
    assert score == pytest.approx(100 * spearmanr(cosines, gold).statistic, abs=1e-6)
    squared = 2 - 2 * cosines[gold > 0.5]
    assert dev.geometry["alignment/dev"] == pytest.approx(squared.mean(), abs=1e-4)


def test_agreement_is_spearman_of_all_pairs_similarities(data, student_folder):
    """Against scipy's, on vectors that the trained student's encoder makes one by one."""
    chosen = StudentSettings(
        model=str(student_folder), pooling="mean", max_length=16, device="cpu", dropout=0.0
    )
    settings = settings_of(data_dev=False, max_steps=3)
    engine = PlainEngine(build_student(chosen, settings.objectives, 1, autocast=False), settings)
    rows = []
    train(engine, settings, data, on_metrics=rows.append)
    assert [("agreement" in row) for row in rows] == [False, False, True]
    encoder, tokenizer = engine.student.encoder.eval(), engine.student.tokenizers[0]
    vectors = []
    for ids in tokenizer.wrap(data.tokens.take(np.arange(150))):
        with torch.no_grad():
            vectors.append(encoder(*map(torch.from_numpy, pad([ids], 0)))[0].numpy())
    own = cosine_similarity(np.stack(vectors))
    teacher = cosine_similarity(data.factors[0].take(np.arange(150)))
    pairs = np.triu_indices(150, 1)
    expected = 100 * spearmanr(own[pairs], teacher[pairs]).statistic
    assert rows[-1]["agreement"] == pytest.approx(expected, abs=0.02)


def test_held_out_sentences_are_not_trained_on(data, student_folder, monkeypatch):
    held, taken, take = replace(data, factors=[], num_held_out=30), [], TokenRows.take
    monkeypatch.setattr(
        TokenRows, "take", lambda self, rows: taken.extend(rows.tolist()) or take(self, rows)
    )
    # two epochs of 7 batches of 16 of the other 120
    settings = settings_of(data_dev=False, objectives={"infonce": {}}, epochs=2, max_steps=None)
    result = run(held, student_folder, settings)
    assert result.progress.step == 14
    assert set(taken) == set(range(30, 150))


def test_a_student_that_cannot_follow_its_teacher_is_said(data, student_folder):
    """As when neither reads the other's language: teacher vectors that have nothing to do with
    the sentences."""
    settings = settings_of(max_steps=5)

    def warning_of(factors):
        chosen = StudentSettings(model=str(student_folder), pooling="mean", max_length=16)
        built = build_student(chosen, settings.objectives, settings.seed, autocast=False)
        taught = replace(data, factors=[factors])
        training = Training(PlainEngine(built, settings), settings, taught)
        list(training.rows())
        return training.warning

    random = np.random.default_rng(0).normal(size=(150, 8)).astype(np.float32)
    assert "hardly agree" in warning_of(Given(random))
    assert warning_of(data.factors[0]) is None


class Given:
    """Factors in memory, in the shape of `FactorRows`."""

    def __init__(self, vectors):
        self.vectors = torch.nn.functional.normalize(torch.from_numpy(vectors), dim=1).numpy()
        self.num_rows = len(vectors)

    def take(self, rows):
        return self.vectors[rows]
