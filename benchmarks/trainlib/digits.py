"""Runs of the vision transformer of ``examples/vit.py`` on handwritten digits."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import torch
import vit
from torch import Tensor

from trainlib.inputs import BadInput
from trainlib.loop import BLOCK, Curve, Plan, Trainer

SIZES = {
    "vit": vit.Sizes(),
    "vit-tiny": vit.Sizes(dim=64, ffn=64, heads=2, layers=1, patch=4),
}
RATES = {"vit": 2e-3, "vit-tiny": 1e-2}
HELD_OUT = 640  # of the images: whole batches of 32, 64 and 128
SPLIT = 20  # seed of what is held out, the same for all runs

IMAGES = 1797

Batch = tuple[Tensor, Tensor]


def epoch(batch: int) -> int:
    """Steps of an epoch; what fills no batch is left out of it."""
    return (IMAGES - HELD_OUT) // batch


class Digits:
    """scikit-learn's digits: images ``[N, 8, 8]``, from -1 to 1, and classes ``[N]``.

    Raises:
        BadInput: where the plan's batches do not make up the held-out images, or whole blocks.
    """

    def __init__(self, plan: Plan) -> None:
        from sklearn.datasets import load_digits

        allowed = [
            n for n in range(1, HELD_OUT + 1) if HELD_OUT % n == 0 and n * plan.seq % BLOCK == 0
        ]
        if plan.batch not in allowed:
            raise BadInput(f"--batch {plan.batch}: expected one of {', '.join(map(str, allowed))}")
        found = load_digits()
        order = torch.randperm(IMAGES, generator=torch.Generator().manual_seed(SPLIT)).numpy()
        images = torch.from_numpy(found.images[order] / 8 - 1)
        self.images = images.to(plan.device, torch.bfloat16)
        self.classes = torch.from_numpy(found.target[order]).to(plan.device)
        self.batch = plan.batch

    def training(self, seed: int) -> Iterator[Batch]:
        """Batches without end, every epoch in another order that the seed fixes."""
        generator = torch.Generator().manual_seed(10_000 + seed)
        while True:
            order = torch.randperm(IMAGES - HELD_OUT, generator=generator)
            for chosen in order.to(self.classes.device).split(self.batch)[: epoch(self.batch)]:
                yield self.images[chosen], self.classes[chosen]

    def validation(self) -> Iterator[Batch]:
        """The held-out images, once."""
        for i in range(IMAGES - HELD_OUT, IMAGES, self.batch):
            yield self.images[i : i + self.batch], self.classes[i : i + self.batch]

    def describe(self) -> dict[str, Any]:
        return {
            "source": "scikit-learn, load_digits",
            "licence": "the 1,797 test images, 8x8, of UCI's Optical Recognition of Handwritten "
            "Digits (CC BY 4.0), in scikit-learn (BSD-3-Clause)",
            "images": IMAGES,
            "held_out": HELD_OUT,
        }


class VisionTrainer(Trainer):
    """As :class:`Trainer`, with classes in the place of next tokens."""

    def _fresh(self, seed: int) -> Any:
        return self._with_norms(vit.build(SIZES[self.plan.size], seed, self.plan.device))

    def _hidden(self, images: Tensor) -> Tensor:
        """Mean over tokens behind the blocks, ``[N, 1, K]``."""
        h = self.model.embed(images)
        for block in self.model.layers.values():
            h = block(h)
        return h.mean(1, keepdim=True)

    def loss(self, batch: Batch) -> Tensor:
        """Cross entropy of the class, nats."""
        images, classes = batch
        return self.tail(self.model.norm, self.model.head, self._hidden(images), classes)

    def train(self, seed: int, batches: Digits, rate: float | None = None) -> Curve:
        """Also the share of held-out images whose class has the largest logit."""
        curve = super().train(seed, batches, rate)
        right = 0
        for images, classes in batches.validation():
            logits = self.model.head(self.model.norm(self._hidden(images)))
            right += int((logits.squeeze(1).argmax(-1) == classes).sum())
        curve.accuracy = right / HELD_OUT
        return curve

    def _some(self, batch: Batch) -> Tensor:
        return batch[0]
