"""DenoSent's denoising decoder, rewritten views and hard negatives, against slow twins."""

import shutil

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForMaskedLM

from stages.errors import UserError
from stages.rows import OwnedRows, TokenRows, npy_bytes
from stages.tokens import Tokeniser
from stages.train.auxiliary import AuxiliaryInput, decoder_layers
from stages.train.engine import PlainEngine
from stages.train.loop import train
from stages.train.objectives import cosines, info_nce, token_cross_entropy
from stages.train.settings import Denoising, Objectives, StudentSettings, TrainSettings
from stages.train.student import build_student
from stages.train.views import BatchReader, TrainingData
from tests.conftest import make_model, make_sentences

PROMPT = dict(pooling="mask", template='"{sentence}" means {mask}.', max_length=24)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("denosent")
    return str(make_model(folder / "bert", layers=2, head="ForMaskedLM", seed=4))


@pytest.fixture(scope="module")
def headless(tmp_path_factory):
    folder = tmp_path_factory.mktemp("headless")
    return str(make_model(folder / "bert", layers=2, seed=4))


def built(model, denoising=None, **settings):
    chosen = dict(model=model, device="cpu", head="linear") | PROMPT | settings
    objectives = {"infonce": {}, "denoising": {"layers": 2, "feed_forward": 64} | (denoising or {})}
    return build_student(
        StudentSettings(**chosen), Objectives.model_validate(objectives), seed=0, autocast=False
    ).train()


def pair_batch(student, left, right):
    """Ids and masks of two views with different texts, padded together."""
    from stages.encoder.tokenizer import pad

    first, second = student.tokenizers
    ids, mask = pad([*first(left), *second(right)], first.pad_id)
    return torch.from_numpy(ids), torch.from_numpy(mask)


def without_dropout(student):
    for module in student.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    return student


def test_golden_values(golden):
    inputs, expected = golden["inputs"], golden["expected"]
    u, v, hard, logits = (
        torch.tensor(inputs[name], dtype=torch.float64)
        for name in ("u", "v", "hard_negative", "token_logits")
    )
    found = info_nce(cosines(u, v), inputs["tau1"], cosines(u, hard))
    assert float(found) == pytest.approx(expected["infonce_hard_negative_tau1"], abs=1e-9)
    ids = torch.tensor(inputs["token_ids_pad0"])
    total, count = token_cross_entropy(logits[ids != 0], ids[ids != 0])
    mean = float(total / count)
    assert mean == pytest.approx(expected["denoising_token_cross_entropy"], abs=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_token_cross_entropy_equals_its_slow_twin(seed):
    random = np.random.default_rng(seed)
    logits, ids = 3 * random.standard_normal((9, 11)), random.integers(0, 11, 9)
    total, count = token_cross_entropy(torch.tensor(logits), torch.tensor(ids))
    rows = zip(logits, ids, strict=True)
    assert float(total) == pytest.approx(
        -sum(np.log(np.exp(row[one]) / np.exp(row).sum()) for row, one in rows), rel=1e-12
    )
    assert int(count) == 9
    half, _ = token_cross_entropy(torch.tensor(logits).bfloat16(), torch.tensor(ids))
    assert half.dtype == torch.float32


def test_the_decoder_of_bert_base_has_the_papers_size_and_no_two_layers_start_alike():
    with torch.device("meta"):
        layers = decoder_layers(768, Denoising())
    assert sum(p.numel() for p in layers.parameters()) == 126_046_208
    small = decoder_layers(8, Denoising(layers=2, feed_forward=4))
    first, second = (layer.self_attn.in_proj_weight for layer in small)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("target", ["input", "memory"])
def test_the_loss_is_what_a_decoder_by_hand_gives(model, target):
    """Slow twin: one sentence at a time, attention over its real tokens only, MLM head on top."""
    student = without_dropout(built(model, {"target": target, "noise": 0.0}, dropout=0.0))
    left = ["a cat eats", "the old woman reads a red book under the tree"]
    right = ["the small cat eats quickly", "an old woman sees a book"]
    ids, mask = pair_batch(student, left, right)
    vectors, sums = student(ids, mask, {})
    total, count = sums["denoising"]
    whole = AutoModelForMaskedLM.from_pretrained(model).eval()
    denoiser = student.auxiliary["denoising"]
    losses = []
    for row in range(2):
        length = int(mask[2 + row].sum())
        wanted = int(mask[row].sum()) if target == "memory" else length
        # positions after the input's end are padding to the decoder, but may be asked for
        states = whole.bert.embeddings(ids[2 + row : 3 + row])
        hidden = torch.arange(ids.shape[1])[None] >= length
        for layer in denoiser.layers:
            states = layer(states, vectors[row].view(1, 1, -1), tgt_key_padding_mask=hidden)
        logits = whole.cls(states)[0, :wanted]
        goal = ids[row if target == "memory" else 2 + row, :wanted]
        losses += [-F.log_softmax(logits, -1)[i, token] for i, token in enumerate(goal)]
    assert int(count) == len(losses)
    torch.testing.assert_close(total, torch.stack(losses).sum(), atol=1e-4, rtol=1e-4)


def test_attention_to_the_one_vector_never_learns_where_to_look(model):
    """Queries and keys over a memory of length one get a gradient of exactly zero."""
    student = built(model)
    ids, mask = pair_batch(student, ["a cat eats", "the dog"], ["the cat eats", "a dog runs"])
    _, sums = student(ids, mask, {})
    sums["denoising"][0].backward()
    for layer in student.auxiliary["denoising"].layers:
        attention = layer.multihead_attn
        query, key, value = attention.in_proj_weight.grad.chunk(3)
        assert not query.any() and not key.any() and value.any()
        query, key, value = attention.in_proj_bias.grad.chunk(3)
        assert not query.any() and not key.any() and value.any()


def test_the_vector_gets_gradient_and_the_decoders_input_does_not(model):
    """Word embeddings learn through the tied head and the vector, positions through the vector."""
    student = built(model, {"noise": 0.0})
    ids, mask = pair_batch(student, ["a cat eats", "the dog"], ["the cat eats", "a dog runs"])
    denoiser, encoder = student.auxiliary["denoising"], student.encoder
    given = AuxiliaryInput(ids, mask)
    vectors = torch.randn(4, encoder.dimension, requires_grad=True)
    denoiser(encoder, given, vectors)[0].backward()
    assert vectors.grad[:2].abs().sum(1).bool().all()
    assert not vectors.grad[2:].any()  # the memory is view 1's
    assert encoder.backbone.embeddings.position_embeddings.weight.grad is None
    assert encoder.backbone.embeddings.word_embeddings.weight.grad.any()


def test_another_sentences_vector_is_another_loss(model):
    student = without_dropout(built(model, {"noise": 0.0}))
    ids, mask = pair_batch(student, ["a cat eats", "the dog"], ["the cat eats", "a dog runs"])
    denoiser, given = student.auxiliary["denoising"], AuxiliaryInput(ids, mask)
    vectors = 5 * torch.randn(4, student.encoder.dimension)
    own, _ = denoiser(student.encoder, given, vectors)
    swapped, _ = denoiser(student.encoder, given, vectors[[1, 0, 2, 3]])
    assert (own - swapped).abs() > 1e-4


def test_noise_drops_its_share_and_scales_the_rest(model, monkeypatch):
    seen = []
    student = without_dropout(built(model, {"noise": 0.8}, dropout=0.0))
    layer = student.auxiliary["denoising"].layers[0]
    layer.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    ids, mask = pair_batch(student, make_sentences(20), make_sentences(20, seed=1))
    student(ids, mask, {})
    clean = student.encoder.backbone.embeddings(ids[20:])
    kept = seen[0] != 0
    assert 0.17 < kept.float().mean() < 0.23
    torch.testing.assert_close(seen[0][kept], 5 * clean[kept])


def test_a_model_without_vocabulary_head_needs_a_new_one_and_says_so(headless):
    with pytest.raises(UserError, match="vocabulary_head: new"):
        built(headless)
    student = built(headless, {"vocabulary_head": "new"})
    head = student.auxiliary["denoising"].head.model
    assert head.get_output_embeddings().weight is student.encoder.backbone.get_input_embeddings(
    ).weight  # fmt: skip
    again = built(headless, {"vocabulary_head": "new"}).auxiliary["denoising"].head.model
    dense = [one.cls.predictions.transform.dense.weight for one in (head, again)]
    assert torch.equal(*dense) and 0 < dense[0].std() < 1


def test_a_new_vocabulary_head_forgets_the_one_that_was_saved(model, tmp_path):
    model = str(shutil.copytree(model, tmp_path / "model"))
    whole = AutoModelForMaskedLM.from_pretrained(model)
    for parameter in whole.cls.predictions.transform.parameters():
        torch.nn.init.constant_(parameter, 7.0)
    torch.nn.init.constant_(whole.cls.predictions.bias, 3.0)
    whole.save_pretrained(model)
    kept, new = (
        built(model, {"vocabulary_head": kind}).auxiliary["denoising"].head.model.cls.predictions
        for kind in ("pretrained", "new")
    )
    assert (kept.transform.dense.weight == 7).all() and (kept.bias == 3).all()
    dense, norm = new.transform.dense, new.transform.LayerNorm
    assert 0 < dense.weight.std() < 1 and (dense.bias == 0).all()
    assert (norm.weight == 1).all() and (norm.bias == 0).all() and (new.bias == 0).all()


def test_models_that_a_decoder_cannot_read_are_refused(model, tmp_path, monkeypatch):
    from transformers import BertModel

    with pytest.raises(UserError, match="3 heads do not divide the 32 dimensions"):
        built(model, {"attention_heads": 3})
    monkeypatch.setattr(BertModel, "get_input_embeddings", lambda self: nn.Embedding(5, 7))
    with pytest.raises(UserError, match="no embedding layer with positions"):
        built(model)


# --- rewritten views and hard negatives ---------------------------------------------------------


def token_rows(folder, name, texts_by_shard, model):
    tokenise = Tokeniser(StudentSettings(model=model, **PROMPT))
    shards = []
    for number, texts in enumerate(texts_by_shard):
        for file, content in tokenise(texts).items():
            (folder / f"{name}-{number}-{file}").write_bytes(content)
        shards.append(tuple(folder / f"{name}-{number}-{f}.npy" for f in ("ids", "offsets")))
    return TokenRows(shards)


@pytest.fixture
def rewritten_data(tmp_path, model):
    """40 sentences in two shards; from two sources three, two, one or no rewrites each."""
    sentences = make_sentences(40)
    rewrites = iter(make_sentences(200, seed=5))
    tokens = token_rows(tmp_path, "s", [sentences[:25], sentences[25:]], model)
    owned, sources = {}, []
    for source in range(2):
        texts, owners = [[], []], []
        for row in range(40):
            for _ in range(row % 3 if source else int(row % 4 == 1)):
                text = next(rewrites)
                texts[row >= 25].append(text)
                owners.append(row)
                owned.setdefault(row, []).append(text)
        sources.append((token_rows(tmp_path, f"r{source}", texts, model), np.array(owners)))
    data = TrainingData(tokens, [], [], [], rewrites=OwnedRows(sources))
    return data, sentences, owned


def batches(student, data, worker=(0, 1), steps=6, **settings):
    chosen = TrainSettings.model_validate(
        dict(objectives={"infonce": {}}, batch_size=8, seed=3) | settings
    )
    reader = BatchReader(chosen, data, student.tokenizers, worker, torch.device("cpu"))
    return dict(reader(range(steps)))


def text_of(student, row):
    tokenizer = student.tokenizers[0].pretrained
    return tokenizer.decode(row, skip_special_tokens=True).split('"')[1].strip()


def plain(text):
    return text.lower().replace(".", " .")


@pytest.mark.parametrize("view", ["second", "first", "none"])
def test_one_view_is_a_rewrite_and_sentences_without_one_stay_out(model, rewritten_data, view):
    data, sentences, owned = rewritten_data
    student = built(model)
    row_of = {plain(text): row for row, text in enumerate(sentences)}
    rewrite_of = {plain(text): row for row, texts in owned.items() for text in texts}
    assert data.num_rows == len(owned) < 40
    used = set()
    for batch in batches(student, data, steps=60, rewritten_view=view).values():
        halves = [[text_of(student, row) for row in half] for half in batch.ids_VbL.chunk(2)]
        if view == "first":
            halves.reverse()
        for left, right in zip(*halves, strict=True):
            assert row_of[left] in owned
            assert left == right if view == "none" else rewrite_of[right] == row_of[left]
            used.add(right)
    if view != "none":
        assert used == set(rewrite_of)  # every rewrite of every source is drawn some time


def test_which_rewrite_is_drawn_does_not_depend_on_the_number_of_workers(model, rewritten_data):
    data, _, _ = rewritten_data
    student = built(model)
    for step, whole in batches(student, data).items():
        expected = whole.ids_VbL.chunk(2)[1]
        halves = [batches(student, data, (rank, 2))[step].ids_VbL.chunk(2)[1] for rank in (0, 1)]
        found = [row[row != 0].tolist() for half in halves for row in half]
        assert found == [row[row != 0].tolist() for row in expected]


def test_hard_negatives_are_candidates_of_every_sentence(model, rewritten_data, tmp_path):
    data, _, owned = rewritten_data
    having = sorted(owned)[::2]
    tokens = token_rows(tmp_path, "n", [make_sentences(len(having), seed=8)], model)
    whole = TrainingData(
        data.tokens, [], [], [], rewrites=data.rewrites,
        negatives=OwnedRows([(tokens, np.array(having))]),
    )  # fmt: skip
    assert whole.rows.tolist() == having
    objectives = {"infonce": {"hard_negatives": True}}
    settings = TrainSettings.model_validate(
        dict(objectives=objectives, batch_size=8, max_steps=1, log_every_steps=1)
    )
    student = build_student(
        StudentSettings(model=model, head="none", dropout=0.0, **PROMPT, device="cpu"),
        settings.objectives, 0, False,
    )  # fmt: skip
    assert student.views == ("first", "second", "negative")
    batch = batches(student, whole, steps=1, objectives=objectives, seed=settings.seed)[0]
    assert len(batch.ids_VbL) == 24
    u, v, n = F.normalize(student.train()(batch.ids_VbL, batch.mask_VbL, {})[0], dim=-1).chunk(3)
    logits = torch.cat([u @ v.T, u @ n.T], 1) / 0.05
    expected = -torch.log_softmax(logits, 1).diagonal().mean()
    rows = []
    train(PlainEngine(student, settings), settings, whole, None, rows.append)
    assert rows[0]["infonce"] == pytest.approx(float(expected), abs=1e-5)


def test_a_killed_denosent_training_resumes_bit_for_bit(model, rewritten_data, tmp_path):
    from stages.files import Root
    from stages.train.checkpoint import Checkpoints

    objectives = {"infonce": {"weight": 5.0}, "denoising": {"layers": 2, "feed_forward": 64}}
    settings = TrainSettings.model_validate(
        dict(objectives=objectives, batch_size=8, max_steps=40, learning_rate=1e-3,
             schedule="constant", warmup_ratio=0.0, checkpoint_every_steps=2, log_every_steps=1)
    )  # fmt: skip

    def run(checkpoints=None, kill_at=None):
        rows = []

        def on_metrics(row):
            rows.append(row)
            if row["step"] == kill_at:
                raise KeyboardInterrupt

        engine = PlainEngine(built(model), settings)
        return train(engine, settings, rewritten_data[0], checkpoints, on_metrics), rows

    undisturbed, rows = run()
    assert {row["learning_rate"] for row in rows} == {1e-3}
    first, last = ([row["denoising"] for row in part] for part in (rows[:5], rows[-5:]))
    assert sum(last) < 0.9 * sum(first)
    checkpoints = Checkpoints(Root(str(tmp_path)), "work")
    with pytest.raises(KeyboardInterrupt):
        run(checkpoints, kill_at=5)
    resumed, _ = run(checkpoints)
    assert all(torch.equal(x, resumed.weights[name]) for name, x in undisturbed.weights.items())


def test_rows_of_empty_shards_are_found(tmp_path, model):
    tokens = token_rows(tmp_path, "e", [["a cat"], [], ["the dog", "a bird"]], model)
    found = tokens.take(np.array([2, 0, 1]))
    assert [len(row) for row in found] == [2, 2, 2]
    owned = OwnedRows([(tokens, np.array([3, 5, 5]))])
    draws = np.array([0.99, 0.0, 0.0])
    chosen = owned.take(np.array([5, 3, 5]), draws)
    assert [x.tolist() for x in chosen] == [x.tolist() for x in tokens.take(np.array([2, 0, 1]))]
    assert owned.owners.tolist() == [3, 5] and npy_bytes(owned.owners)
