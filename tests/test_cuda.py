"""The Triton kernels on a GPU: numbers of each path, and each way in which Inductor runs them."""

from __future__ import annotations

import pytest
import torch
from numerics import assert_same_bytes, assert_same_cast, differing, ulp_distance
from torch import Tensor

from mxnorm_pass.formats import ELEMENTS, RULES, Cast
from mxnorm_pass.ops import rmsnorm_mxquant
from mxnorm_pass.ops.rmsnorm_mxquant import ABSMAX_OP, add_decomposition, decomposition

pytestmark = pytest.mark.cuda

RCEIL = "e4m3/b32/rceil_log2/reciprocal/clamp/plain"
SWIZZLED = "e4m3/b32/rceil_exact/reciprocal/clamp/swizzled"
NVFP4 = "e2m1/b16/e4m3/reciprocal/clamp/swizzled"
F32 = (torch.float32, torch.float32)
CASTS = [
    f"{element}/b{16 if rule == 'e4m3' else 32}/{rule}/{rest}"
    for element in ELEMENTS
    for rule in RULES
    for rest in ("reciprocal/clamp/plain", "divide/bare/swizzled")
    if rule != "e4m3" or element == "e2m1"
]


def launched(
    x: Tensor,
    cast: str,
    hw: int,
    rms: str = "p2",
    gain: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple:
    """``dtype``: what is rounded to, before the gain and behind it."""
    from mxnorm_pass.ops.kernels import launch

    spec, rounding = Cast.parse(cast), (dtype, dtype)
    return launch.rmsnorm_mxquant(x, None, gain, None, None, 1e-5, rms, 0.41, rounding, spec, hw)[
        :3
    ]


def rows(m: int, k: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Rows of all magnitudes, with the special ones."""
    x = torch.randn(m, k, device="cuda") * torch.randn(m, 1, device="cuda").mul(4).exp()
    x = x.to(dtype)
    if m > 5:
        x[1] = 0
        x[2, 3], x[3, k // 2], x[4, 1] = float("nan"), float("inf"), float("-inf")
    return x


def agrees(got: tuple, expected: tuple, what: str) -> None:
    """Roots within 4 ulp; where they are equal, so is every byte.

    Sums run in another order (1 ulp), both divide their own way (1), and both take the chip's root
    (2 ulp by the CUDA programming guide's table).
    """
    (q, s, r), (eq, es, er) = got, expected
    r, er = r.reshape(-1), er.reshape(-1)
    finite = er.isfinite()
    assert torch.equal(r[~finite].isnan(), er[~finite].isnan()), what
    assert int(ulp_distance(r[finite], er[finite]).max()) <= 4, what
    same = (r == er) | (r.isnan() & er.isnan())
    assert bool(same.any()), what
    assert_same_cast((q[same], s[same]), (eq[same], es[same]), what)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cast", CASTS)
def test_the_chips_conversions_give_the_bytes_of_integer_arithmetic(
    cast: str, dtype: torch.dtype
) -> None:
    from mxnorm_pass.ops.kernels import hardware

    x = rows(128, 640)
    gain = torch.randn(640, device="cuda")
    for given in (None, gain, gain.to(dtype)):
        got = launched(x, cast, hardware(x.device), gain=given, dtype=dtype)
        expected = launched(x, cast, 0, gain=given, dtype=dtype)
        assert_same_bytes(got[2], expected[2], "rstd")
        assert_same_bytes(got[1], expected[1], "scale")
        if Cast.parse(cast).layout == "plain":
            assert_same_cast(got[:2], expected[:2], cast)
        else:
            finite = ~expected[2].reshape(-1).isnan()
            assert_same_bytes(got[0][finite], expected[0][finite], cast)


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_every_bfloat16_value_and_every_boundary(element: str) -> None:
    """Scaled by 1: blocks whose absmax is the element's largest value have byte 127."""
    from mxnorm_pass.ops.kernels import hardware

    top = ELEMENTS[element].max
    bf16 = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    powers = torch.exp2(torch.arange(-30, 17, dtype=torch.float32))
    near = (powers[:, None] * torch.tensor([1.0, 1.0625, 1.125, 1.25, 1.5, 1.75, 1.875])).view(-1)
    near = (near.view(torch.int32)[:, None] + torch.arange(-3, 4)).view(-1).view(torch.float32)
    values = torch.cat([bf16[bf16.abs() <= top], near[near <= top], -near[near <= top]])
    values = torch.nn.functional.pad(values, (0, -len(values) % 31)).view(-1, 31)
    x = torch.nn.functional.pad(values, (0, 1), value=top).cuda()
    x = torch.nn.functional.pad(x.reshape(-1), (0, -x.numel() % 512)).view(-1, 512)
    # A mean square of 1 - eps: rstd is 1, and what is cast is x itself.
    cast = f"{element}/b32/rceil_exact/reciprocal/clamp/plain"
    from mxnorm_pass.ops.kernels import launch

    for hw in (0, hardware(x.device)):
        # p1 with correction 0 gives mean square 0, eps 1: the root is 1.
        q, _, r, _ = launch.rmsnorm_mxquant(
            x, None, None, None, None, 1.0, "p1", 0.0, F32, Cast.parse(cast), hw
        )
        assert bool((r == 1).all())
        expected = decomposition(x.cpu(), None, None, None, 1.0, "p1", 0.0, "f32->f32", cast)
        assert_same_bytes(q.cpu(), expected[0], f"{element} hw={hw}")


@pytest.mark.parametrize("k", [32, 96, 640, 2880, 3584, 4096, 5120, 8192, 12288, 16384, 32768])
@pytest.mark.parametrize("rms", ["p1", "p2", "exact"])
def test_all_widths_agree_with_the_decomposition(k: int, rms: str) -> None:
    x = rows(64, k)
    expected = decomposition(x, None, None, None, 1e-5, rms, 0.41, "f32->f32", RCEIL)
    agrees(launched(x, RCEIL, 1, rms), expected, f"{k} {rms}")


def test_rows_do_not_depend_on_how_many_there_are() -> None:
    """One configuration per width: a recomputed forward gives the same bytes."""
    x = rows(300, 5120)
    whole = rmsnorm_mxquant(x, cast=RCEIL)
    for i in (0, 7, 299):
        for a, b in zip(whole, rmsnorm_mxquant(x[i : i + 1], cast=RCEIL), strict=True):
            assert_same_bytes(a[i : i + 1], b)


def test_strided_rows_are_read_in_place() -> None:
    wide = rows(6 * 50, 1024).view(6, 50, 1024)
    gain = torch.randn(640, device="cuda").bfloat16()
    before = torch.cuda.memory_allocated()
    view = wide[:, 3:40, 128:768]
    torch.cuda.reset_peak_memory_stats()
    got = rmsnorm_mxquant(view, gain, cast=SWIZZLED, rounding="bf16->bf16")
    assert torch.cuda.max_memory_allocated() - before < view.numel() * 2, "a copy was made"
    expected = rmsnorm_mxquant(view.contiguous(), gain, cast=SWIZZLED, rounding="bf16->bf16")
    for a, b in zip(got, expected, strict=True):
        assert_same_bytes(a, b)


def test_offsets_beyond_32_bits() -> None:
    m, k = 270_000, 8192
    x = torch.zeros(m, k, device="cuda", dtype=torch.bfloat16)
    x[-1] = torch.randn(k, device="cuda")
    q, s, r = rmsnorm_mxquant(x, cast=RCEIL)
    for got, expected in zip((q, s, r), rmsnorm_mxquant(x[-1:], cast=RCEIL), strict=True):
        assert_same_bytes(got[-1:], expected)


def test_padding_is_zeroed_on_every_replay() -> None:
    """Memory of a graph's pool is dirty from the second replay on."""
    x = rows(130, 2880)
    graph = torch.cuda.CUDAGraph()
    rmsnorm_mxquant(x, cast=SWIZZLED)
    with torch.cuda.graph(graph):
        _, scale, _ = rmsnorm_mxquant(x, cast=SWIZZLED)
    expected = decomposition(x, None, None, None, 1e-6, "exact", 1.0, "f32->f32", SWIZZLED)[1]
    padding = (
        decomposition(
            torch.ones_like(x), None, None, None, 0.0, "exact", 1.0, "f32->f32", SWIZZLED
        )[1]
        == 0
    )
    assert int(padding.sum()) > 0 and expected.shape == scale.shape
    for _ in range(3):
        scale.fill_(77)
        graph.replay()
        torch.cuda.synchronize()
        assert not bool(scale[padding].any())
        assert not bool((scale[~padding] == 77).any())


def op(x: Tensor, gain: Tensor, cast: str = RCEIL) -> tuple[Tensor, ...]:
    return rmsnorm_mxquant(x * 2, gain, cast=cast, rounding="bf16->bf16")


@pytest.mark.parametrize(
    "options",
    [{}, {"cpp_wrapper": True}, {"triton.cudagraphs": True}],
    ids=["python", "cpp_wrapper", "cudagraphs"],
)
@pytest.mark.parametrize("cast", [RCEIL, SWIZZLED, NVFP4])
def test_compiled_is_eager_bit_for_bit(options: dict, cast: str) -> None:
    gain = torch.randn(2048, device="cuda").bfloat16()
    compiled = torch.compile(op, options=options, fullgraph=True)
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(4, 32, 2048, device="cuda").bfloat16()
        for a, b in zip(compiled(x, gain, cast), op(x, gain, cast), strict=True):
            assert_same_bytes(a.clone(), b)


def test_the_generated_code_has_one_kernel_of_ours_and_the_product_before_it() -> None:
    from torch._inductor.utils import run_and_get_code

    x = torch.randn(64, 2048, device="cuda").bfloat16()
    gain = torch.randn(2048, device="cuda").bfloat16()
    _, (code,) = run_and_get_code(torch.compile(op), x, gain)
    assert code.count("rmsnorm_mxquant_kernel_0.run(") == 1
    assert code.count(".run(") == 2
    assert "extern_kernels." not in code


def test_dynamic_rows_do_not_recompile() -> None:
    gain = torch.randn(2048, device="cuda").bfloat16()
    compiled = torch.compile(op, dynamic=True, fullgraph=True)
    x = torch.randn(5, 9, 2048, device="cuda").bfloat16()
    torch._dynamo.mark_dynamic(x, 0)
    compiled(x, gain)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for m, n in ((3, 7), (64, 33), (2, 1024)):
            x = torch.randn(m, n, 2048, device="cuda").bfloat16()
            for a, b in zip(compiled(x, gain), op(x, gain), strict=True):
                assert_same_bytes(a, b)


@pytest.mark.parametrize("cast", [RCEIL, SWIZZLED])
def test_no_rows(cast: str) -> None:
    gain = torch.randn(2048, device="cuda").bfloat16()
    x = torch.randn(0, 2048, device="cuda").bfloat16()
    for f in (op, torch.compile(op), torch.compile(op, dynamic=True)):
        assert [t.numel() for t in f(x, gain, cast)] == [0, 0, 0]


def test_the_residual_is_added_in_the_kernel_or_before_it() -> None:
    from torch._inductor.utils import run_and_get_code

    a = torch.randn(64, 2048, device="cuda").bfloat16()
    b = torch.randn(64, 2048, device="cuda").bfloat16()

    def plain(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return rmsnorm_mxquant(a, residual=b, cast=RCEIL)

    def computed(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return rmsnorm_mxquant(torch.sigmoid(a), residual=b, cast=RCEIL)

    for f, kernels in ((plain, 1), (computed, 2)):
        got, (code,) = run_and_get_code(torch.compile(f), a, b)
        assert code.count(".run(") == kernels
        if f is plain:
            for x, y in zip(got, f(a, b), strict=True):
                assert_same_bytes(x, y)
    expected = add_decomposition(a, b, None, None, None, 1e-6, "p2", 0.4185051, "f32->f32", RCEIL)
    got = plain(a, b)
    assert_same_bytes(got[3], expected[3])
    agrees(got[:3], expected[:3], "residual")


def test_the_largest_value_of_all_takes_two_launches_and_a_scalar_kernel() -> None:
    x, gain = rows(300, 4096)[5:], torch.randn(4096, device="cuda").bfloat16()
    options = (gain, None, 1e-5, "p2", 0.4688, "bf16->bf16", 16)
    expected = ABSMAX_OP(x.cpu(), gain.cpu(), *options[1:])
    assert ABSMAX_OP(x, *options).item() == pytest.approx(expected.item(), rel=2**-7)

    def scaled(x: Tensor) -> Tensor:
        return ABSMAX_OP(x, *options) / (448 * 6)

    assert_same_bytes(torch.compile(scaled)(x), scaled(x))
    x[17, 5] = float("nan")
    assert ABSMAX_OP(x, *options).isnan()


def test_aten_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.utils import run_and_get_code

    x = torch.randn(64, 2048, device="cuda").bfloat16()
    gain = torch.randn(2048, device="cuda").bfloat16()
    ours = op(x, gain)
    monkeypatch.setenv("MXNORM_KERNEL", "aten")
    got, (code,) = run_and_get_code(torch.compile(op), x, gain)
    assert "rmsnorm_mxquant_kernel" not in code
    # Inductor leaves out the roundings to bfloat16 in between.
    assert float(differing(got[0], ours[0]).float().mean()) < 0.1
    monkeypatch.setenv("MXNORM_KERNEL", "cutlass")
    with pytest.raises(ValueError, match="allowed are 'triton', 'aten'"):
        op(x, gain)
