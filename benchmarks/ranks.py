"""Start the ranks of a run on one machine."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def fork(fn: Callable[..., Any], world: int, *args: Any) -> None:
    """Run ``fn(rank, *args)`` in processes with a gloo group among them.

    They are forked, so that what this process has imported need not be imported again; it must not
    have run a backward yet.

    Raises:
        torch.multiprocessing.ProcessRaisedException: where one of them failed.
    """
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_rank, (world, folder, fn, args), nprocs=world, start_method="fork")


def _rank(rank: int, world: int, folder: str, fn: Callable[..., Any], args: Any) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world
    )
    fn(rank, *args)
    dist.destroy_process_group()
