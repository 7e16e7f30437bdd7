"""Translation: two engines that agree, limits, draws, a language learnt, and refusals."""

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stages.errors import UserError
from stages.perturb.settings import BackTranslation, TranslationModel
from stages.perturb.translate import Translation, Translator
from tests.conftest import make_model, make_sentences
from tests.marian import ciphered, make_marian, make_pair

ENGINES = ["ctranslate2", "transformers"]
HELD_OUT = make_sentences(100, seed=77)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Any:
    """These models are so small that a second thread only costs."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def random_marian(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pair(tmp_path_factory.mktemp("random-marian"))[0]


@pytest.fixture(scope="session")
def half_trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Knows some words and often where to stop: searches that are not obvious."""
    english = make_sentences(1000, seed=1)
    folder = tmp_path_factory.mktemp("half-trained-marian") / "model"
    return make_marian(folder, english, [ciphered(text) for text in english], train_steps=200)


@pytest.fixture(scope="session")
def trained_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_pair(tmp_path_factory.mktemp("trained-marian"), train_steps=800)


def translator(folder: Path, prefix: str = "", **settings: Any) -> Translator:
    given = {"device": "cpu"} | settings
    return Translator(TranslationModel(model=str(folder), prefix=prefix), BackTranslation(**given))


def tokens_of(
    one: Translator, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> list[list[int]]:
    """Token ids of the translations, shortest source last: one batch in its own order."""
    seen: list[list[int]] = []
    decode = one._tokenizer.batch_decode

    def spy(rows: list[list[int]], **options: Any) -> Any:
        seen.extend(rows)
        return decode(rows, **options)

    with monkeypatch.context() as patch:
        patch.setattr(one._tokenizer, "batch_decode", spy)
        one(texts, (0,))
    return seen


def texts_of(translations: list[Translation]) -> list[str]:
    return [one.text for one in translations]


@pytest.mark.parametrize("num_beams", [1, 4])
@pytest.mark.parametrize("no_repeat_ngram", [0, 2])
def test_engines_find_the_same_translations(
    half_trained: Path, num_beams: int, no_repeat_ngram: int
) -> None:
    found = [
        translator(half_trained, engine=engine, num_beams=num_beams,
                   no_repeat_ngram=no_repeat_ngram)(HELD_OUT, (0,))
        for engine in ENGINES
    ]  # fmt: skip
    assert len(set(texts_of(found[0]))) > 80
    assert found[0] == found[1]


def test_engines_stop_searching_at_the_same_time(half_trained: Path) -> None:
    # without final period or letter, 8 beams: where searching on changes 3 of 300 translations
    texts = [text.lower()[:-2] for text in make_sentences(300, seed=77)]
    ours, theirs = (
        translator(half_trained, engine=engine, num_beams=8)(texts, (0,)) for engine in ENGINES
    )
    different = sum(a != b for a, b in zip(ours, theirs, strict=True))
    assert different <= 1  # two translations may score alike to the last bit


@pytest.mark.parametrize("engine", ENGINES)
def test_a_batch_gives_what_each_sentence_gives_alone_in_the_order_asked(
    half_trained: Path, engine: str
) -> None:
    one = translator(half_trained, engine=engine, tokens_per_batch=100)
    some = [*HELD_OUT[:20], "", " ", HELD_OUT[0]]
    together = one(some, (0,))
    assert together == [one([text], (0,))[0] for text in some]
    assert together[20] == together[21] == Translation("")
    assert one([], (0,)) == []


@pytest.mark.parametrize("engine", ENGINES)
def test_made_up_language_and_back(trained_pair: tuple[Path, Path], engine: str) -> None:
    there, back = (translator(folder, engine=engine) for folder in trained_pair)
    pivots = texts_of(there(HELD_OUT, (0,)))
    right = sum(pivot == ciphered(text) for pivot, text in zip(pivots, HELD_OUT, strict=True))
    assert right > 0.9 * len(HELD_OUT)
    returned = texts_of(back(pivots, (1,)))
    right = sum(found == text for found, text in zip(returned, HELD_OUT, strict=True))
    assert right > 0.9 * len(HELD_OUT)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_sentence_of_too_many_tokens_is_rejected_and_not_cut(
    half_trained: Path, engine: str
) -> None:
    one = translator(half_trained, engine=engine, max_length=8)
    words = [" ".join(["the"] * count) for count in (8, 6, 7)]  # and an end token
    assert [len(row) for row in one._tokenizer(words).input_ids] == [9, 7, 8]
    found = one(words, (0,))
    assert found == [Translation("", "too_long_to_translate"), *one(words[1:], (0,))]
    assert [translation.reason for translation in found[1:]] == [None, None]


@pytest.mark.parametrize("engine", ENGINES)
def test_growth_is_bounded_for_each_sentence(
    random_marian: Path,
    trained_pair: tuple[Path, Path],
    engine: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = ["The cat sees a small red dog near the old tree", "The cat sees"]
    endless = translator(random_marian, engine=engine, max_growth=1.0, no_repeat_ngram=0)
    lengths = [len(row) for row in endless._tokenizer(texts).input_ids]
    assert lengths[0] > lengths[1] + 5
    found = endless(texts, (0,))
    assert {one.reason for one in found} == {"endless_translation"}
    tokens = tokens_of(endless, texts, monkeypatch)
    assert [len(row) for row in tokens] == [length + 10 for length in lengths]
    # what ends within the bound is left alone
    there = translator(trained_pair[0], engine=engine, max_growth=0.5)
    assert {one.reason for one in there(HELD_OUT, (0,))} == {None}


@pytest.mark.parametrize("engine", ENGINES)
def test_no_sequence_of_tokens_comes_twice(
    random_marian: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def repeating(size: int) -> list[bool]:
        one = translator(random_marian, engine=engine, no_repeat_ngram=size, num_beams=1)
        rows = tokens_of(one, HELD_OUT[:10], monkeypatch)
        return [len({*zip(row, row[1:], row[2:])}) < len(row) - 2 for row in rows]  # noqa: B905

    assert repeating(0) == [True] * 10
    assert repeating(3) == [False] * 10


@pytest.mark.parametrize("engine", ENGINES)
def test_draws_depend_on_the_seed_alone(half_trained: Path, engine: str) -> None:
    settings: dict[str, Any] = {"engine": engine, "num_beams": 1, "temperature": 1.0}
    one = translator(half_trained, **settings)
    first, other, again = (one(HELD_OUT, seed) for seed in ((0, 1), (0, 2), (0, 1)))
    assert first == again == translator(half_trained, **settings)(HELD_OUT, (0, 1))
    assert sum(a != b for a, b in zip(first, other, strict=True)) > 80
    searched = translator(half_trained, engine=engine, num_beams=1)(HELD_OUT, (0,))
    for narrow in ({"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-4}):
        drawn = translator(half_trained, **settings | narrow)(HELD_OUT, (0,))
        assert sum(a == b for a, b in zip(drawn, searched, strict=True)) > 95


def test_int8_translates_as_well(trained_pair: tuple[Path, Path]) -> None:
    found = texts_of(translator(trained_pair[0], precision="int8")(HELD_OUT, (0,)))
    right = sum(pivot == ciphered(text) for pivot, text in zip(found, HELD_OUT, strict=True))
    assert right > 0.9 * len(HELD_OUT)


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
    from transformers import FSMTConfig, FSMTForConditionalGeneration, MarianTokenizer

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
    one = translator(copied, prefix=">>fra<< ")
    row = one._tokenizer([one._prefix + "the cat"]).input_ids[0]
    assert row[0] == renamed_all[">>fra<<"]
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
