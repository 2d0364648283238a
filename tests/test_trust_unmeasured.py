"""Fidelity where there is nothing to measure: said, and not trusted."""

from __future__ import annotations

import json
import math

import pytest
import torch
from models import HandLinear, rows
from test_trust import Zeros
from torch import Tensor, nn

from mxnorm_pass import fidelity


class Parts(nn.Module):
    """Two norms; the second one reads rows of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.RMSNorm(128), nn.RMSNorm(128)
        self.linears = nn.ModuleList([HandLinear(128, 32) for _ in range(2)])

    def forward(self, x: Tensor, some: Tensor) -> tuple[Tensor, Tensor]:
        return self.linears[0](self.first(x)), self.linears[1](self.second(some))


@pytest.mark.parametrize(
    ("some", "why"),
    [
        (torch.zeros(6, 128), "nothing was measured: 6 rows of zeros"),
        (torch.zeros(0, 128), "nothing was measured: no rows"),
        (torch.full((6, 128), math.nan), "6 rows hold NaN or Inf"),
    ],
    ids=["zeros", "none", "nan"],
)
def test_where_nothing_was_measured_nothing_is_trusted(some: Tensor, why: str) -> None:
    x = rows(64, 128, dtype=torch.float32)
    result = fidelity(Parts(), [(x, some)], bound=0.5)
    assert [site.norm for site in result.sites] == ["first", "second"]
    assert [site.norm for site in result.unmeasured] == ["second"]
    (site,) = result.flagged
    assert site.norm == "second" and site.reasons == [why]
    config = result.exact_where()
    assert config.exact == ("second",)
    assert "nothing was measured at: second#0" in str(result)
    assert json.loads(result.to_json())["unmeasured"] == ["second#0"]
    if math.isfinite(some.sum()):
        # Exact there, there is nothing left to distrust; said all the same.
        again = fidelity(Parts(), [(x, some)], bound=0.5, config=config)
        assert not again.flagged and "nothing was measured at: second#0" in str(again)


@pytest.mark.parametrize("n", [0, 4])
def test_batches_without_a_row_to_measure_are_refused(n: int) -> None:
    says = "8 rows of zeros" if n else "no rows"
    with pytest.raises(ValueError, match=rf"nothing was measured in 2 batch.*norm#0: ({says})"):
        fidelity(Zeros(), [torch.zeros(n, 128)] * 2)
