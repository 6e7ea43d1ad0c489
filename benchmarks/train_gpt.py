"""Train a byte-level GPT on the sources of Python's standard library, sharded over all ranks by flatshard.

examples, in an activated environment:
  Two processes on one machine, over gloo on CPU, or over nccl if there are GPUs:
      python benchmarks/train_gpt.py --ranks 2
  The same under torchrun (for ranks on several machines see torchrun --help):
      torchrun --standalone --nproc-per-node 2 benchmarks/train_gpt.py
  Check that sharding changes nothing: 20 steps, compared with an unsharded model that trains in one process on the
  concatenated batches of all ranks. It fails if the two differ:
      python benchmarks/train_gpt.py --ranks 2 --verify
  A shorter run, with a picture of the loss:
      python benchmarks/train_gpt.py --ranks 2 --steps 200 --plot loss.svg
  Save checkpoints, and continue from one with another number of ranks, here on the same rows:
      python benchmarks/train_gpt.py --ranks 2 --steps 100 --batch 8 --save run --save-every 50
      python benchmarks/train_gpt.py --ranks 4 --steps 100 --batch 4 --resume run/step-50
  Kill a rank at random every 20 steps, start another, and see the loss continue to fall:
      python benchmarks/train_gpt.py --ranks 4 --kill-every 20

To read the code, begin with ``main``. All changes that flatshard needs in a training script are in ``build_sharded_model``.
"""

# ruff: noqa: E402  (torch warns at its import where NumPy is missing, which nothing here needs)
from __future__ import annotations

import argparse
import codecs
import dataclasses
import math
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import checkout  # noqa: F401

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

import torch
import torch.distributed as dist
import torch.nn.functional as F
from corpus import VOCABULARY, Corpus, even_windows, load_corpus, random_windows
from counting import storages
from gpt import GPT, Block, GPTConfig
from killing import start_and_kill
from progress import Progress, clock, loss_curve
from ranks import Ranks, are_started, leave, process_group, set_environment, start
from torch import Tensor, nn

import flatshard

WARMUP_STEPS = 60
PROMPT = b"def "
SAMPLE_BYTES = 240
VALIDATION_WINDOWS = 64  # per rank

# The largest relative difference that --verify allows between the sharded run and the one-process run. Both compute the
# same sums in another order: a gradient as one sum over all rows, or as a sum per rank and then over ranks. This changes
# an fp32 result by a few units of 2^-24 = 6e-8. During the learning rate's warm-up, in the first 20 steps, differences do
# not grow: the maximum was 2.4e-7, over seeds, sizes, strategies and 1 to 4 ranks. The smallest fault that was tried, a
# lost gradient of a single bias vector, gives 4e-5; one that is wrong by 1 %, 5e-4; and a wrong divisor, 1. (Many more
# steps or a higher --lr amplify rounding, as in any training: 50 steps gave 3e-6.)
TOLERANCE = 1e-5


# ---------------------------------------------------------------------------------------------------------------------
# The job
# ---------------------------------------------------------------------------------------------------------------------


def main() -> None:
    options = parse_options(sys.argv[1:])
    if options.store:
        train_elastic(options, load_corpus())
        leave(0)
    if options.kill_every:
        leave(start_and_kill(options.ranks or 4, __file__, sys.argv[1:], options.kill_every))
    if options.ranks and not are_started():
        print(f"starting {options.ranks} process{'es' * (options.ranks > 1)}: each imports torch ...", flush=True)
        start(options.ranks, __file__, sys.argv[1:])
        leave(0)
    with process_group() as ranks:
        ranks.say(f"{ranks}: reading the standard library's sources ...")
        corpus = load_corpus()
        ok = verify(options, corpus, ranks) if options.verify else train(options, corpus, ranks)
    leave(0 if ok else 1)


def train(options: Options, corpus: Corpus, ranks: Ranks) -> bool:
    """Train the sharded model and report on it. Return whether the validation loss fell."""
    began = time.perf_counter()
    model = build_sharded_model(options, ranks)
    table = str(flatshard.describe(model))
    ranks.say(f"{options.strategy}, {options.precision}; {len(corpus.train):,} bytes of text\n\n{table}\n")

    loss_before = validation_loss(model, options, corpus, ranks)
    ranks.say(f"validation loss {loss_before:.3f} before training (a uniform guess: {math.log(VOCABULARY):.3f})\n")

    trainer = Trainer(model, options)
    first = trainer.resume(options.resume) if options.resume else 1
    losses, seconds, memory = train_steps(trainer, first, options, corpus, ranks)

    loss_after = validation_loss(model, options, corpus, ranks)
    print_sample(model, options, ranks)
    if options.plot and losses and ranks.rank == 0:
        title = f"GPT of {options.layers} blocks, {ranks}, {options.strategy}, {options.precision}"
        Path(options.plot).write_text(loss_curve(first, losses, title))
    fell = loss_after < loss_before
    tokens = len(losses) * options.batch * options.context * ranks.size
    ranks.say(f"\n{'finished' if fell else 'FAILED: the loss did not fall'}")
    ranks.say(f"  validation loss  {loss_before:.3f} -> {loss_after:.3f}")
    ranks.say(f"  steps            {len(losses)}, {tokens:,} tokens, {tokens / max(seconds, 1e-9):,.0f} tokens/s")
    if memory:
        ranks.say(
            f"  memory           {memory[0]['total'] / 2**20:.1f} MiB a rank; one process: {memory[1]['total'] / 2**20:.1f}"
        )
    ranks.say(f"  time             {clock(seconds)} in steps, {clock(time.perf_counter() - began)} in all")
    if options.save:
        ranks.say(f"  checkpoint       {Path(options.save) / f'step-{options.steps}'}")
    if options.plot:
        ranks.say(f"  loss curve       {options.plot}")
    return fell


def train_elastic(options: Options, corpus: Corpus) -> None:
    """Train in a process of ``start_and_kill``, while ranks are killed and others join."""
    set_environment()
    assert options.store is not None
    store = dist.TCPStore("localhost", options.store, is_master=False)  # type: ignore[attr-defined]
    world_size = options.ranks or 4
    world = flatshard.elastic.World(store, world_size)
    trainer = Trainer(build_sharded_model(options, Ranks(0, 1, torch.device("cpu"))), options)
    job = flatshard.elastic.Job(
        world, trainer.model, trainer.optimizer, extra=[trainer.schedule], log=lambda text: print(text, flush=True)
    )
    for step in job.steps(range(1, options.steps + 1)):
        with job.attempt():
            ranks = Ranks(job.rank, job.world_size, torch.device("cpu"))
            if ranks.rank == 0 and ranks.size < world_size and store.check(["killed"]):
                print(
                    f"step {step} begins {time.monotonic() - float(store.get('killed')):.2f} s after the kill",
                    flush=True,
                )
                store.delete_key("killed")
            loss = ranks.mean(trainer.step(ranks.own_rows(global_batch(options, corpus, ranks, step))))
            if step % 5 == 0 or step == options.steps:
                ranks.say(f"step {step:>4}/{options.steps}  loss {loss:.3f}  {ranks}")
            if ranks.rank == 0:
                store.set("step", f"{step} {ranks.size}")


def train_steps(
    trainer: Trainer, first: int, options: Options, corpus: Corpus, ranks: Ranks
) -> tuple[list[float], float, tuple[dict[str, int], ...]]:
    """Train and print progress. Return each step's mean loss over ranks, the total seconds, and the memory."""
    progress = Progress(first, options.steps, options.batch * options.context * ranks.size)
    means: list[float] = []
    since_line: list[Tensor] = []  # this rank's losses
    seconds = 0.0
    memory: tuple[dict[str, int], ...] = ()
    for step in range(first, options.steps + 1):
        began = time.perf_counter()
        loss = trainer.step(ranks.own_rows(global_batch(options, corpus, ranks, step)))
        since_line.append(loss)
        seconds += time.perf_counter() - began
        if ranks.rank == 0:
            progress.step(step, loss.item())
        if step == first or step % options.log_every == 0 or step == options.steps:
            newest = (ranks.reduce(torch.stack(since_line)) / ranks.size).tolist()
            if ranks.rank == 0:
                progress.line(step, sum(newest) / len(newest), f"lr {trainer.last_lr:.1e}")
            means += newest
            since_line.clear()
        if step == first:
            memory = measured_memory(trainer, options, corpus, ranks)
            ranks.say(f"\n{memory_report(*memory)}\n")
            progress.pause()
        if options.save and (step == options.steps or (options.save_every and step % options.save_every == 0)):
            progress.clear()
            trainer.save(Path(options.save) / f"step-{step}", step)
            progress.pause()
    return means, seconds, memory


def verify(options: Options, corpus: Corpus, ranks: Ranks) -> bool:
    """Train a sharded and an unsharded model on the same batches. Return whether they agree within ``TOLERANCE``.

    Besides the loss, the gradient's norm is compared. AdamW divides the gradient by its own size, so a gradient that is wrong
    by a constant factor would not change the loss.
    """
    sharded = Trainer(build_sharded_model(options, ranks), options)
    reference = Trainer(build_model(options, ranks), options)
    ranks.say(
        f"{ranks}, {options.strategy}: sharded on {ranks.size} x {options.batch} rows, against one process on all\n"
    )
    ranks.say("          loss                                 norm of the gradient")
    ranks.say("step      sharded     one process  difference     sharded     one process  difference")

    largest = 0.0
    agreed = True
    for step in range(1, min(options.verify or 0, options.steps) + 1):
        batch = global_batch(options, corpus, ranks, step)
        # All ranks' batches have the same size, so the mean of their mean losses is the mean over all rows.
        loss = ranks.mean(sharded.step(ranks.own_rows(batch)))
        norm = gradient_norm(sharded.model)
        expected_loss = reference.step(batch).item()
        expected_norm = gradient_norm(reference.model)
        differences = relative_difference(loss, expected_loss), relative_difference(norm, expected_norm)
        largest = max(largest, *differences)
        agreed = agreed and all(difference <= TOLERANCE for difference in differences)  # False for a NaN
        ranks.say(
            f"{step:>4}  {loss:>11.7f}  {expected_loss:>14.7f}  {differences[0]:>10.1e}"
            f"  {norm:>10.7f}  {expected_norm:>14.7f}  {differences[1]:>10.1e}"
        )
    agreed = bool(ranks.reduce(torch.tensor(agreed), dist.ReduceOp.MIN))
    verdict = "equal" if agreed else "NOT EQUAL"
    ranks.say(f"\n{verdict}: largest relative difference {largest:.1e}, tolerance {TOLERANCE:.0e}")
    return agreed


# ---------------------------------------------------------------------------------------------------------------------
# Model and optimizer
# ---------------------------------------------------------------------------------------------------------------------


def build_model(options: Options, ranks: Ranks) -> GPT:
    """Make the full model, with the same initial values on every rank and at every call."""
    torch.manual_seed(options.seed)
    return GPT(options.config()).to(ranks.device)


def build_sharded_model(options: Options, ranks: Ranks) -> GPT:
    """Shard the same model in place: a unit for each ``Block``, and one for the rest."""
    mixed_precision = None
    if options.precision == "bf16":
        mixed_precision = flatshard.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return flatshard.fully_shard(
        build_model(options, ranks),
        policy={Block},
        strategy=flatshard.ShardingStrategy[options.strategy.upper()],
        mixed_precision=mixed_precision,
    )


class Trainer:
    """A model with its AdamW and its learning rates, for both the sharded model and the reference."""

    def __init__(self, model: GPT, options: Options) -> None:
        self.model = model
        # A sharded parameter is a 1-D shard. Its full shape tells matrices from biases and norms.
        matrices = [p for p in model.parameters() if len(flatshard.full_shape(p)) >= 2]
        vectors = [p for p in model.parameters() if len(flatshard.full_shape(p)) < 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
            lr=options.lr,
            betas=(0.9, 0.95),
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: warmup_and_cosine(step, options.steps)
        )
        self.last_lr = 0.0  # of the latest step

    def step(self, windows: Tensor) -> Tensor:
        """Run an optimizer step, and return the loss before it. Gradients stay until the next step."""
        self.optimizer.zero_grad()
        loss = next_byte_loss(self.model, windows)
        loss.backward()  # type: ignore[no-untyped-call]
        self.last_lr = float(self.schedule.get_last_lr()[0])
        self.optimizer.step()
        self.schedule.step()
        return loss.detach()

    def save(self, path: Path, step: int) -> None:
        """Write the state that training continues from."""
        flatshard.save_checkpoint(path, self._state(step), overwrite=True)

    def resume(self, path: str) -> int:
        """Read that state, written by any number of ranks, and return the next step."""
        return int(flatshard.load_checkpoint(path, self._state(0))["step"]) + 1

    def _state(self, step: int) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule, "step": step}


def warmup_and_cosine(step: int, steps: int) -> float:
    """Return the factor on the learning rate: a linear warm-up, then half a cosine down to 0.1."""
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    progress = (step - WARMUP_STEPS) / max(steps - WARMUP_STEPS, 1)
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress))


def next_byte_loss(model: nn.Module, windows: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats, a scalar, of each byte given the bytes before it.

    Args:
        windows: int64 tensor of shape (batch, context + 1).
    """
    logits: Tensor = model(windows[:, :-1])  # (batch, context, vocabulary)
    return F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def validation_loss(model: nn.Module, options: Options, corpus: Corpus, ranks: Ranks) -> float:
    """Return the mean loss over windows of the held-out text, which the ranks divide among them."""
    windows = even_windows(corpus.validation, VALIDATION_WINDOWS * ranks.size, options.context + 1)
    return ranks.mean(next_byte_loss(model, ranks.own_rows(windows)))


def print_sample(model: nn.Module, options: Options, ranks: Ranks) -> None:
    """Print the model's continuation of the prompt, byte by byte."""
    ranks.say(f"\na sample, continuing {PROMPT.decode()!r}:\n")
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for byte in generate(model, PROMPT, SAMPLE_BYTES, options, ranks):
        if ranks.rank == 0:
            print(printable(decoder.decode(bytes([byte]))), end="", flush=True)
    ranks.say("")


def printable(text: str) -> str:
    """Return ``text`` without characters that could change the terminal's settings, such as escape sequences."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


@torch.no_grad()
def generate(model: nn.Module, prompt: bytes, count: int, options: Options, ranks: Ranks) -> Iterator[int]:
    """Yield the bytes of ``prompt``, and then ``count`` sampled ones.

    Inside ``keep_unsharded`` the model is gathered once. All ranks have the same random numbers, so they sample the same
    bytes.
    """
    yield from prompt
    generator = torch.Generator().manual_seed(options.seed)
    text = torch.tensor([list(prompt)], device=ranks.device)  # (1, length)
    with flatshard.keep_unsharded(model):
        for _ in range(count):
            logits: Tensor = model(text[:, -options.context :])[0, -1]  # (vocabulary)
            probabilities = torch.softmax(logits.float() / 0.8, dim=0).cpu()
            following = torch.multinomial(probabilities, 1, generator=generator)
            text = torch.cat([text, following[None].to(ranks.device)], dim=1)
            yield int(following)


# ---------------------------------------------------------------------------------------------------------------------
# Data and measurements
# ---------------------------------------------------------------------------------------------------------------------


def global_batch(options: Options, corpus: Corpus, ranks: Ranks, step: int) -> Tensor:
    """Return the rows that all ranks train on in this step, shape (ranks * batch, context + 1), equal on every rank."""
    seed = options.seed * 1_000_003 + step
    return random_windows(corpus.train, ranks.size * options.batch, options.context + 1, seed=seed).to(ranks.device)


def gradient_norm(model: nn.Module) -> float:
    """Return the norm of the full model's gradient. A sharded gradient's norm is that of the full one, on every rank."""
    return math.hypot(*(float(p.grad.double().norm()) for p in model.parameters() if p.grad is not None))


def relative_difference(value: float, expected: float) -> float:
    return abs(value - expected) / abs(expected)


def measured_memory(
    trainer: Trainer, options: Options, corpus: Corpus, ranks: Ranks
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the bytes that stay on the fullest rank between two steps, and those of an unsharded model after one step."""
    replica = Trainer(build_model(options, ranks), options)
    replica.step(ranks.own_rows(global_batch(options, corpus, ranks, step=1)))
    sharded, replicated = (
        ranks.reduce(torch.tensor(list(footprint(each).values())), dist.ReduceOp.MAX).tolist()
        for each in (trainer, replica)
    )
    names = footprint(trainer)
    return dict(zip(names, sharded, strict=True)), dict(zip(names, replicated, strict=True))


def memory_report(sharded: dict[str, int], replicated: dict[str, int]) -> str:
    """Print the result of ``measured_memory`` as a table."""
    lines = ["MiB on the fullest rank     sharded  replicated"]
    for name, size in sharded.items():
        share = size / replicated[name]
        lines.append(f"{name:<25} {size / 2**20:>9.3f}  {replicated[name] / 2**20:>10.3f}  {share:>5.0%}")
    return "\n".join(lines)


def footprint(trainer: Trainer) -> dict[str, int]:
    """Return the bytes of the storages, with padding, behind the tensors that training keeps."""
    parameters = list(trainer.model.parameters())
    kept = {
        "parameters": [p.detach() for p in parameters],
        "gradients": [p.grad for p in parameters if p.grad is not None],
        "Adam state": [v for state in trainer.optimizer.state.values() for v in state.values() if torch.is_tensor(v)],
    }
    sizes = {name: sum(storages(tensors).values()) for name, tensors in kept.items()}
    return sizes | {"total": sum(sizes.values())}


# ---------------------------------------------------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------------------------------------------------


def option(default: Any, help: str, kind: Any, metavar: str | None = None, **more: Any) -> Any:
    """Return a field of :class:`Options`."""
    return dataclasses.field(default=default, metadata={"help": help, "type": kind, "metavar": metavar, **more})


def number(default: int | None, help: str, **more: Any) -> Any:
    return option(default, help, positive_int, "N", **more)


def positive_int(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def svg_path(text: str) -> str:
    if not text.endswith(".svg"):
        raise argparse.ArgumentTypeError(f"{text} does not end in .svg")
    if not Path(text).absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no such directory")
    return text


def directory(text: str) -> str:
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no such directory")
    return text


@dataclass(frozen=True)
class Options:
    """Command-line options; each field is an option of its name."""

    ranks: int | None = number(None, "start N processes (default: those of torchrun, or this one)")
    layers: int = number(4, "blocks")
    width: int = number(128, "residual stream")
    heads: int = number(4, "must divide width")
    context: int = number(128, "bytes seen")
    batch: int = number(8, "rows per rank")
    steps: int = number(700, "optimizer steps")
    lr: float = option(3e-3, "highest learning rate", float, "X")
    seed: int = option(0, "of weights, batches, sample", int, "N")
    log_every: int = number(25, "steps a line")
    plot: str | None = option(None, "draw the loss of each step", svg_path, "FILE.svg")
    save: str | None = option(None, "write DIR/step-N at the last step", str, "DIR")
    save_every: int | None = number(None, "and every N steps")
    resume: str | None = option(None, "go on from there, with any number of ranks", directory, "DIR/step-N")
    strategy: str = option(
        "full_shard",
        "what the ranks divide among them",
        str,
        choices=[each.name.lower() for each in flatshard.ShardingStrategy],
    )
    precision: str = option(
        "fp32", "computed in; parameters kept and gradients summed in fp32", str, choices=["fp32", "bf16"]
    )
    verify: int | None = number(
        None, "compare the first N steps (20) with one-process training, then exit", nargs="?", const=20
    )

    kill_every: int | None = number(None, "kill one of --ranks (4) at random every N steps, and start another")
    store: int | None = option(None, argparse.SUPPRESS, positive_int)

    def config(self) -> GPTConfig:
        return GPTConfig(VOCABULARY, self.context, self.layers, self.width, self.heads)


def parse_options(arguments: Sequence[str]) -> Options:
    description, _, examples = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=description,
        epilog=examples.rpartition("\n\n")[0],  # the rest is for readers of the code
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for field in dataclasses.fields(Options):
        default = "" if field.default is None else f" (default: {field.default})"
        more = {**field.metadata, "help": field.metadata["help"] + default}
        if more["help"].startswith(argparse.SUPPRESS):
            more["help"] = argparse.SUPPRESS
        parser.add_argument(f"--{field.name.replace('_', '-')}", default=field.default, **more)
    options = Options(**vars(parser.parse_args(arguments)))
    if options.verify and options.precision != "fp32":
        parser.error("--verify compares with fp32 training up to its rounding: use it with --precision fp32")
    if options.kill_every and flatshard.ShardingStrategy[options.strategy.upper()].is_hybrid:
        parser.error("--kill-every starts ranks without torchrun, which tells hybrid strategies what a host is")
    try:
        options.config()
    except ValueError as error:
        parser.error(str(error))
    return options


if __name__ == "__main__":
    main()
