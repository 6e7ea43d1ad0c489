"""A newcomer's mistakes: each raises early, and the message says what to do. Here they stand as a newcomer reads them.

More refusals are in ``core/test_errors.py``. ``EXPECTTEST_ACCEPT=1`` writes the messages anew.
"""

from __future__ import annotations

import copy
import io
import os
import re
import textwrap
import warnings
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from pool import RankFailure
from torch import nn

import flatshard
from flatshard import fully_shard


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x).relu()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.blocks(x))

    def logits(self, x):
        return self.head(x)


class Other(nn.Module):
    pass


def wrapped(text: str) -> str:
    return "\n".join(textwrap.fill(line, 88, subsequent_indent="    ") for line in text.rstrip().splitlines())


def message(mistake: Callable[[], object]) -> str:
    """What a newcomer reads: the error's class and text, or the warning's."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            mistake()
        except Exception as error:
            return wrapped(f"{type(error).__name__}: {error}")
    return wrapped("\n".join(f"{w.category.__name__}: {w.message}" for w in caught) or "nothing is said")


# -- in fully_shard ----------------------------------------------------------------------------------------------------


def test_no_process_group():
    shown = message(lambda: fully_shard(Net()))
    assert_expected_inline(
        shown,
        """\
RuntimeError: fully_shard needs a process group: call
    torch.distributed.init_process_group(...) first (under torchrun,
    init_process_group() alone is enough)""",
    )


def test_a_class_that_matches_nothing(world):
    world(4)
    shown = message(lambda: fully_shard(Net(), policy={Other}))
    assert_expected_inline(
        shown,
        """\
UserWarning: fully_shard: the policy's classes 'Other' matched no submodule, so Net is a
    single unit: its whole size is unsharded at once. Classes in the module: 'Block',
    'Linear', 'Net', 'Sequential'""",
    )


def test_a_module_in_the_place_of_its_class(world):
    world(4)
    shown = message(lambda: fully_shard(Net(), policy={Block()}))
    assert_expected_inline(shown, """ValueError: policy holds an instance of Block: pass the class, policy={Block}""")
    shown = message(lambda: fully_shard(Net(), policy=Block()))
    assert_expected_inline(
        shown,
        """\
ValueError: policy is an instance of Block: pass the class, policy={Block}, for every
    Block to be a unit""",
    )


def test_a_name_in_the_place_of_a_class(world):
    world(4)
    shown = message(lambda: fully_shard(Net(), policy={"Block"}))
    assert_expected_inline(
        shown,
        """\
ValueError: policy: 'Block' is not an nn.Module class: pass classes, as in
    policy={Block}""",
    )


def test_parameters_in_the_place_of_the_module(world):
    world(4)
    shown = message(lambda: fully_shard(Net().parameters()))
    assert_expected_inline(
        shown,
        """\
TypeError: fully_shard takes an nn.Module as module, got a generator; pass the model
    itself, not its parameters or its state""",
    )


def test_a_state_dict_in_the_place_of_the_module(world):
    world(4)
    shown = message(lambda: fully_shard(Net().state_dict()))
    assert_expected_inline(
        shown,
        """\
TypeError: fully_shard takes an nn.Module as module, got a OrderedDict; pass the model
    itself, not its parameters or its state""",
    )


def test_in_inference_mode(world):
    world(4)
    model = Net()
    with torch.inference_mode():
        shown = message(lambda: fully_shard(model))
    assert_expected_inline(
        shown,
        """\
RuntimeError: fully_shard was called inside torch.inference_mode(), where tensors are
    made that cannot be trained: call it outside. The model's forward may run inside""",
    )
    fully_shard(model)


def test_a_function_of_the_module_alone_as_policy(world):
    world(4)

    def is_block(module: nn.Module) -> bool:
        return isinstance(module, Block)

    shown = message(lambda: fully_shard(Net(), policy=is_block))
    assert_expected_inline(
        shown,
        """\
ValueError: policy=is_block cannot be called as policy(module=..., recurse=...,
    nonwrapped_numel=...): got an unexpected keyword argument 'recurse'. For a function
    of the module alone use policy=flatshard.CustomPolicy(function)""",
    )


def test_a_name_in_the_place_of_a_mesh(world):
    world(4)
    shown = message(lambda: fully_shard(Net(), device_mesh="cpu"))
    assert_expected_inline(
        shown,
        """\
TypeError: device_mesh must be a DeviceMesh, got a str: make one by
    torch.distributed.device_mesh.init_device_mesh(device_type, (world_size,)), or omit
    it to shard over all ranks""",
    )


def test_a_container(world):
    world(4)
    shown = message(lambda: fully_shard(nn.ModuleList([Block()])))
    assert_expected_inline(
        shown,
        """\
ValueError: ModuleList has no forward, so its hooks would never run. Shard its items,
    `for m in container: fully_shard(m)`, or the module that calls them""",
    )


def test_a_dtype_in_the_place_of_a_policy(world):
    world(4)
    shown = message(lambda: fully_shard(Net(), mixed_precision=torch.bfloat16))
    assert_expected_inline(
        shown,
        """\
TypeError: mixed_precision must be a flatshard.MixedPrecision or one of FSDP's, got
    torch.bfloat16: pass flatshard.MixedPrecision(param_dtype=torch.bfloat16,
    reduce_dtype=torch.float32)""",
    )


def test_a_strategy_by_another_name(world):
    world(4)
    fully_shard(Net(), strategy="full_shard")
    shown = message(lambda: fully_shard(Net(), strategy="zero3"))
    assert_expected_inline(
        shown,
        """\
ValueError: strategy='zero3' is not one of ShardingStrategy.FULL_SHARD,
    ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.SHARD_OPTIM,
    ShardingStrategy.NO_SHARD, ShardingStrategy.HYBRID_SHARD,
    ShardingStrategy.HYBRID_SHARD_ZERO2, ShardingStrategy.HYBRID_SHARD_OPTIM,
    ShardingStrategy.HYBRID_FULL_SHARD""",
    )


def test_sharded_twice(world):
    world(4)
    shown = message(lambda: fully_shard(fully_shard(Net())))
    assert_expected_inline(
        shown,
        """\
ValueError: this Net is sharded already: fully_shard was called on it, or a policy chose
    it. Call fully_shard once per module, and on inner modules first""",
    )


def test_inside_after_outside(world):
    world(4)
    model = fully_shard(Net())
    shown = message(lambda: fully_shard(model.head))
    assert_expected_inline(
        shown,
        """\
ValueError: 'weight' in this Linear is sharded already, as 'head.weight' of the unit
    around it, a Net: shard inner modules before outer ones, or call fully_shard once,
    on the outermost module, with a policy that chooses them""",
    )


def test_after_ddp(world):
    world(4)
    model = nn.parallel.DistributedDataParallel(Net())
    shown = message(lambda: fully_shard(model))
    assert_expected_inline(
        shown,
        """\
ValueError: 'the module' is managed by DistributedDataParallel already: unwrap it, or
    pass it in ignored_states""",
    )


def test_on_meta_without_initialisers(world):
    world(4)
    with torch.device("meta"):
        model = Net()
        model.scale = nn.Parameter(torch.ones(4))
    shown = message(lambda: fully_shard(model, device_id="cpu"))
    assert_expected_inline(
        shown,
        """\
RuntimeError: 'scale' are on the meta device and their modules cannot initialise them.
    Give their modules a reset_parameters() that sets every parameter and buffer (non-
    persistent ones too), or pass param_init_fn=... to fully_shard""",
    )


# -- afterwards --------------------------------------------------------------------------------------------------------


def test_a_method_that_is_not_forward(world):
    world(4)
    model = fully_shard(Net(), policy={Block})
    shown = message(lambda: model.logits(torch.ones(2, 4)))
    assert_expected_inline(
        shown,
        """\
RuntimeError: parameter 'head.weight' is sharded: this rank has elements 0:4 of shape
    (2, 4). But Linear.forward was called outside of its unit's forward: after
    flatshard.register_forward_method(module, 'logits'), Net.logits gathers what it
    uses. Or make the Linear a unit of its own""",
    )


def test_forward_called_by_itself(world):
    world(4)
    model = fully_shard(Net())
    shown = message(lambda: model.blocks[0](torch.ones(2, 4)))
    assert_expected_inline(
        shown,
        """\
RuntimeError: parameter 'blocks.0.linear.weight' is sharded: this rank has elements 0:16
    of shape (4, 4). But Linear.forward was called outside of its unit's forward: call
    the module that is the unit, as module(...), or run this inside `with
    flatshard.summon_full_params(module):`; for the unit's other methods see
    register_forward_method. Or make the Linear a unit of its own""",
    )


def test_pickling_the_model(world):
    world(4)
    model = fully_shard(Net(), policy={Block})
    shown = message(lambda: torch.save(model, io.BytesIO()))
    assert_expected_inline(
        shown,
        """\
TypeError: a sharded module (unit '<root>') cannot be pickled, because it has process
    groups and hooks. Save it by flatshard.save_checkpoint(path, {'model': module}), or
    whole tensors by torch.save(flatshard.checkpoint.full_state_dict(module), ...)""",
    )


def test_pickling_its_state_dict(world):
    world(4)
    model = fully_shard(Net(), policy={Block})
    shown = message(lambda: torch.save(model.state_dict(), io.BytesIO()))
    assert_expected_inline(
        shown,
        """\
UserWarning: the sharded tensor 'blocks.0.linear.weight' of shape (4, 4) is pickled
    (torch.save), and this rank has only elements 0:8 of it: every rank must save a file
    of its own, which it alone can load. For one file of everything: this rank has only
    a part of it. Take whole tensors from flatshard.checkpoint.full_state_dict(module)
    or flatshard.checkpoint.iter_full_params(module), on all ranks; or hand the dict to
    torch.distributed.checkpoint""",
    )


def test_loading_what_has_another_shape(world):
    world(4)
    model = fully_shard(Net(), policy={Block})
    state = Net().state_dict() | {"head.weight": torch.zeros(5, 4)}
    shown = message(lambda: model.load_state_dict(state))
    assert_expected_inline(
        shown,
        """\
RuntimeError: Error(s) in loading state_dict for Net, in which nothing has been changed:
        head.weight: size mismatch: the checkpoint has shape (5, 4), the model has (2,
    4)""",
    )


def test_loading_the_parts_of_some_rank(world):
    world(4)
    model = fully_shard(Net(), policy={Block})
    parts = copy.deepcopy(Net().state_dict()) | {"head.weight": model.head.weight.detach().clone()}
    shown = message(lambda: model.load_state_dict(parts))
    assert_expected_inline(
        shown,
        """\
RuntimeError: Error(s) in loading state_dict for Net, in which nothing has been changed:
        head.weight: size mismatch: the checkpoint has shape (4,), the model has (2, 4).
    It has the shape of this rank's part, but does not say whose part it is: load values
    of state_dict()""",
    )


def test_replacing_a_parameter(world):
    world(4)
    model = fully_shard(Net(), policy={Block})

    def mistake() -> None:
        model.head.weight = nn.Parameter(torch.zeros(2, 4))
        model(torch.ones(2, 4))

    shown = message(mistake)
    assert_expected_inline(
        shown,
        """\
RuntimeError: parameter 'head.weight' was replaced by a tensor of shape (2, 4); this
    rank's part has shape (4,) (of a parameter of shape (2, 4)). A sharded parameter
    cannot be resized: resize the module before fully_shard, or change values inside
    `with flatshard.summon_full_params(module):`""",
    )


def test_an_optimizer_of_whole_matrices(world):
    world(4)
    model = fully_shard(Net())
    model(torch.ones(2, 4)).sum().backward()
    shown = message(torch.optim.Adafactor(model.parameters()).step)
    assert_expected_inline(
        shown,
        """\
RuntimeError: Adafactor looks at whole parameters, but ranks have parts of
    'blocks.0.linear.weight', 'blocks.1.linear.weight', 'head.weight': on parts it would
    compute wrong updates. Use flatshard.optim.WholeParameterOptimizer(params,
    Adafactor, ...), which works in any layout""",
    )


def test_clipping_parameters_by_our_function(world):
    world(4)
    model = fully_shard(Net())
    shown = message(lambda: flatshard.clip_grad_norm_(model.parameters(), 1.0))
    assert_expected_inline(
        shown,
        """\
TypeError: clip_grad_norm_ takes the module, got a generator: pass the model, or pass
    its parameters to torch's own, torch.nn.utils.clip_grad_norm_""",
    )


def test_a_model_that_is_not_sharded(world):
    world(4)
    shown = message(lambda: flatshard.summon_full_params(Net()).__enter__())
    assert_expected_inline(
        shown, """ValueError: summon_full_params: nothing in this Net is sharded; call fully_shard first"""
    )


def test_after_the_process_group_is_destroyed(world):
    world(4)
    model = fully_shard(Net(), policy={Block})
    dist.destroy_process_group()
    shown = message(lambda: model(torch.ones(2, 4)))
    assert_expected_inline(
        shown,
        """\
CollectiveError: the all-gather of unit '<root>' failed on rank 0 of 4: if it waited in
    vain or lost a connection, look for the first error on the other ranks: one of them
    died, or did not come to this unit. The error on this rank: RuntimeError: the
    process group that this module was sharded over has been destroyed""",
    )


def test_ddp_around_it(world):
    world(4)
    model = fully_shard(Net(), policy={Block})
    shown = message(lambda: nn.parallel.DistributedDataParallel(nn.Sequential(model)))
    assert_expected_inline(
        shown,
        """\
RuntimeError: DistributedDataParallel: all trainable parameters of this Sequential are
    sharded, such as '0.blocks.0.linear.weight', '0.blocks.0.linear.bias',
    '0.blocks.1.linear.weight', ... (3 more), and flatshard averages their gradients
    itself. Do not use DistributedDataParallel. If a tool adds it, choose its single-
    device strategy, or do not pass the model to it""",
    )


def test_computing_with_a_part(world):
    world(4)
    model = fully_shard(Net(), policy={Block})
    shown = message(lambda: (model.head.weight @ model.head.weight.T).trace())
    assert_expected_inline(
        shown,
        """\
RuntimeError: parameter 'head.weight' is sharded: this rank has elements 0:4 of shape
    (2, 4) as a 1-D part, and 'T' needs the whole. It is whole inside `with
    flatshard.summon_full_params(module):` (a gradient, with with_grads=True) and in the
    forward of its module. If a method of yours computes with it, register the method by
    flatshard.register_forward_method""",
    )


def test_initialising_a_part(world):
    world(4)
    model = fully_shard(Net(), policy={Block})
    shown = message(lambda: nn.init.xavier_uniform_(model.head.weight))
    assert_expected_inline(
        shown,
        """\
RuntimeError: parameter 'head.weight' is sharded: this rank has elements 0:4 of shape
    (2, 4) as a 1-D part, and 'dim' needs the whole. It is whole inside `with
    flatshard.summon_full_params(module):` (a gradient, with with_grads=True) and in the
    forward of its module. If a method of yours computes with it, register the method by
    flatshard.register_forward_method""",
    )


def test_copying_a_whole_value_into_a_part(world):
    world(4)
    model = fully_shard(Net(), policy={Block})

    def mistake() -> None:
        with torch.no_grad():
            model.head.weight.copy_(torch.zeros(2, 4))

    shown = message(mistake)
    assert_expected_inline(
        shown,
        """\
RuntimeError: parameter 'head.weight' is sharded: this rank has elements 0:4 of shape
    (2, 4), and copy_ was given the whole. Copy inside `with
    flatshard.summon_full_params(module):`, or call module.load_state_dict(...), where
    each rank takes its part""",
    )


def test_adding_a_layer(world):
    world(4)
    model = fully_shard(Net(), policy={Block})
    model.extra = nn.Linear(2, 2)
    model.extra(model(torch.ones(2, 4))).sum().backward()
    shown = message(torch.optim.SGD(model.parameters(), 0.1).step)
    assert_expected_inline(
        shown,
        """\
RuntimeError: SGD steps 'extra.weight', 'extra.bias', registered in a sharded module
    after fully_shard: nobody averages their gradients, so they would differ between
    ranks. Add modules and parameters (adapters, heads) before fully_shard, or call
    fully_shard on each new module and then build the optimizer. To average them
    yourself, add them before fully_shard and pass them as ignored_states""",
    )


def test_weight_decay_by_shape(world):
    world(4)
    model = fully_shard(Net(), policy={Block})
    decayed = [p for p in model.parameters() if len(p.shape) > 1]
    others = [p for p in model.parameters() if len(p.shape) <= 1]
    shown = message(lambda: torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}]).step())
    assert_expected_inline(
        shown,
        """\
RuntimeError: all parameters of this AdamW are in one group, with weight_decay=0.0:
    matrices such as 'blocks.0.linear.weight', 'blocks.1.linear.weight', 'head.weight',
    and vectors. If a rule on p.shape or p.dim() made the groups: it sees this rank's
    parts, which are 1-D. Use p.ndim or len(flatshard.full_shape(p)) in the rule, make
    the groups before fully_shard, or shard with layout=flatshard.layouts.Rows(). If it
    is meant, leave the empty group out""",
    )


# -- on ranks ----------------------------------------------------------------------------------------------------------


def failure(pool, body: Callable[..., None]) -> str:
    """Rank 0's error; the other rank's is of the same class. What earlier tests did on the same group is left out."""
    with pytest.raises(RankFailure) as caught:
        pool.run(body, world_size=2)
    first, second = sorted(caught.value.failures, key=lambda f: f.rank)
    assert (first.kind, second.kind) == ("raised", "raised"), caught.value
    assert first.type_name == second.type_name
    told = re.sub(r"(\n  rank \d: |Its last collectives: )(.*; )?", r"\1... ", first.message)
    return wrapped(f"{first.type_name}: {re.sub(r'pass [0-9]+ of', 'pass N of', told)}")


def run_differently(ctx) -> None:
    model = fully_shard(Net(), policy={Block}, process_group=ctx.group)
    model(torch.ones(2, 4)) if ctx.rank == 0 else model.blocks[1](torch.ones(2, 4))


def test_ranks_that_run_different_units(pool):
    shown = failure(pool, run_differently)
    assert_expected_inline(
        shown,
        """\
OutOfStepError: ranks run different units. Their last collectives (in pass N of this
    process), the latest at the end:
  rank 0: ... all-gather of '<root>'
  rank 1: ... all-gather of 'blocks.1'
All ranks must run the same units in the same order, forward and backward. If a rank
    does not need a unit that others run, have it call flatshard.skip(unit, x) in its
    place. Layers dropped at random (layerdrop) must be the same on all ranks. What
    communicates, such as full_state_dict, summon_full_params and the norm of a
    gradient, is called by all ranks, not by rank 0 alone. (This check runs in the first
    passes: FLATSHARD_ORDER_CHECK=first, always or off.)""",
    )


def ask_on_rank_0_only(ctx) -> None:
    model = fully_shard(Net(), policy={Block}, process_group=ctx.group)
    if ctx.rank == 0:
        flatshard.checkpoint.full_state_dict(model)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()


def test_whole_state_on_rank_0_only(pool):
    shown = failure(pool, ask_on_rank_0_only)
    assert_expected_inline(
        shown,
        """\
OutOfStepError: ranks wait for each other, as they run different units:
  rank 0 waits for the call of 'full_state_dict' (after pass N of this process), which
    rank 1 has not come to. Its last collectives: ... call of 'full_state_dict'
  rank 1 waits for the all-gather of '<root>' (in pass N of this process), which rank 0
    has not come to. Its last collectives: ... all-gather of '<root>'
All ranks must run the same units in the same order, forward and backward. If a rank
    does not need a unit that others run, have it call flatshard.skip(unit, x) in its
    place. Layers dropped at random (layerdrop) must be the same on all ranks. What
    communicates, such as full_state_dict, summon_full_params and the norm of a
    gradient, is called by all ranks, not by rank 0 alone.""",
    )


def save_on_rank_0_only(ctx) -> str:
    model = fully_shard(Net(), policy={Block}, process_group=ctx.group)
    if ctx.rank:
        return ""
    state, options = {"model": model}, {"process_group": ctx.group, "timeout": timedelta(seconds=2)}
    return message(lambda: flatshard.save_checkpoint("/nowhere/step-1", state, **options))


def test_saving_on_rank_0_only(pool):
    shown, _ = pool.run(save_on_rank_0_only, world_size=2)
    assert_expected_inline(
        shown,
        """\
MeetingError: save_checkpoint('/nowhere/step-1'): 'rank 1' did not come within 2 s. All
    ranks must make this call""",
    )


def work_in_a_fork(ctx) -> str:
    model = fully_shard(Net(), policy={Block}, process_group=ctx.group)
    reads, writes = os.pipe()
    if not (child := os.fork()):  # as a DataLoader does, whose dataset calls the model
        os.write(writes, message(lambda: model(torch.ones(2, 4))).encode())
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as pipe:
        shown = pipe.read()
    os.waitpid(child, 0)
    return shown


def test_a_forward_in_a_worker_of_a_dataloader(pool):
    shown, _ = pool.run(work_in_a_fork, world_size=2)
    shown = wrapped(re.sub("process [0-9]+", "process ...", " ".join(shown.split())))
    assert_expected_inline(
        shown,
        """\
RuntimeError: unit '<root>' runs a forward in process ..., which was forked from rank 0
    after fully_shard. A forked process has no process group, so the forward would wait
    forever. In a DataLoader worker use a model that is not sharded, or run this one in
    the training loop""",
    )


def log_a_norm_on_rank_0_only(ctx) -> None:
    model = fully_shard(Net(), policy={Block}, process_group=ctx.group)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        if ctx.rank == 0:
            print(model.head.weight.grad.norm())


def test_a_norm_on_rank_0_only(pool):
    shown = failure(pool, log_a_norm_on_rank_0_only)
    assert_expected_inline(
        shown,
        """\
OutOfStepError: ranks wait for each other, as not all of them compute the same norm, sum
    or maximum:
  rank 0 waits for the all-reduce for the norm of order 2.0 of the gradient of
    'head.weight' (after pass N of this process), which rank 1 has not come to. Its last
    collectives: ... all-reduce for the norm of order 2.0 of the gradient of
    'head.weight'
  rank 1 waits for the all-gather of '<root>' (in pass N of this process), which rank 0
    has not come to. Its last collectives: ... all-gather of '<root>'
A norm, sum or maximum of sharded parameters or gradients is computed by all ranks
    together. Have all ranks call what computes it, and print the result on one of them.""",
    )


def save_a_bare_model(ctx) -> None:
    model = fully_shard(Net(), policy={Block}, process_group=ctx.group)
    flatshard.save_checkpoint("/nowhere/step-1", model, process_group=ctx.group)


def test_a_model_in_the_place_of_a_jobs_state(pool):
    shown = failure(pool, save_a_bare_model)
    assert_expected_inline(
        shown,
        """\
MeetingError: save_checkpoint('/nowhere/step-1'): TypeError: state must be a dict of
    what the job consists of, such as {'model': model, 'optimizer': optimizer, 'step':
    1}, got a Net""",
    )


def build_different_models(ctx) -> None:
    model = nn.Sequential(Block(), nn.Linear(4, 2 + 4 * ctx.rank))
    fully_shard(model, policy={Block}, process_group=ctx.group)
    model(torch.ones(2, 4)).sum().backward()


def test_models_that_differ(pool):
    shown = failure(pool, build_different_models)
    assert_expected_inline(
        shown,
        """\
OutOfStepError: unit '<root>' is not the same on all ranks: rank 0 has '1.weight' of
    shape (2, 4) where rank 1 has '1.weight' of shape (6, 4). Their last collectives (in
    pass N of this process), the latest at the end:
  rank 0: ... all-gather of '<root>'
  rank 1: ... all-gather of '<root>'
Build the same model on all ranks, from the same arguments, and shard it by the same
    calls. (This check runs in the first passes: FLATSHARD_ORDER_CHECK=first, always or
    off.)""",
    )
