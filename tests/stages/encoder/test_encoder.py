"""The encoder: batching changes nothing, templates survive truncation, pooling is right."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError

import stages.encoder.model
from stages.embed.embedder import Embedder
from stages.encoder.cpu import computed_type
from stages.encoder.model import load_encoder, load_for_inference, pick_device
from stages.encoder.settings import EncoderSettings
from stages.encoder.source import EncoderSource
from stages.encoder.tokenizer import load_tokenizer, pad, readable_errors, token_budget_batches
from stages.errors import UserError
from tests.support.models import make_model, make_sentences

MASK_TEMPLATE = 'The "{sentence}" means {mask} .'


@pytest.mark.parametrize(
    "options",
    [dict(pooling="mean"), dict(pooling="cls"), dict(pooling="mask", template=MASK_TEMPLATE)],
    ids=lambda options: options["pooling"],
)
@pytest.mark.parametrize("tokens_per_batch", [1, 100, 10**6, None])
def test_batches_change_nothing(student_folder, options, tokens_per_batch, monkeypatch):
    """Against a slow twin: one sentence at a time through transformers itself."""
    monkeypatch.setattr(stages.encoder.model, "WINDOW_ROWS", 16)
    texts = make_sentences(40)
    encoder = load_encoder(
        EncoderSettings(
            model=str(student_folder), max_length=24, tokens_per_batch=tokens_per_batch,
            device="cpu", **options,
        )
    )  # fmt: skip
    tokenizer = encoder.tokenizer.pretrained
    found = encoder.encode(texts)
    for text, vector in zip(texts, found, strict=True):
        if options["pooling"] == "mask":
            text = MASK_TEMPLATE.format(sentence=text, mask="[MASK]")
        ids = torch.tensor([tokenizer.encode(text)])
        with torch.no_grad():
            states = encoder.backbone(input_ids=ids).last_hidden_state[0]
        where = ids[0].tolist().index(tokenizer.mask_token_id) if "[MASK]" in text else 0
        expected = states.mean(0) if options["pooling"] == "mean" else states[where]
        np.testing.assert_allclose(vector, expected, atol=1e-5)


def test_an_unset_batch_is_larger_on_a_gpu():
    unset, small = EncoderSettings(model="m"), EncoderSettings(model="m", tokens_per_batch=7)
    assert [unset.batch_tokens(device) for device in ("cpu", "cuda")] == [4096, 16_384]
    assert [small.batch_tokens(device) for device in ("cpu", "cuda")] == [7, 7]


def test_a_gpu_that_is_not_there_is_said(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto") == pick_device("cpu") == torch.device("cpu")
    with pytest.raises(UserError, match="device: cuda, but this process has no GPU"):
        pick_device("cuda")


def test_truncation_shortens_the_sentence_and_never_the_template(student_folder):
    tokenizer = load_tokenizer(
        EncoderSettings(
            model=str(student_folder), pooling="mask", template=MASK_TEMPLATE, max_length=16
        )
    )
    text = " ".join(["cat"] * 100)
    (ids,) = tokenizer([text])
    assert len(ids) == 16
    words = tokenizer.pretrained.convert_ids_to_tokens(ids)
    assert words[:3] == ["[CLS]", "the", '"']
    assert words[-5:] == ['"', "means", "[MASK]", ".", "[SEP]"]
    assert set(words[3:-5]) == {"cat"}


def test_a_mask_token_in_the_sentence_does_not_move_the_pooling(student_folder):
    """The template's mask comes after the sentence, so the last one counts."""
    encoder = load_encoder(
        EncoderSettings(model=str(student_folder), pooling="mask", template=MASK_TEMPLATE)
        .model_copy(update={"max_length": 20, "device": "cpu"})
    )  # fmt: skip
    (ids,) = encoder.tokenizer(["a [MASK] cat"])
    places = [i for i, token in enumerate(ids) if token == encoder.tokenizer.mask_id]
    assert len(places) == 2
    with torch.no_grad():
        states = encoder.backbone(input_ids=torch.tensor(ids[None].astype("i8"))).last_hidden_state
    vector = encoder.encode(["a [MASK] cat"])[0]
    np.testing.assert_allclose(vector, states[0, places[-1]], atol=1e-6)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=200), st.integers(1, 500))
def test_token_budget_batches_hold_every_row_once_within_the_budget(lengths, budget):
    lengths = np.array(lengths)
    batches = token_budget_batches(lengths, budget)
    assert sorted(np.concatenate(batches)) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * lengths[batch].max() <= budget


def test_padding():
    ids, mask = pad([np.array([5, 6, 7]), np.array([8])], pad_id=1)
    assert ids.tolist() == [[5, 6, 7], [8, 1, 1]]
    assert mask.tolist() == [[1, 1, 1], [1, 0, 0]]


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_half_precision_stays_near_float32(student_folder, precision):
    texts = make_sentences(20)
    single, half = (
        load_for_inference(
            EncoderSettings(model=str(student_folder), pooling="mean", precision=p, device="cpu")
            .model_copy(update={"max_length": 20})
        ).encode(texts)
        for p in ("float32", precision)
    )  # fmt: skip
    cosine = (single * half).sum(1) / np.linalg.norm(single, axis=1) / np.linalg.norm(half, axis=1)
    assert cosine.min() > 0.999
    here = computed_type(precision, torch.device("cpu"))
    assert np.array_equal(single, half) == (here == torch.float32)


def test_a_sentence_transformers_folder_names_its_pooling(tmp_path):
    folder = make_model(tmp_path / "model")
    (folder / "1_Pooling").mkdir()
    for config, expected in (
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode": "mean"}, "mean"),
    ):
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))
        encoder = load_encoder(EncoderSettings(model=str(folder), max_length=20))
        assert encoder.settings.pooling == expected
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_max_tokens": true}')
    with pytest.raises(UserError, match="set pooling to"):
        load_encoder(EncoderSettings(model=str(folder), max_length=20))


def remove_tokenizer(folder):
    for file in folder.glob("token*"):
        file.unlink()


def damage_weights(folder):
    (folder / "model.safetensors").write_bytes(b"\x00" * 100)


def change_json(name, **changes):
    def change(folder):
        about = json.loads((folder / name).read_text()) if (folder / name).is_file() else {}
        (folder / name).write_text(json.dumps(about | changes))

    return change


def newer_tokenizer(folder):
    change_json("tokenizer.json", model={"type": "Newer", "vocab": {}})(folder)


def no_tokenizer_in_it(folder):
    (folder / "tokenizer.json").write_text("{}")


@pytest.mark.parametrize("pooling", ["mean", "last", "cls"])
def test_a_text_without_any_token_is_a_zero_vector(tmp_path, pooling):
    """A blank line, where the tokenizer adds nothing (Qwen2, GPT-2); alone or beside others."""
    folder = make_model(tmp_path / "model")
    change_json("tokenizer.json", post_processor=None)(folder)
    encoder = load_encoder(EncoderSettings(model=str(folder), pooling=pooling, max_length=20))
    assert not encoder.encode([""]).any()
    assert encoder.encode([]).shape == (0, 32)
    found = encoder.encode(["", "a cat", "", "the old man sleeps"])
    assert not found[[0, 2]].any()
    for row, text in ((1, "a cat"), (3, "the old man sleeps")):
        np.testing.assert_allclose(found[row], encoder.encode([text])[0], atol=1e-5)


PROMPTS_FILE = "config_sentence_transformers.json"


@pytest.mark.parametrize(
    ("change", "options", "expected"),
    [
        (remove_tokenizer, {}, "has no tokenizer files"),
        (damage_weights, {}, "cannot be loaded"),
        (
            newer_tokenizer,
            {},
            "cannot be loaded .Exception: data did not match .*Check its name and files",
        ),
        (no_tokenizer_in_it, {}, "cannot be loaded .KeyError: "),
        (change_json("config.json", hidden_size=64), {}, "cannot be loaded .RuntimeError: "),
        (change_json("config.json", hidden_act="newer"), {}, "cannot be loaded .KeyError: 'newer'"),
        (change_json("config.json", num_hidden_layers="six"), {}, "cannot be loaded"),
        (change_json(PROMPTS_FILE, prompts=["a"]), {"prompt_name": "a"}, "`prompts` are no texts"),
        (
            change_json(PROMPTS_FILE, prompts={"a": 5}),
            {"prompt_name": "a"},
            f"{PROMPTS_FILE}: not readable, as its `prompts` are no texts by name",
        ),
        (lambda folder: None, dict(max_length=65), "more than the 64 positions"),
        (lambda folder: None, dict(layers=[2]), "has layers 0 to 1"),
        (lambda folder: None, dict(layers=3), "layers=3: model '.*' has only 2"),
        (
            lambda folder: None,
            dict(template="the cat the cat {sentence}", max_length=6),
            "leaves none of max_length=6",
        ),
    ],
)
def test_what_cannot_be_loaded_is_explained(tmp_path, change, options, expected):
    folder = make_model(tmp_path / "model")
    change(folder)
    settings = dict(model=str(folder), pooling="mean", max_length=32)
    with pytest.raises(UserError, match=expected):
        load_encoder(EncoderSettings(**(settings | options)))


def test_sizes_that_are_no_numbers_are_said_before_anything_is_loaded(tmp_path):
    folder = make_model(tmp_path / "model")
    change_json("config.json", num_hidden_layers="six")(folder)
    with pytest.raises(UserError, match="config.json: .* num_hidden_layers is 'six'"):
        EncoderSource(EncoderSettings(model=str(folder), pooling="mean")).check()


def test_what_loading_ends_with_is_kept_as_the_cause():
    """So that a fault of ours, which is one of loading to whoever sees it, is found."""
    with pytest.raises(UserError, match="model 'm': .*ZeroDivisionError: by zero") as caught:
        with readable_errors("m"):
            raise ZeroDivisionError("by zero")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    for once_said in (OSError(28, "No space left on device"), SafetensorError("os error 13")):
        with pytest.raises(UserError, match=r"cannot be loaded \("):
            with readable_errors("m"):
                raise once_said
    no_memory = RuntimeError("DefaultCPUAllocator: can't allocate memory")
    for passes in (MemoryError(), no_memory, UserError("said already")):
        with pytest.raises(type(passes)) as caught:
            with readable_errors("m"):
                raise passes
        assert caught.value is passes


def test_an_encoder_that_gives_no_direction_is_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    folder = make_model(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    save_file(
        {name: torch.full_like(x, torch.nan) for name, x in weights.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    embed = Embedder(EncoderSettings(model=str(folder), pooling="mean", max_length=20))
    with pytest.raises(UserError, match=r"no usable vector for 3 sentences.*Are its weights whole"):
        embed(make_sentences(3))
