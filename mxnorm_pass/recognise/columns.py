"""The other cast of a norm's output: along tokens, for the weight gradient, in the backward.

Autograd reads the same ``y`` again, transposes it and casts it in blocks along tokens; each linear
does so for itself. Such a cast is found from its own absmax (or its opaque op) back to a transpose
of the very node that a site's cast along rows reads. Where that node holds rows gathered from all
ranks, each rank can cast its own rows and send the codes, if no block of tokens mixes ranks.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from torch import SymInt
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from mxnorm_pass.formats import ELEMENTS, Cast
from mxnorm_pass.reasons import Decline
from mxnorm_pass.recognise import aten, opaque
from mxnorm_pass.recognise.cast import cast_site, is_block_max, reduced, values_of, whole
from mxnorm_pass.recognise.cast_spec import recognise_cast
from mxnorm_pass.recognise.moves import Gather, gather_of

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ColumnReader:
    """One cast along tokens, as it stands in the graph.

    Attributes:
        anchor: the block absmax, or the call of an opaque cast op.
        codes: elements as they are stored.
        scales: block scales as they are read from outside.
        behind: nodes between the norm's output and the cast: its views, its transpose.
        inside: nodes that belong to the cast alone.
        block: length of a block as the graph has it, maybe a symbolic expression.
        transposed: codes are ``[M, K]`` in column-major order; else in the order of ``[K, M]``.
        gather: how the rows came together that it casts; None where they are this rank's own.
    """

    anchor: Node
    codes: tuple[Node, ...]
    scales: tuple[Node, ...]
    behind: tuple[Node, ...]
    inside: frozenset[Node]
    block: int | SymInt
    transposed: bool = False
    gather: Gather | None = None


@dataclass
class Columns:
    """One distinct cast along tokens of a site's norm, however many linears make it."""

    cast: Cast
    tensor_scale: Node | None
    readers: list[ColumnReader] = field(default_factory=list)

    @property
    def gathered(self) -> bool:
        """Some of the rows are gathered from all ranks."""
        return any(reader.gather is not None for reader in self.readers)


@dataclass
class SiteColumns:
    """All casts along tokens of one norm's output, and why others were left alone."""

    found: list[Columns] = field(default_factory=list)
    declined: list[Decline] = field(default_factory=list)

    def add(self, reader: ColumnReader, cast: Cast, tensor_scale: Node | None) -> None:
        """One more cast; equal ones come together."""
        for known in self.found:
            if (known.cast, known.tensor_scale) == (cast, tensor_scale):
                known.readers.append(reader)
                return
        self.found.append(Columns(cast, tensor_scale, [reader]))

    def behind(self, sent: Node) -> list[ColumnReader]:
        """Casts of the rows that a collective sends."""
        readers = (reader for columns in self.found for reader in columns.readers)
        return [r for r in readers if r.gather is not None and r.gather.sent is sent]

    def leave(self, readers: list[ColumnReader], why: Decline) -> None:
        """Let casts stay as they are."""
        for columns in list(self.found):
            columns.readers = [r for r in columns.readers if r not in readers]
            if not columns.readers:
                self.found.remove(columns)
        if readers:
            self.declined.append(why)


def find_columns(
    graph: Graph,
    outputs: Iterable[tuple[Node, tuple[Node, ...], SiteColumns]],
    *,
    strict: bool,
) -> None:
    """Find the casts along tokens of the norms' ``outputs``. Evaluates probes; changes nothing.

    Args:
        graph: a joint graph.
        outputs: what a norm's casts along rows read; the moves that its rows went through, none or
            some that send them; the record to write to.
        strict: raise what goes wrong instead of noting it.
    """
    known: dict[Node, tuple[tuple[Node, ...], SiteColumns]] = {}
    for node, moves, record in outputs:
        known.setdefault(aten.origin(node), (moves, record))
    if not known:
        return
    for anchor in graph.nodes:
        if not aten.is_backward(anchor):
            continue
        behind = _rows_behind(anchor)
        if not behind or behind[-1] not in known:
            continue
        moves, record = known[behind[-1]]
        try:
            reader, cast, tensor_scale = _recognise(anchor, behind)
            if moves:
                gather = _gathered(moves, cast, tensor_scale, anchor)
                reader = replace(reader, gather=gather)
            record.add(reader, cast, tensor_scale)
        except Decline as decline:
            record.declined.append(decline)
        except Exception:
            if strict:
                raise
            log.exception("a cast along tokens (at %s) is left alone", anchor.name)
            record.declined.append(Decline("internal_error", traceback.format_exc(), anchor))


def _rows_behind(anchor: Node) -> tuple[Node, ...]:
    """From the transpose of a cast along tokens back to the rows ``[..., K]``, which come last;
    nothing where ``anchor`` is no such cast.
    """
    if not aten.is_call(anchor):
        return ()
    call = opaque.describe_columns(anchor)
    if call is not None:
        return _to_origin(call.values)
    if not is_block_max(anchor):
        return ()
    transpose = aten.origin(values_of(anchor))
    if not _turns_rows(transpose):
        return ()
    path = _to_origin(transpose.all_input_nodes[0])
    k, last = aten.shape(path[0])[-1], aten.shape(path[-1])[-1:]
    return (transpose, *path) if last and aten.same_size(k, last[0]) else ()


def _to_origin(node: Node) -> tuple[Node, ...]:
    path = [node]
    while aten.keeps_order(node) or aten.is_widening(node):
        node = node.all_input_nodes[0]
        path.append(node)
    return tuple(path)


def _turns_rows(node: Node) -> bool:
    """The last axis comes first, and the others stay in their order."""
    if not aten.is_call(node) or node.target not in aten.PERMUTES:
        return False
    rank = len(aten.shape(node))
    if rank < 2:
        return False
    order = list(range(rank))
    if node.target is aten.aten.permute.default:
        axes = node.args[1]
        assert isinstance(axes, (list, tuple))
        order = [int(a) % rank for a in axes]  # type: ignore[arg-type]
    else:
        a, b = (0, 1) if node.target is aten.aten.t.default else node.args[1:3]
        order[int(a)], order[int(b)] = order[int(b)], order[int(a)]  # type: ignore[arg-type]
    return order == [rank - 1, *range(rank - 1)]


def _recognise(anchor: Node, behind: tuple[Node, ...]) -> tuple[ColumnReader, Cast, Node | None]:
    call = opaque.describe_columns(anchor)
    if call is not None:
        return _opaque(anchor, call, behind)
    site = cast_site(anchor)
    if site is None:
        raise Decline("element_dtype", "nothing that a cast stores is made of it", anchor)
    spec = recognise_cast(site)
    rows = aten.shape(site.source)[1:]
    _check_blocks(rows, spec.cast.block_size, anchor)
    block = aten.shape(reduced(anchor))[-1]
    path = (*site.chain, *behind[:-1])
    reader = ColumnReader(anchor, site.codes, site.scales, path, whole(site), block)
    return reader, spec.cast, spec.tensor_scale


def _gathered(
    moves: tuple[Node, ...], cast: Cast, tensor_scale: Node | None, anchor: Node
) -> Gather:
    """How the rows of a cast along tokens came together, where casting them before gives the same:
    every block of tokens is one rank's.
    """
    gather = gather_of(moves)
    if gather is None:
        raise Decline(
            "collective_between",
            f"{moves[0].target} is not the gather of all ranks' rows in their order",
            anchor,
        )
    if not statically_known_true(gather.run % cast.block_size == 0):
        raise Decline(
            "collective_between",
            f"blocks of {cast.block_size} tokens, {gather.run} of each rank behind one another",
            anchor,
        )
    if cast.layout != "plain" or tensor_scale is not None:
        detail = "the per-tensor scale, or the layout of the scales, is that of the rows gathered"
        raise Decline("collective_between", detail, anchor)
    if not isinstance(gather.run, int) and not isinstance(gather.outer, int):
        raise Decline("dynamic_shape", f"{gather.outer} times {gather.run} rows per rank", anchor)
    return gather


def _check_blocks(rows: tuple[object, ...], block: int, anchor: Node) -> None:
    """A block that straddled two columns would be no block of tokens."""
    count: object = 1
    for size in rows:
        count = count * size  # type: ignore[operator]
    if not statically_known_true(count % block == 0):  # type: ignore[operator]
        raise Decline("k_not_multiple", f"{count} tokens, block size {block}", anchor)


def _opaque(
    anchor: Node, call: opaque.CastOp, behind: tuple[Node, ...]
) -> tuple[ColumnReader, Cast, Node | None]:
    outputs = {n.args[1]: n for n in anchor.users if aten.is_getitem(n)}
    if call.qdata not in outputs or call.scale not in outputs:
        raise Decline("scale_escapes", "codes or scales of the op are read by nobody", anchor)
    codes, scales = outputs[call.qdata], outputs[call.scale]
    others = [n for key, n in outputs.items() if key not in (call.qdata, call.scale) and n.users]
    if others:
        raise Decline("scale_escapes", f"{others[0].name} is read as well", anchor)
    m, k = aten.shape(call.values)
    _check_blocks((m,), call.cast.block_size, anchor)
    expected = (m, k) if call.transposed else (k, m)
    if ELEMENTS[call.cast.element].per_byte != 1 or not aten.same_shape(
        aten.shape(codes), expected
    ):
        raise Decline(
            "opaque_cast",
            f"{anchor.target} is known as {call.cast} along tokens, and returns "
            f"{list(aten.shape(codes))}",
            codes,
        )
    inside = frozenset((anchor, codes, scales))
    reader = ColumnReader(
        anchor, (codes,), (scales,), behind[:-1], inside, call.cast.block_size, call.transposed
    )
    return reader, call.cast, call.tensor_scale
