"""What recognition costs: probes, not data; once per distinct site, not once per site."""

from __future__ import annotations

import time

import pytest
import torch
from models import rows
from test_casts import block_graph
from torch.fx import GraphModule

from mxnorm_pass import MXNormConfig
from mxnorm_pass.recognise import coding, consumers, find_sites, norm_function


def forget() -> None:
    """Empty the caches of probe results."""
    for module in (coding, consumers, norm_function):
        module._cache.clear()


def evaluations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the vectors that pieces are evaluated on, one entry per evaluation."""
    from mxnorm_pass.recognise.lift import Piece

    sizes: list[int] = []
    evaluate = Piece.evaluate

    def counted(self: Piece, values: object) -> torch.Tensor:
        result = evaluate(self, values)  # type: ignore[arg-type]
        sizes.append(result.numel())
        return result

    monkeypatch.setattr(Piece, "evaluate", counted)
    return sizes


def recognise(gm: GraphModule) -> int:
    with torch.no_grad():
        return len(find_sites(gm.graph, MXNormConfig(strict=True)).sites)


def test_probes_do_not_grow_with_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same evaluations on the same vectors, whatever M and K."""
    seen = []
    for m, k in ((32, 64), (128, 64), (32, 512)):
        gm = block_graph(rows(m, k), k, layers=1)
        forget()
        with monkeypatch.context() as patch:
            sizes = evaluations(patch)
            assert recognise(gm) == 1
            seen.append(sorted(sizes))
    assert seen[0] == seen[1] == seen[2]
    assert 0 < len(seen[0]) < 40 and max(seen[0]) < 1_000_000


def test_paid_once_per_distinct_site(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six equal layers evaluate as often as one; a second format costs again."""
    counts = {}
    for layers in (1, 6):
        gm = block_graph(rows(32, 64), 64, layers=layers)
        forget()
        with monkeypatch.context() as patch:
            sizes = evaluations(patch)
            assert recognise(gm) == layers
            # The gain's kind is for the report, and packing is read off the structure.
            counts[layers] = len(sizes)
            del sizes[:]
            recognise(gm)
            assert len(sizes) <= 2 * layers, "known by structure the second time"
    assert counts[6] <= counts[1] + 2 * 5


def test_time_does_not_grow_with_the_tensors() -> None:
    """Sixty times the elements take no longer; a factor of five allows for a busy machine."""
    small, large = (block_graph(rows(m, k), k, layers=2) for m, k in ((32, 64), (128, 1024)))
    times = []
    for gm in (small, large):
        forget()
        start = time.process_time()
        recognise(gm)
        times.append(time.process_time() - start)
    assert times[1] < 5 * times[0] + 0.05, times
