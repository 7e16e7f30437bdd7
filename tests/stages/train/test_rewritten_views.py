"""Rewritten views and hard negatives: which are drawn, who has none, what they do to a step."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from stages.files import Root
from stages.rows import OwnedRows
from stages.train.checkpoint import Checkpoints
from stages.train.engine import PlainEngine
from stages.train.settings import Objectives, TrainSettings
from stages.train.student import build_student
from stages.train.student_settings import StudentSettings
from stages.train.views import BatchReader, TrainingData
from tests.support.data import token_rows
from tests.support.models import make_model, make_sentences
from tests.support.training import train

PROMPT = dict(pooling="mask", template='"{sentence}" means {mask}.', max_length=24)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rewritten")
    return str(make_model(folder / "bert", layers=2, head="ForMaskedLM", seed=4))


def settings_of(model):
    return StudentSettings(model=model, **PROMPT)


def built(model):
    """A student with a linear head that also denoises."""
    chosen = StudentSettings(model=model, device="cpu", head="linear", **PROMPT)
    objectives = {"infonce": {}, "denoising": {"layers": 2, "feed_forward": 64}}
    return build_student(
        chosen, Objectives.model_validate(objectives), seed=0, autocast=False, rewritten=True
    ).train()


@pytest.fixture
def rewritten_data(tmp_path, model):
    """40 sentences in two shards; from two sources three, two, one or no rewrites each."""
    sentences = make_sentences(40)
    rewrites = iter(make_sentences(200, seed=5))
    tokens = token_rows(tmp_path, "s", [sentences[:25], sentences[25:]], settings_of(model))
    owned, sources = {}, []
    for source in range(2):
        texts, owners = [[], []], []
        for row in range(40):
            for _ in range(row % 3 if source else int(row % 4 == 1)):
                text = next(rewrites)
                texts[row >= 25].append(text)
                owners.append(row)
                owned.setdefault(row, []).append(text)
        sources.append(
            (token_rows(tmp_path, f"r{source}", texts, settings_of(model)), np.array(owners))
        )
    data = TrainingData(tokens, [], [], [], rewrites=OwnedRows(sources))
    return data, sentences, owned


def batches(student, data, worker=(0, 1), steps=6, **settings):
    chosen = TrainSettings.model_validate(
        dict(objectives={"infonce": {}}, batch_size=8, seed=3) | settings
    )
    reader = BatchReader(
        chosen, data, student.tokenizers, student.views, worker, torch.device("cpu")
    )
    return dict(reader(range(steps)))


def text_of(student, row):
    tokenizer = student.tokenizers[0].pretrained
    return tokenizer.decode(row, skip_special_tokens=True).split('"')[1].strip()


def plain(text):
    return text.lower().replace(".", " .")


@pytest.mark.parametrize("view", ["second", "first", "none"])
def test_one_view_is_a_rewrite_and_sentences_without_one_stay_out(model, rewritten_data, view):
    data, sentences, owned = rewritten_data
    student = built(model)
    row_of = {plain(text): row for row, text in enumerate(sentences)}
    rewrite_of = {plain(text): row for row, texts in owned.items() for text in texts}
    assert data.num_rows == len(owned) < 40
    used = set()
    for batch in batches(student, data, steps=60, rewritten_view=view).values():
        halves = [[text_of(student, row) for row in half] for half in batch.ids_VbL.chunk(2)]
        if view == "first":
            halves.reverse()
        for left, right in zip(*halves, strict=True):
            assert row_of[left] in owned
            assert left == right if view == "none" else rewrite_of[right] == row_of[left]
            used.add(right)
    if view != "none":
        assert used == set(rewrite_of)  # every rewrite of every source is drawn some time


def test_which_rewrite_is_drawn_does_not_depend_on_the_number_of_workers(model, rewritten_data):
    data, _, _ = rewritten_data
    student = built(model)
    for step, whole in batches(student, data).items():
        expected = whole.ids_VbL.chunk(2)[1]
        halves = [batches(student, data, (rank, 2))[step].ids_VbL.chunk(2)[1] for rank in (0, 1)]
        found = [row[row != 0].tolist() for half in halves for row in half]
        assert found == [row[row != 0].tolist() for row in expected]


def test_hard_negatives_are_candidates_of_every_sentence(model, rewritten_data, tmp_path):
    data, _, owned = rewritten_data
    having = sorted(owned)[::2]
    tokens = token_rows(tmp_path, "n", [make_sentences(len(having), seed=8)], settings_of(model))
    whole = TrainingData(
        data.tokens, [], [], [], rewrites=data.rewrites,
        negatives=OwnedRows([(tokens, np.array(having))]),
    )  # fmt: skip
    assert whole.sentences(np.arange(whole.num_rows)).tolist() == having
    held = replace(whole, num_held_out=having[2])
    assert held.sentences(np.arange(held.num_rows)).tolist() == having[2:]
    objectives = {"infonce": {"hard_negatives": True}}
    settings = TrainSettings.model_validate(
        dict(objectives=objectives, batch_size=8, max_steps=1, log_every_steps=1)
    )
    student = build_student(
        StudentSettings(model=model, head="none", dropout=0.0, **PROMPT, device="cpu"),
        settings.objectives, 0, False,
    )  # fmt: skip
    assert student.views == ("first", "negative")  # without dropout the second would be the first
    batch = batches(student, whole, steps=1, objectives=objectives, seed=settings.seed)[0]
    assert len(batch.ids_VbL) == 16
    u, n = F.normalize(student.train()(batch.ids_VbL, batch.mask_VbL, {})[0], dim=-1).chunk(2)
    logits = torch.cat([u @ u.T, u @ n.T], 1) / 0.05
    expected = -torch.log_softmax(logits, 1).diagonal().mean()
    rows = []
    train(PlainEngine(student, settings), settings, whole, None, rows.append)
    assert rows[0]["infonce"] == pytest.approx(float(expected), abs=1e-5)


def test_a_killed_denosent_training_resumes_bit_for_bit(model, rewritten_data, tmp_path):
    objectives = {"infonce": {"weight": 5.0}, "denoising": {"layers": 2, "feed_forward": 64}}
    settings = TrainSettings.model_validate(
        dict(objectives=objectives, batch_size=8, max_steps=40, learning_rate=1e-3,
             schedule="constant", warmup_ratio=0.0, checkpoint_every_steps=2, log_every_steps=1)
    )  # fmt: skip

    def run(checkpoints=None, kill_at=None):
        rows = []

        def on_metrics(row):
            rows.append(row)
            if row["step"] == kill_at:
                raise KeyboardInterrupt

        engine = PlainEngine(built(model), settings)
        return train(engine, settings, rewritten_data[0], checkpoints, on_metrics), rows

    undisturbed, rows = run()
    assert {row["learning_rate"] for row in rows} == {1e-3}
    first, last = ([row["denoising"] for row in part] for part in (rows[:5], rows[-5:]))
    assert sum(last) < 0.9 * sum(first)
    checkpoints = Checkpoints(Root(str(tmp_path)), "work")
    with pytest.raises(KeyboardInterrupt):
        run(checkpoints, kill_at=5)
    resumed, _ = run(checkpoints)
    assert all(torch.equal(x, resumed.weights[name]) for name, x in undisturbed.weights.items())


def test_rows_of_empty_shards_are_found(tmp_path, model):
    tokens = token_rows(tmp_path, "e", [["a cat"], [], ["the dog", "a bird"]], settings_of(model))
    found = tokens.take(np.array([2, 0, 1]))
    assert [len(row) for row in found] == [2, 2, 2]
    owned = OwnedRows([(tokens, np.array([3, 5, 5]))])
    draws = np.array([0.99, 0.0, 0.0])
    chosen = owned.take(np.array([5, 3, 5]), draws)
    assert [x.tolist() for x in chosen] == [x.tolist() for x in tokens.take(np.array([2, 0, 1]))]
    assert owned.owners.tolist() == [3, 5]


def test_rewrites_are_a_second_view_without_dropout_too(student_folder):
    settings = StudentSettings(model=str(student_folder), pooling="mean", dropout=0.0, device="cpu")
    objectives = Objectives.model_validate({"infonce": {}})
    for rewritten, views in ((False, ("first",)), (True, ("first", "second"))):
        built = build_student(settings, objectives, 0, False, rewritten=rewritten)
        assert built.views == views
