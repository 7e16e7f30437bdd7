"""Shared by all tests: tiny models made here, real data when it is there, one Ray cluster."""

import copy
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

WORDS = """the a cat dog bird man woman child runs eats sees reads writes sings plays sleeps house
tree river city book song red blue small large old young quickly slowly happily under over
near""".split()  # noqa: SIM905
# for the S3 server on loopback; Ray's workers inherit them from the cluster started below
os.environ["AWS_ACCESS_KEY_ID"] = os.environ["AWS_SECRET_ACCESS_KEY"] = "loopback"
REPOSITORY = Path(__file__).parent.parent


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """Real data: SENTRAY_DATA, or a folder beside the checkout; its tests need it."""
    place = Path(os.environ.get("SENTRAY_DATA", REPOSITORY.parent / "shared" / "data"))
    if not place.is_dir():
        pytest.skip("no real data: set SENTRAY_DATA to run this test")
    return place


def make_sentences(count: int, seed: int = 0) -> list[str]:
    """Distinct made-up sentences of 4 to 12 words."""
    import random

    source = random.Random(seed)
    found: dict[str, None] = {}
    while len(found) < count:
        words = source.choices(WORDS, k=source.randint(4, 12))
        found[" ".join(words).capitalize() + "."] = None
    return list(found)


def make_model(
    folder: Path,
    layers: int = 2,
    width: int = 32,
    seed: int = 0,
    kind: str = "Bert",
    head: str = "Model",
    **config: Any,
) -> Path:
    """A transformer of a few thousand parameters with a word-level tokenizer, saved like any other.

    Args:
        kind: Bert or Roberta; head: Model, or ForMaskedLM to keep the masked-language head.
    """
    import torch
    import transformers
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {word: i for i, word in enumerate([*special, *WORDS, ".", ":", '"', "means"])}
    rust = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    rust.normalizer = normalizers.Lowercase()
    rust.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    rust.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=rust, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]",
        sep_token="[SEP]", mask_token="[MASK]",
    )  # fmt: skip
    torch.manual_seed(seed)
    settings = {
        "vocab_size": len(vocabulary), "hidden_size": width, "num_hidden_layers": layers,
        "num_attention_heads": 2, "intermediate_size": 2 * width, "max_position_embeddings": 64,
        "initializer_range": 0.2,
    }  # fmt: skip
    whole = getattr(transformers, f"{kind}Config")(**({"pad_token_id": 0} | settings | config))
    getattr(transformers, f"{kind}{head}")(whole).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def teacher_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "teacher", layers=3, width=48, seed=1)


@pytest.fixture(scope="session")
def student_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "student", layers=2, width=32, seed=2)


@pytest.fixture(scope="session")
def golden() -> dict[str, Any]:
    """Golden values of the formulas, when the file is there."""
    file = REPOSITORY.parent / "shared" / "golden" / "losses.json"
    if not file.is_file():
        pytest.skip("no golden values beside the checkout")
    return dict(json.loads(file.read_text()))


@pytest.fixture
def tiny_recipe(
    tmp_path: Path, teacher_folder: Path, student_folder: Path
) -> Callable[..., dict[str, Any]]:
    """Builds a complete recipe over 300 made-up sentences and tiny models, as plain data."""

    def build(**changes: Any) -> dict[str, Any]:
        text = tmp_path / "sentences.txt"
        if not text.exists():
            text.write_text("\n".join(make_sentences(300)) + "\n")
            write_sts(tmp_path / "sts.tsv")
        recipe: dict[str, Any] = {
            "name": "tiny",
            "storage": str(tmp_path / "runs"),
            "sentences": {"path": str(text), "rows_per_shard": 64},
            "teachers": [{"name": "t", "model": str(teacher_folder), "pooling": "mean",
                          "max_length": 32}],
            "student": {"model": str(student_folder), "pooling": "mean", "max_length": 16},
            "train": {
                "objectives": {"infonce": {}, "consistency": {}, "listnet": {}},
                "batch_size": 16, "max_steps": 12, "learning_rate": 1e-3,
                "checkpoint_every_steps": 4, "log_every_steps": 2,
                "dev": {"sts": [{"name": "dev", "path": str(tmp_path / "sts.tsv")}],
                        "every_steps": 6},
            },
            "evaluate": {"sts": [{"name": "made-up", "path": str(tmp_path / "sts.tsv")}],
                         "num_bootstrap": 20, "max_length": 48},
        }  # fmt: skip
        for path, value in changes.items():
            place = recipe
            *parents, last = path.split("__")
            for part in parents:
                place = place[int(part)] if isinstance(place, list) else place.setdefault(part, {})
            place[int(last) if isinstance(place, list) else last] = copy.deepcopy(value)
        return recipe

    return build


def write_sts(file: Path, count: int = 40) -> None:
    """Pairs whose score is the share of words they have in common, times 5."""
    sentences = make_sentences(2 * count, seed=9)
    lines = ["subset\tscore\tsentence1\tsentence2\tsplit"]
    for i, (left, right) in enumerate(zip(sentences[::2], sentences[1::2], strict=True)):
        a, b = set(left.lower().split()), set(right.lower().split())
        score = 5 * len(a & b) / len(a | b)
        lines.append(f"{'odd' if i % 2 else 'even'}\t{score:.3f}\t{left}\t{right}\ttest")
    file.write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[str]:
    """A real cluster of two Ray nodes (2 cores each) on this machine; the address to join."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    cluster.add_node(num_cpus=2)
    cluster.wait_for_nodes()
    yield cluster.address
    cluster.shutdown()


class Sentray:
    """The command line as a user runs it, in a process of its own."""

    def __init__(self, folder: Path, address: str) -> None:
        self.folder = folder
        self.address = address

    def recipe_file(self, recipe):
        file = self.folder / "recipe.yaml"
        file.write_text(yaml.safe_dump(recipe))
        return str(file)

    def start(self, *arguments):
        command = [sys.executable, "-m", "pipeline.cli", *map(str, arguments)]
        if arguments[0] in ("run", "tune"):
            command += ["--address", self.address]
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=self.folder
        )

    def __call__(self, *arguments, code=0):
        process = self.start(*arguments)
        out, err = process.communicate(timeout=400)
        assert process.returncode == code, out + err
        return out if code == 0 else err

    def wait(self, process, happened):
        """Until something is so; the process must not end before."""
        while not happened():
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)  # a poll's pause: spinning would take one of two cores

    def wait_for_idle(self) -> None:
        """Until a killed driver's workers are gone, so that nothing of it writes any more."""
        import ray

        ray.init(address=self.address, log_to_driver=False)
        try:
            while ray.available_resources().get("CPU") != ray.cluster_resources()["CPU"]:
                time.sleep(0.05)
        finally:
            ray.shutdown()


@pytest.fixture
def sentray(tmp_path, ray_cluster):
    return Sentray(tmp_path, ray_cluster)


def made(storage: str) -> dict[str, float]:
    """Every published manifest and finished shard, with its time of writing."""
    root = Path(storage)
    files = [*root.glob("*/*/manifest.json"), *root.glob("*/*/shards/*.json")]
    return {str(file.relative_to(root)): file.stat().st_mtime_ns for file in files}
