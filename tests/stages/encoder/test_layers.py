"""Which layers of a model are kept, and that what was cut is loaded as it was."""

import json

import numpy as np
import pytest
import torch

from stages.encoder.config import check_config, kept_layers
from stages.encoder.model import drops_out, load_encoder, set_dropout
from stages.encoder.settings import EncoderSettings
from stages.errors import UserError
from stages.train.engine import cpu_copy
from stages.train.student import save_encoder
from tests.support.models import make_model, make_sentences

FULL, NEAR = "full_attention", "sliding_attention"


def test_layers_are_kept_in_order(student_folder):
    options = dict(model=str(student_folder), pooling="mean", max_length=20)
    whole = load_encoder(EncoderSettings(**options))
    last = load_encoder(EncoderSettings(**options, layers=[1]))
    assert last.backbone.config.num_hidden_layers == 1
    for name, x in last.backbone.encoder.layer[0].state_dict().items():
        assert torch.equal(x, whole.backbone.encoder.layer[1].state_dict()[name])


@pytest.mark.parametrize(
    ("total", "chosen", "kept"),
    [
        (6, 1, [5]), (6, 2, [0, 5]), (6, 3, [0, 2, 5]), (6, 6, [0, 1, 2, 3, 4, 5]),
        (12, 3, [0, 5, 11]), (12, 4, [0, 3, 7, 11]), (24, 12, [*range(0, 22, 2), 23]),
        (6, [4, 0], [4, 0]), (6, None, None),
    ],
)  # fmt: skip
def test_a_number_of_layers_is_spread_evenly_and_keeps_the_last(total, chosen, kept):
    settings = EncoderSettings(model="any", layers=chosen)
    assert kept_layers(settings, {"num_hidden_layers": total}) == kept


MODERN = {"num_hidden_layers": 22, "global_attn_every_n_layers": 3}  # full: 0, 3, ..., 21
GEMMA = {"num_hidden_layers": 24, "sliding_window_pattern": 6}  # full: 5, 11, 17, 23


@pytest.mark.parametrize(
    ("config", "chosen", "kept"),
    [
        (MODERN, 1, [0]), (MODERN, 2, [0, 20]), (MODERN, 3, [0, 10, 20]),
        (MODERN, 4, [0, 7, 14, 21]), (MODERN, 22, [*range(22)]), (MODERN, [0, 4, 5], [0, 4, 5]),
        (GEMMA, 3, [0, 10, 22]), (GEMMA, 7, [0, 3, 7, 10, 15, 17, 22]),
        ({"num_hidden_layers": 4, "layer_types": [FULL, FULL, NEAR, FULL]}, 3, [0, 1, 2]),
        ({"num_hidden_layers": 4, "layer_types": [FULL] * 4}, 2, [0, 3]),
    ],
)  # fmt: skip
def test_layers_of_several_kinds_keep_the_kinds_of_their_places(config, chosen, kept):
    settings = EncoderSettings(model="any", layers=chosen)
    assert kept_layers(settings, config) == kept
    check_config(settings, config)


@pytest.mark.parametrize("rule", [True, False], ids=["by rule", "by name"])
def test_a_cut_modernbert_is_loaded_as_it_was(tmp_path, rule):
    """Its files on the hub have a rule for kinds of attention, those it saves their names; the
    first layer has no norm before attention."""
    folder = make_model(
        tmp_path / "whole", kind="ModernBert", layers=8, local_attention=4, cls_token_id=2,
        sep_token_id=3, bos_token_id=2, eos_token_id=3,
    )  # fmt: skip
    config = json.loads((folder / "config.json").read_text())
    if rule:
        del config["layer_types"]
        config["global_attn_every_n_layers"] = 3
        (folder / "config.json").write_text(json.dumps(config))
    chosen = EncoderSettings(model=str(folder), pooling="mean", layers=3, max_length=32)
    encoder, texts = load_encoder(chosen), make_sentences(20)
    assert kept_layers(chosen, config) == [0, 2, 7]
    before = encoder.encode(texts)
    save_encoder(encoder, cpu_copy(encoder), tmp_path / "cut")
    saved = json.loads((tmp_path / "cut" / "config.json").read_text())
    assert saved["layer_types"] == [FULL, NEAR, NEAR] and saved["num_hidden_layers"] == 3
    again = load_encoder(EncoderSettings(model=str(tmp_path / "cut"), max_length=32))
    np.testing.assert_allclose(again.encode(texts), before, atol=1e-6)
    first = load_encoder(chosen.model_copy(update={"layers": [0, 1, 2]}))
    assert np.abs(first.encode(texts) - before).max() > 0.01  # other layers than the first


def test_a_cut_longformer_is_loaded_as_it_was_and_drops_nothing_at_rate_0(tmp_path):
    folder = make_model(
        tmp_path / "whole", kind="Longformer", layers=4, attention_window=[4, 4, 4, 4],
        sep_token_id=3, bos_token_id=2, eos_token_id=3,
    )  # fmt: skip
    settings = EncoderSettings(model=str(folder), pooling="mean", layers=2, max_length=32)
    encoder, texts = load_encoder(settings), make_sentences(20)
    before = encoder.encode(texts)
    save_encoder(encoder, cpu_copy(encoder), tmp_path / "cut")
    again = load_encoder(EncoderSettings(model=str(tmp_path / "cut"), max_length=32))
    np.testing.assert_allclose(again.encode(texts), before, atol=1e-6)
    assert drops_out(encoder.backbone)
    set_dropout(encoder.backbone, 0.0)
    assert not drops_out(encoder.backbone)
    ids = torch.tensor([[2, 6, 7, 8, 3]])
    encoder.train()
    with torch.no_grad():
        one, other = (encoder(ids, torch.ones_like(ids)) for _ in range(2))
    assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("changes", "config", "message"),
    [
        ({"layers": [0, 3, 5]}, MODERN, r"kind of its new place, as \[0, 2, 5\] are; `layers: 3`"),
        ({"layers": [3, 4, 5]}, MODERN, "Layer 0 must be the first"),
        ({"layers": 2}, {"num_hidden_layers": 12, "num_hidden_groups": 1}, "share their weights"),
        ({"pooling": "mean"}, {"num_hidden_layers": 6, "is_encoder_decoder": True},
         "is an encoder-decoder"),
    ],
)  # fmt: skip
def test_layers_that_cannot_be_kept(changes, config, message):
    with pytest.raises(UserError, match=message):
        check_config(EncoderSettings(model="any", **changes), config)
