"""Two processes against one: the gathered loss has the global batch's value and gradient."""

import multiprocessing

import torch
import torch.distributed as dist

from stages.train.engine import gather_rows
from stages.train.objectives import Scores, cosines, total_loss, unit
from stages.train.settings import Objectives

OBJECTIVES = Objectives.model_validate(
    {"infonce": {}, "consistency": {}, "listnet": {}, "listmle": {"weight": 0.1}}
)


def inputs():
    generator = torch.Generator().manual_seed(0)
    u, v, t = (torch.randn(8, 5, dtype=torch.float64, generator=generator) for _ in range(3))
    return u, v, unit(t) @ unit(t).T


def worker(rank, rendezvous, results):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    u, v, T = inputs()
    own = slice(4 * rank, 4 * rank + 4)
    mine = [x[own].clone().requires_grad_() for x in (u, v)]
    loss, _ = total_loss(Scores(cosines(*map(gather_rows, mine)), T, None), OBJECTIVES, {})
    loss.backward()
    results.put((rank, loss.item(), [x.grad.tolist() for x in mine]))
    dist.destroy_process_group()


def test_two_processes_have_the_loss_and_gradient_of_one(tmp_path):
    u, v, T = inputs()
    u, v = u.requires_grad_(), v.requires_grad_()
    expected, _ = total_loss(Scores(cosines(u, v), T, None), OBJECTIVES, {})
    expected.backward()

    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [
        context.Process(target=worker, args=(rank, tmp_path / "rendezvous", results))
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    found = sorted(results.get(timeout=120) for _ in processes)
    for process in processes:
        process.join()
    for number, whole in enumerate((u.grad, v.grad)):
        joined = torch.cat([torch.tensor(grads[number]) for _, _, grads in found])
        torch.testing.assert_close(joined.double(), whole, atol=1e-6, rtol=1e-5)
    for _, loss, _ in found:
        torch.testing.assert_close(loss, expected.item())
