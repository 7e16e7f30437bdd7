"""Prompts: two templates, their bias, final periods, and the same vectors after export."""

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from torch import nn

from stages.encoder.model import load_encoder, load_for_inference
from stages.encoder.settings import EncoderSettings
from stages.encoder.tokenizer import SentenceTokenizer, load_tokenizer
from stages.errors import UserError
from stages.export.folder import export_student
from stages.train.student import save_encoder
from stages.train.student_settings import StudentSettings
from tests.support.heads import FIRST, PROMPTS, batch_of, built, token_data
from tests.support.models import byte_tokenizer, make_model, make_sentences


def test_each_view_has_its_template_around_the_same_sentence(models, tmp_path):
    student = built(models["Bert"], **PROMPTS)
    data = token_data(tmp_path, model=models["Bert"], **PROMPTS)
    batch = batch_of(student, {"infonce": {}}, data)
    for view, rows in enumerate(batch.ids_VbL.chunk(2)):
        tokenizer = student.tokenizers[view]
        assert rows[:, : len(tokenizer.prefix)].tolist() == [tokenizer.prefix] * 8
        lengths = batch.mask_VbL.chunk(2)[view].sum(1)
        for row, length in zip(rows, lengths, strict=True):
            assert row[length - len(tokenizer.suffix) : length].tolist() == tokenizer.suffix
    inside = [
        [row[len(t.prefix) : n - len(t.suffix)].tolist() for row, n in zip(rows, ns, strict=True)]
        for rows, ns, t in zip(batch.ids_VbL.chunk(2), batch.mask_VbL.sum(1).chunk(2),
                               student.tokenizers, strict=True)
    ]  # fmt: skip
    assert inside[0] == inside[1]
    assert batch.ids_VbL.shape[1] <= 24


@pytest.mark.parametrize("kind", ["Bert", "Roberta"])
def test_the_template_bias_is_the_template_around_a_sentence_nobody_sees(models, kind):
    """Slow twin: a real sentence of that length in between, hidden from attention."""
    student = built(models[kind], **PROMPTS, template_denoising=True)
    encoder, (first, second) = student.encoder, student.tokenizers
    lengths = [1, 5, 3, 5]
    masks = [
        torch.tensor([[1] * (len(t.prefix) + n + len(t.suffix)) + [0] * (5 - n) for n in lengths])
        for t in (first, second)
    ]
    width = max(mask.shape[1] for mask in masks)
    padded = [nn.functional.pad(mask, (0, width - mask.shape[1])) for mask in masks]
    found = student.template_bias(torch.cat(padded))
    expected = []
    for tokenizer in (first, second):
        for n in lengths:
            ids = torch.tensor([[*tokenizer.prefix, *[7] * n, *tokenizer.suffix]])
            seen = torch.ones_like(ids)
            seen[:, len(tokenizer.prefix) : len(tokenizer.prefix) + n] = 0
            states = encoder.backbone(input_ids=ids, attention_mask=seen).last_hidden_state
            expected.append(encoder.pool(states, ids, seen)[0])
    torch.testing.assert_close(found, torch.stack(expected), atol=1e-5, rtol=1e-4)
    assert found.requires_grad


def test_the_bias_is_subtracted_while_training_only(models, tmp_path):
    plain = built(models["Bert"], **PROMPTS, head="none")
    denoised = built(models["Bert"], **PROMPTS, head="none", template_denoising=True)
    batch = batch_of(
        plain,
        {"infonce": {}},
        token_data(tmp_path, model=models["Bert"], **PROMPTS),
    )
    inputs = batch.ids_VbL, batch.mask_VbL, {}
    bias = denoised.template_bias(batch.mask_VbL)
    torch.testing.assert_close(plain(*inputs)[0] - bias, denoised(*inputs)[0])
    torch.testing.assert_close(plain.eval()(*inputs)[0], denoised.eval()(*inputs)[0])


@pytest.mark.parametrize("rule", ["keep", "promptbert", "sncse"])
@pytest.mark.parametrize("kind", ["Bert", "Roberta"])
def test_a_prompted_student_is_the_same_in_sentence_transformers(models, tmp_path, kind, rule):
    """Template, mask pooling, final period and truncation are all in the exported folder."""
    settings = StudentSettings(model=models[kind], final_period=rule, **PROMPTS)
    encoder = load_encoder(settings.encoder())
    weights = {name: x.contiguous() for name, x in encoder.backbone.state_dict().items()}
    save_encoder(encoder, weights, tmp_path / "trained")
    ours = EncoderSettings(model=str(tmp_path / "trained"), max_length=20, device="cpu")
    export_student(tmp_path / "trained", load_tokenizer(ours), 20, "card", tmp_path / "student")
    texts = [
        *make_sentences(30), "a cat", "a cat.", "a cat?", "the cat eats!", 'the "cat"',
        " ".join(["red"] * 60), "", "a a", "b",
    ]  # fmt: skip
    theirs = SentenceTransformer(str(tmp_path / "student"), device="cpu").encode(texts)
    expected = load_for_inference(ours).encode_unit(texts)
    np.testing.assert_allclose(theirs, expected, atol=1e-5)
    again = EncoderSettings(model=str(tmp_path / "student"), max_length=20, device="cpu")
    np.testing.assert_allclose(load_for_inference(again).encode_unit(texts), expected, atol=1e-5)
    # what docs/how-it-works.md says of such a sentence: both masks count there
    text = f"a {encoder.tokenizer.pretrained.mask_token} cat"
    theirs = SentenceTransformer(str(tmp_path / "student"), device="cpu").encode([text])
    assert np.abs(theirs - load_for_inference(ours).encode_unit([text])).max() > 1e-3


@pytest.mark.parametrize(
    ("rule", "text", "expected"),
    [
        ("promptbert", "a cat", "a cat."),
        ("promptbert", "a cat!", "a cat!."),
        ("promptbert", 'a "cat"', 'a "cat"'),
        ("promptbert", "a cat?", "a cat?"),
        ("sncse", "a cat", "a cat ."),
        ("sncse", "a cat!", "a cat!"),
        ("sncse", "a cat)", "a cat)"),
        ("keep", "a cat", "a cat"),
    ],
)
def test_the_final_period_follows_its_rule(models, rule, text, expected):
    tokenizer = load_tokenizer(
        EncoderSettings(model=models["Bert"], pooling="mean", max_length=32, final_period=rule)
    )
    (ids,) = SentenceTokenizer(byte_tokenizer(), tokenizer.settings)([text])
    assert byte_tokenizer().decode(ids) == expected
    assert [row.dtype for row in tokenizer([text, ""])] == [np.int32, np.int32]


def test_a_tokenizer_without_a_mask_token_and_a_template_that_leaves_no_room(models):
    settings = EncoderSettings(model=models["Bert"], pooling="mask", template=FIRST, max_length=32)
    pretrained = load_tokenizer(settings).pretrained
    with pytest.raises(UserError, match="leaves none of max_length=9"):
        SentenceTokenizer(pretrained, settings.model_copy(update={"max_length": 9}))
    pretrained.mask_token = None
    with pytest.raises(UserError, match="no mask token"):
        SentenceTokenizer(pretrained, settings)
    words = settings.model_copy(update={"pooling": "last", "template": 'the "{sentence}" means :'})
    (ids,) = SentenceTokenizer(pretrained, words)(["a cat"])
    told = pretrained.convert_ids_to_tokens(ids)
    assert told == ["[CLS]", "the", '"', "a", "cat", '"', "means", ":", "[SEP]"]


def test_positions_that_a_model_takes_and_does_not_use_are_refused(tmp_path):
    """DeBERTa's of version 3."""
    model = make_model(tmp_path / "model", kind="DebertaV2", position_biased_input=False)
    with pytest.raises(UserError, match="template_denoising.* takes no position ids"):
        built(str(model), **PROMPTS, template_denoising=True)


def test_a_template_that_the_models_folder_decides_is_not_taken_silently(models, tmp_path):
    settings = StudentSettings(model=models["Bert"], **PROMPTS)
    encoder = load_encoder(settings.encoder())
    save_encoder(encoder, {k: x.contiguous() for k, x in encoder.backbone.state_dict().items()},
                 tmp_path / "trained")  # fmt: skip
    again = EncoderSettings(model=str(tmp_path / "trained"), template="a {sentence}", max_length=24)
    with pytest.raises(UserError, match="its sentray.json sets template"):
        load_tokenizer(again)
