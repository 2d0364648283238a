"""The small Llama of examples/titan.py, which is put together as torchtitan puts its own.

Its checkpointing of whole blocks and FSDP2 run in tests/test_fsdp.py.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import training_block
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import mxnorm_pass

sys.path[:0] = [str(Path(__file__).parent.parent / "examples")]

import titan  # noqa: E402

SMALL = titan.Sizes(dim=64, ffn=128, heads=2, kv_heads=2, layers=1)


@pytest.fixture
def ranks() -> Iterator[None]:
    """Two ranks, of which one is here and nothing is sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.usefixtures("ranks")
def test_tensor_and_sequence_parallel_with_selective_checkpointing() -> None:
    """torchtitan's plan, its policy and FSDP2 at once: two sites of a block, one graph."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    backend = mxnorm_pass.backend(inner="eager", strict=True)
    model = titan.build(SMALL, gains=0.3)
    titan.parallelise(model, dp=mesh["dp"], tp=mesh["tp"], ac="selective", backend=backend)
    titan.loss_of(model, torch.randint(0, 256, (2, 65))).backward()
    assert len(backend.report.graphs) == 1
    assert {s.norm: s.consumers for s in backend.report.sites} == {
        "attention_norm": ["attention.qkv_linear.wqkv"],
        "ffn_norm": ["feed_forward.w1", "feed_forward.w3"],
    }
    assert {s.status for s in backend.report.sites} == {"rewritten"}, backend.report


def test_paths_through_wrappers() -> None:
    """A checkpoint wrapper, and a function around a module's forward as torchtitan 0.3 puts it."""

    def wrap(module: Any) -> Any:
        inner = module.forward

        def outer(*args: Tensor) -> Tensor:
            return inner(*args)

        module.forward = outer
        return module

    block = training_block("llama", k=64, widths=(32,))
    wrap(block.norm)
    block.linears[0] = wrap(torch.nn.Sequential(block.linears[0]))
    backend = mxnorm_pass.backend(inner="eager", strict=True)
    wrapped = checkpoint_wrapper(block)
    x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
    torch.compile(wrapped, backend=backend, fullgraph=True)(x)[0].float().sum().backward()
    (site,) = backend.report.sites
    assert (site.norm, site.consumers, site.status) == ("norm", ["linears.0.0"], "rewritten")
    # What users write meets it.
    config = mxnorm_pass.MXNormConfig(exclude=("norm",))
    assert [s.reason for s in mxnorm_pass.explain(block, x, config=config).sites] == ["excluded"]


def test_the_documented_converter_is_the_example() -> None:
    """What docs/serving.md shows, and runs with a stand-in, is what ran with torchtitan."""
    root = Path(__file__).parent.parent
    code = (root / "examples/mxnorm_converter.py").read_text()
    shown = (root / "docs/serving.md").read_text()
    assert f'```python title="mxnorm_converter.py"\n{code}```' in shown
