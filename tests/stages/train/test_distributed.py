"""Two processes against one: the gathered loss has the global batch's value and gradient."""

import multiprocessing

import torch
import torch.distributed as dist

from stages.train.auxiliary import GlobalBatchNorm
from stages.train.engine import gather_rows
from stages.train.loss import total_loss
from stages.train.objectives.base import Scores
from stages.train.objectives.scores import cosines, row_cosines, unit
from stages.train.settings import Objectives

OBJECTIVES = Objectives.model_validate(
    {
        "infonce": {},
        "consistency": {},
        "listnet": {},
        "listmle": {"weight": 0.1},
        "rank_regression": {"low": -0.5, "high": 0.9, "combine": "sum"},
        "soft_negative": {"weight": 2},
    }
)


def inputs():
    generator = torch.Generator().manual_seed(0)
    u, v, t = (torch.randn(8, 5, dtype=torch.float64, generator=generator) for _ in range(3))
    return u, v, unit(t) @ unit(t).T


def scores_of(u, v, T):
    return Scores(cosines(u, v), T, {"negated": row_cosines(u, v.flip(1))})


def worker(rank, rendezvous, results):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    u, v, T = inputs()
    own = slice(4 * rank, 4 * rank + 4)
    mine = [x[own].clone().requires_grad_() for x in (u, v)]
    u, v = map(gather_rows, mine)
    loss, _ = total_loss(
        Scores(cosines(u, v), T, {"negated": row_cosines(u, v.flip(1))}), OBJECTIVES, {}
    )
    loss.backward()
    results.put((rank, loss.item(), [x.grad.tolist() for x in mine]))
    dist.destroy_process_group()


def norm_worker(rank, rendezvous, results):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    x, weights = norm_inputs()
    mine = x[3 * rank : 3 * rank + 3].clone().requires_grad_()
    out = GlobalBatchNorm(4, affine=False)(mine)
    (out * weights[3 * rank : 3 * rank + 3]).sum().backward()
    results.put((rank, out.tolist(), mine.grad.tolist()))
    dist.destroy_process_group()


def norm_inputs():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(6, 4, generator=generator), torch.randn(6, 4, generator=generator)


def test_batch_norm_over_two_processes_is_that_of_one(tmp_path):
    x, weights = norm_inputs()
    x = x.requires_grad_()
    whole = GlobalBatchNorm(4, affine=False)(x)
    (whole * weights).sum().backward()
    found = run_two(norm_worker, tmp_path)
    torch.testing.assert_close(torch.tensor([r for _, out, _ in found for r in out]), whole)
    gradients = torch.tensor([row for _, _, grad in found for row in grad])
    torch.testing.assert_close(gradients, x.grad, atol=1e-5, rtol=1e-4)


def run_two(target, tmp_path):
    """Both processes' results, by rank."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [
        context.Process(target=target, args=(rank, tmp_path / "rendezvous", results))
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    found = sorted(results.get(timeout=120) for _ in processes)
    for process in processes:
        process.join()
    return found


def test_two_processes_have_the_loss_and_gradient_of_one(tmp_path):
    u, v, T = inputs()
    u, v = u.requires_grad_(), v.requires_grad_()
    expected, _ = total_loss(
        Scores(cosines(u, v), T, {"negated": row_cosines(u, v.flip(1))}), OBJECTIVES, {}
    )
    expected.backward()

    found = run_two(worker, tmp_path)
    for number, whole in enumerate((u.grad, v.grad)):
        joined = torch.cat([torch.tensor(grads[number]) for _, _, grads in found])
        torch.testing.assert_close(joined.double(), whole, atol=1e-6, rtol=1e-5)
    for _, loss, _ in found:
        torch.testing.assert_close(loss, expected.item())
