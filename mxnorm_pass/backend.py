"""Ways in: backends for torch.compile, options for plain Inductor, and :func:`explain`."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import itertools
import logging
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from mxnorm_pass import compat
from mxnorm_pass.choices import Remarks
from mxnorm_pass.config import MXNormConfig
from mxnorm_pass.graph_pass import MXNormPass
from mxnorm_pass.inner import compile_inner, run_eagerly
from mxnorm_pass.recognise.paths import places
from mxnorm_pass.report import GraphReport, Report, RewriteError, dump, generated, store

log = logging.getLogger(__name__)

HOOK = "joint_custom_pre_pass"


class MXNormBackend:
    """A torch.compile backend: Inductor with :class:`MXNormPass` on its joint-graph hook.

    Whatever was on the hook stays on it and runs first. ``mode`` and ``options`` of torch.compile
    reach Inductor; options whose names begin with ``mxnorm.`` are this package's.

    Attributes:
        config: the options that ``options={"mxnorm....": ...}`` changes.
        report: what was done to the graphs that this backend compiled.
    """

    def __init__(self, config: MXNormConfig | None = None, name: str = "mxnorm") -> None:
        self.config = MXNormConfig.checked(config)
        self.report = Report()
        self._remarks = Remarks(self.report)
        self.__name__ = name

    def __call__(
        self,
        gm: GraphModule,
        example_inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: dict[str, Any] | None = None,
    ) -> Callable[..., Any]:
        """Compile one graph; Dynamo calls this.

        Raises:
            RewriteError: where ``require_rewrites`` is not met.
        """
        config, inductor = MXNormConfig.split_options(options, self.config)
        patches: dict[str, Any] = {**compat.mode_options(mode), **inductor}
        # Requirements are checked here, where they hold on a cache hit as well.
        graph_pass = _chained(dataclasses.replace(config, require_rewrites=None), patches)
        graph_pass.places = places(gm)
        patches[HOOK] = graph_pass
        key = store.key(gm, example_inputs, graph_pass.identity())
        # compile_fx owns the graph that it is given; the copy shares parameters and buffers.
        spare = GraphModule(gm, copy.deepcopy(gm.graph))
        collector = generated.Collector(compile_inner)
        compiled = _compile(gm, example_inputs, config, patches, collector)
        graphs = graph_pass.report.graphs
        generated.attach(graphs, collector.code)
        if graphs:
            store.save(key, graphs)
        else:
            # torch found the compiled graph in its cache and did not call the pass. A dump needs
            # the graph itself.
            if not dump.folders(config.dump_dir):
                graphs = store.load(key)
                for graph in graphs:
                    dump.trace(graph)
            graphs = graphs or _retrace(spare, example_inputs, patches)
            for graph in graphs:
                graph.from_cache = True
        self._remarks.add(config, graphs)
        for graph in graphs:
            graph_pass.require(graph, config.require_rewrites)
        return compiled


def _retrace(
    gm: GraphModule, example_inputs: Sequence[Any], patches: dict[str, Any]
) -> list[GraphReport]:
    """The report of a cached graph whose entry in the store is gone, from tracing it again."""
    graph_pass = patches[HOOK]
    config = dataclasses.replace(graph_pass.config, inner="eager")
    again = MXNormPass(config, graph_pass.previous)
    _compile(gm, example_inputs, config, {**patches, HOOK: again})
    return again.report.graphs


def _chained(config: MXNormConfig, patches: dict[str, Any]) -> MXNormPass:
    """Our pass behind what the user's options or Inductor's config hold on the hook."""
    on_hook = patches.get(HOOK, getattr(torch._inductor.config, HOOK))
    earlier = [p for p in compat.passes_on_hook(on_hook) if not isinstance(p, MXNormPass)]
    return MXNormPass(config, earlier)


def _compile(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    config: MXNormConfig,
    patches: dict[str, Any],
    inner: Callable[..., Any] = compile_inner,
) -> Callable[..., Any]:
    from torch._inductor.compile_fx import compile_fx

    if config.inner == "eager":
        # No code is generated, so there is nothing to cache or to replay. Inductor's own random
        # numbers run eagerly without their seed: a dropout that activation checkpointing runs
        # again would draw another mask in the backward.
        patches = {
            **patches,
            "fx_graph_cache": False,
            "triton.cudagraphs": False,
            "fallback_random": True,
        }
        with torch._functorch.config.patch(enable_autograd_cache=False):
            compiled = compile_fx(
                gm,
                example_inputs,
                inner_compile=run_eagerly,  # type: ignore[arg-type]
                config_patches=patches,
            )
    else:
        compiled = compile_fx(gm, example_inputs, inner_compile=inner, config_patches=patches)
    return compiled  # type: ignore[return-value]


def backend(config: MXNormConfig | None = None, **options: Any) -> MXNormBackend:
    """A configured backend: ``torch.compile(model, backend=mxnorm_pass.backend(p=1))``.

    Args:
        config: all options at once, or
        options: the fields of :class:`MXNormConfig` that differ from its defaults (from
            ``config``).

    Raises:
        TypeError: where ``config`` is no :class:`MXNormConfig`.
        ValueError: for an unknown option or a value that is not allowed.
    """
    return MXNormBackend(MXNormConfig.changed(config, options))


def inductor_options(config: MXNormConfig | None = None) -> dict[str, Any]:
    """Options for plain Inductor: ``torch.compile(model, options=mxnorm_pass.inductor_options())``.

    Passes that Inductor's config holds at the time of this call stay on the hook and run first. The
    pass is ``options["joint_custom_pre_pass"]``; its ``report`` is filled as graphs are compiled.

    Args:
        config: options of the pass.

    Raises:
        ValueError: for ``inner="eager"``, which needs the backend.
    """
    chosen = MXNormConfig.checked(config)
    if chosen.inner != "inductor":
        raise ValueError(
            "inner='eager' needs the backend: torch.compile(..., backend=backend(config))"
        )
    return {HOOK: _chained(chosen, {})}


_calls = itertools.count()

_BY_NAME: dict[str, MXNormBackend] = {
    "mxnorm": MXNormBackend(MXNormConfig(), "mxnorm"),
    "mxnorm_exact": MXNormBackend(MXNormConfig(rms="exact"), "mxnorm_exact"),
}


def mxnorm(gm: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
    """The backend ``"mxnorm"``: RMS estimated from the block absmax."""
    return _BY_NAME["mxnorm"](gm, example_inputs, **kwargs)


def mxnorm_exact(
    gm: GraphModule, example_inputs: Sequence[Any], **kwargs: Any
) -> Callable[..., Any]:
    """The backend ``"mxnorm_exact"``: the true RMS in the same op."""
    return _BY_NAME["mxnorm_exact"](gm, example_inputs, **kwargs)


def last_report(name: str = "mxnorm") -> Report:
    """What the backends given by name, ``"mxnorm"`` and ``"mxnorm_exact"``, did in this process.

    Args:
        name: of the backend.

    Raises:
        ValueError: for another name.
    """
    if name not in _BY_NAME:
        raise ValueError(f"no backend {name!r}: allowed are {', '.join(_BY_NAME)}")
    return _BY_NAME[name].report


def explain(
    model: Callable[..., Any],
    *inputs: Any,
    training: bool | None = None,
    config: MXNormConfig | None = None,
    **kwargs: Any,
) -> Report:
    """What the pass rewrites in a model, what not, and why; no code is generated.

    The model is traced and run once, eagerly, on the inputs given.

    Args:
        model: a module or function.
        inputs: its positional inputs.
        training: trace with gradients (the joint graph of forward and backward) or without; by
            default as the module is: in training mode and with a parameter that wants a gradient.
        config: options; ``inner`` is ignored.
        kwargs: its keyword inputs.

    Returns:
        The report; ``print`` it, or read ``report.sites``.

    Raises:
        RewriteError: where ``config.require_rewrites`` is not met.
        TypeError: where ``config`` is no :class:`MXNormConfig`, or an option is among the inputs.
        Exception: what the model or torch raises where it cannot be traced; one in the backward has
            a note, since a model quantised for inference has none.
    """
    chosen = dataclasses.replace(MXNormConfig.checked(config), inner="eager")
    tracer = MXNormBackend(chosen)
    target = getattr(model, "_orig_mod", model)
    _no_options(target, inputs, kwargs)
    if training is None:
        training = (
            isinstance(target, torch.nn.Module)
            and target.training
            and any(p.requires_grad for p in target.parameters())
        )
    # Each call is a compile of its own, and must not run into the limit of recompiles.
    limit = torch._dynamo.config.patch(recompile_limit=2**16, accumulated_recompile_limit=2**16)
    with torch.random.fork_rng(), torch.set_grad_enabled(training), limit:
        compiled = torch.compile(_fresh(target), backend=tracer)
        try:
            compiled(*inputs, **kwargs)
        except Exception as error:
            _reraise(error, training)
    if not tracer.report.graphs:
        tracer.report.warnings.append("torch.compile handed over no graph: nothing was looked at")
    tracer.report.warnings.extend(_dropped_biases(target, tracer.report))
    return tracer.report


def _no_options(model: Callable[..., Any], inputs: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """An option among the model's inputs, where the model takes no such input, is ours."""
    strays = [name for name in kwargs if name in MXNormConfig.names()]
    if not strays:
        return
    run = model.forward if isinstance(model, torch.nn.Module) else model
    try:
        inspect.signature(run).bind(*inputs, **kwargs)
    except TypeError as error:
        raise TypeError(
            f"{strays[0]} is no input of the model ({error}); options go into "
            f"config=MXNormConfig({strays[0]}=...)"
        ) from None


def _fresh(model: Callable[..., Any]) -> Callable[..., Any]:
    """A new function around the model, so that Dynamo's cache of compiled frames is not asked."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    # Dynamo keeps compiled frames with the code object, and this one is shared by all calls.
    call.__code__ = call.__code__.replace(co_name=f"explain_{next(_calls)}")
    return call


_BACKWARD = (
    "the backward cannot be traced; a model quantised for inference wants training=False (--infer "
    "in the shell)"
)


def _reraise(error: Exception, training: bool) -> None:
    """Dynamo wraps what a backend raises; a user asked for our own error."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, RewriteError):
            raise cause from None
        innermost = cause
        cause = getattr(cause, "inner_exception", None) or cause.__cause__
    if training and _in_backward(innermost):
        _note(error, _BACKWARD)
    raise error


def _in_backward(error: BaseException) -> bool:
    """Whether autograd was running a backward when this was raised."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_globals.get("__name__") == torch.autograd.__name__ for frame, _ in frames)


def _note(error: Exception, text: str) -> None:
    """As ``add_note``, also for Python 3.10, which has neither it nor shows what it leaves."""
    error.__notes__ = [*getattr(error, "__notes__", []), text]
    if sys.version_info < (3, 11):
        error.args = (f"{error}\n{text}",)


def _dropped_biases(model: Any, report: Report) -> list[str]:
    """Linears whose bias torchao's MXFP8 training path leaves out of the product (torchao 0.18)."""
    if not isinstance(model, torch.nn.Module):
        return []
    dropped = []
    for path in dict.fromkeys(c for s in report.sites for c in s.consumers):
        try:
            linear = model.get_submodule(path)
        except AttributeError:
            continue
        weight = type(getattr(linear, "weight", None)).__name__
        if (
            weight == "MXFP8TrainingWeightWrapperTensor"
            and getattr(linear, "bias", None) is not None
        ):
            dropped.append(f"{path} has a bias, which torchao's MXFP8 training path ignores")
    return dropped
