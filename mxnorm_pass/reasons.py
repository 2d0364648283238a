"""Why a site is left alone: stable codes, what each means, and what a user can do about it."""

from __future__ import annotations

from torch.fx import Node

REASONS: dict[str, tuple[str, str]] = {
    # -- the norm
    "centred": (
        "the row is centred first (LayerNorm, or the root of a variance)",
        "nothing: the estimate holds for the mean of squares only",
    ),
    "multi_axis": (
        "the mean runs over another axis than the last one, or over several",
        "normalise the last axis only",
    ),
    "norm_form": (
        "what stands between row mean and cast is none of the known RMSNorm forms",
        "compare the detail with docs/design.md; a new form is a welcome report",
    ),
    "extra_operand": (
        "the norm's output is combined with another activation before the cast",
        "apply the modulation, gate or mask elsewhere, or leave the site to the compiler",
    ),
    "unsupported_dtype": (
        "the row, or what the cast reads, is neither bfloat16 nor float32",
        "train or serve in bfloat16",
    ),
    "graph_input": (
        "the cast reads a graph input: the norm, if one made it, is in another graph",
        "remove the graph break between norm and linear (fullgraph=True names it)",
    ),
    "reordered": (
        "elements are moved within rows or overwritten, or rows are joined, between norm and cast",
        "normalise what is left after it, or cast before it; picking whole rows is fine",
    ),
    "collective_between": (
        "a collective stands between norm and cast, and codes cannot be sent in the place of rows",
        "read the gathered rows by MX casts alone; in training give each rank whole blocks of 32 "
        "tokens of every sequence",
    ),
    "sharded_row": (
        "the row itself is sharded: its mean of squares is added up over ranks",
        "shard tokens (sequence parallel), or gather the row before the norm",
    ),
    "opaque_norm": (
        "the cast reads the output of a norm that is one opaque op (a kernel of a library or hub)",
        "use the model's own RMSNorm: compiled, it costs nothing more",
    ),
    # -- the cast
    "opaque_cast": (
        "the norm feeds an opaque op that looks like a cast and that nobody has registered",
        "say what it does with mxnorm_pass.register_cast_op",
    ),
    "rotated": (
        "the values are rotated (Hadamard) before the cast: their block maxima are not the row's",
        "nothing: the estimate does not hold for rotated values",
    ),
    "k_not_multiple": (
        "the row length is not a multiple of the block size",
        "pad the hidden size to a multiple of the block size",
    ),
    "row_mismatch": (
        "the cast's rows are not the norm's rows",
        "normalise and quantise the same last axis",
    ),
    "cast_form": (
        "the norm's values are stored narrow by no absmax over blocks of 16 to 128 in a row",
        "take torch.amax(torch.abs(blocks), -1) over the last axis of blocks of a row",
    ),
    "element_dtype": (
        "what the cast stores is none of the elements e4m3, e5m2, e2m3, e3m2, e2m1 (packed)",
        "see the table of formats in README.md",
    ),
    "scale_rule": (
        "the block scale is none of FLOOR, CEIL, EVEN, RCEIL, nor NVFP4's",
        "compare what was computed with what was expected; torchao's scale modes are all known",
    ),
    "element_rounding": (
        "the stored element is not its value rounded to nearest even in units of the scale",
        "use torchao's to_mx, or a cast that rounds to nearest even",
    ),
    "scale_escapes": (
        "the block absmax or an intermediate of the cast is read by something else",
        "read the stored scale instead",
    ),
    "no_matmul": (
        "no matrix multiplication reads the cast",
        "nothing: there is no consumer to fold the gain into or to feed",
    ),
    "block_size_conflict": (
        "the norm already feeds a cast of another block size, and has one rstd for all its users",
        "use one block size for all consumers of a norm",
    ),
    # -- the user's choice, and ourselves
    "dynamic_shape": (
        "several leading sizes are symbolic and the cast regroups them",
        "mark fewer dimensions as dynamic",
    ),
    "gradient_form": (
        "gradient='projected' or 'own' changes what the backward makes of the row's root, and "
        "something else than the norm goes back to that root, or its backward is of no known form",
        "let what else reads the root or the mean of squares (a loss) compute its own, or train "
        "with gradient='straight_through'",
    ),
    "calibration_block": (
        "the calibration file's constant was fitted for another block size",
        "calibrate the model with the casts that it has now",
    ),
    "excluded": (
        "include/exclude leaves this norm out",
        "change MXNormConfig.include or MXNormConfig.exclude",
    ),
    "switched_off": (
        "off, or MXNORM_OFF, names this site",
        "take it out of MXNormConfig.off or MXNORM_OFF",
    ),
    "disabled": ("MXNORM_DISABLE is set", "unset MXNORM_DISABLE"),
    "internal_error": (
        "the pass failed on this site and left it as it was; the detail holds the traceback",
        "please report it; MXNormConfig(strict=True) raises instead",
    ),
}


class Decline(Exception):
    """A site that is left as it is. ``reason`` is a key of :data:`REASONS`.

    ``computed`` and ``expected`` are given where something came near: what the node computes, and
    what it would have to. ``norm`` is the module path of the norm, where that was found before.
    """

    norm: str = ""

    def __init__(
        self,
        reason: str,
        detail: str,
        node: Node | None = None,
        *,
        computed: str = "",
        expected: str = "",
    ) -> None:
        assert reason in REASONS, reason
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail if node is None else f"{detail} (at {node.name})"
        self.node = node
        self.computed = computed
        self.expected = expected
