"""Translation models that can be used, and those that are refused and why."""

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import MarianTokenizer

from stages.errors import UserError
from tests.support.marian import HELD_OUT
from tests.support.models import make_model
from tests.support.translation import translator

ENGINES = ["ctranslate2", "transformers"]


@pytest.fixture
def copied(random_marian: Path, tmp_path: Path) -> Path:
    return shutil.copytree(random_marian, tmp_path / "model")


def change_json(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def resave(folder: Path, change: Callable[[Any], None]) -> None:
    from transformers import MarianMTModel

    model = MarianMTModel.from_pretrained(folder)
    change(model)
    model.save_pretrained(folder)


def test_folder_without_its_vocabulary(copied: Path) -> None:
    (copied / "vocab.json").unlink()
    (copied / "target.spm").unlink()
    with pytest.raises(UserError, match="lacks target.spm, vocab.json"):
        translator(copied)


def test_folder_without_any_tokenizer(tmp_path: Path) -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    T5ForConditionalGeneration(
        T5Config(vocab_size=300, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    ).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="it has no tokenizer files"):
        translator(tmp_path)


def test_models_that_need_language_codes_are_refused(copied: Path) -> None:
    from transformers import M2M100Config, M2M100ForConditionalGeneration, M2M100Tokenizer

    tokenizer = M2M100Tokenizer(str(copied / "vocab.json"), str(copied / "source.spm"))
    tokenizer.save_pretrained(copied)
    M2M100ForConditionalGeneration(
        M2M100Config(
            vocab_size=len(tokenizer), d_model=16, encoder_layers=1, decoder_layers=1,
            encoder_ffn_dim=16, decoder_ffn_dim=16, encoder_attention_heads=2,
            decoder_attention_heads=2,
        )
    ).save_pretrained(copied)  # fmt: skip
    with pytest.raises(UserError, match="a m2m_100 needs language codes"):
        translator(copied)


def test_a_sentence_encoder_cannot_translate(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a bert is not a sequence-to-sequence model"):
        translator(make_model(tmp_path / "bert"))


@pytest.mark.parametrize("engine", ENGINES)
def test_pickled_weights_are_never_read(copied: Path, engine: str) -> None:
    import torch
    from safetensors.torch import load_file

    weights = copied / "model.safetensors"
    torch.save(load_file(weights), copied / "pytorch_model.bin")
    weights.unlink()
    with pytest.raises(UserError, match="pickle"):
        translator(copied, engine=engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_safetensors_are_taken_where_a_pickle_lies_beside(copied: Path, engine: str) -> None:
    (copied / "pytorch_model.bin").write_bytes(b"cos\nabort\n(tR.")  # ends the process if read
    assert len(translator(copied, engine=engine)(HELD_OUT[:2], (0,))) == 2


@pytest.mark.parametrize("package", ["ctranslate2", "sentencepiece", "sacremoses"])
def test_missing_package_is_named(
    random_marian: Path, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "stages.packages.find_spec",
        lambda name: None if name == package else found(name),
    )
    with pytest.raises(UserError, match=rf"\({package}\).*pip install 'sentray\[translation\]'$"):
        translator(random_marian)


def test_architecture_that_ctranslate2_does_not_know(tmp_path: Path, copied: Path) -> None:
    from transformers import FSMTConfig, FSMTForConditionalGeneration

    tokenizer = MarianTokenizer.from_pretrained(copied)
    FSMTForConditionalGeneration(
        FSMTConfig(
            langs=["en", "de"], src_vocab_size=len(tokenizer), tgt_vocab_size=len(tokenizer),
            d_model=16, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=16, decoder_ffn_dim=16,
            encoder_attention_heads=2, decoder_attention_heads=2,
        )
    ).save_pretrained(tmp_path / "fsmt")  # fmt: skip
    tokenizer.save_pretrained(tmp_path / "fsmt")
    with pytest.raises(UserError, match="cannot convert it .*set engine: transformers"):
        translator(tmp_path / "fsmt")


def test_marian_whose_start_token_was_trained_is_left_to_transformers(copied: Path) -> None:
    def train(model: Any) -> None:
        model.get_input_embeddings().weight.data[model.config.pad_token_id] = 0.5

    resave(copied, train)
    with pytest.raises(UserError, match="starts from a token .*set engine: transformers"):
        translator(copied)
    translator(copied, engine="transformers")


def test_several_target_languages_need_a_prefix(copied: Path) -> None:
    vocabulary = json.loads((copied / "vocab.json").read_text())
    renamed = dict(zip(["</s>", "<unk>", ">>deu<<", ">>fra<<"], vocabulary, strict=False))
    new_name = {old: new for new, old in renamed.items()}
    renamed_all = {new_name.get(token, token): i for token, i in vocabulary.items()}
    (copied / "vocab.json").write_text(json.dumps(renamed_all))
    with pytest.raises(UserError, match="set prefix to one of >>deu<<, >>fra<<"):
        translator(copied)
    row = MarianTokenizer.from_pretrained(copied)([">>fra<< the cat"]).input_ids[0]
    assert row[0] == renamed_all[">>fra<<"]
    one = translator(copied, prefix=">>fra<< ")
    assert one(HELD_OUT[:5], (0,)) != translator(copied, prefix=">>deu<< ")(HELD_OUT[:5], (0,))


def test_task_models_need_a_prefix(copied: Path) -> None:
    task = {"translation_en_to_de": {"prefix": "translate English to German: "}}
    change_json(copied / "config.json", task_specific_params=task)
    with pytest.raises(UserError, match="set prefix, such as 'translate English to German: '"):
        translator(copied)


def test_more_tokens_than_positions(random_marian: Path) -> None:
    with pytest.raises(UserError, match="max_length=200 is more than the 128 positions"):
        translator(random_marian, max_length=200)


def test_arithmetic_that_the_cpu_has_not(random_marian: Path) -> None:
    with pytest.raises(UserError, match="set precision: float32"):
        translator(random_marian, precision="float16")
