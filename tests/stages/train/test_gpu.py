"""On a GPU: the numbers that a CPU has, with every engine. Left out where there is none."""

import json
import multiprocessing
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from stages.encoder.model import load_for_inference
from stages.encoder.settings import EncoderSettings
from stages.rows import unit_rows
from stages.train.engine import DeepSpeedEngine, PlainEngine
from tests.stages.train.test_engines import HALF, LAYOUTS, folder, keep, trained
from tests.support.models import make_sentences

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU of CUDA")
__all__ = ["folder"]
STAGES = (0, 1, 2, 3)


def worker(folder, out):
    """Trains with every ZeRO stage on one GPU; each writes what came of it."""
    import deepspeed

    deepspeed.init_distributed(
        dist_backend="nccl", auto_mpi_discovery=False, verbose=False, rank=0, world_size=1,
        init_method=f"file://{out}/rendezvous",
    )  # fmt: skip
    for stage in STAGES:
        for case in LAYOUTS:
            result = trained(case, folder, DeepSpeedEngine, stage, device="cuda")
            keep(f"{case}-{stage}", out, result)
        place = out / f"handed-{stage}"
        trained("two teachers", folder, DeepSpeedEngine, stage, place, HALF, device="cuda")
        result = trained("two teachers", folder, DeepSpeedEngine, stage, place, device="cuda")
        keep(f"handed-{stage}", out, result)
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def out(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("gpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        patch.setenv("LOCAL_RANK", "0")
        patch.setenv("DS_ACCELERATOR", "cuda")
        process = multiprocessing.get_context("spawn").Process(target=worker, args=(folder, out))
        process.start()
        process.join()
    assert process.exitcode == 0
    return out


def agree(found, expected):
    """Losses and gradient norms of two trainings, and their weights."""
    for row, other in zip(found[0], expected[0], strict=True):
        for key in ("loss", "gradient_norm"):
            assert row[key] == pytest.approx(other[key], rel=2e-3, abs=2e-4), (row["step"], key)
    for name, weight in expected[1].items():
        if not name.endswith("key.bias"):  # its gradient is rounding noise
            np.testing.assert_allclose(found[1][name], weight, atol=2e-3, err_msg=name)


@pytest.mark.parametrize("case", LAYOUTS)
def test_the_plain_engine_agrees_with_the_cpu(folder, case):
    found, expected = (
        trained(case, folder, PlainEngine, device=device) for device in ("cuda", "cpu")
    )
    agree(found, expected)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("case", LAYOUTS)
def test_zero_stages_agree_with_the_cpu(folder, out, case, stage):
    rows = json.loads((out / f"{case}-{stage}.json").read_text())
    weights = load_file(out / f"{case}-{stage}.weights")
    agree((rows, weights), trained(case, folder, PlainEngine))


@pytest.mark.parametrize("stage", STAGES)
def test_a_checkpoint_of_a_gpu_goes_on_bit_for_bit(out, stage):
    """As undisturbed there."""
    found, expected = (
        load_file(out / f"{name}-{stage}.weights") for name in ("handed", "two teachers")
    )
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


@pytest.mark.parametrize(("first", "second"), [("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")])
def test_plain_training_goes_on_where_it_is_continued(folder, tmp_path, first, second):
    trained("two teachers", folder, PlainEngine, None, tmp_path, HALF, device=first)
    found = trained("two teachers", folder, PlainEngine, None, tmp_path, device=second)
    expected = trained("two teachers", folder, PlainEngine, device=second)
    if first == second:
        assert all(torch.equal(found[1][name], weight) for name, weight in expected[1].items())
    agree(found, expected)


@pytest.mark.parametrize(
    ("precision", "most"), [("float32", 1e-5), ("bfloat16", 1e-2), ("float16", 1e-3)]
)
def test_vectors_agree_with_the_cpu(folder, precision, most):
    """Cosine distance, in the batches of different lengths that inference makes."""
    settings = EncoderSettings(
        model=str(folder / "teacher"), pooling="mean", max_length=32, tokens_per_batch=256
    )
    on_cpu = load_for_inference(settings.model_copy(update={"device": "cpu"}))
    on_gpu = load_for_inference(
        settings.model_copy(update={"device": "cuda", "precision": precision})
    )
    found, expected = (unit_rows(x.encode(make_sentences(80))) for x in (on_gpu, on_cpu))
    assert (1 - (found.astype("f8") * expected).sum(1)).max() < most
