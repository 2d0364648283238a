"""The column kernel on a GPU: numbers of each path, and each way in which Inductor runs it."""

from __future__ import annotations

import pytest
import torch
from numerics import assert_same_bytes, assert_same_cast
from torch import Tensor

from mxnorm_pass.formats import ELEMENTS, RULES, Cast
from mxnorm_pass.ops import rmsnorm_mxquant, rmsnorm_mxquant_colwise
from mxnorm_pass.ops.colwise import decomposition
from mxnorm_pass.ops.rmsnorm_mxquant import parse_rounding

pytestmark = pytest.mark.cuda

BF16, F32 = torch.bfloat16, torch.float32
RCEIL = "e4m3/b32/rceil_log2/reciprocal/clamp/plain"
SWIZZLED = "e4m3/b32/rceil_exact/reciprocal/clamp/swizzled"
NVFP4 = "e2m1/b16/e4m3/reciprocal/clamp/swizzled"
CASTS = [
    f"{element}/b{16 if rule == 'e4m3' else 32}/{rule}/{rest}"
    for element in ELEMENTS
    for rule in RULES
    for rest in ("reciprocal/clamp/plain", "divide/clamp/swizzled")
    if rule != "e4m3" or element == "e2m1"
]


def rows(m: int, k: int, dtype: torch.dtype = BF16) -> Tensor:
    """Rows of all magnitudes, with the special ones."""
    torch.manual_seed(m + k)
    x = torch.randn(m, k, device="cuda") * torch.randn(m, 1, device="cuda").mul(4).exp()
    x = x.to(dtype)
    if m > 200:
        x[1] = 0
        x[2, k - 1], x[40, k // 2], x[70, 1] = float("nan"), float("inf"), float("-inf")
        x[128:192, k // 3] = 0
    return x


def root(x: Tensor) -> Tensor:
    return torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)


def launched(
    x: Tensor, cast: str, hw: int, gain: Tensor | None = None, rounding: str = "f32->f32"
) -> tuple[Tensor, Tensor]:
    from mxnorm_pass.ops.kernels import cols_launch

    how = (parse_rounding(rounding), Cast.parse(cast), hw)
    return cols_launch.rmsnorm_mxquant_colwise(x, root(x), gain, None, *how)


@pytest.mark.parametrize("index", range(len(CASTS)), ids=CASTS)
def test_every_path_gives_the_bytes_of_the_decomposition(index: int) -> None:
    """The chip's conversions, integer arithmetic, and aten on the same device."""
    from mxnorm_pass.ops.kernels import hardware

    cast, dtype = CASTS[index], (BF16, F32)[index // 2 % 2]
    x = rows(224, 352, dtype)
    gain = torch.randn(352, device="cuda")
    given = (None, gain, gain.bfloat16())[index % 3]
    options = (given, "f32->f32" if index % 5 == 0 else "bf16->bf16")
    chip = launched(x, cast, hardware(x.device), *options)
    integer = launched(x, cast, 0, *options)
    expected = decomposition(x, root(x), given, None, options[1], cast)
    for got in (chip, integer):
        assert_same_bytes(got[1], expected[1], f"{cast} scale")
        if Cast.parse(cast).layout == "plain":
            assert_same_cast(got, expected, cast)
    finite = x.float().isfinite().all(0)
    assert int(finite.sum()) > 300
    assert_same_bytes(chip[0][finite], integer[0][finite], cast)


@pytest.mark.parametrize("m", [32, 96, 128, 160, 4096])
@pytest.mark.parametrize("k", [2, 32, 62, 64, 640, 2880, 4096])
def test_sizes(m: int, k: int) -> None:
    x = rows(m, k)
    for cast in (RCEIL, SWIZZLED):
        got = rmsnorm_mxquant_colwise(x, root(x), cast=cast, rounding="bf16->bf16")
        expected = decomposition(x, root(x), None, None, "bf16->bf16", cast)
        for a, b in zip(got, expected, strict=True):
            assert_same_bytes(a, b, f"{cast} {m} {k}")


@pytest.mark.parametrize("block", [16, 64, 128])
def test_blocks(block: int) -> None:
    for dtype in (BF16, F32):
        x = rows(5 * 128, 640, dtype)
        for layout in ("plain", "swizzled"):
            cast = f"e4m3/b{block}/floor/divide/clamp/{layout}"
            got = rmsnorm_mxquant_colwise(x, root(x), cast=cast, rounding="bf16->bf16")
            expected = decomposition(x, root(x), None, None, "bf16->bf16", cast)
            for a, b in zip(got, expected, strict=True):
                assert_same_bytes(a, b, cast)


def test_strided_rows_are_read_in_place() -> None:
    wide = rows(6 * 64, 1024).view(6, 64, 1024)
    view = wide[:, 3:35, 128:768]
    r = root(view)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    got = rmsnorm_mxquant_colwise(view, r, cast=SWIZZLED)
    assert torch.cuda.max_memory_allocated() - before < view.numel() * 1.5, "a copy was made"
    expected = rmsnorm_mxquant_colwise(view.contiguous(), r, cast=SWIZZLED)
    for a, b in zip(got, expected, strict=True):
        assert_same_bytes(a, b)


def test_offsets_beyond_32_bits() -> None:
    m, k = 270_016, 8192
    x = torch.zeros(m, k, device="cuda", dtype=BF16)
    x[-64:] = torch.randn(64, k, device="cuda")
    r = torch.ones(m, 1, device="cuda")
    got = rmsnorm_mxquant_colwise(x, r, cast=RCEIL)
    expected = rmsnorm_mxquant_colwise(x[-64:], r[-64:], cast=RCEIL)
    assert_same_bytes(got[0][:, -64:], expected[0])
    assert_same_bytes(got[1][:, -2:], expected[1])
    assert not bool(got[0][:, :-64].view(torch.uint8).any())


def test_padding_is_zeroed_on_every_replay() -> None:
    """Memory of a graph's pool is dirty from the second replay on."""
    x = rows(9 * 32, 2880)
    r, graph = root(x), torch.cuda.CUDAGraph()
    rmsnorm_mxquant_colwise(x, r, cast=SWIZZLED)
    with torch.cuda.graph(graph):
        _, scale = rmsnorm_mxquant_colwise(x, r, cast=SWIZZLED)
    expected = decomposition(x, r, None, None, "f32->f32", SWIZZLED)[1]
    for _ in range(3):
        scale.fill_(77)
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bytes(scale, expected)


def both(x: Tensor, gain: Tensor, cast: str = RCEIL) -> tuple[Tensor, ...]:
    """Both casts of a site; the other one has the gain, as where it is folded in the first."""
    x = x * 2
    qdata, scale, rstd = rmsnorm_mxquant(x, gain, cast=cast, rounding="bf16->bf16")
    columns = rmsnorm_mxquant_colwise(x, rstd, gain, cast=cast, rounding="bf16->bf16")
    return qdata, scale, *columns


@pytest.mark.parametrize(
    "options",
    [{}, {"cpp_wrapper": True}, {"triton.cudagraphs": True}],
    ids=["python", "cpp_wrapper", "cudagraphs"],
)
@pytest.mark.parametrize("cast", [RCEIL, SWIZZLED, NVFP4])
def test_compiled_is_eager_bit_for_bit(options: dict, cast: str) -> None:
    from torch._inductor.utils import run_and_get_code

    gain = torch.randn(2048, device="cuda").bfloat16()
    compiled = torch.compile(both, options=options, fullgraph=True)
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(4, 32, 2048, device="cuda").bfloat16()
        for a, b in zip(compiled(x, gain, cast), both(x, gain, cast), strict=True):
            assert_same_bytes(a.clone(), b)
    if not options:
        torch._dynamo.reset()
        _, (code,) = run_and_get_code(torch.compile(both), x, gain, cast)
        assert code.count(".run(") == 3 and "extern_kernels." not in code


def test_dynamic_rows_do_not_recompile() -> None:
    gain = torch.randn(2048, device="cuda").bfloat16()
    compiled = torch.compile(both, dynamic=True, fullgraph=True)
    x = torch.randn(4, 96, 2048, device="cuda").bfloat16()
    for axis in (0, 1):
        torch._dynamo.mark_dynamic(x, axis)
    compiled(x, gain)
    # A single block would be a compile of its own: torch tells sizes of one apart.
    with torch._dynamo.config.patch(error_on_recompile=True):
        for m, n in ((3, 64), (64, 33), (2, 1024), (8, 12)):
            x = torch.randn(m, n, 2048, device="cuda").bfloat16()
            for a, b in zip(compiled(x, gain), both(x, gain), strict=True):
                assert_same_bytes(a, b)


@pytest.mark.parametrize("cast", [RCEIL, SWIZZLED])
def test_no_rows(cast: str) -> None:
    gain = torch.randn(2048, device="cuda").bfloat16()
    x = torch.randn(0, 2048, device="cuda").bfloat16()
    for f in (both, torch.compile(both)):
        assert [t.numel() for t in f(x, gain, cast)[2:]] == [0, 0]


def test_odd_widths_take_the_decomposition() -> None:
    x = rows(64, 33)
    got = rmsnorm_mxquant_colwise(x, root(x), cast=RCEIL)
    for a, b in zip(got, decomposition(x, root(x), None, None, "f32->f32", RCEIL), strict=True):
        assert_same_bytes(a, b)
