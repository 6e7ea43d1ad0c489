"""Train a mixture of experts on four ranks of this machine, two by two:

    python experts.py

Ranks of a row of the mesh ("ep") have different experts, and send each other tokens. Ranks of a column ("dp") shard the same.
"""

import os
import warnings

warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # torch needs none here

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.run import main as torchrun
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import flatshard


class AllToAll(torch.autograd.Function):
    """Send ``sent[i]`` rows to rank ``i`` of the group, and receive ``received[i]`` rows from it."""

    @staticmethod
    def forward(ctx, rows, sent, received, group):
        ctx.sizes = received, sent, group
        result = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(result, rows.contiguous(), received, sent, group=group)
        return result

    @staticmethod
    def backward(ctx, grad):
        return AllToAll.apply(grad, *ctx.sizes), None, None, None


class Experts(nn.Module):
    def __init__(self, count, width):
        super().__init__()
        self.up = nn.Parameter(torch.randn(count, width, 2 * width) * width**-0.5)
        self.down = nn.Parameter(torch.randn(count, 2 * width, width) * width**-0.5)

    def forward(self, rows, counts):  # counts[0] rows for the first expert of this rank, and so on
        up, down = (w.to_local() if isinstance(w, DTensor) else w for w in (self.up, self.down))
        return torch.cat([(r @ u).relu() @ d for r, u, d in zip(rows.split(counts), up, down, strict=True)])


class MoE(nn.Module):
    def __init__(self, count, width, top=2):
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, count, bias=False)
        self.experts, self.top, self.group = Experts(count, width), top, None
        self.register_buffer("bias", torch.zeros(count))  # balances the load
        self.register_buffer("load", torch.zeros(count), persistent=False)

    def forward(self, x):
        tokens = self.norm(x).flatten(0, -2)
        scores = self.router(tokens).softmax(-1)
        chosen = (scores + self.bias).topk(self.top).indices
        order = chosen.flatten().argsort(stable=True)  # by expert, and so by rank
        counts = chosen.flatten().bincount(minlength=len(self.bias))
        self.load += counts
        rows = self.dispatch(tokens[order // self.top], counts) * scores.gather(1, chosen).flatten()[order].unsqueeze(1)
        return x + torch.zeros_like(tokens).index_add(0, order // self.top, rows).view_as(x)

    def dispatch(self, rows, counts):  # counts[0] rows for the first of all experts, and so on
        if self.group is None:
            return self.experts(rows, counts.tolist())
        counts = counts.view(self.group.size(), -1)  # a row for each rank, with a column for each of its experts
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self.group)
        sent, received = counts.sum(1).tolist(), arriving.sum(1).tolist()
        rows = AllToAll.apply(rows, sent, received, self.group)  # by rank, and then by expert
        experts = torch.arange(arriving.shape[1], device=rows.device).repeat(len(arriving))
        order = experts.repeat_interleave(arriving.flatten()).argsort(stable=True)  # by expert
        rows = self.experts(rows[order], arriving.sum(0).tolist())
        return AllToAll.apply(rows[order.argsort()], received, sent, self.group)


def divide_experts(model, mesh):
    """Give each rank of ``mesh["ep"]`` its experts. As DTensors, they have one name on all ranks in a checkpoint."""
    for module in model.modules():
        if isinstance(module, MoE):
            module.group = mesh.get_group("ep")
        elif isinstance(module, Experts):
            for name, weight in list(module.named_parameters()):
                part = distribute_tensor(weight.detach(), mesh["ep"], [Shard(0)])
                setattr(module, name, nn.Parameter(part, requires_grad=weight.requires_grad))


def main(steps=40, over=2):
    torch.manual_seed(0)  # the same initial values on every rank
    mesh = init_device_mesh("cpu", (dist.get_world_size() // over, over), mesh_dim_names=("dp", "ep"))
    model = nn.Sequential(nn.Linear(16, 32), MoE(8, 32), MoE(8, 32), nn.Linear(32, 4))
    divide_experts(model, mesh)
    flatshard.fully_shard(model, policy={MoE}, shard_mesh_fn=lambda _, p: mesh["dp"] if type(p) is DTensor else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(1, steps + 1):
        x = torch.randn(64, 16, generator=torch.Generator().manual_seed(1000 * step + dist.get_rank()))
        (loss := nn.functional.cross_entropy(model(x), x[:, :4].argmax(1))).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # over all experts and all else
        optimizer.step()
        optimizer.zero_grad()
        for moe in model[1:3]:  # prefer experts that had fewer tokens than the mean
            dist.all_reduce(moe.load)
            moe.bias += 1e-2 * (moe.load.mean() - moe.load).sign()
            moe.load.zero_()
        if step % 20 == dist.get_rank() == 0:
            print(f"step {step:>4}  loss {loss.item():.3f}  norm {norm.item():.3f}", flush=True)


if __name__ == "__main__":
    if "RANK" in os.environ:  # torchrun has started this process
        dist.init_process_group("gloo")
        main()
        dist.destroy_process_group()
    else:
        torchrun(["--standalone", "--nproc-per-node", "4", __file__])
