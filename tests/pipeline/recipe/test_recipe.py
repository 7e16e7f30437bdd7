"""Recipes: strict, overridable, and clear about what is wrong and where."""

import pytest
import yaml

from pipeline.recipe.document import Document
from pipeline.recipe.read import dump_recipe, load_recipe
from stages.errors import UserError
from tests.support import REPOSITORY
from tests.support.recipes import setting
from tune.definition import Search
from tune.searchers import listed_configurations

RECIPES = REPOSITORY / "recipes"


def write(tmp_path, recipe):
    file = tmp_path / "recipe.yaml"
    file.write_text(recipe if isinstance(recipe, str) else yaml.safe_dump(recipe))
    return str(file)


def test_a_resolved_recipe_reads_back_the_same(tmp_path, tiny_recipe):
    recipe = load_recipe(write(tmp_path, tiny_recipe()))
    assert load_recipe(write(tmp_path, dump_recipe(recipe))) == recipe


def test_a_name_that_looks_like_a_number_stays_a_name(tmp_path, tiny_recipe):
    recipe = load_recipe(write(tmp_path, tiny_recipe()), ["name='12e4'"])
    assert load_recipe(write(tmp_path, dump_recipe(recipe))).name == "12e4"


@pytest.mark.parametrize("file", sorted(RECIPES.glob("*.yaml")), ids=lambda file: file.stem)
def test_every_shipped_recipe_is_valid(file, monkeypatch):
    monkeypatch.setenv("SENTRAY_DATA", "/anywhere")
    monkeypatch.setenv("SENTEVAL_DATA", "/anywhere")
    if "recipe" not in yaml.safe_load(file.read_text()):
        assert load_recipe(str(file)).name == file.stem


def test_shipped_searches_have_the_settings_of_their_papers(data_folder, monkeypatch, tmp_path):
    monkeypatch.setenv("SENTRAY_DATA", str(data_folder))
    monkeypatch.setenv("SENTEVAL_DATA", str(tmp_path))
    years = [f"STS/STS{year}-en-test" for year in range(12, 17)]
    for folder in ("SICK", "STS/STSBenchmark", *years):
        (tmp_path / folder).mkdir(parents=True)
    sizes = {}
    for file in sorted(RECIPES.glob("*.yaml")):
        if "recipe" in yaml.safe_load(file.read_text()):
            search = Search(str(file))
            assert search.name == file.stem
            sizes[search.name] = len(listed_configurations(search.settings, search.space))
    assert sizes == {"denosent-search": 21, "rankcse-search": 18, "rankencoder-search": 40,
                     "wiki-search": 24}  # fmt: skip


def test_an_alias_is_a_value_of_its_own(tmp_path):
    """What is overridden where it stands is not where it was copied to."""
    file = tmp_path / "aliased.yaml"
    file.write_text("a: &a [{b: 1}]\nc: *a\n")
    assert Document(str(file), ["a.0.b=2"]).raw == {"a": [{"b": 2}], "c": [{"b": 1}]}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["train.dev.sts=[{name: a, path: x}, {name: a, path: y}]"],
            "two sets are called 'a'",
        ),
        (
            ["train.dev={transfer: [{name: a, path: x, split: dev}]}"],
            "transfer task 'a': split says what is tested",
        ),
        (["train.batch_sise=8"], "train.batch_sise: unknown setting; did you mean 'batch_size'?"),
        (["student.haed=none"], "did you mean 'head'?"),
        (["train.objectives.listnet.tau=1"], "student_temperature"),
        (["train.batch_size=many"], "train.batch_size: Input should be a valid integer"),
        (["train.learning_rate=0"], "greater than 0"),
        (["train.objectives={}"], "name at least one objective"),
        (["teachers=[]"], "need a teacher"),
        (["teachers.3.weight=1"], "not one of the list's numbers"),
        (["train.num_workers=3"], "cannot be divided among num_workers 3"),
        (["train.engine=plain", "train.num_workers=2"], "is for one worker"),
        (["train.zero_stage=2"], "zero_stage needs engine: deepspeed"),
        (["student.pooling=mask"], "needs a template"),
        (["teachers.0.template=hello"], "{sentence} exactly once"),
        (["student.second_template=a {sentence}"], "need a template"),
        (["student.template=a {sentence}", "student.template_denoising=true"], "pooling: mask"),
        (
            ["train.objectives={infonce: {}, rank_regression: {low: 0.9}}"],
            "low 0.9 (tau_l) is above high 0.8 (tau_u)",
        ),
        (["train.objectives={rank_regression: {}}"], "has no other to take the maximum with"),
        (["train.objectives={infonce: {}, soft_negative: {low: 1.0}}"], "(alpha) is above high"),
        (
            ["train.objectives.replaced_token={generator: {model: 'recipe:a.yaml'}}"],
            "must be a pretrained model",
        ),
        (["teachers.0.similarity=ranks"], "needs a corpus: add `ranks"),
        (
            ["teachers.0.similarity=ranks", "train.objectives={vector_regression: {}}"],
            "'t' teaches ranks: use similarity_regression",
        ),
        (["teachers=[{name: v, vectors: {path: v.npy}}]"], "does not say whose vectors it has"),
        (
            ["teachers=[{name: v, max_length: 32, vectors: {path: v.parquet}}]"],
            "its vectors are given, so `max_length` has no effect",
        ),
        (["teachers.0.vectors={path: v.parquet}"], "leave out `model` and `similarity`"),
        (["teachers.0.endpoint={model: m}"], "come from its endpoint, so leave out `model` and"),
        (
            ["teachers=[{name: v, pooling: cls, endpoint: {model: m}}]"],
            "come from its endpoint, so `pooling` has no effect",
        ),
        (
            ["teachers=[{name: v, similarity: ranks, endpoint: {model: m}}]"],
            "come from its endpoint, so leave out `model` and `similarity`",
        ),
        (
            ["teachers=[{name: v, vectors: {path: v.parquet}, endpoint: {model: m}}]"],
            "are given (`vectors`) or asked for (`endpoint`); leave one of them out",
        ),
        (["teachers=[{name: v, endpoint: {}}]"], "model"),
        (["ranks={corpus_size: 50, dimensions: 50}"], "must be below corpus_size 50"),
        (["ranks={corpus_size: 500}", "sentences.limit=400"], "is more than sentences.limit 400"),
        (["teachers.0.model=recipe:x.yaml"], "is that recipe's"),
        (["evaluate.retrieval={}"], "needs held-out pairs"),
        (["sentences.min_chars=2000"], "is above max_chars"),
        (["sentences.dataset=x/y"], "exactly one of"),
        (["sentences={dataset: x/y, source: jsonl}"], "source 'jsonl' is of a `path`"),
        (["train.batch_size"], "key.sub=value"),
        (["name=Bad Name"], "name: String should match"),
        (["teachers.0.name=after"], "is taken"),
        (["sentences.path=${NO_SUCH_VARIABLE}/x"], "NO_SUCH_VARIABLE is not set"),
    ],
)
def test_wrong_settings_are_named(tmp_path, tiny_recipe, overrides, expected):
    file = write(tmp_path, tiny_recipe())
    with pytest.raises(UserError) as caught:
        load_recipe(file, overrides)
    assert expected in str(caught.value)


def test_a_variable_that_is_a_name_of_a_task(tmp_path, tiny_recipe, monkeypatch):
    """A task's name alone is short for its settings, of which it is one."""
    monkeypatch.setenv("TASK", "STS12")
    monkeypatch.setattr("pipeline.recipe.document.FILLED_IN", {})  # else hidden ever after
    recipe = load_recipe(write(tmp_path, tiny_recipe('evaluate.mteb=["${TASK}"]')))
    assert recipe.evaluate.mteb[0].task == "STS12"
    assert recipe.unexpanded({"task": "STS12"}) == {"task": "${TASK}"}
    assert "STS12" not in dump_recipe(recipe) and "task: ${TASK}" in dump_recipe(recipe)


def test_equal_views_are_warned_of_and_different_ones_are_not(tmp_path, tiny_recipe):
    student = tiny_recipe()["student"] | {"dropout": 0.0}
    alike = load_recipe(write(tmp_path, tiny_recipe(setting("student", student))))
    assert any("both views of a sentence are the same" in w for w in alike.warnings())
    only = [setting("student", student), setting("train.objectives", {"infonce": {}})]
    (warning,) = load_recipe(write(tmp_path, tiny_recipe(*only))).warnings()
    assert "infonce only spreads" in warning and "consistency" not in warning
    student |= {"template": "a {sentence}", "second_template": "b {sentence}"}
    assert not load_recipe(write(tmp_path, tiny_recipe(setting("student", student)))).warnings()


def test_a_second_template_that_nobody_reads_is_warned_of(tmp_path, tiny_recipe):
    student = {"head": "none", "template": "a {sentence}", "second_template": "b {sentence}"}
    overrides = [
        setting("student", tiny_recipe()["student"] | student),
        setting("train.objectives", {"vector_regression": {}}),
    ]
    (found,) = load_recipe(write(tmp_path, tiny_recipe(*overrides))).warnings()
    assert found.startswith("student.second_template has no effect")


def test_what_regression_on_vectors_cannot_use_is_warned_of(tmp_path, tiny_recipe):
    alone = setting("train.objectives", {"vector_regression": {}})
    rewrites = setting("perturb", [{"name": "p", "pairs": {"path": "pairs.tsv"}}])

    def warnings(*overrides):
        return load_recipe(write(tmp_path, tiny_recipe(alone, *overrides))).warnings()

    assert not warnings("student.head=none")
    (head,) = warnings("student.head=tanh")
    assert head.startswith("student.head: tanh is between")
    (views,) = warnings("student.head=none", rewrites)
    assert views.startswith("perturb has no effect")
    assert not warnings("student.head=none", rewrites, "train.rewritten_view=first")


def test_an_error_names_the_line(tmp_path):
    text = (RECIPES / "quickstart.yaml").read_text().replace("learning_rate:", "learning_rat:")
    line = 1 + text[: text.index("learning_rat:")].count("\n")
    with pytest.raises(UserError, match=f"line {line}: train.learning_rat: unknown setting"):
        load_recipe(write(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("name: [", "not valid YAML"),
        ("", "is empty"),
        ("name: a\nname: b\n", "line 2: not valid YAML (the key 'name' is there twice)"),
        ("- 1\n", "not a mapping"),
    ],
)
def test_broken_files_are_explained(tmp_path, text, expected):
    with pytest.raises(UserError) as caught:
        load_recipe(write(tmp_path, text))
    assert expected in str(caught.value)


def test_overrides_reach_lists_and_missing_sections(tmp_path, tiny_recipe):
    raw = tiny_recipe()
    del raw["evaluate"]
    recipe = load_recipe(
        write(tmp_path, raw),
        ["teachers.0.weight=2.5", "evaluate.num_bootstrap=7", "train.learning_rate=3e-5"],
    )
    assert recipe.teachers[0].weight == 2.5
    assert recipe.evaluate.num_bootstrap == 7
    assert recipe.train.learning_rate == 3e-5
