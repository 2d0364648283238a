"""Times of GPU work: CUDA graphs over rotating buffers, and the copies that say what is possible.

A single launch of a few microseconds cannot be timed from the host, and a buffer that was just read
sits in the L2 cache. So many launches are captured in one graph, each on the next of a ring of
inputs and with the outputs of the last ones still held, so that these rotate too; the cache is
flushed by reads between replays.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

REPLAYS = 21
TARGET_MS = 2.0
MAX_LAUNCHES = 1000
MAX_COPIES = 1000
L2_FACTOR = 4.5
"""Bytes that one turn of the ring touches, in sizes of the L2 cache."""

Inputs = tuple[Tensor, "Tensor | None"]


@dataclass
class Timing:
    """Milliseconds per call: median, 10th and 90th percentile over the replays."""

    ms: float
    p10: float
    p90: float
    launches: int
    replays: int
    ring: int

    @property
    def spread(self) -> float:
        """Width from the 10th to the 90th percentile, as a share of the median."""
        return (self.p90 - self.p10) / self.ms

    def describe(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


class Clock:
    """Times calls on one device; on a CPU by the host's clock, without graphs: a smoke test."""

    def __init__(self, device: torch.device, tiny: bool = False) -> None:
        self.device = device
        self.cuda = device.type == "cuda"
        self.replays = 3 if tiny else REPLAYS
        self.l2 = 1 << 16
        self.name = "CPU"
        self._flushed: Tensor | None = None
        if self.cuda:
            properties = torch.cuda.get_device_properties(device)
            self.l2 = int(getattr(properties, "L2_cache_size", 0)) or 60 << 20
            self.name = properties.name
            self._flushed = torch.zeros(
                int(L2_FACTOR * self.l2) // 4, dtype=torch.float32, device=device
            )

    def copies(self, bytes_per_call: float) -> int:
        """How many buffers a ring needs so that one turn overflows the cache."""
        most = MAX_COPIES if self.cuda else 3
        return max(2, min(most, math.ceil(L2_FACTOR * self.l2 / bytes_per_call)))

    def measure(self, call: Callable[..., Any], ring: Sequence[tuple[Any, ...]]) -> Timing:
        """Time ``call(*inputs)`` over the ring; what it returns is held for one turn."""
        for inputs in ring[:2]:
            call(*inputs)
        if not self.cuda:
            return self._by_host(call, ring)
        torch.cuda.synchronize(self.device)
        few = min(len(ring), 8)
        graph, held = self._capture(call, ring, few)
        pilot = statistics.median(self._replay(graph, few, 3))
        del graph, held
        launches = max(4, min(MAX_LAUNCHES, math.ceil(TARGET_MS / pilot)))
        graph, held = self._capture(call, ring, launches)
        self._replay(graph, launches, 2)
        times = self._replay(graph, launches, self.replays)
        del graph, held
        return _timing(times, launches, min(len(ring), launches))

    def _capture(
        self, call: Callable[..., Any], ring: Sequence[tuple[Any, ...]], launches: int
    ) -> tuple[torch.cuda.CUDAGraph, list[Any]]:
        graph = torch.cuda.CUDAGraph()
        held: list[Any] = [None] * len(ring)
        with torch.cuda.graph(graph):
            for i in range(launches):
                outputs = call(*ring[i % len(ring)])
                held[i % len(ring)] = outputs
        return graph, held

    def _replay(self, graph: torch.cuda.CUDAGraph, launches: int, replays: int) -> list[float]:
        """Milliseconds per launch of each replay."""
        events = []
        for _ in range(replays):
            # While the GPU sleeps the host enqueues what follows: its time is not in the figure.
            torch.cuda._sleep(600_000)
            self.flush()
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            events.append((start, end))
        torch.cuda.synchronize(self.device)
        return [start.elapsed_time(end) / launches for start, end in events]

    def flush(self) -> None:
        """Fill the cache with something else. By reads: written lines would have to be evicted."""
        if self._flushed is not None:
            torch.amax(self._flushed)

    def _by_host(self, call: Callable[..., Any], ring: Sequence[tuple[Any, ...]]) -> Timing:
        times = []
        for i in range(self.replays):
            start = time.perf_counter()
            call(*ring[i % len(ring)])
            times.append((time.perf_counter() - start) * 1e3)
        return _timing(times, 1, len(ring))

    def release(self) -> None:
        """Give freed memory back before a shape that needs much of it."""
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()

    def copy_bandwidth(self, size: int) -> dict[str, float]:
        """Bytes per second, read and written, of large device-to-device transfers.

        ``kernel``: the best of a few copy kernels in a graph; ``driver``: ``Tensor.copy_`` launched
        from the host. ``copy``, the limit that shares are taken of, is the faster one. (Captured in
        a graph ``Tensor.copy_`` becomes a node that was seen at two thirds of either.)
        """
        moved = 2 * size
        kernel = self.copy_of(moved)
        source = torch.zeros(size, dtype=torch.uint8, device=self.device).random_(0, 256)
        target = torch.empty_like(source)
        times = [self._once(target, source) for _ in range(self.replays)]
        driver = statistics.median(times)
        return {
            "bytes_moved": moved,
            "copy": moved / (min(kernel.ms, driver) * 1e-3),
            "copy_spread": kernel.spread,
            "kernel": moved / (kernel.ms * 1e-3),
            "driver": moved / (driver * 1e-3),
        }

    def _once(self, target: Tensor, source: Tensor) -> float:
        if not self.cuda:
            start = time.perf_counter()
            target.copy_(source)
            return (time.perf_counter() - start) * 1e3
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(600_000)
        begin.record()
        for _ in range(4):
            target.copy_(source)
        end.record()
        torch.cuda.synchronize(self.device)
        return float(begin.elapsed_time(end)) / 4

    def copy_of(self, moved: int) -> Timing:
        """A copy that moves as many bytes, half of them in: what launch and tail cost as well."""
        count = max(8192, (moved // 2 + 8191) // 8192 * 8192)
        copies = self.copies(2 * count)
        sources = torch.zeros(copies, count, dtype=torch.uint8, device=self.device)
        sources.random_(0, 256)
        targets = torch.empty_like(sources)
        ring = [(targets[i], sources[i]) for i in range(copies)]
        if not self.cuda:
            return self.measure(lambda target, source: target.copy_(source), ring)
        from .copying import CONFIGS, copy

        found = [self.measure(partial(copy, *config), ring) for config in CONFIGS]
        return min(found, key=lambda timing: timing.ms)


def _timing(times: list[float], launches: int, ring: int) -> Timing:
    ordered = sorted(times)
    tenth = len(ordered) // 10
    return Timing(
        statistics.median(ordered), ordered[tenth], ordered[-1 - tenth], launches, len(times), ring
    )


def gpu_work(run: Callable[[], Any]) -> list[tuple[str, float]]:
    """Name and microseconds of everything that ``run`` does on the GPU, by the profiler."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    return [
        (event.name, event.time_range.elapsed_us())
        for event in seen.events()
        if event.device_type == DeviceType.CUDA
        # Ranges that code marks for readers of traces are shown on the GPU's line as well.
        and not getattr(event, "is_user_annotation", False)
        and not event.name.startswith(("## Call", "Torch-Compiled Region", "ProfilerStep"))
    ]
