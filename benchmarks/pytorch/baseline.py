"""The training step in PyTorch: what ours is measured against. GPT-2 needs torch and numpy and no JAX; of the other
models transformers has the step, and `megajax.convert` says which class and weights are meant.

    python benchmarks/pytorch/baseline.py PRESET [train.py's flags] [--device cpu|gpu] [--compile] [--threads N]
        [--steps N | --serve]

Tensor parallelism as Megatron's, data parallelism as `DistributedDataParallel`, fused AdamW, autocast for bf16. A run
of several processes, one for each device, is told by `--distributed.*`; tensor ranks are innermost. Flags without a
meaning here are ignored, among them `--optimizer.zero`: weights and moments are on every data rank.
"""

import contextlib
import json
import math
import resource
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import paired
import torch
import torch.distributed as dist
from pytorch.gpt import split_dim
from pytorch.peers import Peer, peer_of
from torch import Tensor
from torch.nn.utils import get_total_norm as total_norm

from megajax.core.errors import UserError
from megajax.core.models.registry import DECODER
from megajax.core.optim.config import OptimizerConfig
from megajax.host.ending import run
from megajax.settings.config import Config
from megajax.settings.validation import validate


class Coming:
    """A number that a GPU computes; to know it waits for that, and not for what the GPU does afterwards."""

    def __init__(self, number: Tensor):
        self._host = torch.empty((), pin_memory=True)
        self._host.copy_(number, non_blocking=True)
        self._there = torch.cuda.Event()
        self._there.record()

    def __float__(self) -> float:
        self._there.synchronize()
        return self._host.item()


class Baseline:
    """A training run of `config`: this process's part of the model, and its optimizer."""

    def __init__(self, config: Config, *, device: str = "cpu", compiled: bool = False):
        check(config, device)
        self.config, mesh, process = config, config.mesh, max(0, config.distributed.process_id)
        self.data_rank, self.tensor_rank = divmod(process, mesh.tensor)
        self.device = torch.device("cpu")
        if device == "gpu":
            self.device = torch.device("cuda", process % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        self.data_group, self.tensor_group = connect(config, self.device)
        with self.device:
            self.model = make_model(peer_of(config.model), config, self.tensor_rank, self.tensor_group)
        self._initialize()
        self.loss_sum: Any = self.model
        if self.data_group is not None:
            self.loss_sum = torch.nn.parallel.DistributedDataParallel(
                self.model, process_group=self.data_group, gradient_as_bucket_view=True
            )
        if compiled:
            self.loss_sum = torch.compile(self.loss_sum)
        self.step_number = 0
        self.optimizer = make_optimizer(self.model, config.optimizer)
        named = dict(self.model.named_parameters())
        self.duplicated = [weight for name, weight in named.items() if split_dim(name) is None]
        self.split = [weight for name, weight in named.items() if split_dim(name) is not None]

    def load(self, params: dict) -> None:
        """Take the weights of our canonical form, whole numpy arrays, layers stacked; the optimizer's state stays."""
        whole = self.model.canonical_weights(params)
        for name, weight in self.model.named_parameters():
            self._set(name, weight, whole[name])

    def step(self, arrays: Mapping[str, np.ndarray]) -> float:
        """One optimizer step on the global batch, int32 arrays by name; the loss before it."""
        return float(self.start_step(arrays))

    def start_step(self, arrays: Mapping[str, np.ndarray]) -> "Tensor | Coming":
        """`step`, without waiting for a GPU."""
        data = self.config.mesh.data
        rows = self.config.train.global_batch // data
        mine = slice(self.data_rank * rows, (self.data_rank + 1) * rows)
        counts = self.model.num_targets(arrays)
        per_target = self._put(data / counts, np.float32)  # DDP's mean is to be a sum
        parts = [self._put(arrays[name][mine]).split(self.config.train.microbatch) for name in self.model.inputs]
        microbatches = list(zip(*parts, strict=True))

        self.optimizer.zero_grad(set_to_none=True)
        loss = torch.zeros((), device=self.device)
        for number, microbatch in enumerate(microbatches):
            last = number == len(microbatches) - 1
            with contextlib.nullcontext() if last or data == 1 else self.loss_sum.no_sync():
                with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.precision == "bf16"):
                    part = (self.loss_sum(*microbatch) * per_target).sum()
                part.backward()
            loss += part.detach() / data
        if self.data_group is not None:
            dist.all_reduce(loss, group=self.data_group)
        self._clip()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step_number, self.config.optimizer)
        self.optimizer.step()
        self.step_number += 1
        return Coming(loss) if self.device.type == "cuda" else loss

    def peak_bytes(self) -> int:
        """Most bytes held so far: by tensors of the GPU, or by the process."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def _put(self, array: Any, dtype: type = np.int64) -> Tensor:
        host = torch.from_numpy(np.array(array, dtype))
        return host.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else host

    @torch.no_grad()
    def _clip(self) -> None:
        """Scale the gradients down to `clip_norm`; every element counts once."""
        duplicated, split = ([weight.grad for weight in weights] for weights in (self.duplicated, self.split))
        if self.tensor_group is None:
            norm = total_norm(duplicated + split, foreach=True)
        else:
            square = total_norm(split, foreach=True).square()
            dist.all_reduce(square, group=self.tensor_group)
            norm = (total_norm(duplicated, foreach=True).square() + square).sqrt()
        torch._foreach_mul_(duplicated + split, (self.config.optimizer.clip_norm / norm).clamp(max=1.0))

    def _initialize(self) -> None:
        """Fresh weights: the whole of each is drawn on every rank, so that it is the same on every mesh."""
        model, draws = self.config.model, torch.Generator(self.device).manual_seed(self.config.seed)
        for name, weight in self.model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.zeros_(weight)
            elif weight.ndim == 1:
                torch.nn.init.ones_(weight)
            else:
                residual = name.endswith(self.model.residual)
                std = model.residual_init_std if residual else model.init_std
                dim = split_dim(name)
                shape = [n * self.config.mesh.tensor if i == dim else n for i, n in enumerate(weight.shape)]
                self._set(name, weight, torch.randn(shape, generator=draws, device=self.device) * std)

    @torch.no_grad()
    def _set(self, name: str, weight: Tensor, whole: Tensor) -> None:
        dim = split_dim(name)
        part = whole if dim is None else whole.chunk(self.config.mesh.tensor, dim)[self.tensor_rank]
        assert part.shape == weight.shape, name
        weight.copy_(part)


def make_model(peer: Peer, config: Config, rank: int, group: dist.ProcessGroup | None) -> Any:
    """This process's part of the model."""
    if not peer.splits:
        return peer.load()(config.model)
    remat = config.train.remat == "layer"
    return peer.load()(config.model, tensor=config.mesh.tensor, rank=rank, group=group, remat=remat)


def check(config: Config, device: str) -> None:
    """Refuse what the peer does not do. Raises `UserError`."""
    mesh, number = config.mesh, max(1, config.distributed.num_processes)
    words = f"--model.family {config.model.family}"
    if config.model.family == DECODER:
        words += f" --model.positions {config.model.positions}"
    splits = peer_of(config.model).splits
    refused = {
        f"--model.dropout {config.model.dropout}; valid: 0": config.model.dropout != 0,
        f"--mesh.pipe {mesh.pipe}; valid: 1": mesh.pipe != 1,
        "--sequence-parallel; valid: --no-sequence-parallel": config.sequence_parallel,
        f"--precision {config.precision}; valid: fp32, bf16": config.precision not in ("fp32", "bf16"),
        f"--train.remat {config.train.remat}; valid: none, layer": config.train.remat not in ("none", "layer"),
        f"--optimizer.skip-above {config.optimizer.skip_above}; valid: 0": config.optimizer.skip_above != 0,
        f"--mesh.data {mesh.data} x --mesh.tensor {mesh.tensor} with {words}; valid: 1 x 1": (
            not splits and mesh.data * mesh.tensor != 1
        ),
        f"--train.remat {config.train.remat} with {words}; valid: none": (not splits and config.train.remat != "none"),
        "--device gpu; valid: cpu, as torch finds no GPU": device == "gpu" and not torch.cuda.is_available(),
        f"--mesh.data {mesh.data} x --mesh.tensor {mesh.tensor} with --distributed.num-processes {number}; "
        f"valid: {mesh.data * mesh.tensor}, a process for each device": mesh.data * mesh.tensor != number,
    }
    for message, wrong in refused.items():
        if wrong:
            raise UserError(f"the PyTorch baseline has no {message}")
    validate(config, mesh.num_devices)


def connect(config: Config, device: torch.device) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """This process's data group and tensor group; None for a group of one."""
    mesh, cluster = config.mesh, config.distributed
    if mesh.num_devices == 1:
        return None, None
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"tcp://{cluster.coordinator}",
        world_size=cluster.num_processes,
        rank=cluster.process_id,
    )
    grid = dist.init_device_mesh(device.type, (mesh.data, mesh.tensor), mesh_dim_names=("data", "tensor"))
    data, tensor = (grid.get_group(name) for name in ("data", "tensor"))
    return data if mesh.data > 1 else None, tensor if mesh.tensor > 1 else None


def make_optimizer(model: torch.nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW; weight decay on matrices and embeddings only."""
    groups = [
        {"params": [weight for weight in model.parameters() if weight.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [weight for weight in model.parameters() if weight.ndim == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(config.beta1, config.beta2), eps=config.epsilon, fused=True)


def learning_rate(step: int, config: OptimizerConfig) -> float:
    """The rate of the update that follows `step` finished ones, as `megajax.core.optim.adam.learning_rate`'s."""
    peak, floor = config.learning_rate, config.min_learning_rate
    warmup, decay = config.warmup, config.decay_steps
    if step < warmup:
        return peak * step / warmup
    if config.schedule == "constant":
        return peak
    assert config.schedule in ("cosine", "linear"), config.schedule
    progress = min(1.0, (step - warmup) / max(1, decay - warmup))
    left = 1.0 - progress if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return floor + (peak - floor) * left


def main() -> None:
    """Parse the command line, then run steps or serve."""
    own, _, config = paired.command_line(
        __doc__, "", device=("cpu", "gpu"), compile=False, threads=0, steps=5, serve=False
    )
    if own.threads:
        torch.set_num_threads(own.threads)
    baseline = Baseline(config, device=own.device, compiled=own.compile)
    arrays = paired.random_arrays(config, 0)
    about = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if own.device == "gpu" else "cpu",
        "precision": config.precision,
        "compiled": own.compile,
        "threads": torch.get_num_threads(),
    }

    if own.serve:
        paired.serve(
            lambda: baseline.start_step(arrays), {"memory": lambda: {"peak_bytes": baseline.peak_bytes()}}, **about
        )
    else:
        losses, seconds = [], []
        for _ in range(own.steps):
            start = time.perf_counter()
            losses.append(baseline.step(arrays))
            seconds.append(time.perf_counter() - start)
        typical = statistics.median(seconds[1:] or seconds)
        about |= {"losses": losses, "seconds_per_step": typical, "tokens_per_second": arrays["tokens"].size / typical}
        if config.distributed.process_id <= 0:
            print(json.dumps(about | {"peak_bytes": baseline.peak_bytes()}))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    run(main)
