"""What is stale, what is not, and why: fingerprints of whole recipes, nothing is run."""

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import yaml

from pipeline.plan.graph import build_graph
from pipeline.plan.plan import make_plan, plan_text
from pipeline.recipe.read import load_recipe
from pipeline.run.runner import named
from pipeline.run.scheduler import batches
from pipeline.store.manifest import versions_here
from stages.errors import UserError
from stages.recipe import Recipe
from tests.support.here import make_here
from tests.support.models import make_model, make_sentences
from tests.support.recipes import setting, tiny, write_recipe


def both_tests(who):
    return {f"evaluate:{who}:size", f"evaluate:{who}:made-up"}


AFTER_TRAINING = {"train", *both_tests("after"), "export", "speed"}


@pytest.fixture
def stale(tmp_path, tiny_recipe):
    """Names of the nodes whose fingerprint differs between two recipes."""

    def prints(recipe):
        file = tmp_path / "recipe.yaml"
        file.write_text(yaml.safe_dump(recipe))
        return {
            name: node.fingerprint for name, node in build_graph(load_recipe(file)).nodes.items()
        }

    base = prints(tiny_recipe())

    def compare(*overrides):
        found = prints(tiny_recipe(*overrides))
        return {name for name in found if base.get(name) != found[name]}

    compare.prints = prints
    return compare


EVERYTHING = {"sentences", "embed:t", "tokens", *AFTER_TRAINING}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (["teachers.0.name=big"], {"embed:big", *both_tests("big"), "speed"}),  # under new names
        (["sentences.seed=1"], EVERYTHING),
        (["sentences.rows_per_shard=100"], EVERYTHING),
        (["teachers.0.max_length=24"], {"embed:t", *AFTER_TRAINING}),
        (["teachers.0.precision=bfloat16"],
         {"embed:t", *both_tests("t"), *AFTER_TRAINING}),
        (["student.max_length=20"], {"tokens", *AFTER_TRAINING}),
        (["student.layers=[0]"], {*both_tests("before"), *AFTER_TRAINING}),
        (["student.dropout=0.3"], AFTER_TRAINING),
        (["teachers.0.weight=2.0"], AFTER_TRAINING),
        (["train.objectives.listnet.student_temperature=0.1"], AFTER_TRAINING),
        (["train.seed=3"], AFTER_TRAINING),
        # one test, and nothing that does not read it
        (["evaluate.num_bootstrap=3"],
         {"evaluate:before:made-up", "evaluate:t:made-up", "evaluate:after:made-up"}),
        # execution, not identity
        (["student.tokens_per_batch=7", "teachers.0.device=cpu", "train.num_workers=2",
          "train.zero_stage=3", "train.cpus_per_worker=1", "train.checkpoint_every_steps=1",
          "train.max_failures=0", "sentences.max_rejects_kept=3"], set()),
    ],
)  # fmt: skip
def test_a_changed_setting_makes_stale_what_depends_on_it(stale, changes, expected):
    assert stale(*changes) == expected


def test_files_count_by_content_and_kind_not_by_place(stale, tmp_path):
    text = (tmp_path / "sentences.txt").read_text()
    (tmp_path / "moved.txt").write_text(text)
    assert stale(f"sentences.path={tmp_path}/moved.txt") == set()
    (tmp_path / "sentences.tsv").write_text(text)
    assert "sentences" in stale(f"sentences.path={tmp_path}/sentences.tsv")
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
    first = stale.prints(
        tiny_recipe(setting("student.model", str(make_model(tmp_path / "a", seed=2))))
    )
    folder = make_model(tmp_path / "b", seed=2)
    assert stale.prints(tiny_recipe(f"student.model={folder}")) == first
    with (folder / name).open("a") as file:
        file.write(" ")
    assert stale.prints(tiny_recipe(f"student.model={folder}"))["tokens"] != first["tokens"]


def test_a_teachers_name_and_place_are_not_identity(tmp_path, stale, tiny_recipe, student_folder):
    recipe = tiny_recipe()
    first = stale.prints(recipe)
    other = dict(recipe["teachers"][0], name="other", model=str(student_folder))
    recipe["teachers"] = [other, dict(recipe["teachers"][0], name="renamed")]
    second = stale.prints(recipe)
    assert second["embed:renamed"] == first["embed:t"]
    assert second["train"] != first["train"]


def test_without_a_listwise_objective_no_teacher_is_embedded(stale, tiny_recipe):
    found = stale.prints(tiny_recipe("train.objectives={infonce: {}}"))
    assert "embed:t" not in found
    assert both_tests("t") <= found.keys()


RANKS = [
    "ranks={corpus_size: 100, dimensions: 20}",
    "teachers.0.similarity=ranks",
    "train.objectives={infonce: {}, rank_regression: {}}",
]
WITH_RANKS = {"corpus:after", *both_tests("after+ranks")}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (["ranks.seed=1"], {"corpus:t", "ranks:t", *both_tests("t+ranks")} | WITH_RANKS),
        (["ranks.dimensions=10"], {"corpus:t", "ranks:t", *both_tests("t+ranks")} | WITH_RANKS),
        (["train.objectives.rank_regression.low=0.1"], WITH_RANKS),
        (
            ["evaluate.max_length=40"],
            both_tests("before") | both_tests("t") | both_tests("t+ranks") | WITH_RANKS,
        ),
    ],
)
def test_ranks_make_stale_what_depends_on_them(stale, tiny_recipe, changes, expected):
    base = stale.prints(tiny_recipe(*RANKS))
    found = stale.prints(tiny_recipe(*RANKS, *changes))
    changed = {name for name in found if found[name] != base[name]}
    # the export reads the corpus; speed only the student
    after = {"export"} | (
        both_tests("after") | {"speed"} if "ranks" not in next(iter(changes)) else set()
    )
    if changes != ["evaluate.max_length=40"]:
        after |= AFTER_TRAINING
    assert changed == expected | after


def test_the_share_of_ranks_at_inference_changes_use_and_not_training(stale, tiny_recipe):
    base = stale.prints(tiny_recipe(*RANKS))
    half = stale.prints(tiny_recipe(*RANKS, "ranks.inference_weight=0.5"))
    changed = {name for name in half if half[name] != base[name]}
    assert changed == {*both_tests("after+ranks"), "export"}
    without = stale.prints(tiny_recipe(*RANKS, "ranks.inference_weight=null"))
    assert base.keys() - without.keys() == WITH_RANKS
    assert without["train"] == base["train"]


def test_recipes_share_what_they_have_in_common(stale, tiny_recipe, tmp_path):
    """The base's sentences and tokens are this recipe's too; the same student is one training."""
    base = tiny_recipe("name=base", "teachers=[]", "train.objectives={infonce: {}}")
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(base))
    alone = stale.prints(base)
    teacher = {"name": "b", "model": f"recipe:{tmp_path}/base.yaml", "max_length": 32}
    found = stale.prints(tiny_recipe(setting("teachers", [teacher])))
    assert "base/train" in found and found["base/train"] == alone["train"]
    assert found["tokens"] == alone["tokens"]
    assert not {"base/tokens", "base/sentences", "base/evaluate:after:size"} & found.keys()
    # the base's storage, too, is as it is written
    odd = tiny_recipe(setting("teachers", [teacher])) | {"storage": f"{tmp_path}/it: [is # 😀"}
    assert stale.prints(odd).keys() == found.keys()
    longer = stale.prints(tiny_recipe(setting("teachers", [teacher]), "student.max_length=20"))
    assert longer["base/tokens"] == alone["tokens"] != longer["tokens"]
    start = stale.prints(tiny_recipe(setting("student", {"model": teacher["model"]})))
    assert start["base/train"] == alone["train"] != start["train"]


def test_a_step_of_two_recipes_is_this_recipes(stale, tiny_recipe, tmp_path):
    """Teacher t here is teacher x of the base: it is looked up here, under its name here."""
    base = tiny_recipe("name=base", "teachers.0.name=x")
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(base))
    first = {"name": "b", "model": f"recipe:{tmp_path}/base.yaml", "max_length": 32}
    recipe = tiny_recipe(setting("teachers", [first, *tiny_recipe()["teachers"]]))
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    nodes = build_graph(load_recipe(tmp_path / "recipe.yaml")).nodes
    assert "base/embed:x" not in nodes
    assert {node.recipe for name, node in nodes.items() if "/" not in name} == {"tiny"}
    assert nodes["base/train"].inputs["embed:x"] == "embed:t"
    seen = set()
    for name, node in nodes.items():
        assert set(node.inputs.values()) <= seen, name
        seen.add(name)


def test_two_recipes_of_one_name_that_differ_are_refused(stale, tiny_recipe, tmp_path):
    teachers = []
    for seed in (1, 2):
        base = tiny_recipe("name=base", "teachers=[]", f"train.seed={seed}",
                           "train.objectives={infonce: {}}")  # fmt: skip
        (tmp_path / f"{seed}.yaml").write_text(yaml.safe_dump(base))
        teachers.append({"name": f"b{seed}", "model": f"recipe:{tmp_path}/{seed}.yaml"})
    with pytest.raises(UserError, match="two recipes with different settings are called 'base'"):
        stale.prints(tiny_recipe(setting("teachers", teachers)))
    # nor may it be called like the recipe that builds on it
    with pytest.raises(UserError, match="two recipes with different settings are called 'base'"):
        stale.prints(tiny_recipe("name=base", setting("teachers", teachers[:1])))
    # but two copies of one may have other tests
    base["train"]["seed"] = 1
    base["evaluate"]["speed"] = not base["evaluate"].get("speed", True)
    (tmp_path / "2.yaml").write_text(yaml.safe_dump(base))
    assert "base/train" in stale.prints(tiny_recipe(setting("teachers", teachers)))


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
    assert "12 of 12 to do" in result.stdout


def test_what_negations_read_does_not_depend_on_rewrites(tmp_path, tiny_recipe, student_folder):
    (tmp_path / "p.tsv").write_text("sentence1\tsentence2\n")
    translation = {"model": str(student_folder)}
    sources = [
        {"name": "p", "pairs": {"path": str(tmp_path / "p.tsv")}},
        {"name": "t", "backtranslation": {"to_pivot": translation, "from_pivot": translation}},
    ]
    changes = ["train.objectives={infonce: {}, soft_negative: {}}"]
    file = tmp_path / "recipe.yaml"
    found = []
    for perturb in ([], sources[:1], sources):
        file.write_text(yaml.safe_dump(tiny_recipe(setting("perturb", perturb), *changes)))
        found.append(build_graph(load_recipe(file)).nodes["tokens:negated"])
    assert [node.inputs for node in found] == 3 * [{"sentences": "sentences"}]
    assert len({node.fingerprint for node in found}) == 1


def test_a_begun_name_is_every_node_that_begins_so():
    nodes = dict.fromkeys(
        ["evaluate:after:STS", "evaluate:after+256d:STS", "evaluate:afterwards:STS", "train"]
    )
    assert named("evaluate:after", nodes) == ["evaluate:after:STS", "evaluate:after+256d:STS"]
    assert named("evaluate", nodes) == [*nodes][:3]
    assert named("evaluate:after+256d", nodes) == ["evaluate:after+256d:STS"]


def test_sources_that_nobody_installed_are_one_message(monkeypatch):
    def version(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr("pipeline.store.manifest.version", version)
    with pytest.raises(UserError, match="sentray is not installed in .*: install Sentray there"):
        versions_here()


def test_other_versions_are_a_note(tmp_path, teacher_folder, student_folder):
    recipe = Recipe.model_validate(tiny(tmp_path, teacher_folder, student_folder))
    make_here(recipe, "tokens")
    plan = make_plan(recipe)
    assert "note:" not in plan_text(plan)
    for name in ("sentences", "tokens"):
        file = tmp_path / "runs" / plan.folders[name] / "manifest.json"
        manifest = json.loads(file.read_text())
        manifest["versions"] |= {"torch": "1.0"}
        if name == "tokens":  # one package that only some stages use, and one that is not here
            manifest["versions"] |= {"deepspeed": "0.1", "no-such-package": "1.0"}
        file.write_text(json.dumps(manifest))
    text = plan_text(make_plan(recipe))
    here = {name: metadata.version(name) for name in ("torch", "deepspeed")}
    assert (
        f"note: made with torch 1.0, and now {here['torch']} is here: sentences and 1 more" in text
    )
    assert f"note: made with deepspeed 0.1, and now {here['deepspeed']} is here: tokens\n" in text
    assert "= tokens" in text and text.count("note:") == 2


def test_packages_that_decide_what_a_stage_makes(tmp_path, tiny_recipe):
    """They are in its manifest, so that the plan tells of other versions."""
    file = tmp_path / "labels.tsv"
    file.write_text("label\tsplit\ttext\n")
    rewrites = {"pairs": {"path": str(file)}, "filters": {"language": "en"}}
    recipe = Recipe.model_validate(
        tiny_recipe(
            "sentences.split_sentences=true",
            setting("perturb", [{"name": "p"} | rewrites]),
            setting("evaluate.classification", [{"name": "c", "path": str(file)}]),
            "export.variants=[onnx-int8]",
        )
    )
    nodes = build_graph(recipe).nodes
    packages = {name: {*node.stage.packages} for name, node in nodes.items()}
    assert packages["sentences"] == {"sentencex"}
    assert packages["perturb:p"] == {"rapidfuzz", "py3langid"}
    assert packages["evaluate:after:made-up"] == {"scipy"}
    assert packages["evaluate:after:classification-c"] == {"scikit-learn"}
    assert packages["export:onnx-int8"] >= {"sentence-transformers", "onnxruntime", "scipy"}
    make_here(recipe, "sentences")
    made = make_plan(recipe).nodes["sentences"].manifest.versions
    assert made["sentencex"] == metadata.version("sentencex")


def test_an_encoders_tests_are_divided_among_processes_by_their_files(stale, tiny_recipe, tmp_path):
    """Each sentence is embedded in one process; and the same artifacts come of it."""
    recipe = tiny_recipe()
    known = recipe["evaluate"]["sts"][0]
    halves = [
        {"name": "low", "path": known["path"], "max_score": 3},
        {"name": "high", "path": known["path"], "min_score": 2},
    ]
    copy = tmp_path / "copy.tsv"
    copy.write_bytes(Path(known["path"]).read_bytes())
    tests = setting("evaluate.sts", [*halves, {"name": "copy", "path": str(copy)}])
    file = tmp_path / "recipe.yaml"

    first = {"name": "b", "model": recipe["student"]["model"], "pooling": "cls"}
    more = ["student.head=none", "student.dimensions=[8]", setting("evaluate.baselines", [first])]

    def processes(count):
        """What is made together, by encoder."""
        changed = tiny_recipe(tests, f"evaluate.processes={count}", *more)
        nodes = build_graph(load_recipe(write_recipe(file, changed))).nodes.values()
        found = {}
        for number, batch in enumerate(batches([one for one in nodes if one.kind == "evaluate"])):
            for node in batch:
                _, encoder, test = node.name.split(":")
                found.setdefault(encoder, {}).setdefault(number, []).append(test)
        return {encoder: [*several.values()] for encoder, several in found.items()}

    for count, expected in {
        1: [["size", "low", "high", "copy"]],
        2: [["size", "copy"], ["low", "high"]],
        9: [["size"], ["low", "high"], ["copy"]],
    }.items():
        found = processes(count)
        without_size = [[test for test in some if test != "size"] for some in expected]
        assert found.pop("after+8d") == [some for some in without_size if some]
        assert found == dict.fromkeys(["before", "t", "after", "b"], expected)
    assert stale("evaluate.processes=2") == set()


def test_what_exports_say_is_their_identity(tmp_path, tiny_recipe):
    """Prompts of queries and documents were once left out, where there are any."""

    def export(*changes):
        recipe = write_recipe(tmp_path / "r.yaml", tiny_recipe(*changes))
        return build_graph(load_recipe(recipe)).nodes["export"]

    plain, prompted = export(), export("student.prompt='a cat: '")
    assert prompted.identity == plain.identity | {"prompts": ["default", "query", "document"]}


def test_widths_of_models_of_the_hub_need_no_hub(tmp_path, tiny_recipe, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: 1 / 0)
    recipe = tiny_recipe(
        "student.dimensions=[32,16]", "student.head=none", "student.model=a/b",
        "evaluate.speed=false", "train.objectives={vector_regression: {}}",
    )  # fmt: skip
    nodes = build_graph(load_recipe(write_recipe(tmp_path / "r.yaml", recipe))).nodes
    assert nodes["export"].stage.widths == (32, 16)


def test_the_whole_width_among_the_dimensions_is_no_second_student(tmp_path, tiny_recipe):
    """The tiny student's is 32."""
    recipe = tiny_recipe("student.dimensions=[32,16]", "student.head=none", "evaluate.speed=false",
                         "train.objectives={vector_regression: {}}")  # fmt: skip
    nodes = build_graph(load_recipe(write_recipe(tmp_path / "r.yaml", recipe))).nodes
    cut = [name for name in nodes if name.startswith("evaluate:after+")]
    assert cut and all(name.startswith("evaluate:after+16d:") for name in cut)
    assert nodes["export"].stage.widths == (16,)
