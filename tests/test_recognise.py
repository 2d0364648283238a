"""What is a site, what is not, and the reason that is given."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from compiling import graphs, run
from models import (
    EMULATED,
    FORMS,
    AutogradMXLinear,
    Block,
    Norm,
    inference_block,
    make_norm,
    rows,
    training_block,
)
from numerics import assert_same_bytes, sqnr
from torch import Tensor, nn
from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
from torchao.prototype.mx_formats.config import ScaleCalculationMode

from mxnorm_pass import MXNormConfig, explain
from mxnorm_pass.reference import MXNormLinear
from mxnorm_pass.testing import assert_rewrites

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
EXACT = MXNormConfig(rms="exact", strict=True)


def mx_linear(k: int, n: int) -> nn.Module:
    return MXFP8Linear(k, n, bias=False, kernel_preference=EMULATED).to(torch.bfloat16)


def one_linear(norm: nn.Module, k: int = 128) -> Block:
    torch.manual_seed(0)
    return Block(norm, [mx_linear(k, 64)])


@pytest.mark.parametrize("form", FORMS)
def test_forms_in_inference(form: str) -> None:
    """One op for both linears, gain in the kernel, and with the true RMS the same numbers."""
    block, x = inference_block(form), rows(2, 32, 128)
    plain = run(block, x, training=False, off=True)
    exact = run(block, x, training=False, config=EXACT)
    (site,) = exact.report.sites
    assert site.status == "rewritten", site
    assert site.consumers == ["linears.0", "linears.1"]
    assert site.spec["gain"] == {"bare": "none", "gemma": "1+w"}.get(form, "w")
    assert site.spec["gain_at"] == ("none" if form == "bare" else "kernel")
    assert site.spec["eps"] == pytest.approx(1e-6, rel=1e-6)
    assert site.spec["k"] == 128
    for a, b in zip(plain.outputs, exact.outputs, strict=True):
        if form in ("gemma4", "reciprocal_sqrt", "sqrt_division", "sum_over_k"):
            # pow, 1/sqrt and a division differ from rsqrt by an ulp of float32, which moves a
            # bfloat16 value in a few thousand by one ulp: far below the cast's own noise of about
            # 28 dB.
            assert sqnr(a, b) > 45
        else:
            assert torch.equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["torch", "gemma", "sqrt_division", "bare"])
def test_forms_in_training(form: str) -> None:
    """Gradients of row and gain under the true RMS are those of the unrewritten graph."""
    block, x = training_block(form, widths=(64,)), rows(2, 32, 128)
    plain, exact = run(block, x, off=True), run(block, x, config=EXACT)
    assert exact.report.rewritten == 1
    assert set(plain.gradients) == set(exact.gradients)
    for name, gradient in plain.gradients.items():
        if form == "sqrt_division":
            assert sqnr(gradient, exact.gradients[name]) > 40, name
        else:
            assert torch.equal(gradient, exact.gradients[name]), name


@pytest.mark.parametrize("element", [E4M3, E5M2])
@pytest.mark.parametrize("mode", list(ScaleCalculationMode))
def test_cast_modes(mode: ScaleCalculationMode, element: torch.dtype) -> None:
    """All of torchao's scale modes keep their bytes: output bitwise the unrewritten graph's."""
    block = inference_block("torch", widths=(64,), mode=mode, element=element)
    x = rows(64, 128) * torch.exp2(torch.arange(64.0) - 32).unsqueeze(-1).to(torch.bfloat16)
    plain = run(block, x, training=False, off=True)
    exact = run(block, x, training=False, config=EXACT)
    (site,) = exact.report.sites
    rule = mode.value if mode is not ScaleCalculationMode.RCEIL else "rceil_log2"
    assert (site.spec["scale_rule"], site.spec["element"]) == (
        rule,
        "e4m3" if element is E4M3 else "e5m2",
    )
    # FLOOR and CEIL overflow e5m2 to Inf, with and without the pass: compare bytes.
    assert_same_bytes(exact.outputs[0], plain.outputs[0])


@pytest.mark.parametrize("mode", [ScaleCalculationMode.FLOOR, ScaleCalculationMode.EVEN])
def test_cast_modes_fold_in_training(mode: ScaleCalculationMode) -> None:
    """Folded output and gradients against the oracle, for chains that are no RCEIL."""
    block = training_block(
        "torch", widths=(64,), linear=lambda k, n: AutogradMXLinear(k, n, E5M2, mode)
    )
    x = rows(2, 32, 128)
    result = run(block, x)
    (site,) = result.report.sites
    assert site.spec["gain_at"] == "fold"
    from mxnorm_pass.formats import Cast

    cast = Cast("e5m2", 32, mode.value, "divide", site.spec["saturate"])
    oracle = MXNormLinear(block.norm.weight.detach(), block.linears[0].weight.detach(), cast=cast)
    xo = x.clone().requires_grad_()
    out = oracle(xo)
    assert_same_bytes(result.outputs[0], out)
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(out.dtype))
    assert_same_bytes(result.gradients["input0"], xo.grad)
    assert_same_bytes(result.gradients["norm.weight"], oracle.gain.grad)
    assert_same_bytes(result.gradients["linears.0.weight"], oracle.weight.grad)


class Spelled(nn.Module):
    """F.rms_norm called in one of its spellings, and its residual stream returned."""

    def __init__(self, spelling: str):
        super().__init__()
        self.weight = nn.Parameter(1 + 0.3 * torch.randn(128))
        self.linear = mx_linear(128, 64)
        self.spelling = spelling

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        x = a + b
        if self.spelling == "defaults":
            y = F.rms_norm(x, [128])
        elif self.spelling == "positional":
            y = F.rms_norm(x, [128], self.weight, None)
        elif self.spelling == "keywords":
            y = F.rms_norm(input=x, normalized_shape=(128,), weight=self.weight, eps=1e-5)
        elif self.spelling == "reshaped":
            y = F.rms_norm(x.view(-1, 128), [128], self.weight, 1e-5).view(x.shape)
        else:
            y = F.rms_norm(x.float(), [128], self.weight.float(), 1e-5).to(torch.bfloat16)
        return self.linear(y), x


@pytest.mark.parametrize("spelling", ["defaults", "positional", "keywords", "reshaped", "upcast"])
def test_spellings_of_rms_norm(spelling: str) -> None:
    """Every spelling is a site, and the residual stream keeps its value bit for bit."""
    torch.manual_seed(0)
    model = Spelled(spelling).to(torch.bfloat16)
    a, b = rows(2, 32, 128), rows(2, 32, 128, seed=1)
    with torch.no_grad():
        result = run(model, a, b, training=False, config=EXACT)
        plain = run(model, a, b, training=False, off=True)
    assert result.report.rewritten == 1
    eps = 1.1920928955078125e-07 if spelling in ("defaults", "positional") else 1e-5
    assert result.report.sites[0].spec["eps"] == pytest.approx(eps, rel=1e-6)
    assert torch.equal(result.outputs[0], plain.outputs[0])
    assert torch.equal(result.outputs[1], a + b)


@pytest.mark.parametrize("shape", [(128,), (32, 128), (2, 16, 128), (2, 2, 8, 128)])
def test_ranks(shape: tuple[int, ...]) -> None:
    block = inference_block("llama", widths=(64,))
    x = rows(*shape)
    plain = run(block, x, training=False, off=True)
    exact = run(block, x, training=False, config=EXACT)
    assert exact.report.rewritten == 1
    assert torch.equal(plain.outputs[0], exact.outputs[0])


@pytest.mark.parametrize("layout", ["sliced", "transposed", "expanded"])
def test_layouts(layout: str) -> None:
    """A row that is a view of something else gives what its contiguous copy gives."""

    class Viewed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = inference_block("torch", widths=(64,))

        def forward(self, x: Tensor) -> Tensor:
            if layout == "sliced":
                x = x[..., 64:192]
            elif layout == "transposed":
                x = x.transpose(0, 1)
            else:
                x = x.expand(4, *x.shape)
            return self.block(x)[0]

    wide = rows(2, 16, 256) if layout == "sliced" else rows(2, 16, 128)
    model = Viewed()
    plain = run(model, wide, training=False, off=True)
    exact = run(model, wide, training=False, config=EXACT)
    assert exact.report.rewritten == 1
    assert torch.equal(plain.outputs[0], exact.outputs[0])


@pytest.mark.parametrize(
    ("x_dtype", "gain_dtype"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float32),
    ],
)
@pytest.mark.parametrize("form", ["torch", "llama"])
def test_mixed_dtypes(form: str, x_dtype: torch.dtype, gain_dtype: torch.dtype) -> None:
    """The graph's own dtypes and roundings are kept: bitwise under the true RMS."""
    block = one_linear(make_norm(form, 128, dtype=gain_dtype))
    x = rows(64, 128, dtype=x_dtype)
    block.linears[0].to(block.norm(x).dtype)
    plain = run(block, x, training=False, off=True)
    exact = run(block, x, training=False, config=EXACT)
    assert exact.report.rewritten == 1, exact.report
    assert torch.equal(plain.outputs[0], exact.outputs[0])


def test_autocast() -> None:
    """float32 parameters, bfloat16 products: the norm reads what a linear under autocast gives."""
    block = one_linear(make_norm("torch", 128, dtype=torch.float32))
    before, x = nn.Linear(128, 128), rows(64, 128, dtype=torch.float32)

    def call(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return block.linears[0](block.norm(before(x)).to(torch.bfloat16))

    plain = run(call, x, training=False, off=True)
    exact = run(call, x, training=False, config=EXACT)
    assert exact.report.rewritten == 1
    assert torch.equal(plain.outputs[0], exact.outputs[0])


def test_changed_eps_changes_the_result() -> None:
    """eps is part of what is recognised, also as an input under dynamic shapes."""
    x = rows(64, 128) * 1e-3
    outputs = []
    for eps in (1e-6, 1e-2):
        block = inference_block("llama", widths=(64,))
        block.norm.eps = eps
        result = run(block, x, training=False, config=EXACT, dynamic=True)
        assert result.report.rewritten == 1
        assert torch.equal(
            result.outputs[0], run(block, x, training=False, off=True, dynamic=True).outputs[0]
        )
        outputs.append(result.outputs[0])
    assert sqnr(outputs[0], outputs[1]) < 5


def test_fp16_is_declined() -> None:
    """torchao's cast takes no float16; a float16 row widened by hand is declined all the same."""

    def form(x: Tensor, w: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x.half(), (x.shape[-1],), w.half(), eps).bfloat16()

    report = explain(one_linear(Norm(form, 128).bfloat16()), rows(64, 128), training=False)
    assert [(s.status, s.reason) for s in report.sites] == [("declined", "unsupported_dtype")]


def test_blocks_across_rows_are_declined() -> None:
    """A cast over blocks of 32 of rows of 48: the absmax of a block is not within one row."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.RMSNorm(48, eps=1e-6)
            self.linear = mx_linear(96, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(self.norm(x.view(-1, 2, 48)).view(-1, 96))

    report = explain(Heads().bfloat16(), rows(64, 96), training=False)
    assert [(s.status, s.reason) for s in report.sites] == [("declined", "k_not_multiple")]


def test_per_head_norm_is_a_site_of_its_own() -> None:
    """Heads of 64 in rows of 128: whole blocks, so the cast of the flattened rows can be served."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.RMSNorm(64, eps=1e-6)
            self.linear = mx_linear(128, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(self.norm(x.view(-1, 2, 64)).view(-1, 128))

    model, x = Heads().bfloat16(), rows(64, 128)
    plain = run(model, x, training=False, off=True)
    exact = run(model, x, training=False, config=EXACT)
    assert exact.report.rewritten == 1
    assert torch.equal(plain.outputs[0], exact.outputs[0])


def test_graph_break_has_its_own_reason() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.RMSNorm(128), mx_linear(128, 64)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x)
            torch._dynamo.graph_break()
            return self.linear(y)

    report = explain(Broken().bfloat16(), rows(64, 128), training=False)
    assert [(s.reason, s.consumers) for s in report.sites] == [("graph_input", ["linear"])]


def test_no_norm_is_no_site() -> None:
    """A cast without a norm and a norm without a cast are no sites."""

    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.final, self.one = nn.RMSNorm(128), mx_linear(128, 128)
            self.head = nn.Linear(128, 32)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.final(x + self.one(F.silu(x))))

    report = assert_rewrites(Other().bfloat16(), rows(64, 128), 0, training=False)
    assert report.sites == []
    assert "Nothing to rewrite" in str(report)


MOVED = {
    "columns": lambda y: y[:, :64].contiguous(),
    "joined": lambda y: torch.cat([y, torch.zeros_like(y)]),
}


@pytest.mark.parametrize("move", MOVED)
def test_moved_rows_are_declined(move: str) -> None:
    """Parts of rows, and joins: no miss in silence, no failure, numbers untouched."""
    norm = make_norm("torch", 128)
    k = 64 if move == "columns" else 128
    linear = mx_linear(k, 64)

    def call(x: Tensor) -> Tensor:
        return linear(MOVED[move](norm(x)))

    result = run(call, rows(64, 128), training=False)
    assert [s.reason for s in result.report.sites] == ["reordered"], result.report
    plain = run(call, rows(64, 128), training=False, off=True)
    assert_same_bytes(result.outputs[0], plain.outputs[0])


@pytest.mark.parametrize("shape", [(1, 128), (1, 1, 128)])
def test_gain_kept_with_leading_ones(shape: tuple[int, ...]) -> None:
    norm = make_norm("llama", 128)
    norm.weight = nn.Parameter(norm.weight.detach().view(shape))
    block, x = one_linear(norm), rows(2, 32, 128)
    exact = run(block, x, config=EXACT)
    plain = run(block, x, off=True)
    assert exact.report.rewritten == 1
    assert_same_bytes(exact.outputs[0], plain.outputs[0])
    assert_same_bytes(exact.gradients["norm.weight"], plain.gradients["norm.weight"])


def test_post_norm_is_declined() -> None:
    """The cast reads the residual stream, to which a norm's output was added."""

    class Post(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.post, self.linear = nn.RMSNorm(128), mx_linear(128, 64)

        def forward(self, x: Tensor, h: Tensor) -> Tensor:
            return self.linear(x + self.post(h))

    report = explain(Post().bfloat16(), rows(64, 128), rows(64, 128, seed=1), training=False)
    assert [(s.status, s.reason) for s in report.sites] == [("declined", "extra_operand")]


def test_readers_without_a_cast_see_the_same_estimate() -> None:
    """A router and a gate read x * rstd * g; the MX linear's gain is folded and theirs is not."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = make_norm("torch", 768)
            self.mx = mx_linear(768, 64)
            self.router, self.gate = nn.Linear(768, 8, bias=False), nn.Linear(768, 1, bias=False)

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            y = self.norm(x)
            return self.mx(y), self.router(y), self.gate(y)

    torch.manual_seed(0)
    model, x = Mixed().bfloat16(), rows(64, 768)
    result = run(model, x)
    (site,) = result.report.sites
    assert site.spec["gain_at"] == "fold"
    assert site.consumers == ["mx"] and site.also_read_by == ["router", "gate"]
    from mxnorm_pass import reference

    rho = reference.rstd(x, 1e-6)
    y = reference.normalise(x, rho, model.norm.weight)
    assert torch.equal(result.outputs[1], F.linear(y, model.router.weight))
    assert torch.equal(result.outputs[2], F.linear(y, model.gate.weight))


def cast_matmul(y: Tensor, weight: Tensor, block: int, mode: ScaleCalculationMode) -> Tensor:
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    a, b = (MXTensor.to_mx(t, E4M3, block, mode) for t in (y, weight))
    return torch.mm(a, b.t())


class TwoCasts(nn.Module):
    """One norm, cast in two ways."""

    def __init__(self, *casts: tuple[int, ScaleCalculationMode]):
        super().__init__()
        self.norm, self.casts = make_norm("torch", 128), casts
        self.weight = nn.Parameter(rows(64, 128))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.norm(x)
        return tuple(cast_matmul(y, self.weight, *cast) for cast in self.casts)


def test_two_scale_modes_make_two_ops() -> None:
    """One norm and one op per distinct cast; both keep their bytes, and share one rstd."""
    model = TwoCasts((32, ScaleCalculationMode.FLOOR), (32, ScaleCalculationMode.RCEIL))
    x = rows(64, 128)
    plain = run(model, x, training=False, off=True)
    exact = run(model, x, training=False, config=EXACT)
    assert [s.spec["scale_rule"] for s in exact.report.sites] == ["floor", "rceil_log2"]
    assert exact.report.rewritten == 2
    for a, b in zip(exact.outputs, plain.outputs, strict=True):
        assert_same_bytes(a, b)


def test_two_block_sizes_share_no_rstd() -> None:
    """The estimate depends on the block size: the second cast stays, on the first one's rstd."""
    model = TwoCasts((32, ScaleCalculationMode.RCEIL), (16, ScaleCalculationMode.RCEIL))
    x = rows(64, 128)
    result = run(model, x, training=False)
    assert [s.reason for s in result.report.sites] == [None, "block_size_conflict"]
    from mxnorm_pass import reference

    y = reference.normalise(x, reference.rstd(x, 1.2e-7), model.norm.weight)
    expected = cast_matmul(y, model.weight, 16, ScaleCalculationMode.RCEIL)
    assert sqnr(expected, result.outputs[1]) > 40


ELEMENTS = {"e2m3": "fp6_e2m3", "e3m2": "fp6_e3m2", "e2m1": torch.float4_e2m1fn_x2}


@pytest.mark.parametrize(
    "element", [pytest.param(e, marks=[] if e == "e2m1" else pytest.mark.long) for e in ELEMENTS]
)
def test_narrow_elements_in_training(element: str) -> None:
    """MXFP6 codes dequantise in plain ops, so a gain folds; packed MXFP4 keeps it in the op."""
    block = training_block(
        "llama",
        widths=(64,),
        linear=lambda k, n: AutogradMXLinear(k, n, ELEMENTS[element], ScaleCalculationMode.RCEIL),
    )
    x = rows(64, 128)
    exact, plain = run(block, x, config=EXACT), run(block, x, off=True)
    assert exact.report.sites[0].spec["element"] == element
    for name, gradient in plain.gradients.items():
        assert_same_bytes(exact.gradients[name], gradient, name)
    assert_same_bytes(exact.outputs[0], plain.outputs[0])
    folded = run(block, x)
    assert folded.report.sites[0].spec["gain_at"] == ("kernel" if element == "e2m1" else "fold")


@pytest.mark.parametrize("mode", ScaleCalculationMode, ids=lambda mode: mode.name)
def test_mxfp4_in_inference(mode: ScaleCalculationMode) -> None:
    block = inference_block("llama", widths=(64,), element=torch.float4_e2m1fn_x2, mode=mode)
    x = rows(64, 128)
    exact = run(block, x, config=EXACT, training=False)
    plain = run(block, x, off=True, training=False)
    spec = exact.report.sites[0].spec
    assert (exact.report.rewritten, spec["format"]) == (1, "MXFP4")
    assert_same_bytes(exact.outputs[0], plain.outputs[0])


def test_regrouped_symbolic_sizes() -> None:
    """Two symbolic leading axes that the cast regroups: right numbers or a reason, no failure."""

    class Regrouped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = make_norm("llama", 128)

        def forward(self, x: Tensor) -> Tensor:
            from torchao.prototype.mx_formats.mx_tensor import to_mx

            y = self.norm(x).view(x.shape[1] // 2, x.shape[0] * 2, 128)
            scale, data = to_mx(y, E4M3, 32, ScaleCalculationMode.RCEIL)
            scale = scale.float().repeat_interleave(32, -1).view(-1, 128)
            flat = data.float().view(-1, 128) * scale
            return flat @ flat.T

    # dynamic=True would make the cast's own 448 an input, which is a reason of its own.
    model, x = Regrouped(), rows(6, 8, 128)
    marked = x.clone()
    for axis in (0, 1):
        torch._dynamo.mark_dynamic(marked, axis)
    capture = graphs(model, marked, training=False, config=MXNormConfig(rms="exact"))
    assert capture.report.sites[0].reason in (None, "dynamic_shape")
    under_true = run(model, x, training=False, config=MXNormConfig(rms="exact"), dynamic=True)
    assert [s.reason for s in under_true.report.sites] == ["scale_rule"]
    assert "mark_dynamic" in under_true.report.sites[0].detail
    plain = run(model, x, training=False, off=True, dynamic=True)
    assert_same_bytes(under_true.outputs[0], plain.outputs[0])


def test_include_and_exclude() -> None:
    block, x = inference_block("llama", widths=(64,)), rows(64, 128)
    left = run(block, x, training=False, config=MXNormConfig(exclude=("norm",)))
    assert [s.reason for s in left.report.sites] == ["excluded"]
    other = run(block, x, training=False, config=MXNormConfig(include=("*.mlp.*",)))
    assert [s.reason for s in other.report.sites] == ["excluded"]
    hit = run(block, x, training=False, config=MXNormConfig(include="no*", exclude="none"))
    assert [s.status for s in hit.report.sites] == ["rewritten"]
