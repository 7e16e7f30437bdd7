"""A batch without padding, against the same sentences one by one."""

import pytest
import torch

from stages.encoder.tokenizer import pad
from stages.train.settings import Objectives
from stages.train.student import build_student
from stages.train.student_settings import StudentSettings
from tests.support.models import make_model, make_sentences

OTHERS = {
    "MPNet": {},  # its attention depends on places in the row
    "ModernBert": {"local_attention": 4},
    "Qwen3": {"num_key_value_heads": 1, "head_dim": 16, "pad_token_id": 0},
}


def student_of(folder, pooling):
    settings = StudentSettings(
        model=str(folder), pooling=pooling, max_length=16, device="cpu", dropout=0.0
    )
    objectives = Objectives.model_validate({"infonce": {}})
    return build_student(settings, objectives, seed=0, autocast=False)


def batch_of(student, count):
    """Token ids and mask of sentences of 1 to 36 words, cut to 16 tokens."""
    sentences = [" ".join(make_sentences(1 + i % 3, seed=i)) for i in range(count - 1)] + ["cat"]
    tokenizer = student.tokenizers[0]
    return [torch.from_numpy(x) for x in pad(tokenizer(sentences), tokenizer.pad_id)]


def vectors_and_gradients(student, ways):
    found = []
    for way in ways:
        student.train().zero_grad()
        vectors = way()
        weights = torch.arange(len(vectors))[:, None] / len(vectors)
        (vectors * weights).sum().backward()
        gradients = {name: x.grad for name, x in student.named_parameters() if x.requires_grad}
        found.append((vectors.detach(), gradients))
    return found


@pytest.mark.parametrize("count", [5, 140])
@pytest.mark.parametrize(
    ("kind", "pooling"), [("Bert", "mean"), ("Bert", "cls"), ("Roberta", "mean")]
)
def test_without_padding_nothing_else_changes(tmp_path, kind, pooling, count):
    student = student_of(make_model(tmp_path, kind=kind), pooling)
    ids, mask = batch_of(student, count)
    assert student.packs

    def one_by_one():
        rows = [(ids[i : i + 1, :n], mask[i : i + 1, :n]) for i, n in enumerate(mask.sum(1))]
        return torch.cat([student.head(student.encoder(*row)) for row in rows])

    ways = [lambda: student(ids, mask, {})[0], one_by_one]
    packed, alone = vectors_and_gradients(student, ways)
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=1e-3)
    assert student.num_positions % 32 == 0
    assert int(mask.sum()) <= student.num_positions < min(int(mask.sum()) + 32, ids.numel())


@pytest.mark.parametrize("kind", OTHERS)
def test_models_that_cannot_be_packed_are_computed_in_groups(tmp_path, kind):
    student = student_of(make_model(tmp_path, kind=kind, **OTHERS[kind]), "mean")
    ids, mask = batch_of(student, 140)
    assert not student.packs
    ways = [lambda: student(ids, mask, {})[0], lambda: student.head(student.encoder(ids, mask))]
    grouped, padded = vectors_and_gradients(student, ways)
    torch.testing.assert_close(grouped, padded, atol=1e-5, rtol=1e-3)
    assert int(mask.sum()) < student.num_positions < ids.numel()
