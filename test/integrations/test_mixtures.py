"""Mixtures of experts of transformers: sharded as they are, and with their experts divided between ranks."""

import copy
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import ranks
from scripts import EXAMPLES, PACKAGE
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import flatshard

pytestmark = [pytest.mark.clients("transformers"), pytest.mark.time_limit(600)]

VOCABULARY, LENGTH, EXPERTS = 40, 6, 8
SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16, "num_experts_per_tok": 2}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
HEADS = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": EXPERTS},
    "qwen3_moe": {"num_experts": EXPERTS, "moe_intermediate_size": 12, "head_dim": 4},
    "deepseek_v3": {
        "n_routed_experts": EXPERTS,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 12,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        **HEADS,
    },
    "gpt_oss": {"num_local_experts": EXPERTS, "head_dim": 4, "sliding_window": 4},
}


def make(name: str) -> Any:
    """Return a tiny model whose routers send each token to experts of its own."""
    import transformers

    config = transformers.AutoConfig.for_model(name, **{**SIZES, **MODELS[name]})
    config._attn_implementation = config._experts_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for p in model.parameters():
        p.data.normal_(0.0, 0.3 if p.dim() > 1 else 0.05).add_(1.0 if p.dim() == 1 else 0.0)
    return model


def experts_of(model: nn.Module) -> list[Any]:
    """Return the modules that have stacks of experts."""
    return [module for name, module in model.named_modules() if name.endswith(".experts")]


def tokens(size: int, step: int) -> Tensor:
    """Return the tokens of ``size`` ranks. A rank repeats two tokens of its own, so its routers choose few experts."""
    generator = torch.Generator().manual_seed(step)
    two = torch.randint(3, VOCABULARY, (size, 1, 2), generator=generator)
    return two.repeat(1, 2, LENGTH // 2)


def count_unused(model: nn.Module, unused: list[int]) -> None:
    """Add the number of experts without tokens to ``unused`` in each forward of experts."""
    for experts in experts_of(model):
        experts.register_forward_pre_hook(
            lambda module, args: unused.append(EXPERTS - len(set(args[1].flatten().tolist())))
        )


def full(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def check_training(plain: Any, model: Any, rank: int, size: int) -> None:
    """Train both for two steps, and compare losses, gradients, norms and parameters with one process.

    ``rank``, ``size``: of this rank among those with data of their own.
    """
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (plain, model)]
    for step in range(2):
        ids = tokens(size, step)
        expected = plain(input_ids=ids.flatten(0, 1), labels=ids.flatten(0, 1)).loss
        loss = model(input_ids=ids[rank], labels=ids[rank]).loss
        expected.backward()
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        torch.testing.assert_close(total / dist.get_world_size(), expected.detach(), rtol=1e-4, atol=1e-5)
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 1.0) for m in (plain, model)]
        torch.testing.assert_close(norms[1], norms[0], rtol=1e-4, atol=1e-6)
        with flatshard.summon_full_params(model, writeback=False, with_grads=True):
            for (name, p), (_, q) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
                got = torch.zeros_like(p) if q.grad is None else full(q.grad)
                want = torch.zeros_like(p) if p.grad is None else p.grad
                torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
                p.grad = None if p.grad is None else got.clone()  # AdamW divides by small gradients
        for each in optimizers:
            each.step()
            each.zero_grad()
        with flatshard.summon_full_params(model, writeback=False):
            for p, q in zip(plain.parameters(), model.parameters(), strict=True):
                torch.testing.assert_close(full(q), p, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", MODELS)
@ranks(2, pool="pair")
def test_sharded_as_they_are(ctx, name: str) -> None:
    """Ranks send tokens to different experts, of which some get none."""
    plain, unused = make(name), []
    model = copy.deepcopy(plain)
    count_unused(model, unused)
    flatshard.fully_shard(model)
    check_training(plain, model, ctx.rank, ctx.world_size)
    assert min(unused) >= 1


def expand(model: nn.Module, plan: dict[str, str]) -> dict[str, str]:
    """Return a plan of transformers with the numbers of layers. A rule of a module also concerns its parameters."""
    found: dict[str, str] = {}
    params = dict(model.named_parameters())
    for name in [*params, *dict(model.named_modules())]:  # parameters first
        rule = re.sub(r"\.\d+\.", ".*.", name)
        style = plan.get(rule) or (plan.get(rule.rpartition(".")[0]) if name in params else None)
        if style is not None:
            found[name] = style
    return found


def divide_by_transformers(ctx: Any, model: Any) -> None:
    """Divide experts by the model's own plan, and shard: the recipe."""
    page = (PACKAGE / "docs" / "integrations" / "mixtures.md").read_text()
    marker = rf"<!-- run by: test/integrations/{Path(__file__).name} -->\n```python\n(.*?)```"
    (recipe,) = re.findall(marker, page, re.DOTALL)
    exec(compile(recipe, "recipe", "exec"), {"model": model, "flatshard": flatshard})


def divide_by_the_example(ctx: Any, model: Any) -> None:
    """Divide experts, and dispatch tokens as the example does."""
    mesh = ctx.device_mesh((2, 2), ("dp", "ep"))
    AllToAll = runpy.run_path(str(EXAMPLES["experts"]))["AllToAll"]
    group = mesh.get_group("ep")

    def dispatch(experts: Any, forward: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        order = chosen.flatten().argsort(stable=True)  # by expert, and so by rank
        counts = chosen.flatten().bincount(minlength=EXPERTS).view(group.size(), -1)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=group)
        sent, received = counts.sum(1).tolist(), arriving.sum(1).tolist()
        rows = AllToAll.apply(x[order // chosen.shape[1]], sent, received, group)
        own = torch.arange(arriving.shape[1]).repeat(len(arriving)).repeat_interleave(arriving.flatten()).unsqueeze(1)
        registered = dict(experts._parameters)
        experts._parameters.update({name: p.to_local() for name, p in registered.items()})
        try:
            rows = forward(rows, own, torch.ones_like(own, dtype=x.dtype))
        finally:
            experts._parameters.update(registered)
        rows = AllToAll.apply(rows, received, sent, group) * weights.flatten()[order].unsqueeze(1)
        return torch.zeros_like(x).index_add(0, order // chosen.shape[1], rows)

    for experts in experts_of(model):
        for name, weight in list(experts.named_parameters()):
            setattr(experts, name, nn.Parameter(distribute_tensor(weight.detach(), mesh["ep"], [Shard(0)])))
        experts.num_experts //= group.size()
        forward = experts.forward
        experts.forward = lambda *args, e=experts, f=forward: dispatch(e, f, *args)
    flatshard.fully_shard(model, shard_mesh_fn=lambda fqn, param: mesh["dp"] if isinstance(param, DTensor) else None)


DIVISIONS = {"transformers": divide_by_transformers, "the example": divide_by_the_example}


@pytest.mark.parametrize("by", DIVISIONS)
@pytest.mark.parametrize("name", MODELS)
@ranks(4, timeout=240.0)
def test_with_divided_experts(ctx, name: str, by: str) -> None:
    plain = make(name)
    model = copy.deepcopy(plain)
    DIVISIONS[by](ctx, model)
    check_training(plain, model, ctx.rank, ctx.world_size)


@pytest.mark.parametrize("name", MODELS)
@ranks(4, timeout=240.0)
def test_after_tensor_parallelism(ctx, name: str) -> None:
    """Sharded over "dp", after transformers has divided attention and whole experts over "tp"."""
    from transformers.distributed.expert_parallel import apply_expert_parallelism
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    plain = make(name)
    model = copy.deepcopy(plain)
    mesh = ctx.device_mesh((2, 2), ("dp", "tp"))
    matrices, experts = expand(model, model.tp_plan), expand(model, model.ep_plan)
    packed = copy.deepcopy(plain)
    apply_tensor_parallelism(model, mesh["tp"], {n: style for n, style in matrices.items() if ".experts" not in n})
    apply_expert_parallelism(model, mesh["tp"], mesh["tp"], experts)
    flatshard.fully_shard(model, device_mesh=mesh["dp"])
    check_training(plain, model, mesh["dp"].get_local_rank(), 2)
    if "packed_colwise" in matrices.values():
        apply_tensor_parallelism(packed, mesh["tp"], matrices)
        with pytest.raises(ValueError, match=r"gate_up_proj' is a DTensor placed as .* leave it out of the plan"):
            flatshard.fully_shard(packed, device_mesh=mesh["dp"])


@ranks(2, pool="pair")
def test_a_model_that_transformers_has_sharded(ctx, path: str) -> None:
    """``DistributedConfig`` gives all ranks that tensor parallelism leaves to FSDP2."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    if ctx.rank == 0:
        make("mixtral").save_pretrained(path)
    dist.barrier()
    config = DistributedConfig(fsdp_size=2, ep_size=2)
    model = AutoModelForCausalLM.from_pretrained(path, distributed_config=config)
    with pytest.raises(ValueError, match=r"is managed by FSDPModule already"):
        flatshard.fully_shard(model)
