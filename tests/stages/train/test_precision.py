"""Where digits are kept: from the backbone's output to the cosines, and of stored factors."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from stages.encoder.tokenizer import pad
from stages.rows import FactorRows, unit_rows
from stages.train.engine import PlainEngine, adamw
from stages.train.settings import Objectives, TrainSettings
from stages.train.state import read_state
from stages.train.student import build_student
from stages.train.student_settings import StudentSettings
from tests.support.models import make_model, make_sentences

PROMPTS = dict(pooling="mask", template='The "{sentence}" means {mask} .', template_denoising=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_model(tmp_path_factory.mktemp("bf16") / "bert", head="ForMaskedLM", seed=4))


@pytest.mark.parametrize("head", ["tanh", "linear", "batchnorm", "none"])
@pytest.mark.parametrize("student", [dict(pooling="mean"), dict(pooling="cls"), PROMPTS],
                         ids=["mean", "cls", "denoised"])  # fmt: skip
def test_what_enters_the_cosines_is_float32_from_the_backbone_on(model, head, student, monkeypatch):
    """Under autocast a head of its own rounds vectors to 8 bits, 0.06 as a logit at 0.025."""
    settings = StudentSettings(model=model, device="cpu", head=head, dropout=0.0, **student)
    built = build_student(settings, Objectives.model_validate({"infonce": {}}), 0, autocast=True)
    built.train()
    tokenizer = built.tokenizers[0]
    rows = tokenizer(make_sentences(4))
    ids, mask = (torch.from_numpy(x) for x in pad([*rows, *rows], tokenizer.pad_id))
    outputs, inner = [], []
    pool = built.encoder.pool

    def watched(states, *batch):
        outputs.append(states)
        return pool(states, *batch)

    monkeypatch.setattr(built.encoder, "pool", watched)
    layers = built.encoder.backbone.modules()
    first = next(module for module in layers if isinstance(module, nn.Linear))
    hook = first.register_forward_hook(lambda *found: inner.append(found[2]))
    vectors, _ = built(ids, mask, {})
    hook.remove()
    assert inner[0].dtype == torch.bfloat16  # the transformer itself does compute in it
    pooled = pool(outputs[0].float(), ids, mask)
    if settings.template_denoising:
        with torch.autocast("cpu", torch.bfloat16):
            bias = built.template_bias(mask)
        pooled = pooled - bias
    expected = built.head(pooled)
    assert vectors.dtype == torch.float32
    torch.testing.assert_close(vectors, expected, atol=1e-6, rtol=1e-6)
    vectors.sum().backward()
    for parameter in built.head.parameters():
        assert parameter.grad is None or parameter.grad.dtype == torch.float32


class Watch(TorchFunctionMode):
    """Types of what attention is given, as the kernel sees it."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            given = [*args, *(kwargs or {}).values()]
            self.seen += [x.dtype for x in given if torch.is_tensor(x) and x.is_floating_point()]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("autocast", [False, True])
def test_attention_is_float32_on_a_cpu(model, autocast):
    """Its gradient in bfloat16 would be half of the step."""
    settings = StudentSettings(model=model, device="cpu", dropout=0.0, pooling="mean")
    objectives = Objectives.model_validate({"infonce": {}})
    built = build_student(settings, objectives, 0, autocast).train()
    rows = built.tokenizers[0](make_sentences(4))
    ids, mask = (torch.from_numpy(x) for x in pad(rows, 0))
    with Watch() as watch:
        found, _ = built(ids, mask, {})
    assert set(watch.seen) == {torch.float32}
    assert len(watch.seen) >= 3 * len(built.encoder.backbone.encoder.layer)
    exact, _ = build_student(settings, objectives, 0, False)(ids, mask, {})
    assert (1 - F.cosine_similarity(found, exact)).max() < 1e-2


def stored(tmp_path, factors):
    np.save(tmp_path / "factors.npy", factors)
    return FactorRows([tmp_path / "factors.npy"], len(factors))


def test_half_precision_factors_are_unit_vectors_again_when_read(tmp_path):
    """Anisotropic vectors: similarities differ by less than what rounding does to lengths."""
    random = np.random.default_rng(0)
    vectors = unit_rows(random.standard_normal((60, 768)) + 4 * random.standard_normal(768))
    found = stored(tmp_path, vectors.astype(np.float16)).take(np.arange(60))
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=3e-7)
    exact = vectors @ vectors.T
    raw = vectors.astype(np.float16).astype(np.float32)
    errors = [np.abs((x @ x.T - exact)[~np.eye(60, dtype=bool)]).max() for x in (found, raw)]
    assert errors[0] < errors[1] / 3


def test_factors_that_are_shorter_on_purpose_stay_so(tmp_path):
    """Compressed rank vectors: what is missing of their length was cut off with their noise."""
    random = np.random.default_rng(0)
    short = unit_rows(random.standard_normal((20, 64))) * random.uniform(0.8, 0.99, (20, 1))
    half = short.astype(np.float16)
    np.testing.assert_array_equal(stored(tmp_path, half).take(np.arange(20)), half)


@pytest.mark.parametrize("weight_decay", [0.0, 0.5])
def test_weight_decay_spares_biases_and_norms(model, weight_decay, tmp_path):
    def engine(weight_decay):
        student = build_student(
            StudentSettings(model=model, device="cpu", pooling="mean"),
            Objectives.model_validate({"infonce": {}}), 0, autocast=False,
        )  # fmt: skip
        settings = TrainSettings.model_validate(
            dict(objectives={"infonce": {}}, weight_decay=weight_decay, learning_rate=0.1)
        )
        return PlainEngine(student, settings)

    one = engine(weight_decay)
    with torch.no_grad():
        for parameter in one.student.parameters():
            parameter.fill_(1.0)
    one.step(sum(0 * p.sum() for p in one.student.parameters()), 0.1)
    for name, parameter in one.student.named_parameters():
        spared = name.endswith("bias") or "LayerNorm" in name
        expected = 1.0 if spared else 1 - 0.1 * weight_decay
        assert torch.equal(parameter, torch.full_like(parameter, expected)), name

    # moments go to their own parameter, whichever groups wrote and read them
    one.step(sum((n + 1) * p.sum() for n, p in enumerate(one.student.parameters())), 0.1)
    one.snapshot().write(tmp_path)
    for other in (engine(0.0), engine(0.3)):
        other.load(read_state(tmp_path, torch.device("cpu")))
        pairs = zip(one.student.parameters(), other.student.parameters(), strict=True)
        for a, b in pairs:
            for name in ("exp_avg", "exp_avg_sq", "step"):
                assert torch.equal(one.optimizer.state[a][name], other.optimizer.state[b][name])


def test_both_engines_have_the_same_groups():
    layers = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    for weight_decay, sizes in ((0.0, [4]), (0.1, [1, 3])):
        settings = SimpleNamespace(learning_rate=1.0, weight_decay=weight_decay)
        groups = adamw(list(layers.parameters()), settings).param_groups
        assert [len(group["params"]) for group in groups] == sizes
        assert [group["weight_decay"] for group in groups] == [weight_decay, 0.0][: len(sizes)]
