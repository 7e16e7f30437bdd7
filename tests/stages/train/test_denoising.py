"""DenoSent's denoising decoder against slow twins."""

import shutil

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForMaskedLM

from stages.encoder.tokenizer import pad
from stages.errors import UserError
from stages.train.auxiliary import AuxiliaryInput, decoder_layers, token_cross_entropy
from stages.train.objectives.infonce import info_nce
from stages.train.objectives.scores import cosines
from stages.train.settings import Denoising, Objectives
from stages.train.student import build_student
from stages.train.student_settings import StudentSettings
from tests.support.models import make_model, make_sentences

PROMPT = dict(pooling="mask", template='"{sentence}" means {mask}.', max_length=24)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("denosent")
    return str(make_model(folder / "bert", layers=2, head="ForMaskedLM", seed=4))


@pytest.fixture(scope="module")
def headless(tmp_path_factory):
    folder = tmp_path_factory.mktemp("headless")
    return str(make_model(folder / "bert", layers=2, seed=4))


def built(model, denoising=None, **settings):
    chosen = dict(model=model, device="cpu", head="linear") | PROMPT | settings
    objectives = {"infonce": {}, "denoising": {"layers": 2, "feed_forward": 64} | (denoising or {})}
    return build_student(
        StudentSettings(**chosen), Objectives.model_validate(objectives), seed=0, autocast=False,
        rewritten=True,
    ).train()  # fmt: skip


def pair_batch(student, left, right):
    """Ids and masks of two views with different texts, padded together."""
    first, second = student.tokenizers
    ids, mask = pad([*first(left), *second(right)], first.pad_id)
    return torch.from_numpy(ids), torch.from_numpy(mask)


def without_dropout(student):
    for module in student.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    return student


def test_golden_values(golden):
    inputs, expected = golden["inputs"], golden["expected"]
    u, v, hard, logits = (
        torch.tensor(inputs[name], dtype=torch.float64)
        for name in ("u", "v", "hard_negative", "token_logits")
    )
    found = info_nce(cosines(u, v), inputs["tau1"], cosines(u, hard))
    assert float(found) == pytest.approx(expected["infonce_hard_negative_tau1"], abs=1e-9)
    ids = torch.tensor(inputs["token_ids_pad0"])
    total, count = token_cross_entropy(logits[ids != 0], ids[ids != 0])
    mean = float(total / count)
    assert mean == pytest.approx(expected["denoising_token_cross_entropy"], abs=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_token_cross_entropy_equals_its_slow_twin(seed):
    random = np.random.default_rng(seed)
    logits, ids = 3 * random.standard_normal((9, 11)), random.integers(0, 11, 9)
    total, count = token_cross_entropy(torch.tensor(logits), torch.tensor(ids))
    rows = zip(logits, ids, strict=True)
    assert float(total) == pytest.approx(
        -sum(np.log(np.exp(row[one]) / np.exp(row).sum()) for row, one in rows), rel=1e-12
    )
    assert int(count) == 9
    half, _ = token_cross_entropy(torch.tensor(logits).bfloat16(), torch.tensor(ids))
    assert half.dtype == torch.float32


def test_the_decoder_of_bert_base_has_the_papers_size_and_no_two_layers_start_alike():
    with torch.device("meta"):
        layers = decoder_layers(768, Denoising())
    assert sum(p.numel() for p in layers.parameters()) == 126_046_208
    small = decoder_layers(8, Denoising(layers=2, feed_forward=4))
    first, second = (layer.self_attn.in_proj_weight for layer in small)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("target", ["input", "memory"])
def test_the_loss_is_what_a_decoder_by_hand_gives(model, target):
    """Slow twin: one sentence at a time, attention over its real tokens only, MLM head on top."""
    student = without_dropout(built(model, {"target": target, "noise": 0.0}, dropout=0.0))
    left = ["a cat eats", "the old woman reads a red book under the tree"]
    right = ["the small cat eats quickly", "an old woman sees a book"]
    ids, mask = pair_batch(student, left, right)
    vectors, sums = student(ids, mask, {})
    total, count = sums["denoising"]
    whole = AutoModelForMaskedLM.from_pretrained(model).eval()
    denoiser = student.auxiliary["denoising"]
    losses = []
    for row in range(2):
        length = int(mask[2 + row].sum())
        wanted = int(mask[row].sum()) if target == "memory" else length
        # positions after the input's end are padding to the decoder, but may be asked for
        states = whole.bert.embeddings(ids[2 + row : 3 + row])
        hidden = torch.arange(ids.shape[1])[None] >= length
        for layer in denoiser.layers:
            states = layer(states, vectors[row].view(1, 1, -1), tgt_key_padding_mask=hidden)
        logits = whole.cls(states)[0, :wanted]
        goal = ids[row if target == "memory" else 2 + row, :wanted]
        losses += [-F.log_softmax(logits, -1)[i, token] for i, token in enumerate(goal)]
    assert int(count) == len(losses)
    torch.testing.assert_close(total, torch.stack(losses).sum(), atol=1e-4, rtol=1e-4)


def test_attention_to_the_one_vector_never_learns_where_to_look(model):
    """Queries and keys over a memory of length one get a gradient of exactly zero."""
    student = built(model)
    ids, mask = pair_batch(student, ["a cat eats", "the dog"], ["the cat eats", "a dog runs"])
    _, sums = student(ids, mask, {})
    sums["denoising"][0].backward()
    for layer in student.auxiliary["denoising"].layers:
        attention = layer.multihead_attn
        query, key, value = attention.in_proj_weight.grad.chunk(3)
        assert not query.any() and not key.any() and value.any()
        query, key, value = attention.in_proj_bias.grad.chunk(3)
        assert not query.any() and not key.any() and value.any()


def test_the_vector_gets_gradient_and_the_decoders_input_does_not(model):
    """Word embeddings learn through the tied head and the vector, positions through the vector."""
    student = built(model, {"noise": 0.0})
    ids, mask = pair_batch(student, ["a cat eats", "the dog"], ["the cat eats", "a dog runs"])
    denoiser, encoder = student.auxiliary["denoising"], student.encoder
    given = AuxiliaryInput(ids, mask)
    vectors = torch.randn(4, encoder.dimension, requires_grad=True)
    denoiser(encoder, given, vectors)[0].backward()
    assert vectors.grad[:2].abs().sum(1).bool().all()
    assert not vectors.grad[2:].any()  # the memory is view 1's
    assert encoder.backbone.embeddings.position_embeddings.weight.grad is None
    assert encoder.backbone.embeddings.word_embeddings.weight.grad.any()


def test_another_sentences_vector_is_another_loss(model):
    student = without_dropout(built(model, {"noise": 0.0}))
    ids, mask = pair_batch(student, ["a cat eats", "the dog"], ["the cat eats", "a dog runs"])
    denoiser, given = student.auxiliary["denoising"], AuxiliaryInput(ids, mask)
    vectors = 5 * torch.randn(4, student.encoder.dimension)
    own, _ = denoiser(student.encoder, given, vectors)
    swapped, _ = denoiser(student.encoder, given, vectors[[1, 0, 2, 3]])
    assert (own - swapped).abs() > 1e-4


def test_noise_drops_its_share_and_scales_the_rest(model, monkeypatch):
    seen = []
    student = without_dropout(built(model, {"noise": 0.8}, dropout=0.0))
    layer = student.auxiliary["denoising"].layers[0]
    layer.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    ids, mask = pair_batch(student, make_sentences(20), make_sentences(20, seed=1))
    student(ids, mask, {})
    clean = student.encoder.backbone.embeddings(ids[20:])
    kept = seen[0] != 0
    assert 0.17 < kept.float().mean() < 0.23
    torch.testing.assert_close(seen[0][kept], 5 * clean[kept])


def test_a_model_without_vocabulary_head_needs_a_new_one_and_says_so(headless):
    with pytest.raises(UserError, match="vocabulary_head: new"):
        built(headless)
    student = built(headless, {"vocabulary_head": "new"})
    head = student.auxiliary["denoising"].head.model
    assert head.get_output_embeddings().weight is student.encoder.backbone.get_input_embeddings(
    ).weight  # fmt: skip
    again = built(headless, {"vocabulary_head": "new"}).auxiliary["denoising"].head.model
    dense = [one.cls.predictions.transform.dense.weight for one in (head, again)]
    assert torch.equal(*dense) and 0 < dense[0].std() < 1


def test_a_new_vocabulary_head_forgets_the_one_that_was_saved(model, tmp_path):
    model = str(shutil.copytree(model, tmp_path / "model"))
    whole = AutoModelForMaskedLM.from_pretrained(model)
    for parameter in whole.cls.predictions.transform.parameters():
        torch.nn.init.constant_(parameter, 7.0)
    torch.nn.init.constant_(whole.cls.predictions.bias, 3.0)
    whole.save_pretrained(model)
    kept, new = (
        built(model, {"vocabulary_head": kind}).auxiliary["denoising"].head.model.cls.predictions
        for kind in ("pretrained", "new")
    )
    assert (kept.transform.dense.weight == 7).all() and (kept.bias == 3).all()
    dense, norm = new.transform.dense, new.transform.LayerNorm
    assert 0 < dense.weight.std() < 1 and (dense.bias == 0).all()
    assert (norm.weight == 1).all() and (norm.bias == 0).all() and (new.bias == 0).all()


def test_models_that_a_decoder_cannot_read_are_refused(model, tmp_path, monkeypatch):
    from transformers import BertModel

    with pytest.raises(UserError, match="3 heads do not divide the 32 dimensions"):
        built(model, {"attention_heads": 3})
    monkeypatch.setattr(BertModel, "get_input_embeddings", lambda self: nn.Embedding(5, 7))
    with pytest.raises(UserError, match="no embedding layer with positions"):
        built(model)
