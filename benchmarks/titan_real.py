"""torchtitan's own Llama 3 through the pass, on CPU: is every site found, under every plan?

    pip install --no-deps torchtitan==0.3.0 spmd_types==0.2.3 torchdata torch_checkpointing tyro ...
    python benchmarks/titan_real.py --tp 2

Builds the Trainer.Config of ``llama3_debugmodel`` with converters, as a config registry does, and
what the Trainer builds from it: ParallelDims, the model, ``parallelize_llama`` (tensor parallel,
checkpointing, compile, FSDP2), and runs a few steps with its loss. The Trainer itself wants a GPU.
Two things are put in place of what a CPU has not got, by converters as well: MXFP8 linears are the
emulated ones, and attention is torchtitan's ScaledDotProductAttention. With ``--tp`` there is no
FSDP2, and parameters are bfloat16.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "benchmarks")]

import ranks  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from cpu_bfloat16 import speed_up_bfloat16  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torchao.prototype.moe_training import mxfp8_linear  # noqa: E402
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference  # noqa: E402
from torchtitan.tools import utils as tools  # noqa: E402

# Without a GPU torchtitan takes "cuda" all the same; other modules copy this at their import.
tools.device_type, tools.device_module = "cpu", torch.cpu

from mxnorm_converter import MXNormConverter  # noqa: E402
from torchtitan.components.quantization.mx import MXFP8Linear  # noqa: E402
from torchtitan.config import CompileConfig  # noqa: E402
from torchtitan.distributed import ParallelDims, utils  # noqa: E402
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC  # noqa: E402
from torchtitan.models.common.attention import (  # noqa: E402
    FlexAttention,
    ScaledDotProductAttention,
)
from torchtitan.models.common.linear import Linear  # noqa: E402
from torchtitan.models.llama3 import model_registry, parallelize  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402
from torchtitan.protocols.model import ModelConfigConverter  # noqa: E402

import mxnorm_pass  # noqa: E402

AC = {"none": None, "full": FullAC.Config(), "selective": SelectiveAC.Config()}


class EmulatedMXFP8Linear(MXFP8Linear):
    @dataclass(kw_only=True, slots=True)
    class Config(MXFP8Linear.Config):
        pass

    def __init__(self, config: Config) -> None:
        mxfp8_linear.MXFP8Linear.__init__(
            self,
            config.in_features,
            config.out_features,
            bias=config.bias,
            kernel_preference=KernelPreference.EMULATED,
        )


class OnCPU(ModelConfigConverter):
    """MXFP8 linears in all blocks, as MXFP8LinearConverter makes them, and SDPA for flex."""

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConfigConverter.Config):
        layers: int = 2

    def __init__(self, config: Config) -> None:
        self.config = config

    def convert(self, model_config: Any) -> Any:
        model_config.layers = model_config.layers[: self.config.layers]
        for _, _, parent, attr in list(model_config.traverse(FlexAttention.Config)):
            setattr(parent, attr, ScaledDotProductAttention.Config())
        for fqn, linear, parent, attr in list(model_config.traverse(Linear.Config)):
            if fqn.startswith("layers."):
                fields = {
                    f.name: getattr(linear, f.name) for f in dataclasses.fields(Linear.Config)
                }
                setattr(parent, attr, EmulatedMXFP8Linear.Config(**fields))
        return model_config


def small(parameter: Tensor) -> None:
    nn.init.normal_(parameter, std=0.02)


def steps(rank: int, args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    converters: list[Any] = [OnCPU.Config()]
    if args.route == "hook":
        converters.append(MXNormConverter.Config())
    config = llama3_debugmodel()
    config.model_spec = model_registry("debugmodel", converters=converters)
    config.compile = CompileConfig(enable=True, components=["model"], backend="inductor")
    backend = mxnorm_pass.backend(inner="eager", strict=True)
    if args.route == "backend":
        # By name in earnest: compile.backend = "mxnorm". Without code generation it is faster here.
        torch._dynamo.register_backend(backend, name="mxnorm_eager")
        config.compile = CompileConfig(enable=True, components=["model"], backend="mxnorm_eager")
    config.parallelism.tensor_parallel_degree = args.tp
    config.parallelism.spmd_backend = args.spmd
    config.activation_checkpoint = AC[args.ac]
    config.training.seq_len = args.seq
    dims = ParallelDims.from_config(config.parallelism, dist.get_world_size())
    dims.build_mesh()
    utils.set_spmd_backend(config.parallelism.spmd_backend)
    config.model_spec.model.update_from_config(config=config)
    dtype = torch.float32
    if args.tp > 1:
        # FSDP2 of torch 2.13 does not take the local tensors that torchtitan 0.3.0 shards into.
        parallelize.apply_fsdp_to_decoder = lambda *_, **__: None
        dtype = torch.bfloat16
    with torch.device("meta"), tools.set_default_dtype(dtype):
        model = config.model_spec.model.build()
    model.verify_module_protocol()
    model = config.model_spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=config.training,
        parallelism=config.parallelism,
        compile_config=config.compile,
        ac_config=config.activation_checkpoint,
        dump_folder="",
    )
    model.to_empty(device="cpu")
    if args.tp > 1:  # its initialisations are of whole parameters
        for module in model.modules():
            wanted = getattr(module, "_param_init", None) or {}
            init = nn.init.ones_ if isinstance(module, nn.RMSNorm) else small
            module._param_init = dict.fromkeys(wanted, init)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    context = utils.get_spmd_context(parallel_dims=dims)
    optimizer = torch.optim.AdamW(model.parameters(), lr=8e-4)
    generator = torch.Generator().manual_seed(rank // args.tp)
    tokens = torch.randint(0, 2048, (2, args.seq + 1), generator=generator)
    for _ in range(args.steps):
        with context():
            out = model(tokens[:, :-1])
            out = getattr(out, "full_tensor", lambda out=out: out)()
            # Under tensor parallel the vocabulary may be sharded; any loss does here.
            loss = out.float().logsumexp(-1).mean() - out.float()[..., 0].mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"loss {loss.item():.4f}", flush=True)
    report = MXNormConverter.report if args.route == "hook" else backend.report
    for r in range(dist.get_world_size()):
        dist.barrier()
        if r == rank:
            print(f"rank {rank}\n{report}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--ac", choices=sorted(AC), default="selective")
    parser.add_argument("--route", choices=("backend", "hook"), default="backend")
    parser.add_argument(
        "--spmd", choices=("spmd_types", "partial_dtensor", "full_dtensor"), default="spmd_types"
    )
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--steps", type=int, default=2)
    args = parser.parse_args()
    speed_up_bfloat16()
    ranks.fork(steps, args.ranks, args)


if __name__ == "__main__":
    main()
