"""Regression on teachers' vectors: golden values, gradients, projections; a batch of one view."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from stages.encoder.model import load_encoder
from stages.encoder.settings import EncoderSettings
from stages.encoder.source import EncoderSource
from stages.errors import UserError
from stages.rows import FactorRows
from stages.train.auxiliary import AuxiliaryInput
from stages.train.engine import PlainEngine
from stages.train.objectives.vector_regression import VectorRegression, vector_regression
from stages.train.order import BatchOrder
from stages.train.settings import Objectives, TrainSettings
from stages.train.stage import Teacher, Train
from stages.train.student import build_student, save_encoder, widths_of
from stages.train.student_settings import StudentSettings
from stages.train.vectors import NUM_SAMPLED, VectorRegressor, _sampled, principal_projection
from stages.train.views import TrainingData, view_names
from tests.support.data import token_rows
from tests.support.models import make_sentences
from tests.support.training import train

WIDTH = 32  # of the tiny student


@pytest.mark.parametrize("distance", ["cosine", "mse"])
def test_distances_equal_golden_values(golden, distance):
    u, projection, teacher = (
        torch.tensor(golden["inputs"][name], dtype=torch.float64)
        for name in ("u", "projection", "teacher1")
    )
    f = teacher / teacher.norm(dim=1, keepdim=True)
    name = {"cosine": "cosine", "mse": "mse_unit_vectors"}[distance]
    expected = golden["expected"][f"vector_regression_{name}_teacher1"]
    found = vector_regression(u @ projection.T, f, distance).mean()
    assert float(found) == pytest.approx(expected, rel=1e-12)
    single = vector_regression((u @ projection.T).float(), f.float(), distance).mean()
    assert float(single) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("distance", ["cosine", "mse"])
def test_gradients_are_those_of_finite_differences(distance):
    generator = torch.Generator().manual_seed(0)
    u = torch.randn(3, 5, dtype=torch.float64, generator=generator, requires_grad=True)
    f = torch.randn(3, 5, dtype=torch.float64, generator=generator)
    assert torch.autograd.gradcheck(lambda u: vector_regression(u, f, distance), u)


def test_a_projection_starts_at_the_principal_directions():
    generator = np.random.default_rng(0)
    spread = np.array([3.0, 2.0, 1.0, 0.5, 0.1])
    vectors = (generator.normal(size=(400, 5)) * spread).astype(np.float32)
    _, _, directions = np.linalg.svd(vectors, full_matrices=False)
    for dimension in (2, 5, 7):
        weight = principal_projection(vectors, dimension).weight.detach().numpy()
        assert weight.shape == (5, dimension)
        kept = directions[: min(dimension, 5)]
        np.testing.assert_allclose(weight @ weight.T, kept.T @ kept, atol=1e-5)


@pytest.fixture
def teacher(tmp_path):
    """Unit vectors of 150 sentences in three shards, as wide as is asked for."""

    def make(width, name="teacher"):
        generator = np.random.default_rng([width, *name.encode()])
        paths = []
        for shard in range(3):
            rows = generator.normal(size=(50, width))
            rows /= np.linalg.norm(rows, axis=1, keepdims=True)
            paths.append(tmp_path / f"{name}-{width}-{shard}.npy")
            np.save(paths[-1], rows.astype(np.float16))
        return FactorRows(paths, 50)

    return make


class Encoder:
    dimension = WIDTH


def test_teachers_are_mixed_by_their_weights(teacher):
    same, wider = teacher(WIDTH), teacher(48)
    rows = np.arange(4)
    factors = [torch.from_numpy(one.take(rows)) for one in (same, wider)]
    u = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))
    module = VectorRegressor(Encoder(), [(same, 1.0), (wider, 3.0)], VectorRegression(), [WIDTH])
    total, count = module(Encoder(), AuxiliaryInput(u, u, 1, factors=factors), u)
    identity, projection = module.projections
    assert not list(identity.parameters())
    parts = [
        vector_regression(u, factors[0], "cosine"),
        vector_regression(u @ projection.weight.T, factors[1], "cosine"),
    ]
    assert int(count) == 4
    assert float(total.detach()) == pytest.approx(
        float((0.25 * parts[0] + 0.75 * parts[1]).sum().detach())
    )


@pytest.mark.parametrize("width", [WIDTH, 48])
def test_a_second_teacher_of_another_space_is_reached_by_a_map(teacher, width):
    """The student's coordinates are the first one's of its width, wherever that stands; the map
    between the teachers brings it to the other."""
    home = teacher(WIDTH)
    turn = np.linalg.qr(np.random.default_rng(0).normal(size=(width, width)))[0][:WIDTH]
    rows = np.arange(150)
    other = SimpleNamespace(
        num_rows=150, dimension=width, take=lambda rows: (home.take(rows) @ turn).astype(np.float32)
    )
    others = [(other, 1.0), (home, 1.0)] if width != WIDTH else [(home, 1.0), (other, 1.0)]
    module = VectorRegressor(Encoder(), others, VectorRegression(), [WIDTH])
    u = torch.from_numpy(home.take(rows))
    factors = [torch.from_numpy(one.take(rows)) for one, _ in others]
    total, _ = module(Encoder(), AuxiliaryInput(u, u, 1, factors=factors), u)
    assert float(total.detach()) < 1e-3  # both are met at once: with identities, a mean of 1/2
    assert sum(one.numel() for one in module.parameters()) == WIDTH * width


def test_a_wide_teachers_squared_differences_do_not_count_less(teacher):
    """Each a mean over its own coordinates, teachers of 32 and 48 dimensions of equal weight had 60
    and 40 percent of the loss."""
    same, wider = teacher(WIDTH), teacher(48)
    factors = [torch.from_numpy(one.take(np.arange(4))) for one in (same, wider)]
    u = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))
    chosen = VectorRegression(distance="mse")
    module = VectorRegressor(Encoder(), [(same, 1.0), (wider, 3.0)], chosen, [WIDTH])
    total, _ = module(Encoder(), AuxiliaryInput(u, u, 1, factors=factors), u)
    cosines = VectorRegressor(Encoder(), [(same, 1.0), (wider, 3.0)], VectorRegression(), [WIDTH])
    expected, _ = cosines(Encoder(), AuxiliaryInput(u, u, 1, factors=factors), u)
    whole = 2 * float(expected.detach()) / (0.25 * WIDTH + 0.75 * 48)
    assert float(total.detach()) == pytest.approx(whole, rel=1e-3)


def test_widths_that_differ_need_a_projection(teacher):
    with pytest.raises(UserError, match=f"have {WIDTH} dimensions and a teacher's 48; set proj"):
        VectorRegressor(
            Encoder(), [(teacher(48), 1.0)], VectorRegression(projection="none"), [WIDTH]
        )
    learned = VectorRegression(projection="learned")
    (projection,) = VectorRegressor(
        Encoder(), [(teacher(WIDTH), 1.0)], learned, [WIDTH]
    ).projections
    assert projection.weight.requires_grad


def aligned_student(student_folder, teacher, width):
    settings = StudentSettings(
        model=str(student_folder), pooling="mean", max_length=16, head="none", device="cpu",
        aligned=True,
    )  # fmt: skip
    objectives = Objectives.model_validate({"vector_regression": {}})
    return build_student(settings, objectives, 0, False, teachers=[(teacher(width), 1.0)])


@pytest.mark.parametrize("width", [48, 20])
def test_an_aligned_student_keeps_its_map_to_the_teacher(student_folder, tmp_path, teacher, width):
    """It starts where a projection does, is trained, and belongs to the saved encoder."""
    student = aligned_student(student_folder, teacher, width)
    (dense,) = student.encoder.dense
    start = dense.linear.weight.detach().clone()
    vectors = teacher(width).take(np.arange(150))
    torch.testing.assert_close(start, principal_projection(vectors, WIDTH).weight.detach())
    assert not list(student.auxiliary.parameters())
    assert student.encoder.dimension == width
    shards = [make_sentences(150)[i : i + 50] for i in range(0, 150, 50)]
    plain = StudentSettings(model=str(student_folder), pooling="mean", max_length=16)
    data = TrainingData(token_rows(tmp_path, "tokens", shards, plain), [teacher(width)], [1.0], [])
    settings = TrainSettings.model_validate(
        {"objectives": {"vector_regression": {}}, "batch_size": 16, "max_steps": 3}
    )
    result = train(PlainEngine(student, settings), settings, data)
    assert not torch.equal(result.weights["dense.0.linear.weight"], start)
    save_encoder(student.encoder, result.weights, tmp_path / "saved")
    saved = EncoderSettings(model=str(tmp_path / "saved"), max_length=16, device="cpu")
    again = load_encoder(saved)
    texts = make_sentences(5)
    student.eval()
    np.testing.assert_allclose(again.encode(texts), student.encoder.encode(texts), atol=1e-6)


def test_an_aligned_student_of_the_teachers_width_needs_no_map(student_folder, teacher):
    assert not len(aligned_student(student_folder, teacher, WIDTH).encoder.dense)


def test_prefixes_go_through_the_leading_columns_of_the_projection(teacher):
    """Slow twin: each width cut by itself, and the mean of the distances."""
    wider = teacher(48)
    factors = torch.from_numpy(wider.take(np.arange(4)))
    u = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))
    module = VectorRegressor(Encoder(), [(wider, 1.0)], VectorRegression(), [WIDTH, 20, 8])
    total, _ = module(Encoder(), AuxiliaryInput(u, u, 1, factors=[factors]), u)
    weight = module.projections[0].weight
    expected = [
        vector_regression(u[:, :w] @ weight[:, :w].T, factors, "cosine").sum() for w in (32, 20, 8)
    ]
    assert float(total.detach()) == pytest.approx(float(sum(expected).detach()) / 3, rel=1e-5)


def test_the_width_of_an_aligned_student_is_its_teachers_where_that_is_known(student_folder):
    settings = TrainSettings.model_validate({"objectives": {"vector_regression": {}}})
    aligned = StudentSettings(model=str(student_folder), pooling="mean", head="none", aligned=True)
    source = EncoderSource(aligned)
    known = (Teacher("t", SimpleNamespace(width=lambda: 48), None),)
    widths = [Train(source, settings, 100, teachers=some).output_width() for some in (known, ())]
    assert widths == [48, None]  # none: of a plug-in's similarity


def test_a_training_is_the_same_wherever_its_model_lies(student_folder, tmp_path):
    settings = TrainSettings.model_validate({"objectives": {"infonce": {}}})

    def identity(folder, **config):
        shutil.copytree(student_folder, folder)
        about = json.loads((folder / "config.json").read_text()) | config
        (folder / "config.json").write_text(json.dumps(about))
        student = StudentSettings(model=str(folder), pooling="mean", dropout=0.0)
        return Train(EncoderSource(student), settings, 100).identity({})

    assert identity(tmp_path / "longformer-notes") == identity(tmp_path / "other")
    assert identity(tmp_path / "none", model_type=None)
    assert identity(tmp_path / "kind", model_type="longformer")["student.longformer"] == 2


def test_an_encoder_that_may_be_cut_is_turned_to_principal_directions(student_folder, teacher):
    """The turn changes no cosine, the projection turns it back, and a cut is a PCA."""
    options = dict(
        model=str(student_folder), pooling="mean", max_length=16, head="none", device="cpu"
    )
    objectives = Objectives.model_validate({"vector_regression": {}})
    plain, cut = (
        build_student(
            StudentSettings(**options, dimensions=dimensions), objectives, 0, False,
            teachers=[(teacher(WIDTH), 1.0), (teacher(WIDTH, "other"), 1.0)],
        ).eval()
        for dimensions in ([], [20, 8])
    )  # fmt: skip
    assert cut.widths == (WIDTH, 20, 8) and plain.widths == (WIDTH,)
    texts = make_sentences(12)
    before, after = (torch.from_numpy(one.encoder.encode(texts)) for one in (plain, cut))
    torch.testing.assert_close(after @ after.T, before @ before.T, atol=1e-4, rtol=1e-4)
    back, other = (one.weight.detach() for one in cut.auxiliary["vector_regression"].projections)
    torch.testing.assert_close(after @ back.T, before, atol=1e-4, rtol=1e-4)
    vectors, others = (teacher(WIDTH, name).take(np.arange(150)) for name in ("teacher", "other"))
    between = torch.from_numpy(np.linalg.lstsq(vectors, others, rcond=None)[0])
    torch.testing.assert_close(after @ other.T, before @ between, atol=1e-4, rtol=1e-4)
    _, _, directions = np.linalg.svd(vectors, full_matrices=False)
    np.testing.assert_allclose(
        np.abs(after[:, :8]), np.abs(before.numpy() @ directions[:8].T), atol=1e-4
    )
    aligned = StudentSettings(**options, dimensions=[8], aligned=True)
    kept = build_student(aligned, objectives, 0, False, teachers=[(teacher(WIDTH), 1.0)])
    assert not len(kept.encoder.dense)  # the teacher's own coordinates


def test_objectives_are_averaged_over_widths(student_folder, tmp_path, teacher):
    """One step at dropout 0 against each width computed by hand."""
    options = StudentSettings(
        model=str(student_folder), pooling="mean", max_length=16, head="none", dropout=0.0,
        device="cpu", dimensions=[20, 8],
    )  # fmt: skip
    settings = TrainSettings.model_validate({
        "objectives": {"similarity_regression": {}}, "batch_size": 16, "max_steps": 1,
        "log_every_steps": 1,
    })  # fmt: skip
    shards = [make_sentences(150)[i : i + 50] for i in range(0, 150, 50)]
    tokens = token_rows(tmp_path, "tokens", shards, options)
    data = TrainingData(tokens, [teacher(48)], [1.0], [])
    student = build_student(options, settings.objectives, 0, autocast=False)
    rows = BatchOrder(150, 16, settings.seed).rows(0)
    u = torch.from_numpy(student.encoder.encode([make_sentences(150)[i] for i in rows]))
    f = torch.from_numpy(teacher(48).take(rows))
    expected = []
    for width in (WIDTH, 20, 8):
        cut = u[:, :width] / u[:, :width].norm(dim=1, keepdim=True)
        difference = (cut @ cut.T - f @ f.T)[~torch.eye(16, dtype=bool)]
        expected.append(float((difference**2).mean()))
    result = train(PlainEngine(student, settings), settings, data)
    assert result.progress.history[0]["loss"] == pytest.approx(np.mean(expected), rel=1e-3)
    parts = result.progress.history[0]["similarity_regression"]
    assert parts == pytest.approx(expected[0], rel=1e-3)  # of the whole width


def test_a_width_beyond_the_vectors_is_refused(student_folder):
    student = StudentSettings(
        model=str(student_folder), pooling="mean", head="none", dimensions=[WIDTH + 1]
    )
    objectives = Objectives.model_validate({"listnet": {}})
    with pytest.raises(UserError, match="student.dimensions: 33 is more than the 32"):
        build_student(student, objectives, 0, autocast=False)


def test_the_whole_width_may_be_named_and_is_trained_once():
    settings = StudentSettings(model="m", pooling="mean", head="none", dimensions=[8, WIDTH, 16])
    assert widths_of(settings, WIDTH) == (WIDTH, 16, 8)


def test_there_is_one_view_where_nobody_reads_another_or_it_would_be_the_same():
    alone = Objectives.model_validate({"vector_regression": {}})
    both = Objectives.model_validate({"vector_regression": {}, "listnet": {}})
    assert view_names(alone, True) == view_names(both, False) == ("first",)
    assert view_names(both, True) == ("first", "second")


@pytest.mark.parametrize("others", [{}, {"listnet": {}}])
def test_a_student_comes_nearer_to_its_teacher(student_folder, tmp_path, teacher, others):
    student = StudentSettings(
        model=str(student_folder), pooling="mean", max_length=16, head="none", device="cpu"
    )
    sentences = make_sentences(150)
    shards = [sentences[i : i + 50] for i in range(0, 150, 50)]
    data = TrainingData(token_rows(tmp_path, "tokens", shards, student), [teacher(48)], [1.0], [])
    settings = TrainSettings.model_validate({
        "objectives": {"vector_regression": {}} | others, "batch_size": 16, "max_steps": 100,
        "learning_rate": 3e-3, "log_every_steps": 1,
    })  # fmt: skip
    teachers = list(zip(data.factors, data.teacher_weights, strict=True))
    built = build_student(student, settings.objectives, 0, autocast=False, teachers=teachers)
    before = built.auxiliary["vector_regression"].projections[0].weight.detach().clone()
    result = train(PlainEngine(built, settings), settings, data)
    distances = [row["vector_regression"] for row in result.progress.history]
    # random vectors of width 48 are at distance 1; 150 of them can be learned by heart
    assert 0.9 < distances[0] < 1.1
    assert np.mean(distances[-10:]) < np.mean(distances[:10]) - 0.05
    after = built.auxiliary["vector_regression"].projections[0].weight
    assert not torch.equal(before, after)
    assert not [name for name in result.weights if "projection" in name]


def test_of_two_views_the_first_learns_the_vectors(teacher):
    factors = torch.from_numpy(teacher(WIDTH).take(np.arange(4)))
    module = VectorRegressor(Encoder(), [(teacher(WIDTH), 1.0)], VectorRegression(), [WIDTH])
    ids = torch.zeros(8, 1)
    batch = AuxiliaryInput(ids, ids, 2, factors=[factors])
    total, count = module(Encoder(), batch, torch.cat([factors, factors.flip(0)]))
    assert int(count) == 4 and float(total) == pytest.approx(0, abs=1e-5)


def test_projections_are_in_float32_under_autocast(teacher):
    wider = teacher(48)
    factors = torch.from_numpy(wider.take(np.arange(4)))
    module = VectorRegressor(Encoder(), [(wider, 1.0)], VectorRegression(), [WIDTH])
    u = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))
    batch = AuxiliaryInput(u, u, 1, factors=[factors])
    expected = float(module(Encoder(), batch, u)[0])
    with torch.autocast("cpu", torch.bfloat16):
        assert float(module(Encoder(), batch, u)[0]) == pytest.approx(expected, rel=1e-6)


def test_without_projection_an_encoder_that_may_be_cut_is_as_it_was(student_folder, teacher):
    settings = StudentSettings(
        model=str(student_folder), pooling="mean", head="none", dimensions=[8], device="cpu"
    )
    objectives = Objectives.model_validate({"vector_regression": {"projection": "none"}})
    student = build_student(settings, objectives, 0, False, teachers=[(teacher(WIDTH), 1.0)])
    assert not len(student.encoder.dense) and not list(student.auxiliary.parameters())


def test_directions_are_learned_from_rows_of_the_whole_corpus():
    rows = _sampled(SimpleNamespace(num_rows=10**6, take=lambda rows: rows))
    assert len(rows) == NUM_SAMPLED and (rows[0], rows[-1]) == (0, 10**6 - 1)
