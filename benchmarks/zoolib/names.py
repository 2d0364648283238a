"""Which architectures there are: the model types of transformers whose source can hold an RMSNorm.

Reading the source only keeps hundreds of models without any from being built. Whether a model has
an RMSNorm is decided later, on the built model, by how its modules behave.
"""

from __future__ import annotations

import importlib
import re
from functools import cache
from pathlib import Path
from typing import Any

_HINT = re.compile(r"rsqrt|rms_?norm|pow\([^()]*-0\.5", re.IGNORECASE)

# One per form of norm or way of reaching a linear that is known to differ from the others.
SUBSET = (
    "llama",
    "qwen3",
    "olmo2",
    "gpt_oss",
    "gemma2",
    "gemma3_text",
    "gemma3n_text",
    "gemma4_text",
    "t5",
    "llama4_text",
    "nanochat",
    "mamba2",
    "qwen3_next",
    "muse_spark_text",
    "cohere",
    "dory",
    "bitnet",
    "deepseek_v3",
    "mixtral",
    "qwen2_5_vl_vision",
    "pixtral",
    "phi3",
)


def folder(model_type: str) -> str:
    """The package below ``transformers.models`` that a model type lives in."""
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    return str(model_type_to_module_name(model_type))


@cache
def mrope(model_type: str) -> bool:
    """Whether the source reads sections of rotary frequencies, for rows, columns and time."""
    import transformers

    path = Path(str(transformers.__file__)).parent / "models" / folder(model_type)
    files = sorted(path.glob("modeling_*.py"))
    return any("mrope_section" in f.read_text(encoding="utf-8") for f in files)


def modeling_modules(model_type: str) -> list[str]:
    """Names of the modules with torch models of a model type."""
    import transformers

    name = folder(model_type)
    path = Path(str(transformers.__file__)).parent / "models" / name
    return [
        f"transformers.models.{name}.{file.stem}"
        for file in sorted(path.glob("modeling_*.py"))
        if not file.stem.startswith(("modeling_tf_", "modeling_flax_"))
    ]


@cache
def candidates() -> tuple[str, ...]:
    """Model types whose source speaks of an RMSNorm; those of one model before composites."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    root = Path(str(transformers.__file__)).parent / "models"
    seen: dict[str, bool] = {}
    found: dict[str, str] = {}
    for model_type, config in CONFIG_MAPPING_NAMES.items():
        name = folder(model_type)
        if name not in seen:
            files = sorted((root / name).glob("modeling_*.py"))
            seen[name] = any(_HINT.search(f.read_text(encoding="utf-8")) for f in files)
        # Some configurations are listed under two names.
        if seen[name] and config not in found.values():
            found[model_type] = config
    return tuple(sorted(found, key=lambda m: (bool(sub_configs(m)), m)))


def config_class(model_type: str) -> Any:
    """The configuration class of a model type."""
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type]


def sub_configs(model_type: str) -> dict[str, Any]:
    """Configurations nested in the one of a model type; empty where it is one model."""
    return dict(getattr(config_class(model_type), "sub_configs", {}) or {})


def model_class(model_type: str) -> Any:
    """The class that is built: the causal LM where there is one, else the base model.

    A composite is built as its base model: its causal LM is that of its text part, which has a
    model type of its own. Where no auto class knows the type, the module is searched.

    Raises:
        LookupError: where no class takes the configuration.
    """
    import transformers
    from transformers.models.auto import modeling_auto

    causal = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    base = modeling_auto.MODEL_MAPPING_NAMES.get(model_type)
    base = base[0] if isinstance(base, (tuple, list)) else base
    wanted = config_class(model_type)
    for name in (base, causal) if sub_configs(model_type) else (causal, base):
        cls = getattr(transformers, name, None) if name else None
        if cls is not None and takes(cls, wanted):
            return cls
    found = []
    for module in modeling_modules(model_type):
        for cls in vars(importlib.import_module(module)).values():
            if (
                isinstance(cls, type)
                and cls.__module__ == module
                and issubclass(cls, transformers.PreTrainedModel)
                and not cls.__name__.endswith("PreTrainedModel")
                and takes(cls, wanted)
            ):
                found.append(cls)
    if not found:
        raise LookupError(f"no model class takes a {wanted.__name__}")
    return min(found, key=lambda c: ("For" in c.__name__, len(c.__name__)))


def takes(cls: Any, wanted: type) -> bool:
    """Whether a model class is made from that configuration class itself."""
    return getattr(cls, "config_class", None) is wanted
