"""What is stale, what is not, and why: fingerprints of whole recipes, nothing is run."""

import json
import subprocess
import sys

import pytest
import yaml

from pipeline.graph import build_graph
from pipeline.recipe import load_recipe
from stages.errors import UserError
from tests.conftest import make_model, make_sentences

AFTER_TRAINING = {"train", "evaluate:after", "export", "speed"}


@pytest.fixture
def stale(tmp_path, tiny_recipe):
    """Names of the nodes whose fingerprint differs between two recipes."""

    def prints(recipe):
        file = tmp_path / "recipe.yaml"
        file.write_text(yaml.safe_dump(recipe))
        return {name: node.fingerprint for name, node in build_graph(load_recipe(file)).items()}

    base = prints(tiny_recipe())

    def compare(**changes):
        found = prints(tiny_recipe(**changes))
        return {name for name in found if base.get(name) != found[name]}

    compare.prints = prints
    return compare


EVERYTHING = {"sentences", "embed:t", "tokens", *AFTER_TRAINING}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (dict(sentences__seed=1), EVERYTHING),
        (dict(sentences__rows_per_shard=100), EVERYTHING),
        (dict(teachers__0__max_length=24), {"embed:t", *AFTER_TRAINING}),
        (dict(teachers__0__precision="bfloat16"),
         {"embed:t", "evaluate:t", *AFTER_TRAINING}),
        (dict(student__max_length=20), {"tokens", *AFTER_TRAINING}),
        (dict(student__layers=[0]), {"evaluate:before", *AFTER_TRAINING}),
        (dict(student__dropout=0.3), AFTER_TRAINING),
        (dict(teachers__0__weight=2.0), AFTER_TRAINING),
        (dict(train__objectives__listnet__student_temperature=0.1), AFTER_TRAINING),
        (dict(train__seed=3), AFTER_TRAINING),
        (dict(evaluate__num_bootstrap=3),
         {"evaluate:before", "evaluate:t", "evaluate:after", "export", "speed"}),
        # execution, not identity
        (dict(student__tokens_per_batch=7, teachers__0__device="cpu", train__num_workers=2,
              train__zero_stage=3, train__cpus_per_worker=1, train__checkpoint_every_steps=1,
              train__max_failures=0, sentences__max_rejects_kept=3), set()),
    ],
)  # fmt: skip
def test_a_changed_setting_makes_stale_what_depends_on_it(stale, changes, expected):
    assert stale(**changes) == expected


def test_files_count_by_content_and_kind_not_by_place(stale, tmp_path):
    text = (tmp_path / "sentences.txt").read_text()
    (tmp_path / "moved.txt").write_text(text)
    assert stale(sentences__path=str(tmp_path / "moved.txt")) == set()
    (tmp_path / "sentences.tsv").write_text(text)
    assert "sentences" in stale(sentences__path=str(tmp_path / "sentences.tsv"))
    (tmp_path / "sentences.txt").write_text(text + "One more sentence.\n")
    assert "sentences" in stale()


def test_a_local_data_set_counts_by_content(stale, tmp_path, tiny_recipe):
    folder = tmp_path / "dataset"
    folder.mkdir()

    def prints(sentences):
        lines = [json.dumps({"text": s}) for s in sentences]
        (folder / "train.jsonl").write_text("\n".join(lines))
        recipe = tiny_recipe()
        recipe["sentences"] = {"dataset": str(folder)}
        return stale.prints(recipe)["sentences"]

    assert prints(make_sentences(5)) != prints(make_sentences(6))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "merges.txt", "spiece.model"])
def test_a_local_model_counts_by_content(stale, tmp_path, tiny_recipe, name):
    first = stale.prints(tiny_recipe(student__model=str(make_model(tmp_path / "a", seed=2))))
    folder = make_model(tmp_path / "b", seed=2)
    assert stale.prints(tiny_recipe(student__model=str(folder))) == first
    with (folder / name).open("a") as file:
        file.write(" ")
    assert stale.prints(tiny_recipe(student__model=str(folder)))["tokens"] != first["tokens"]


def test_a_teachers_name_and_place_are_not_identity(tmp_path, stale, tiny_recipe, student_folder):
    recipe = tiny_recipe()
    first = stale.prints(recipe)
    other = dict(recipe["teachers"][0], name="other", model=str(student_folder))
    recipe["teachers"] = [other, dict(recipe["teachers"][0], name="renamed")]
    second = stale.prints(recipe)
    assert second["embed:renamed"] == first["embed:t"]
    assert second["train"] != first["train"]


def test_without_a_listwise_objective_no_teacher_is_embedded(stale, tiny_recipe):
    found = stale.prints(tiny_recipe(train__objectives={"infonce": {}}))
    assert "embed:t" not in found
    assert "evaluate:t" in found


RANKS = dict(
    ranks={"corpus_size": 100, "dimensions": 20},
    teachers__0__similarity="ranks",
    train__objectives={"infonce": {}, "rank_regression": {}},
)
WITH_RANKS = {"corpus:after", "evaluate:after+ranks"}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (dict(ranks__seed=1), {"corpus:t", "ranks:t", "evaluate:t+ranks"} | WITH_RANKS),
        (dict(ranks__dimensions=10), {"corpus:t", "ranks:t", "evaluate:t+ranks"} | WITH_RANKS),
        (dict(train__objectives__rank_regression__low=0.1), WITH_RANKS),
        (
            dict(evaluate__max_length=40),
            {"evaluate:before", "evaluate:t", "evaluate:t+ranks"} | WITH_RANKS - {"train"},
        ),
    ],
)
def test_ranks_make_stale_what_depends_on_them(stale, tiny_recipe, changes, expected):
    base = stale.prints(tiny_recipe(**RANKS))
    found = stale.prints(tiny_recipe(**RANKS, **changes))
    changed = {name for name in found if found[name] != base[name]}
    after = AFTER_TRAINING - ({"train"} if "evaluate__max_length" in changes else set())
    assert changed == expected | after


def test_the_share_of_ranks_at_inference_changes_use_and_not_training(stale, tiny_recipe):
    base = stale.prints(tiny_recipe(**RANKS))
    half = stale.prints(tiny_recipe(**RANKS, ranks__inference_weight=0.5))
    changed = {name for name in half if half[name] != base[name]}
    assert changed == {"evaluate:after+ranks", "export", "speed"}
    without = stale.prints(tiny_recipe(**RANKS, ranks__inference_weight=None))
    assert base.keys() - without.keys() == WITH_RANKS
    assert without["train"] == base["train"]


def test_recipes_share_what_they_have_in_common(stale, tiny_recipe, tmp_path):
    """The base's sentences and tokens are this recipe's too; the same student is one training."""
    base = tiny_recipe(name="base", teachers=[], train__objectives={"infonce": {}})
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(base))
    alone = stale.prints(base)
    teacher = {"name": "b", "model": f"recipe:{tmp_path}/base.yaml", "max_length": 32}
    found = stale.prints(tiny_recipe(teachers=[teacher]))
    assert "base/train" in found and found["base/train"] == alone["train"]
    assert found["tokens"] == alone["tokens"]
    assert not {"base/tokens", "base/sentences", "base/evaluate:after"} & found.keys()
    longer = stale.prints(tiny_recipe(teachers=[teacher], student__max_length=20))
    assert longer["base/tokens"] == alone["tokens"] != longer["tokens"]
    start = stale.prints(tiny_recipe(student={"model": teacher["model"]}))
    assert start["base/train"] == alone["train"] != start["train"]


def test_a_step_of_two_recipes_is_this_recipes(stale, tiny_recipe, tmp_path):
    """Teacher t here is teacher x of the base: it is looked up here, under its name here."""
    base = tiny_recipe(name="base", teachers__0__name="x")
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(base))
    first = {"name": "b", "model": f"recipe:{tmp_path}/base.yaml", "max_length": 32}
    recipe = tiny_recipe(teachers=[first, *tiny_recipe()["teachers"]])
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    nodes = build_graph(load_recipe(tmp_path / "recipe.yaml"))
    assert "base/embed:x" not in nodes
    assert {node.recipe.name for name, node in nodes.items() if "/" not in name} == {"tiny"}
    assert nodes["base/train"].inputs["embed:x"] == "embed:t"
    seen = set()
    for name, node in nodes.items():
        assert set(node.inputs.values()) <= seen, name
        seen.add(name)


def test_two_recipes_of_one_name_that_differ_are_refused(stale, tiny_recipe, tmp_path):
    teachers = []
    for seed in (1, 2):
        base = tiny_recipe(name="base", teachers=[], train__seed=seed,
                           train__objectives={"infonce": {}})  # fmt: skip
        (tmp_path / f"{seed}.yaml").write_text(yaml.safe_dump(base))
        teachers.append({"name": f"b{seed}", "model": f"recipe:{tmp_path}/{seed}.yaml"})
    with pytest.raises(UserError, match="two recipes with different settings are called 'base'"):
        stale.prints(tiny_recipe(teachers=teachers))


def test_planning_imports_neither_torch_nor_ray(tmp_path, tiny_recipe):
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(tiny_recipe()))
    code = (
        "import sys; from pipeline.cli import main; assert main(['plan', sys.argv[1]]) == 0; "
        "print(sorted({'torch', 'ray', 'transformers', 'scipy'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(file)], capture_output=True, text=True, check=True
    )
    assert result.stdout.splitlines()[-1] == "[]"
    assert "9 of 9 to do" in result.stdout


def test_what_negations_read_does_not_depend_on_rewrites(tmp_path, tiny_recipe, student_folder):
    (tmp_path / "p.tsv").write_text("sentence1\tsentence2\n")
    translation = {"model": str(student_folder)}
    sources = [
        {"name": "p", "pairs": {"path": str(tmp_path / "p.tsv")}},
        {"name": "t", "backtranslation": {"to_pivot": translation, "from_pivot": translation}},
    ]
    changes = {"train__objectives": {"infonce": {}, "soft_negative": {}}}
    file = tmp_path / "recipe.yaml"
    found = []
    for perturb in ([], sources[:1], sources):
        file.write_text(yaml.safe_dump(tiny_recipe(perturb=perturb, **changes)))
        found.append(build_graph(load_recipe(file))["tokens:negated"])
    assert [node.inputs for node in found] == 3 * [{"sentences": "sentences"}]
    assert len({node.fingerprint for node in found}) == 1
