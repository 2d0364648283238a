"""A torchtitan model converter that puts the pass on Inductor's hook."""

from dataclasses import dataclass, field
from typing import Any

import torch._inductor.config
from torchtitan.protocols.model import ModelConfigConverter

import mxnorm_pass


class MXNormConverter(ModelConfigConverter):
    """Leaves the model as it is; to be listed after the MX converter."""

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConfigConverter.Config):
        options: dict[str, Any] = field(default_factory=dict)
        """Fields of mxnorm_pass.MXNormConfig."""

    report = mxnorm_pass.Report()

    def __init__(self, config: Config):
        self.config = config

    def convert(self, model_config):
        hooks = mxnorm_pass.inductor_options(mxnorm_pass.MXNormConfig(**self.config.options))
        for name, value in hooks.items():
            setattr(torch._inductor.config, name, value)
            type(self).report = value.report
        return model_config
