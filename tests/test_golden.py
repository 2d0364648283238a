"""Graphs before and after the pass, for eyes; EXPECTTEST_ACCEPT=1 rewrites them.

The listings are those of torch 2.13, whose graphs differ in places from those of other versions.
"""

from __future__ import annotations

import difflib

import expecttest
import pytest
import torch.distributed as dist
from compiling import graphs, listing
from models import inference_block, rows, training_block
from test_sharded import WORLD, along, trained
from torch.fx import Graph
from torch.testing._internal.distributed.fake_pg import FakeStore

from mxnorm_pass.compat import TORCH_VERSION

pytestmark = pytest.mark.skipif(TORCH_VERSION != (2, 13), reason="listings of torch 2.13")


class TestGolden(expecttest.TestCase):
    """Graphs before and after, for eyes; EXPECTTEST_ACCEPT=1 rewrites them."""

    maxDiff = None

    def test_inference(self) -> None:
        capture = graphs(inference_block("llama", widths=(64,)), rows(64, 128), training=False)
        self.assertExpectedInline(
            _until(listing(capture.before[0]), "convert_element_type_7"),
            """\
arg0_1: bfloat16[128] = placeholder
arg1_1: bfloat16[64, 128] = placeholder
arg2_1: float8_e4m3fn[64, 128] = placeholder
arg3_1: float8_e8m0fnu[32, 16] = placeholder
convert_element_type: float32[64, 128] = prims.convert_element_type.default(arg1_1, float32)
pow_1: float32[64, 128] = aten.pow.Tensor_Scalar(convert_element_type, 2)
mean: float32[64, 1] = aten.mean.dim(pow_1, [-1], True)
add: float32[64, 1] = aten.add.Tensor(mean, 1e-06)
rsqrt: float32[64, 1] = aten.rsqrt.default(add)
mul: float32[64, 128] = aten.mul.Tensor(convert_element_type, rsqrt)
convert_element_type_1: bfloat16[64, 128] = prims.convert_element_type.default(mul, bfloat16)
mul_1: bfloat16[64, 128] = aten.mul.Tensor(arg0_1, convert_element_type_1)
permute: float8_e4m3fn[128, 64] = aten.permute.default(arg2_1, [1, 0])
permute_1: float8_e8m0fnu[16, 32] = aten.permute.default(arg3_1, [1, 0])
view: bfloat16[64, 4, 32] = aten.view.default(mul_1, [64, 4, 32])
abs_1: bfloat16[64, 4, 32] = aten.abs.default(view)
amax: bfloat16[64, 4] = aten.amax.default(abs_1, [-1])
unsqueeze: bfloat16[64, 4, 1] = aten.unsqueeze.default(amax, -1)
convert_element_type_2: float32[64, 4, 32] = prims.convert_element_type.default(view, float32)
convert_element_type_3: float32[64, 4, 1] = prims.convert_element_type.default(unsqueeze, float32)
div: float32[64, 4, 1] = aten.div.Tensor(convert_element_type_3, 448)
isnan: bool[64, 4, 1] = aten.isnan.default(div)
isinf: bool[64, 4, 1] = aten.isinf.default(div)
log2: float32[64, 4, 1] = aten.log2.default(div)
ceil: float32[64, 4, 1] = aten.ceil.default(log2)
clamp_min: float32[64, 4, 1] = aten.clamp_min.default(ceil, -127)
clamp_max: float32[64, 4, 1] = aten.clamp_max.default(clamp_min, 127)
add_1: float32[64, 4, 1] = aten.add.Tensor(clamp_max, 127)
convert_element_type_4: uint8[64, 4, 1] = prims.convert_element_type.default(add_1, uint8)
scalar_tensor: uint8[] = aten.scalar_tensor.default(254, dtype=uint8, layout=torch.strided, device=cpu)
where: uint8[64, 4, 1] = aten.where.self(isinf, scalar_tensor, convert_element_type_4)
scalar_tensor_1: uint8[] = aten.scalar_tensor.default(255, dtype=uint8, layout=torch.strided, device=cpu)
where_1: uint8[64, 4, 1] = aten.where.self(isnan, scalar_tensor_1, where)
eq: bool[64, 4, 1] = aten.eq.Scalar(where_1, 255)
eq_1: bool[64, 4, 1] = aten.eq.Scalar(where_1, 254)
eq_2: bool[64, 4, 1] = aten.eq.Scalar(where_1, 0)
convert_element_type_5: float32[64, 4, 1] = prims.convert_element_type.default(where_1, float32)
sub: float32[64, 4, 1] = aten.sub.Tensor(127, convert_element_type_5)
exp2: float32[64, 4, 1] = aten.exp2.default(sub)
scalar_tensor_2: float32[] = aten.scalar_tensor.default(1, dtype=float32, layout=torch.strided, device=cpu)
where_2: float32[64, 4, 1] = aten.where.self(eq_2, scalar_tensor_2, exp2)
scalar_tensor_3: float32[] = aten.scalar_tensor.default(5.87747175e-39, dtype=float32, layout=torch.strided, device=cpu)
where_3: float32[64, 4, 1] = aten.where.self(eq_1, scalar_tensor_3, where_2)
where_4: float32[64, 4, 1] = aten.where.self(eq, div, where_3)
mul_2: float32[64, 4, 32] = aten.mul.Tensor(convert_element_type_2, where_4)
clamp_min_1: float32[64, 4, 32] = aten.clamp_min.default(mul_2, -448)
clamp_max_1: float32[64, 4, 32] = aten.clamp_max.default(clamp_min_1, 448)
convert_element_type_6: float8_e4m3fn[64, 4, 32] = prims.convert_element_type.default(clamp_max_1, float8_e4m3fn)
view_1: float8_e4m3fn[64, 128] = aten.view.default(convert_element_type_6, [64, 128])
view_2: float8_e8m0fnu[64, 4, 1] = aten.view.dtype(where_1, float8_e8m0fnu)
squeeze: float8_e8m0fnu[64, 4] = aten.squeeze.dim(view_2, -1)
""",
        )
        self.assertExpectedInline(
            _until(listing(capture.after[0]), "convert_element_type_7"),
            """\
arg0_1: bfloat16[128] = placeholder
arg1_1: bfloat16[64, 128] = placeholder
arg2_1: float8_e4m3fn[64, 128] = placeholder
arg3_1: float8_e8m0fnu[32, 16] = placeholder
rmsnorm_mxquant = mxnorm.rmsnorm_mxquant.default(arg1_1, arg0_1, None, None, 1e-06, p2, 0.418505105, bf16->bf16, e4m3/b32/rceil_log2/reciprocal/clamp/plain)
scale: uint8[64, 4] = getitem(rmsnorm_mxquant, 1)
view_default_1: uint8[64, 4, 1] = aten.view.default(scale, [64, 4, 1])
qdata: float8_e4m3fn[64, 128] = getitem(rmsnorm_mxquant, 0)
view_default: float8_e4m3fn[64, 4, 32] = aten.view.default(qdata, [64, 4, 32])
permute: float8_e4m3fn[128, 64] = aten.permute.default(arg2_1, [1, 0])
permute_1: float8_e8m0fnu[16, 32] = aten.permute.default(arg3_1, [1, 0])
view_1: float8_e4m3fn[64, 128] = aten.view.default(view_default, [64, 128])
view_2: float8_e8m0fnu[64, 4, 1] = aten.view.dtype(view_default_1, float8_e8m0fnu)
squeeze: float8_e8m0fnu[64, 4] = aten.squeeze.dim(view_2, -1)
""",
        )

    def test_training(self) -> None:
        block = training_block("torch", widths=(64,))
        capture = graphs(block, rows(64, 128).requires_grad_())
        self.assertExpectedInline(
            _changed(capture.before[0], capture.after[0]),
            """\
- pow_1: float32[64, 128] = aten.pow.Tensor_Scalar(convert_element_type, 2)
- mean: float32[64, 1] = aten.mean.dim(pow_1, [1], True)
- add: float32[64, 1] = aten.add.Scalar(mean, 9.99999997e-07)
- rsqrt: float32[64, 1] = aten.rsqrt.default(add)
+ rmsnorm_mxquant = mxnorm.rmsnorm_mxquant.default(primals_2, None, None, None, 9.99999997e-07, p2, 0.418505105, f32->f32, e4m3/b32/rceil_log2/reciprocal/clamp/plain)
+ rstd: float32[64, 1] = getitem(rmsnorm_mxquant, 2)
+ scale: uint8[64, 4] = getitem(rmsnorm_mxquant, 1)
+ view_default_1: uint8[64, 4, 1] = aten.view.default(scale, [64, 4, 1])
+ qdata: float8_e4m3fn[64, 128] = getitem(rmsnorm_mxquant, 0)
+ view_default: float8_e4m3fn[64, 4, 32] = aten.view.default(qdata, [64, 4, 32])
- alias: float32[64, 1] = aten.alias.default(rsqrt)
+ alias: float32[64, 1] = aten.alias.default(rstd)
- mul: float32[64, 128] = aten.mul.Tensor(convert_element_type, rsqrt)
+ mul: float32[64, 128] = aten.mul.Tensor(convert_element_type, rstd)
- mul_1: float32[64, 128] = aten.mul.Tensor(mul, primals_1)
- convert_element_type_1: bfloat16[64, 128] = prims.convert_element_type.default(mul_1, bfloat16)
- view: bfloat16[64, 128] = aten.view.default(convert_element_type_1, [-1, 128])
- view_1: bfloat16[64, 4, 32] = aten.view.default(view, [64, 4, 32])
- abs_1: bfloat16[64, 4, 32] = aten.abs.default(view_1)
- amax: bfloat16[64, 4] = aten.amax.default(abs_1, [-1])
- unsqueeze: bfloat16[64, 4, 1] = aten.unsqueeze.default(amax, -1)
- convert_element_type_2: float32[64, 4, 32] = prims.convert_element_type.default(view_1, float32)
- convert_element_type_3: float32[64, 4, 1] = prims.convert_element_type.default(unsqueeze, float32)
- div: float32[64, 4, 1] = aten.div.Tensor(convert_element_type_3, 448)
- isnan: bool[64, 4, 1] = aten.isnan.default(div)
- isinf: bool[64, 4, 1] = aten.isinf.default(div)
- log2: float32[64, 4, 1] = aten.log2.default(div)
- ceil: float32[64, 4, 1] = aten.ceil.default(log2)
- clamp_min: float32[64, 4, 1] = aten.clamp_min.default(ceil, -127)
- clamp_max: float32[64, 4, 1] = aten.clamp_max.default(clamp_min, 127)
- add_1: float32[64, 4, 1] = aten.add.Tensor(clamp_max, 127)
- convert_element_type_4: uint8[64, 4, 1] = prims.convert_element_type.default(add_1, uint8)
- scalar_tensor: uint8[] = aten.scalar_tensor.default(254, dtype=uint8, layout=torch.strided, device=cpu)
- where: uint8[64, 4, 1] = aten.where.self(isinf, scalar_tensor, convert_element_type_4)
- scalar_tensor_1: uint8[] = aten.scalar_tensor.default(255, dtype=uint8, layout=torch.strided, device=cpu)
- where_1: uint8[64, 4, 1] = aten.where.self(isnan, scalar_tensor_1, where)
- eq: bool[64, 4, 1] = aten.eq.Scalar(where_1, 255)
- eq_1: bool[64, 4, 1] = aten.eq.Scalar(where_1, 254)
- eq_2: bool[64, 4, 1] = aten.eq.Scalar(where_1, 0)
- convert_element_type_5: float32[64, 4, 1] = prims.convert_element_type.default(where_1, float32)
- sub: float32[64, 4, 1] = aten.sub.Tensor(127, convert_element_type_5)
- exp2: float32[64, 4, 1] = aten.exp2.default(sub)
- scalar_tensor_2: float32[] = aten.scalar_tensor.default(1, dtype=float32, layout=torch.strided, device=cpu)
- where_2: float32[64, 4, 1] = aten.where.self(eq_2, scalar_tensor_2, exp2)
- scalar_tensor_3: float32[] = aten.scalar_tensor.default(5.87747175e-39, dtype=float32, layout=torch.strided, device=cpu)
- where_3: float32[64, 4, 1] = aten.where.self(eq_1, scalar_tensor_3, where_2)
- where_4: float32[64, 4, 1] = aten.where.self(eq, div, where_3)
- mul_2: float32[64, 4, 32] = aten.mul.Tensor(convert_element_type_2, where_4)
- clamp_min_1: float32[64, 4, 32] = aten.clamp_min.default(mul_2, -448)
- clamp_max_1: float32[64, 4, 32] = aten.clamp_max.default(clamp_min_1, 448)
- convert_element_type_6: float8_e4m3fn[64, 4, 32] = prims.convert_element_type.default(clamp_max_1, float8_e4m3fn)
- view_2: float8_e4m3fn[64, 128] = aten.view.default(convert_element_type_6, [64, 128])
+ view_2: float8_e4m3fn[64, 128] = aten.view.default(view_default, [64, 128])
- view_3: float8_e8m0fnu[64, 4, 1] = aten.view.dtype(where_1, float8_e8m0fnu)
+ view_3: float8_e8m0fnu[64, 4, 1] = aten.view.dtype(view_default_1, float8_e8m0fnu)
+ convert_element_type_default_1: float32[128] = prims.convert_element_type.default(primals_1, float32)
+ convert_element_type_default: float32[64, 128] = prims.convert_element_type.default(primals_3, float32)
+ mul_tensor: float32[64, 128] = aten.mul.Tensor(convert_element_type_default, convert_element_type_default_1)
- view_4: bfloat16[64, 4, 32] = aten.view.default(primals_3, [64, 4, 32])
+ view_default_2: float32[64, 4, 32] = aten.view.default(mul_tensor, [64, 4, 32])
- abs_2: bfloat16[64, 4, 32] = aten.abs.default(view_4)
+ abs_2: float32[64, 4, 32] = aten.abs.default(view_default_2)
- amax_1: bfloat16[64, 4] = aten.amax.default(abs_2, [-1])
+ amax_1: float32[64, 4] = aten.amax.default(abs_2, [-1])
- unsqueeze_1: bfloat16[64, 4, 1] = aten.unsqueeze.default(amax_1, -1)
+ unsqueeze_1: float32[64, 4, 1] = aten.unsqueeze.default(amax_1, -1)
- convert_element_type_7: float32[64, 4, 32] = prims.convert_element_type.default(view_4, float32)
+ convert_element_type_7: float32[64, 4, 32] = prims.convert_element_type.default(view_default_2, float32)
- view_17: bfloat16[64, 128] = aten.view.default(convert_element_type_1, [-1, 128])
- permute_16: bfloat16[128, 64] = aten.permute.default(view_17, [1, 0])
- clone_2: bfloat16[128, 64] = aten.clone.default(permute_16, memory_format=torch.contiguous_format)
+ rmsnorm_mxquant_colwise = mxnorm.rmsnorm_mxquant_colwise.default(primals_2, rstd, primals_1, None, f32->bf16, e4m3/b32/rceil_log2/reciprocal/clamp/plain)
+ scale_columns: uint8[128, 2] = getitem(rmsnorm_mxquant_colwise, 1)
+ view_default_4: uint8[128, 2, 1] = aten.view.default(scale_columns, [128, 2, 1])
+ qdata_columns: float8_e4m3fn[128, 64] = getitem(rmsnorm_mxquant_colwise, 0)
- view_36: bfloat16[128, 2, 32] = aten.view.default(clone_2, [128, 2, 32])
+ view_default_3: float8_e4m3fn[128, 2, 32] = aten.view.default(qdata_columns, [128, 2, 32])
- abs_6: bfloat16[128, 2, 32] = aten.abs.default(view_36)
- amax_5: bfloat16[128, 2] = aten.amax.default(abs_6, [-1])
- unsqueeze_5: bfloat16[128, 2, 1] = aten.unsqueeze.default(amax_5, -1)
- convert_element_type_43: float32[128, 2, 32] = prims.convert_element_type.default(view_36, float32)
- convert_element_type_44: float32[128, 2, 1] = prims.convert_element_type.default(unsqueeze_5, float32)
- div_5: float32[128, 2, 1] = aten.div.Tensor(convert_element_type_44, 448)
- isnan_5: bool[128, 2, 1] = aten.isnan.default(div_5)
- isinf_5: bool[128, 2, 1] = aten.isinf.default(div_5)
- log2_5: float32[128, 2, 1] = aten.log2.default(div_5)
- ceil_5: float32[128, 2, 1] = aten.ceil.default(log2_5)
- clamp_min_10: float32[128, 2, 1] = aten.clamp_min.default(ceil_5, -127)
- clamp_max_10: float32[128, 2, 1] = aten.clamp_max.default(clamp_min_10, 127)
- add_6: float32[128, 2, 1] = aten.add.Tensor(clamp_max_10, 127)
- convert_element_type_45: uint8[128, 2, 1] = prims.convert_element_type.default(add_6, uint8)
- scalar_tensor_24: uint8[] = aten.scalar_tensor.default(254, dtype=uint8, layout=torch.strided, device=cpu)
- where_29: uint8[128, 2, 1] = aten.where.self(isinf_5, scalar_tensor_24, convert_element_type_45)
- scalar_tensor_25: uint8[] = aten.scalar_tensor.default(255, dtype=uint8, layout=torch.strided, device=cpu)
- where_30: uint8[128, 2, 1] = aten.where.self(isnan_5, scalar_tensor_25, where_29)
- eq_15: bool[128, 2, 1] = aten.eq.Scalar(where_30, 255)
- eq_16: bool[128, 2, 1] = aten.eq.Scalar(where_30, 254)
- eq_17: bool[128, 2, 1] = aten.eq.Scalar(where_30, 0)
- convert_element_type_46: float32[128, 2, 1] = prims.convert_element_type.default(where_30, float32)
- sub_9: float32[128, 2, 1] = aten.sub.Tensor(127, convert_element_type_46)
- exp2_5: float32[128, 2, 1] = aten.exp2.default(sub_9)
- scalar_tensor_26: float32[] = aten.scalar_tensor.default(1, dtype=float32, layout=torch.strided, device=cpu)
- where_31: float32[128, 2, 1] = aten.where.self(eq_17, scalar_tensor_26, exp2_5)
- scalar_tensor_27: float32[] = aten.scalar_tensor.default(5.87747175e-39, dtype=float32, layout=torch.strided, device=cpu)
- where_32: float32[128, 2, 1] = aten.where.self(eq_16, scalar_tensor_27, where_31)
- where_33: float32[128, 2, 1] = aten.where.self(eq_15, div_5, where_32)
- mul_11: float32[128, 2, 32] = aten.mul.Tensor(convert_element_type_43, where_33)
- clamp_min_11: float32[128, 2, 32] = aten.clamp_min.default(mul_11, -448)
- clamp_max_11: float32[128, 2, 32] = aten.clamp_max.default(clamp_min_11, 448)
- convert_element_type_47: float8_e4m3fn[128, 2, 32] = prims.convert_element_type.default(clamp_max_11, float8_e4m3fn)
- view_37: float8_e4m3fn[128, 64] = aten.view.default(convert_element_type_47, [128, 64])
+ view_37: float8_e4m3fn[128, 64] = aten.view.default(view_default_3, [128, 64])
- view_38: float8_e8m0fnu[128, 2, 1] = aten.view.dtype(where_30, float8_e8m0fnu)
+ view_38: float8_e8m0fnu[128, 2, 1] = aten.view.dtype(view_default_4, float8_e8m0fnu)
- mul_17: float32[64, 128] = aten.mul.Tensor(mul_15, rsqrt)
+ mul_17: float32[64, 128] = aten.mul.Tensor(mul_15, rstd)
""",
        )

    def test_gathered_in_training(self) -> None:
        """Codes of rows in the forward, codes along tokens in the backward."""
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
        try:
            got = trained(along(1, dist.group.WORLD), (2, 32))
        finally:
            dist.destroy_process_group()
        known = {n.name for n in got.before.nodes}
        new = (n for n in got.after.nodes if n.name not in known)
        starts = tuple(f"{n.name}{end}" for n in new for end in (": ", " = "))
        ours = [line for line in listing(got.after).splitlines() if line.startswith(starts)]
        self.assertExpectedInline(
            "\n".join(ours) + "\n",
            """\
rmsnorm_mxquant = mxnorm.rmsnorm_mxquant.default(primals_1, primals_2, None, None, 1e-06, exact, 1, bf16->bf16, e4m3/b32/rceil_log2/reciprocal/clamp/plain)
rstd: float32[2, 32, 1] = getitem(rmsnorm_mxquant, 2)
scale: uint8[2, 32, 4] = getitem(rmsnorm_mxquant, 1)
all_gather_into_tensor_default_1: uint8[4, 32, 4] = _c10d_functional.all_gather_into_tensor.default(scale, 2, 0)
wait_tensor_default_1: uint8[4, 32, 4] = _c10d_functional.wait_tensor.default(all_gather_into_tensor_default_1)
slice_tensor_3: uint8[2, 32, 4] = aten.slice.Tensor(wait_tensor_default_1, 0, 2, 4)
slice_tensor_2: uint8[2, 32, 4] = aten.slice.Tensor(wait_tensor_default_1, 0, 0, 2)
cat_default_1: uint8[2, 64, 4] = aten.cat.default([slice_tensor_2, slice_tensor_3], 1)
view_default_1: uint8[128, 4, 1] = aten.view.default(cat_default_1, [128, 4, 1])
qdata: float8_e4m3fn[2, 32, 128] = getitem(rmsnorm_mxquant, 0)
view_dtype: uint8[2, 32, 128] = aten.view.dtype(qdata, uint8)
all_gather_into_tensor_default: uint8[4, 32, 128] = _c10d_functional.all_gather_into_tensor.default(view_dtype, 2, 0)
wait_tensor_default: uint8[4, 32, 128] = _c10d_functional.wait_tensor.default(all_gather_into_tensor_default)
slice_tensor_1: uint8[2, 32, 128] = aten.slice.Tensor(wait_tensor_default, 0, 2, 4)
slice_tensor: uint8[2, 32, 128] = aten.slice.Tensor(wait_tensor_default, 0, 0, 2)
cat_default: uint8[2, 64, 128] = aten.cat.default([slice_tensor, slice_tensor_1], 1)
view_dtype_1: float8_e4m3fn[2, 64, 128] = aten.view.dtype(cat_default, float8_e4m3fn)
view_default: float8_e4m3fn[128, 4, 32] = aten.view.default(view_dtype_1, [128, 4, 32])
rmsnorm_mxquant_colwise = mxnorm.rmsnorm_mxquant_colwise.default(primals_1, rstd, primals_2, None, bf16->bf16, e4m3/b32/rceil_log2/reciprocal/clamp/plain)
scale_columns: uint8[128, 2] = getitem(rmsnorm_mxquant_colwise, 1)
all_gather_into_tensor_default_3: uint8[256, 2] = _c10d_functional.all_gather_into_tensor.default(scale_columns, 2, 0)
wait_tensor_default_3: uint8[256, 2] = _c10d_functional.wait_tensor.default(all_gather_into_tensor_default_3)
view_default_4: uint8[2, 128, 2, 1] = aten.view.default(wait_tensor_default_3, [2, 128, 2, 1])
permute_default_1: uint8[128, 2, 2, 1] = aten.permute.default(view_default_4, [1, 2, 0, 3])
clone_default_1: uint8[128, 2, 2, 1] = aten.clone.default(permute_default_1, memory_format=torch.contiguous_format)
view_default_5: uint8[128, 4] = aten.view.default(clone_default_1, [128, -1])
view_default_7: uint8[128, 4, 1] = aten.view.default(view_default_5, [128, 4, 1])
qdata_columns: float8_e4m3fn[128, 64] = getitem(rmsnorm_mxquant_colwise, 0)
view_dtype_2: uint8[128, 64] = aten.view.dtype(qdata_columns, uint8)
all_gather_into_tensor_default_2: uint8[256, 64] = _c10d_functional.all_gather_into_tensor.default(view_dtype_2, 2, 0)
wait_tensor_default_2: uint8[256, 64] = _c10d_functional.wait_tensor.default(all_gather_into_tensor_default_2)
view_default_2: uint8[2, 128, 2, 32] = aten.view.default(wait_tensor_default_2, [2, 128, 2, 32])
permute_default: uint8[128, 2, 2, 32] = aten.permute.default(view_default_2, [1, 2, 0, 3])
clone_default: uint8[128, 2, 2, 32] = aten.clone.default(permute_default, memory_format=torch.contiguous_format)
view_default_3: uint8[128, 128] = aten.view.default(clone_default, [128, -1])
view_dtype_3: float8_e4m3fn[128, 128] = aten.view.dtype(view_default_3, float8_e4m3fn)
view_default_6: float8_e4m3fn[128, 4, 32] = aten.view.default(view_dtype_3, [128, 4, 32])
""",
        )


def _until(text: str, name: str) -> str:
    """The part of a listing that the rewrite concerns; what follows is the matmul's own."""
    return text.partition(f"{name}:")[0]


def _changed(before: Graph, after: Graph) -> str:
    """Lines that went and lines that came, in order."""
    old, new = listing(before).splitlines(), listing(after).splitlines()
    return "\n".join(d for d in difflib.ndiff(old, new) if d[0] in "+-") + "\n"
