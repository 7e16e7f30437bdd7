"""Packed linear layers give the same vectors; a model that they would change keeps its own."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN

from stages.contract import EncoderLabel
from stages.embed.stage import Embed
from stages.encoder import cpu
from stages.encoder.cpu import PackedLinear, pack_linears, packed_gain
from stages.encoder.model import load_encoder, load_for_inference
from stages.encoder.settings import EncoderSettings
from stages.encoder.source import EncoderSource
from stages.evaluate import base
from stages.evaluate.size import Size
from stages.evaluate.stage import Evaluate
from stages.rows import unit_rows
from stages.train.settings import Objectives, TrainSettings
from stages.train.student import autocasts
from tests.support.models import make_model, make_sentences

INFONCE = Objectives.model_validate({"infonce": {}})


@pytest.fixture(autouse=True)
def faster(monkeypatch):
    """Whatever this machine measures."""
    monkeypatch.setattr(cpu, "packed_gain", lambda *layer: 2.0)


@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "relu"])
def test_vectors_are_those_of_torchs_layers(teacher_folder, activation, monkeypatch):
    settings = EncoderSettings(
        model=str(teacher_folder), pooling="mean", max_length=32, device="cpu"
    )
    plain = load_encoder(settings)
    for layer in plain.backbone.encoder.layer:
        layer.intermediate.intermediate_act_fn = ACT2FN[activation]
    texts = make_sentences(50)
    expected = plain.encode_unit(texts)
    said = pack_linears(plain.backbone)
    assert said == "linear layers packed for oneDNN, 2.00 times as fast as torch's"
    assert not [m for m in plain.backbone.modules() if isinstance(m, nn.Linear)]
    found = plain.encode_unit(texts)
    assert (1 - (expected * found).sum(1)).max() < 1e-6
    fused = isinstance(
        plain.backbone.encoder.layer[0].intermediate.intermediate_act_fn, nn.Identity
    )
    assert fused == (activation == "gelu")


@pytest.mark.parametrize("texts", [[], ["one sentence"]])
def test_few_sentences(teacher_folder, texts):
    settings = EncoderSettings(
        model=str(teacher_folder), pooling="mean", max_length=32, device="cpu"
    )
    encoder = load_for_inference(settings)
    assert "packed" in encoder.arithmetic
    np.testing.assert_allclose(
        encoder.encode(texts), load_encoder(settings).encode(texts), atol=1e-5
    )


@pytest.mark.parametrize("has_instructions", [True, False])
def test_bfloat16_where_the_processor_has_it(teacher_folder, has_instructions, monkeypatch):
    """Without instructions it would be slower than float32, and less exact."""
    monkeypatch.setattr(
        cpu, "_is_supported", lambda dtype: has_instructions or dtype == torch.float32
    )
    monkeypatch.setattr(cpu, "PackedLinear", lambda linear, activation: linear)
    settings = EncoderSettings(
        model=str(teacher_folder), pooling="mean", max_length=32, device="cpu"
    )
    texts = make_sentences(50)
    exact = load_encoder(settings).encode_unit(texts)
    found = load_for_inference(settings.model_copy(update={"precision": "bfloat16"}))
    dtype = torch.bfloat16 if has_instructions else torch.float32
    assert {parameter.dtype for parameter in found.backbone.parameters()} == {dtype}
    error = (1 - (exact * unit_rows(found.encode(texts))).sum(1)).max()
    assert 1e-6 < error < 2e-3 if has_instructions else error < 1e-6
    assert ("no instructions for bfloat16" in found.arithmetic) == (not has_instructions)
    assert autocasts(TrainSettings(objectives=INFONCE, precision="bfloat16"), "cpu") == (
        has_instructions
    )
    assert not autocasts(TrainSettings(objectives=INFONCE), "cpu")


def test_rotary_positions_keep_their_precision(tmp_path, monkeypatch):
    """In bfloat16 their angles were off by more with every position."""
    monkeypatch.setattr(cpu, "_is_supported", lambda dtype: True)
    folder = make_model(
        tmp_path / "model", kind="Qwen3", num_key_value_heads=1, head_dim=16, pad_token_id=0
    )
    settings = EncoderSettings(
        model=str(folder), pooling="mean", max_length=32, device="cpu", precision="bfloat16"
    )
    exact, found = (dict(one(settings).backbone.named_buffers())["rotary_emb.inv_freq"]
                    for one in (load_encoder, load_for_inference))  # fmt: skip
    assert found.dtype == torch.float32 and torch.equal(found, exact)


@pytest.mark.parametrize(("activation", "packs"), [("gelu", True), ("relu", False)])
def test_slower_layers_are_packed_for_a_gelu_only(teacher_folder, monkeypatch, activation, packs):
    monkeypatch.setattr(cpu, "packed_gain", lambda *layer: 0.9)
    settings = EncoderSettings(
        model=str(teacher_folder), pooling="mean", max_length=32, device="cpu"
    )
    backbone = load_encoder(settings).backbone
    for layer in backbone.encoder.layer:
        layer.intermediate.intermediate_act_fn = ACT2FN[activation]
    assert pack_linears(backbone).startswith("linear layers packed") == packs


def test_how_vectors_are_computed_is_said_by_whoever_loads_a_model(teacher_folder, monkeypatch):
    """Loudly where a stage embeds all there is, or where it is slow."""
    said = []
    work = SimpleNamespace(
        say=lambda line, important=False: said.append((line, important)), count_tokens=None
    )
    settings = EncoderSettings(
        model=str(teacher_folder), pooling="mean", max_length=32, device="cpu", precision="bfloat16"
    )
    source, label = EncoderSource(settings), EncoderLabel("t", "teacher")
    monkeypatch.setattr(cpu, "_is_supported", lambda dtype: dtype == torch.float32)
    Embed(source).open(SimpleNamespace(**vars(work), input=lambda name: None))
    Evaluate(Size(), source, label, 32).load(work)
    assert [loud for _, loud in said] == [True, False]
    assert all("no instructions for bfloat16" in line for line, _ in said)
    said.clear()
    slow = "WARNING: torch's linear layers"
    monkeypatch.setattr("stages.encoder.model.pack_linears", lambda *_: slow)
    exact = EncoderSource(settings.model_copy(update={"precision": "float32"}))
    Evaluate(Size(), exact, label, 32).load(work)
    assert said == [(slow, True)]


class Odd(nn.Module):
    """A model that reads a layer's weights by itself."""

    def __init__(self):
        super().__init__()
        self.embed, self.dense = nn.Embedding(8, 4), nn.Linear(4, 4)

    def forward(self, input_ids):
        states = self.embed(input_ids) @ self.dense.weight
        return type("Out", (), {"last_hidden_state": states})


def test_a_model_that_uses_weights_otherwise_keeps_its_layers():
    odd = Odd()
    assert pack_linears(odd).startswith("WARNING: torch's linear layers, as this model")
    assert type(odd.dense) is nn.Linear


class Twisted(Odd):
    """One whose activation is not where others have it."""

    def __init__(self):
        super().__init__()
        self.intermediate_act_fn = nn.GELU()

    def forward(self, input_ids):
        states = self.dense(self.embed(input_ids)) - 2 * self.intermediate_act_fn(
            self.embed(input_ids)
        )
        return type("Out", (), {"last_hidden_state": states})


def test_a_model_that_computes_otherwise_keeps_its_layers():
    torch.manual_seed(0)
    twisted = Twisted()
    ids = torch.arange(8)[None]
    before = twisted(ids).last_hidden_state
    assert pack_linears(twisted).startswith("WARNING: torch's linear layers, as this model")
    assert torch.equal(before, twisted(ids).last_hidden_state)


def test_where_packing_does_not_pay_torchs_layers_stay(monkeypatch):
    monkeypatch.setattr(cpu, "packed_gain", lambda *layer: 0.5)
    odd = Odd()
    assert (
        pack_linears(odd) == "torch's linear layers: packed for oneDNN they are 0.50 times as fast"
    )
    assert type(odd.dense) is nn.Linear


def test_the_gain_is_torchs_time_over_the_packed_layers(monkeypatch):
    noise = iter([1.0, 9.0, 1.0, 0.1, *[1.0] * 30])  # somebody else used the processor
    seconds = {nn.Linear: 0.3, PackedLinear: 0.2}
    monkeypatch.setattr(cpu, "_seconds", lambda layer, x: seconds[type(layer)] * next(noise))
    assert packed_gain(16, 8, torch.float32, 1) == pytest.approx(1.5)


def test_a_layer_without_bias():
    linear = nn.Linear(6, 5, bias=False)
    x = torch.randn(3, 6)
    torch.testing.assert_close(PackedLinear(linear)(x), linear(x).detach())


def test_packed_weights_count(teacher_folder):
    """They are no parameters any more, and still are what the model weighs."""
    settings = EncoderSettings(
        model=str(teacher_folder), pooling="mean", max_length=32, device="cpu"
    )
    packed = load_for_inference(settings)
    assert "packed" in packed.arithmetic
    whole = sum(p.numel() for p in load_encoder(settings).backbone.parameters())
    result = Size().score(base.Tested(packed.encode_unit, packed), None)
    figures = {figure.name: figure.value for figure in result.figures}
    assert figures == {"layers": 3, "MB": 4 * whole / 1e6}
    assert whole > sum(p.numel() for p in packed.backbone.parameters())
