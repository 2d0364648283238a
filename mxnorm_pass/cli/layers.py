"""Equal layers of a model, so that each kind is traced once however often it occurs.

Layers of a ``ModuleList`` are of one kind when they have the same modules, with the same shapes,
the same settings and the same entries in the configuration's lists (``layer_types`` and the like).
The others of a kind are replaced by :class:`Skip`, which hands its input on: indices, masks and
whatever else the model looks up by a layer's number stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Choice = Callable[[str, nn.Module], object]
"""What the options say about the module at a path: layers for which it differs differ in kind."""
_SCALARS = (bool, int, float, str, torch.dtype, type(None))


@dataclass
class Kind:
    """Layers that are alike.

    Attributes:
        stack: path of their ModuleList.
        label: how they differ from the other kinds of the stack.
        members: positions in the list.
        traced: those that are traced: the first and, where it begins the stack, a second one,
            since its input comes from no residual add.
    """

    stack: str
    label: str
    members: list[int]
    traced: list[int] = field(default_factory=list)

    def weight(self, position: int) -> int:
        """How many layers the traced one at ``position`` stands for."""
        if len(self.traced) == len(self.members):
            return 1
        if len(self.traced) == 1:
            return len(self.members)
        return 1 if position == self.traced[0] else len(self.members) - 1


@dataclass
class Layers:
    """The stacks of a model, by path."""

    kinds: list[Kind]

    def find(self, path: str) -> tuple[Kind, int, str] | None:
        """Kind, position and path within the layer of a module; None outside all stacks."""
        for kind in self.kinds:
            if path.startswith(f"{kind.stack}."):
                number, _, rest = path[len(kind.stack) + 1 :].partition(".")
                if number.isdigit() and int(number) in kind.members:
                    return kind, int(number), rest
        return None

    def weight(self, path: str) -> int:
        """How many modules of the whole model the one at ``path`` stands for; 0 if skipped."""
        found = self.find(path)
        if found is None:
            return 1
        kind, position, _ = found
        return kind.weight(position) if position in kind.traced else 0

    def alike(self, path: str) -> list[str]:
        """Paths of the module at ``path`` in all layers of its kind; its own outside of layers."""
        found = self.find(path)
        if found is None:
            return [path]
        kind, _, rest = found
        return [f"{kind.stack}.{position}.{rest}" for position in kind.members]


def stacks(model: nn.Module) -> Iterator[tuple[str, nn.ModuleList]]:
    """Outermost lists of modules."""
    inside: list[str] = []
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module):
            if any(path.startswith(f"{outer}.") for outer in inside):
                continue
            inside.append(path)
            yield path, module


def find_layers(model: nn.Module, choice: Choice = lambda path, module: None) -> Layers:
    """Sort the layers of every stack into kinds, in order of first occurrence."""
    lists = _config_lists(model)
    kinds: list[Kind] = []
    for path, stack in stacks(model):
        descriptions = [_describe(layer) for layer in stack]
        for setting in _numbered(descriptions):
            for description in descriptions:
                description.pop(setting, None)
        groups: dict[object, Kind] = {}
        features: dict[object, dict[str, str]] = {}
        for i, layer in enumerate(stack):
            entries = {name: values[i] for name, values in lists if len(values) == len(stack)}
            chosen = [choice(f"{path}.{i}.{n}", m) for n, m in layer.named_modules() if n]
            key = (
                tuple(descriptions[i].items()),
                repr(entries),
                repr(chosen),
            )
            if key not in groups:
                groups[key] = Kind(path, type(layer).__name__, [])
                features[key] = _features(layer, entries)
            groups[key].members.append(i)
        _label(list(groups.values()), list(features.values()), descriptions)
        for kind in groups.values():
            count = 2 if kind.members[0] == 0 and len(kind.members) > 1 else 1
            kind.traced = kind.members[:count]
            kinds.append(kind)
    return Layers(kinds)


def _describe(layer: nn.Module) -> dict[tuple[str, str], object]:
    """Everything about a layer that its computation may depend on, by module and name."""
    found: dict[tuple[str, str], object] = {}
    for path, module in layer.named_modules():
        found[path, "class"] = f"{type(module).__module__}.{type(module).__qualname__}"
        for name, value in vars(module).items():
            if isinstance(value, _SCALARS):
                found[path, name] = value
            elif isinstance(value, (tuple, list)) and all(isinstance(v, _SCALARS) for v in value):
                found[path, name] = tuple(value)
        for name, tensor in (
            *module.named_parameters(recurse=False),
            *module.named_buffers(recurse=False),
        ):
            found[path, f"tensor {name}"] = (tuple(tensor.shape), tensor.dtype)
    return found


def _numbered(descriptions: list[dict[tuple[str, str], object]]) -> set[tuple[str, str]]:
    """Settings that are the layer's own number, counted from anywhere."""
    found: set[tuple[str, str]] = set()
    for key in dict.fromkeys(k for d in descriptions for k in d):
        offsets = set()
        for i, description in enumerate(descriptions):
            if key in description:
                value = description[key]
                is_number = isinstance(value, int) and not isinstance(value, bool)
                offsets.add(value - i if isinstance(value, int) and is_number else None)
        if len(offsets) == 1 and None not in offsets:
            found.add(key)
    return found


def _config_lists(model: nn.Module) -> list[tuple[str, list[Any]]]:
    """Lists in the configurations of a model: what it may look up by a layer's number."""
    seen: set[int] = set()
    lists: dict[str, list[Any]] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is None or id(config) in seen or not hasattr(config, "to_dict"):
            continue
        seen.add(id(config))
        for name, value in vars(config).items():
            if isinstance(value, (list, tuple)) and value:
                lists.setdefault(f"{type(config).__name__}.{name}", list(value))
    return list(lists.items())


def _features(layer: nn.Module, entries: dict[str, Any]) -> dict[str, str]:
    """What might tell a kind from another in words."""
    found = {name: str(v) for name, v in entries.items() if isinstance(v, (str, int, bool))}
    found["class"] = type(layer).__name__
    for name, child in layer.named_children():
        found[f"child {name}"] = type(child).__name__
    for name, value in vars(layer).items():
        if isinstance(value, (str, bool)) and name != "training":
            found[name] = value if isinstance(value, str) else f"{name}={value}"
    return found


def _label(
    kinds: list[Kind],
    features: list[dict[str, str]],
    descriptions: list[dict[tuple[str, str], object]],
) -> None:
    """Name each kind of a stack by what the kinds differ in: a type if any does, else a setting."""
    if len(kinds) == 1:
        return
    names = dict.fromkeys(n for f in features for n in f)
    differing = [n for n in names if len({f.get(n) for f in features}) > 1]
    firsts = [descriptions[kind.members[0]] for kind in kinds]
    settings = [
        key
        for key in dict.fromkeys(k for d in firsts for k in d)
        if key[1] != "class" and len({repr(d.get(key)) for d in firsts}) == len(kinds)
    ]
    for number, (kind, own) in enumerate(zip(kinds, features, strict=True)):
        words = ", ".join(dict.fromkeys(own[n] for n in differing if n in own))
        if not words and settings:
            path, name = settings[0]
            words = f"{path}.{name}={firsts[number].get(settings[0])}".lstrip(".")
        kind.label = words or f"{kind.label}, form {number + 1}"
    if len({kind.label for kind in kinds}) < len(kinds):
        for number, kind in enumerate(kinds):
            kind.label += f", form {number + 1}"


class Form:
    """What the layers of a kind return, learnt from one that runs."""

    def __init__(self) -> None:
        self.entries: tuple[object, ...] | None = None
        """None: the hidden states alone; else where each entry of a tuple comes from."""
        self.fits = True

    def learn(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Compare an output with the inputs; ``fits`` where a skipped layer could return it."""
        source = first(args, kwargs)
        out = output[0] if isinstance(output, tuple) and output else output
        self.fits = (
            isinstance(source, Tensor)
            and isinstance(out, Tensor)
            and out.shape == source.shape
            and out.dtype == source.dtype
        )
        if isinstance(output, tuple):
            self.entries = tuple(self._entry(o, args, kwargs) for o in output[1:])

    @staticmethod
    def _entry(value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        for i, arg in enumerate(args):
            if value is arg:
                return i
        for name, arg in kwargs.items():
            if value is arg and value is not None:
                return name
        return None


def first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The hidden states among a layer's arguments: the first one."""
    return args[0] if args else next(iter(kwargs.values()), None)


class Skip(nn.Module):
    """In the place of a layer that is like a traced one: returns its input in the layer's form."""

    def __init__(self, layer: nn.Module, form: Form) -> None:
        super().__init__()
        for name, value in vars(layer).items():
            if isinstance(value, _SCALARS) and not hasattr(self, name):
                setattr(self, name, value)
        self.form = form

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The first argument, alone or in a tuple with what else the layer would hand on."""
        source = first(args, kwargs)
        entries = self.form.entries
        if entries is None:
            return source
        rest = [
            args[e] if isinstance(e, int) else kwargs.get(e) if isinstance(e, str) else None
            for e in entries
        ]
        return (source, *rest)


class Cut:
    """A model with only the traced layers of each kind left in it."""

    def __init__(self, model: nn.Module, layers: Layers) -> None:
        self.model = model
        self.layers = layers
        self._original: list[tuple[nn.ModuleList, int, nn.Module]] = []
        self._forms: list[tuple[nn.Module, Form]] = []
        for kind in layers.kinds:
            stack = model.get_submodule(kind.stack)
            assert isinstance(stack, nn.ModuleList)
            form = Form()
            self._forms.append((stack[kind.traced[-1]], form))
            for i in kind.members:
                if i not in kind.traced:
                    self._original.append((stack, i, stack[i]))
                    stack[i] = Skip(stack[i], form)

    @property
    def skipped(self) -> int:
        """How many layers were replaced."""
        return len(self._original)

    def learn(self, run: Callable[[], object]) -> bool:
        """Run the model once for the forms of its layers; False where a form cannot be skipped.

        A failing run teaches what it reached, and the form of the rest is taken to be plain: some
        models can be traced on the meta device, but not run there.
        """
        handles = []
        for layer, form in self._forms:

            def hook(_: Any, args: Any, kwargs: Any, output: Any, form: Form = form) -> None:
                form.learn(args, kwargs, output)

            handles.append(layer.register_forward_hook(hook, with_kwargs=True))
        try:
            run()
        except Exception:
            pass
        finally:
            for handle in handles:
                handle.remove()
        return all(form.fits for _, form in self._forms)

    def restore(self) -> None:
        """Put the layers back; every layer is its own kind from now on."""
        for stack, i, layer in self._original:
            stack[i] = layer
        self._original = []
        for kind in self.layers.kinds:
            kind.traced = list(kind.members)
