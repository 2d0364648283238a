"""``docs/train.md`` and ``docs/reproduce.md``: numbers of the pages against curves read afresh."""

from __future__ import annotations

import csv
import json
import math
import re
import shutil
import sys
import xml.etree.ElementTree as ET
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import moe
import reproduce
import titan
import train
from trainlib import claims, corpus, document, figures, gradients, logs, results, runs, words
from trainlib.loop import SIZES, Curve, Plan
from trainlib.results import Difference

ROOT = Path(__file__).parents[1]
OFF = {"rmsnorm": 0.0, "exact": 0.0, "p1": 0.03, "p2": 0.02, "p4": 0.05, "p2-learnt": 0.004}
OFF |= {"p2-own": 0.0, "p2-projected": 0.004, "p2-straight": 0.021}
MACHINE = {"device": "a chip", "torch": "2.11.0", "torchao": "0.18.0"}


def curve(variant: str, seed: int, rate: float, steps: int, end: str = "") -> Curve:
    """A falling loss with the seed's noise, and the variant's own on top; ``end`` diverges it."""
    rng = np.random.default_rng(seed)
    own = np.random.default_rng([seed, sum(map(ord, variant))])
    t = np.arange(steps)
    loss = 3 + 6 * np.exp(-t / (0.1 * steps)) + rng.normal(0, 0.05, steps) + 100 * rate
    if OFF[variant]:
        loss = loss + OFF[variant] + own.normal(0, 5e-4) + own.normal(0, 0.003, steps)
    norm = 0.3 + rng.gamma(2, 0.05, steps)
    if end == "nan":
        loss[-10:] = norm[-10:] = np.nan
    elif end == "rises":
        loss[-30:] += np.linspace(0, 3, 30)
    if (variant, seed) == ("p1", 1):
        loss[steps * 3 // 4] += 4
    sites = 2 if variant in ("exact", "p1", "p2") else 0
    made = Curve(variant, seed, rate, loss.tolist(), norm.tolist(), float(loss[-5:].mean()))
    made.sites, made.seconds = sites, 2.0
    made.norms = [
        {"norm": f"{i}.ffn_norm", "ratio_mean": 1 + 0.1 * i + 0.2 * (variant == "p2-own"),
         "ratio_sd": 0.03 + 0.01 * seed, "channel": 2 + own.random(), "kurtosis": 3 + own.random()}
        for i in range(3)
    ]  # fmt: skip
    return made


def save(
    folder: Path, size: str, variants, seeds, rates, ends=None, steps=120, longest=10**5
) -> None:
    text = corpus.Corpus(
        np.zeros(9_400_000, np.uint16), "linux-source-6.1.tar.xz", 4 * 10**7, 16384, "ab" * 32,
        3 * 10**7, longest,
    )  # fmt: skip
    plan = Plan(size, steps, 2, 1024, rates[0], 10, "cuda")
    made = [
        curve(v, s, r, steps, (ends or {}).get((v, r), ""))
        for s in seeds for r in rates for v in variants
    ]  # fmt: skip
    results.save(folder, plan, text, made, MACHINE)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Folders of invented runs, and the pages and figures that the command makes of them."""
    root = tmp_path_factory.mktemp("train")
    data = root / "data"
    save(data / "125m", "125m", ["rmsnorm", "p2", "exact", "p1"], [0, 1, 2, 3], [1e-3])
    ends = {("p1", 8e-3): "rises", ("p1", 32e-3): "nan", ("rmsnorm", 32e-3): "nan"}
    save(data / "15m-rates", "15m", ["rmsnorm", "p1", "p2"], [0], [2e-3, 8e-3, 32e-3], ends)
    save(data / "15m-open", "15m", ["p4", "p2-learnt"], [0], [2e-3])
    save(data / "1b", "1b", ["rmsnorm", "p2"], [4], [3e-4], steps=60, longest=10**9)
    save(data / "vit", "other", ["rmsnorm", "p2"], [0, 1], [1e-3], steps=60)
    about = json.loads((data / "vit" / "runs.json").read_text())
    about |= {"parameters": 5_000_000, "command": "python elsewhere.py --seeds 0 1"}
    about["corpus"] = {"source": "pictures", "licence": "CC-0"}
    for run, value in zip(about["runs"], (0.5, 0.52, 0.6, 0.58), strict=True):
        run["accuracy"] = value
    (data / "vit" / "runs.json").write_text(json.dumps(about))
    out = root / "docs" / "train.md"
    (root / "docs" / "img").mkdir(parents=True)
    (root / "docs" / "img" / "train-gone.svg").write_text("<svg/>")
    assert train.main(["document", "--data", str(data), "--out", str(out)]) == 0
    return data, out


def read(data: Path, name: str) -> dict[tuple[str, int, float], tuple[np.ndarray, np.ndarray]]:
    """Losses and gradient norms from the CSV file, by nothing of the script's."""
    found = defaultdict(list)
    with (data / name / "curves.csv").open() as file:
        for r in csv.DictReader(file):
            key = r["variant"], int(r["seed"]), float(r["rate"])
            found[key].append((float(r["loss"]), float(r["grad_norm"])))
    return {k: tuple(np.array(v).T) for k, v in found.items()}


def interval(values) -> tuple[float, float]:
    """Mean and half-width, by SciPy's own test."""
    low, high = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    return float(np.mean(values)), float(high - low) / 2


def tail(loss: np.ndarray) -> float:
    return float(loss[-(len(loss) // 20) :].mean())


def test_sentences_are_what_the_curves_say(made) -> None:
    data, out = made
    page = out.read_text()
    found = read(data, "125m")
    assert len(found) == 16
    for variant, name in (("p1", "p = 1"), ("p2", "p = 2")):
        gaps = [tail(found[variant, s, 1e-3][0]) - tail(found["rmsnorm", s, 1e-3][0])
                for s in range(4)]  # fmt: skip
        mean, half = interval(gaps)
        assert half < 0.01 and abs(mean) > half
        assert (
            f"- **{name} minus RMSNorm**: {mean:+.4f} ± {half:.4f} nats over 4 pairs: a "
            "difference, the interval excludes zero."
        ) in page
    assert "**exact (fused) minus RMSNorm**: +0.0000 ± 0.0000 nats over 4 pairs: no diff" in page
    ends = [tail(found["p1", s, 1e-3][0]) for s in range(4)]
    mean, sd = np.mean(ends), np.std(ends, ddof=1)
    assert f"| p1 | 0.001 | 4 | {mean:.4f} ± {sd:.4f} | " in page
    gaps = [tail(found["p1", s, 1e-3][0]) - tail(found["p2", s, 1e-3][0]) for s in range(4)]
    assert "- **p = 1 minus p = 2**: {:+.4f} ± {:.4f} nats".format(*interval(gaps)) in page
    short = page[: page.index("## What is run")]
    gaps = [tail(found["p2", s, 1e-3][0]) - tail(found["rmsnorm", s, 1e-3][0]) for s in range(4)]
    assert (
        "- 125M parameters, peak rate 0.001: p = 2 minus RMSNorm {:+.4f} ± {:.4f}".format(
            *interval(gaps)
        )
        in short
    )
    assert (
        "- Not measured: 125M parameters, an earlier text; The gradient's part, at 15M parameters; "
        "Mixture of experts."
    ) in short
    # The one spike that was put in, and what the second half's gradient norms reach.
    most = max(found["p1", s, 1e-3][1][60:].max() for s in range(4))
    middle = np.median([found["p1", s, 1e-3][1][60:] for s in range(4)])
    assert (
        f"p = 1 1 in 4 runs (gradient norm {middle:.3f} in the median, {most:.3g} at most)" in page
    )
    (one,) = (
        tail(found["p2", 4, 3e-4][0]) - tail(found["rmsnorm", 4, 3e-4][0])
        for found in [read(data, "1b")]
    )
    assert f"**p = 2 minus RMSNorm**: {one:+.4f} nats in one pair, which has no interval" in page
    ends = {v: read(data, "1b")[v, 4, 3e-4][0] for v in ("rmsnorm", "p2")}
    ten, twenty, half = (float(ends["p2"][-n:].mean() - ends["rmsnorm"][-n:].mean())
                         for n in (6, 12, 30))  # fmt: skip
    assert (
        "Over the last 10%, 20% and 50% of the steps, minus RMSNorm: "
        f"p = 2 {ten:+.4f}, {twenty:+.4f} and {half:+.4f}."
    ) in page


def test_held_out_losses_and_norms(made) -> None:
    data, out = made
    page = out.read_text()
    known = {
        (r["variant"], r["seed"]): r["validation"]
        for r in json.loads((data / "125m" / "runs.json").read_text())["runs"]
    }
    mean, half = interval([known["p2", s] - known["rmsnorm", s] for s in range(4)])
    assert f"On held-out tokens: {mean:+.4f} ± {half:.4f}." in page
    channels = defaultdict(list)
    with (data / "125m" / "norms.csv").open() as file:
        for r in csv.DictReader(file):
            if r["variant"] == "p2":
                channels[r["norm"]].append(float(r["channel"]))
    means = [np.mean(v) for v in channels.values()]
    assert (
        "- **p = 2**: estimate over true RMS 1.000 to 1.200 in the mean, standard deviation" in page
    )
    assert f"largest channel {min(means):.2f} to {max(means):.2f} times the median one" in page
    assert "0.0450 to 0.0450 (Gaussian rows: 0.0311)" in page  # sd .03 to .06; 768 columns


def test_rates(made) -> None:
    """Where each diverges: p = 1 by rising at .008, RMSNorm by NaN at .032, p = 2 nowhere."""
    data, out = made
    page = out.read_text()
    found = read(data, "15m-rates")
    best = {v: tail(found[v, 0, 2e-3][0]) for v in ("rmsnorm", "p1", "p2")}
    assert (
        "Seed 0; in brackets, minus RMSNorm; bold, a variant's best: RMSNorm diverges at 0.032; "
        "p = 1 diverges at 0.008; no other diverged up to 0.032."
    ) in page
    gap = best["p2"] - best["rmsnorm"]
    assert f"| p = 2 | **{best['p2']:.4f}** ({gap:+.4f}) | " in page
    # Without a pair no difference, and none of a run that diverged.
    assert f"| {tail(found['p2', 0, 32e-3][0]):.4f} | " in page
    rise = np.mean([tail(found["p2", 0, r][0]) for r in (2e-3, 8e-3, 32e-3)]) - best["p2"]
    lost = np.mean([best["rmsnorm"], tail(found["rmsnorm", 0, 8e-3][0]),
                    found["rmsnorm", 0, 32e-3][0][0]]) - best["rmsnorm"]  # fmt: skip
    assert f" | {rise:.4f} |" in page and f"1 of 1 diverged | {lost:.4f} |" in page
    claim = (out.parent / "reproduce.md").read_text()
    assert (
        "RMSNorm 0.032, p = 1 0.008, p = 2 none; tried up to 0.032 | p = 1 diverges earlier"
        in claim
    )
    # The open questions' runs have their pair among these.
    other = {v: tail(read(data, "15m-open")[v, 0, 2e-3][0]) for v in ("p4", "p2-learnt")}
    assert f"**p = 4 minus RMSNorm**: {other['p4'] - best['rmsnorm']:+.4f} nats in one pair" in page
    assert (
        f"At 0.002, seed 0, minus RMSNorm: p = 2 {gap:+.4f}; p = 2 (learnt c) "
        f"{other['p2-learnt'] - best['rmsnorm']:+.4f}; p = 4 {other['p4'] - best['rmsnorm']:+.4f}. "
        "One pair each: undecided.\n"
    ) in page
    short = page[: page.index("## What is run")]
    next_one = tail(found["p2", 0, 8e-3][0]) - tail(found["rmsnorm", 0, 8e-3][0])
    assert (
        "- Learning rates at 15M parameters, other peak rates: p = 2 minus RMSNorm at 0.008 "
        f"{next_one:+.4f} (one pair), undecided; at 0.032 a run diverged.\n"
    ) in short


def test_the_rate_of_equally_many_runs_is_the_one_that_suits_rmsnorm(tmp_path: Path) -> None:
    """The lowest where no RMSNorm run tells, and the one of the most runs whatever it ends at."""
    ends = {("rmsnorm", 1e-3): "rises"}  # the invented losses rise with the rate
    save(tmp_path / "15m-rates", "15m", ["rmsnorm", "p2"], [0], [4e-3, 1e-3, 2e-3], ends)
    about, curves = logs.load(tmp_path / "15m-rates")
    assert figures.main_rate(runs.Folder(tmp_path, about, curves)) == 2e-3
    without = [c for c in curves if c.variant != "rmsnorm"]
    assert figures.main_rate(runs.Folder(tmp_path, about, without)) == 1e-3
    fewer = [c for c in curves if (c.variant, c.rate) != ("p2", 2e-3)]
    assert figures.main_rate(runs.Folder(tmp_path, about, fewer)) == 4e-3


def test_gradients_of_the_estimate_are_set_beside_each_other(tmp_path: Path) -> None:
    """Seeds of the sweep at that rate are among the pairs; what each gradient leaves is said."""
    variants = ["rmsnorm", "p2", "p2-projected", "p2-own"]
    save(tmp_path / "15m", "15m", variants, [1, 2, 3], [4e-3])
    save(tmp_path / "15m-rates", "15m", ["rmsnorm", "p1", "p2"], [0], [1e-3, 4e-3])
    save(tmp_path / "15m-open", "15m", ["p4", "p2-straight", *variants[2:]], [0], [1e-3, 4e-3])
    found = runs.read(tmp_path)
    page = document.page(found)
    section = page[page.index("## The gradient's part") : page.index("## Learning rates")]
    ends = {key: tail(v[0]) for name in found for key, v in read(tmp_path, name).items()}
    said = {}
    two = [("p2-projected", "p2"), ("p2-own", "p2-projected")]
    for one, other in [(v, "rmsnorm") for v in variants[1:]] + two:
        said[one, other] = interval([ends[one, s, 4e-3] - ends[other, s, 4e-3] for s in range(4)])
    for (one, other), (mean, half) in said.items():
        line = f"- **{figures.label(one)} minus {figures.label(other)}**: "
        assert f"{line}{mean:+.4f} ± {half:.4f} nats over 4 pairs" in section
    assert "Seeds 0, 1, 2 and 3 at a peak rate of 0.004." in section
    # Variants that the folder itself has not are another section's.
    assert "p = 4" not in section and "| p1 |" not in section
    whole, left = said["p2", "rmsnorm"][0], said["p2-projected", "rmsnorm"]
    assert (
        f"Of p = 2's {whole:+.4f} nats the *projected* gradient leaves {left[0]:+.4f} ± "
        f"{left[1]:.4f}, differs; the *own* gradient leaves +0.0000 ± 0.0000, no difference seen."
    ) in section
    alone = np.mean([ends["p2", s, 4e-3] - ends["rmsnorm", s, 4e-3] for s in (1, 2, 3)])
    assert (
        "Seed 0 is of the runs in `15m-open` and `15m-rates`, pooled here. Without, minus RMSNorm: "
        f"p = 2 {alone:+.4f} (3 pairs), undecided; p = 2 (projected gradient) "
    ) in section
    plain, two = (ends[v, 0, 4e-3] - ends["rmsnorm", 0, 4e-3] for v in ("p2-straight", "p2"))
    assert (
        f"(p = 2 (plain)) end {plain:+.4f} from RMSNorm at 0.004, and p = 2 {two:+.4f}: the gap is "
        "there without folding and without our op; it is one seed.\n`train.py` has "
        "`p2-pass-projected` and `p2-pass-own` to part the two; they are not run yet."
    ) in section
    # A gap of the plain norm that is small says nothing of the kind.
    near = runs.read(tmp_path)["15m-open"]
    for c in near.curves:
        if c.variant == "p2-straight":
            c.loss[:] = [v - 0.02 for v in c.loss]
    told = gradients.route(4e-3, found, runs.join(near, found["15m-rates"]))
    assert f"{plain - 0.02:+.4f} from RMSNorm at 0.004, and p = 2 {two:+.4f}; it is" in told[1]
    assert "| RMSNorm | 1.100 | 0.045 |" in section
    assert "| p = 2 (own gradient) | 1.300 | 0.045 |" in section
    assert "the estimate is 30% too large, against 10% with RMSNorm" in section
    # Each pair is in one line of the head alone, and at several rates in the table alone.
    short = page[: page.index("## What is run")]
    rest = ends["p2", 0, 1e-3] - ends["rmsnorm", 0, 1e-3]
    assert "Open questions" not in short and short.count("p = 2 minus RMSNorm") == 2
    assert (
        "- Learning rates at 15M parameters, peak rate 0.001: p = 2 minus RMSNorm "
        f"{rest:+.4f} nats in one pair, which has no interval: undecided."
    ) in short
    swept = page[page.index("## Learning rates") : page.index("## 1B")]
    asked = page[page.index("## Open questions") : page.index("## Mixture")]
    assert "minus RMSNorm**" not in swept + asked and "| p = 1 |" not in asked
    assert f"({two:+.4f})" in swept and f"({two:+.4f})" in asked
    claim = reproduce.page(reproduce.DOCS, tmp_path)
    assert (
        "at 15M none of RMSNorm, p = 1, p = 2 diverged | not tested: nothing diverged up to 0.004 |"
    ) in claim
    assert (
        "| of the gradient more than of the estimate: "
        "[pre-training](train.md#the-gradients-part-at-15m-parameters); a Gaussian row's"
    ) in claim
    assert f"| {whole:+.4f} ± {said['p2', 'rmsnorm'][1]:.4f}, 4 pairs, at a peak rate of" in claim


def test_pairs_on_another_text_are_told_apart_and_together(tmp_path: Path) -> None:
    save(tmp_path / "125m", "125m", ["rmsnorm", "p2"], [0, 1, 2, 3], [1e-3])
    save(tmp_path / "125m-tables", "125m", ["rmsnorm", "p1", "p2"], [3, 6], [1e-3], longest=10**9)
    page = document.page(runs.read(tmp_path))
    gaps = []
    for name, seeds in (("125m", range(4)), ("125m-tables", (3, 6))):
        found = read(tmp_path, name)
        gaps += [tail(found["p2", s, 1e-3][0]) - tail(found["rmsnorm", s, 1e-3][0]) for s in seeds]
    both = "{:+.4f} ± {:.4f} nats over 6 pairs".format(*interval(gaps))
    assert f"- **p = 2 minus RMSNorm, over both texts**: {both}" in page
    assert "It takes one difference for both texts; seed 3 is in both.\n" in page
    claim = reproduce.page(reproduce.DOCS, tmp_path)
    assert f"As one with the runs on an earlier text: {both}" in claim
    # p = 1 ran on the earlier one alone.
    assert re.search(
        r"125M: p = 1 minus RMSNorm.*2 pairs, no interval .* \(the earlier one\)", claim
    )


def test_images_are_told_apart_by_those_held_out(tmp_path: Path) -> None:
    save(tmp_path / "vit", "other", ["rmsnorm", "exact", "p2"], [0, 1, 2, 3], [1e-3])
    path = tmp_path / "vit" / "runs.json"
    about = json.loads(path.read_text())
    about["corpus"] = {"source": "pictures", "licence": "CC-0", "images": 9, "held_out": 4}
    about |= {"parameters": 5, "command": "python elsewhere.py"}
    for run in about["runs"]:
        by = {"rmsnorm": 0.0, "exact": -0.013, "p2": 0.02 * (-1) ** run["seed"]}[run["variant"]]
        run["validation"] = 0.1 + 0.001 * run["seed"] + by + 1e-5 * run["seed"] * (by != 0)
    path.write_text(json.dumps(about))
    page = document.page(runs.read(tmp_path))
    mean, half = interval([0.02, -0.01999, 0.02002, -0.01997])
    words = f"{mean:+.4f} ± {half:.4f} nats over 4 pairs: undecided, the interval holds zero.\n"
    assert (
        f"- Vision transformer, peak rate 0.001: p = 2 minus RMSNorm on held-out images {words}"
    ) in page
    section = page[page.index("## Vision") : page.index("## Make it")]
    assert f"- **p = 2 minus RMSNorm, on held-out images**: {words}" in section
    most = max(tail(loss) for loss, _ in read(tmp_path, "vit").values())
    (said,) = re.findall(r"Training losses end at (\S+) nats or less: ", section)
    assert 0 <= float(said) - most <= 1e-4
    assert "`exact`, which computes RMSNorm's own function, excludes zero" in section


def test_other_seeds_of_two_variants(tmp_path: Path) -> None:
    """What p = 2 costs is also said on the seeds that its own gradient has run on."""
    save(tmp_path / "125m", "125m", ["rmsnorm", "p2", "p2-own"], range(5), [1e-3])
    folder = runs.read(tmp_path)["125m"]
    assert gradients.on_the_seeds_of(folder.curves, "p2-own") is None
    kept = [c for c in folder.curves if c.variant != "p2-own" or c.seed > 0]
    page = document.page({"125m": runs.Folder(folder.path, folder.about, kept)})
    ends = {key: tail(v[0]) for key, v in read(tmp_path, "125m").items()}
    few = [ends["p2", s, 1e-3] - ends["rmsnorm", s, 1e-3] for s in (1, 2, 3, 4)]
    told = "{:+.4f} ± {:.4f} nats over 4 pairs".format(*interval(few))
    assert f"- **p = 2 minus RMSNorm, on the seeds of p = 2 (own gradient)**: {told}" in page


def test_one_rate_is_no_sweep(tmp_path: Path) -> None:
    """And runs that were left out are named beside the command that makes them."""
    save(tmp_path / "15m-rates", "15m", ["rmsnorm", "p2"], [0], [4e-3])
    kept = runs.read(tmp_path)["15m-rates"]
    page = document.page({"15m-rates": kept})
    assert "One peak rate so far, 0.004, seed 0: no sweep." in page and "sensitivity |" not in page
    assert "best at" not in page and "It also makes" not in page
    found = read(tmp_path, "15m-rates")
    gap = tail(found["p2", 0, 4e-3][0]) - tail(found["rmsnorm", 0, 4e-3][0])
    assert f"- **p = 2 minus RMSNorm**: {gap:+.4f} nats in one pair" in page
    claim = reproduce.page(reproduce.DOCS, tmp_path)
    assert "not measured: one peak rate at 15M, 0.004, where none diverged | – |" in claim
    assert f"| {gap:+.4f}, one pair, no interval, at a peak rate of 0.004 |" in claim
    save(tmp_path / "15m-rates", "15m", ["rmsnorm", "p1", "p2"], [0, 1, 2], [4e-3])
    about, curves = logs.load(tmp_path / "15m-rates")
    curves = [c for c in curves if c.variant != "p1" or c.seed == 1]
    page = document.page({"15m-rates": runs.Folder(tmp_path / "15m-rates", about, curves)})
    assert "It also makes `p1` of seeds 0 and 2 at 0.004, which are not among these." in page


def test_other_folders(made) -> None:
    _, out = made
    page = out.read_text()
    # Accuracies 50 and 60%, with p = 2 52 and 58%: differences of +2 and -2 points.
    half = 12.706 * math.sqrt(8) / math.sqrt(2)
    assert "| RMSNorm | 2 | 55.00% ± 7.07 |  |" in page
    assert f"| p = 2 | 2 | 55.00% ± 4.24 | +0.00 ± {half:.2f} |" in page
    assert "`pictures`: CC-0." in page and "    python elsewhere.py --seeds 0 1" in page
    assert (
        "## Mixture of experts\n\nNot measured: there are no runs in `docs/data/train/moe`." in page
    )
    assert (
        "--size 125m --variants rmsnorm exact p1 p2 --seeds 0 1 2 3 --rates 0.001 --tokens 245760"
        in page
    )
    assert "| `125m` | 125.9M | 120 | 0.25M | 0.00195 | 0.01% | 0.03 |" in page


def test_runs_can_be_made_again_from_the_archive(made) -> None:
    """With the text of each folder, and a word where its held-out tokens are of another kind."""
    page = made[1].read_text()
    text = "    python benchmarks/train.py corpus usr/src/linux-source-6.1.tar.xz --bytes 30000000"
    assert page.count(f"{text} --longest 100000 --out corpus.npz\n") == 3
    assert page.count(f"{text} --longest 1000000000 --out corpus.npz\n") == 1
    assert page.count("    python benchmarks/train.py run ") == 4
    assert page.count("    python elsewhere.py --seeds 0 1 --out docs/data/train/vit\n") == 1
    assert page.count("measure nothing: no validation losses are given") == 1
    section = page[page.index("## 1B parameters") : page.index("## Open questions")]
    assert "held-out" not in section and "| – |" in section
    section = page[page.index("### 1b") : page.index("### vit")]
    assert section.count(" | – | ") == 2 and "| – |" not in page[page.index("### vit") :]


def test_figures(made) -> None:
    """Valid, of what is there, and those of runs that are gone are gone."""
    _, out = made
    names = {p.name for p in (out.parent / "img").iterdir()}
    assert names == {
        "train-125m.svg", "train-125m-spread.svg", "train-125m-norms.svg", "train-15m-rates.svg",
        "train-15m-open.svg", "train-1b.svg", "train-vit.svg",
    }  # fmt: skip
    for path in (out.parent / "img").iterdir():
        root = ET.parse(path).getroot()
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert f"(img/{path.name})" in out.read_text()
        lines = [g for g in root.iter() if g.get("id", "").startswith("line2d")]
        assert len(lines) > 10 and path.stat().st_size < 150_000
    assert all(f"(img/{name})" in out.read_text() for name in names)


def test_legends_hide_no_line_and_say_what_there_is(made) -> None:
    """Bands of enough pairs alone; marks of runs that diverged where there are any."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = runs.read(made[0])

    def drawn(figure) -> tuple[str, list[str], int]:
        assert not any(panel.get_legend() for panel in figure.axes)
        (legend,) = figure.legends
        bands = sum(len(panel.collections) for panel in figure.axes)
        plt.close(figure)
        return legend.get_title().get_text(), [t.get_text() for t in legend.texts], bands

    title, names, bands = drawn(figures.curves(found["125m"])(plt))
    assert (title, bands) == ("right, bands: 95%; grey: ± .01", 3)
    assert names == ["RMSNorm", *(f"{v} (4 pairs)" for v in ("exact (fused)", "p = 1", "p = 2"))]
    title, names, bands = drawn(figures.curves(found["vit"])(plt))
    assert (title, names, bands) == ("right, grey: ± .01", ["RMSNorm", "p = 2 (2 pairs)"], 0)
    lost = found["15m-rates"]
    assert drawn(figures.rates(lost)(plt))[0] == "X at the top: diverged"
    kept = runs.Folder(lost.path, lost.about, lost.of("p2"))
    assert drawn(figures.rates(kept)(plt))[:2] == ("", ["p = 2"])
    assert drawn(figures.norms(found["125m"])(plt))[0] == ""
    assert drawn(figures.spread(found["125m"])(plt))[0] == "right, x: a spike of the loss"


def test_bands_over_training(made) -> None:
    data, _ = made
    folder = runs.read(data)["125m"]
    band = runs.band(folder.curves, "p2", 3)
    assert band is not None and (band.pairs, band.steps[0], band.steps[-1]) == (4, 3, 120)
    found = read(data, "125m")
    at = 77
    gaps = [found["p2", s, 1e-3][0] - found["rmsnorm", s, 1e-3][0] for s in range(4)]
    mean, half = interval([g[at - 3 : at].mean() for g in gaps])
    i = band.steps.index(at)
    assert (band.mean[i], band.half[i]) == pytest.approx((mean, half))
    assert runs.band(folder.curves, "p4", 3) is None
    assert len(runs.thin(1000)) <= runs.POINTS and runs.thin(1000)[-1] == 999


def test_stale_pages_are_named(made, tmp_path, capsys, monkeypatch) -> None:
    data, out = made
    images = out.parent / "img"
    monkeypatch.setattr(figures, "render", lambda p: {n: (images / n).read_text() for n in p})
    shutil.copytree(out.parent, tmp_path / "docs")
    copy = tmp_path / "docs" / "train.md"
    argv = ["document", "--data", str(data), "--out", str(copy)]
    assert train.main([*argv, "--check"]) == 0
    copy.write_text(copy.read_text().replace(" over 4 pairs", " over 5 pairs", 1))
    assert train.main([*argv, "--check"]) == 1
    assert capsys.readouterr().out == f"stale: {copy}\n"
    assert train.main(argv) == 0 and copy.read_text() == out.read_text()


def test_no_runs_and_half_a_run(tmp_path, made, capsys) -> None:
    empty = tmp_path / "none"
    empty.mkdir()
    found = document.page(runs.read(empty))
    assert found.count("Not measured: there are no runs in `docs/data/train/") == 8
    claim = reproduce.page(reproduce.DOCS, empty)
    assert claim.count("not measured | – | no runs in `docs/data/train/") == 5
    data, _ = made
    shutil.copytree(data / "1b", tmp_path / "half" / "1b")
    (tmp_path / "half" / "1b" / "norms.csv").unlink()
    argv = ["document", "--data", str(tmp_path / "half"), "--out", str(tmp_path / "train.md")]
    assert train.main(argv) == 2
    assert "1b: norms.csv missing; a run writes all three" in capsys.readouterr().err
    (tmp_path / "half" / "1b" / "norms.csv").write_text(" " * 2_000_001)
    assert train.main(argv) == 2
    assert "at most 2,000,000 belong" in capsys.readouterr().err


def test_runs_that_diverged_leave_a_page(tmp_path: Path) -> None:
    """No number is made of them, and those of the other variants stay."""
    ends = {("p1", 1e-3): "nan", ("rmsnorm", 2e-3): "nan"}
    save(tmp_path / "125m", "125m", ["rmsnorm", "p1", "p2"], [0, 1, 2, 3], [1e-3], ends, steps=60)
    save(tmp_path / "moe", "moe", ["rmsnorm", "p2"], [0, 1], [2e-3], ends, steps=60)
    page = document.page(runs.read(tmp_path))
    assert page.count("minus RMSNorm**: no number, since a run diverged.\n") == 2
    assert "| p1 | 0.001 | 4 | nan ± nan | nan |" in page
    assert re.search(
        r"\*\*p = 2 minus RMSNorm\*\*: \+0\.0\d+ ± .* On held-out tokens: \+0\.0", page
    )
    assert "| a run diverged | – | 0.1M tokens" in reproduce.page(reproduce.DOCS, tmp_path)


def test_runs_of_two_commands_become_one_folder(made, tmp_path, capsys) -> None:
    data, _ = made
    for seed in (0, 1, 2, 3):
        save(tmp_path / str(seed), "125m", ["rmsnorm", "p2", "exact", "p1"], [seed], [1e-3])
    folders = [str(tmp_path / str(seed)) for seed in (0, 1, 2, 3)]
    assert train.main(["merge", *folders, "--out", str(tmp_path / "125m")]) == 0
    for name in ("curves.csv", "norms.csv", "runs.json"):
        assert (tmp_path / "125m" / name).read_text() == (data / "125m" / name).read_text()
    assert train.main(["merge", folders[1], folders[1], "--out", str(tmp_path / "out")]) == 2
    assert "there more than once: rmsnorm, seed 1, rate 0.001; p2" in capsys.readouterr().err
    argv = ["merge", folders[0], str(data / "1b"), "--out", str(tmp_path / "out")]
    assert train.main(argv) == 2
    said = capsys.readouterr().err
    assert "1b: not made as" in said and "plan.steps 60 against 120; corpus.longest" in said


@pytest.mark.parametrize("size", ["125m", "15m", "1b", "moe"])
def test_parameters(size: str) -> None:
    kind = moe.Llama if isinstance(SIZES[size], moe.Sizes) else titan.Llama
    with torch.device("meta"):
        count = sum(p.numel() for p in kind(SIZES[size]).parameters())
    assert runs.Folder(Path(size), {"plan": {"size": size}}, []).parameters == count


# --- claim by claim -------------------------------------------------------------------------------


def test_an_interval_without_zero_is_said_also_where_it_is_wide() -> None:
    wide = Difference((0.2, 0.25, 0.31, 0.27))
    assert wide.verdict == "undecided" and wide.excludes_zero and "without zero" in str(wide)
    assert "over 4 pairs: undecided, the interval excludes zero" in words.said(wide)
    holds = Difference((0.2, -0.25, 0.31, 0.27))
    assert not holds.excludes_zero and "without zero" not in str(holds)
    assert "over 4 pairs: undecided, the interval holds zero" in words.said(holds)
    few = Difference((0.2, 0.25, 0.31))
    assert not few.excludes_zero and "without zero" not in str(few)
    narrow = Difference((0.02, 0.021, 0.022, 0.02))
    assert narrow.verdict == "differs" and not narrow.only_size_is_open


def test_losses_against_the_report() -> None:
    """+.026 reported; intervals that hold it, that hold zero, both, neither."""
    expected = {
        (0.024, 0.025, 0.026, 0.027): "same",
        (0.010, 0.011, 0.012, 0.011): "same sign, smaller",
        (0.050, 0.051, 0.052, 0.051): "same sign, larger",
        (-0.010, -0.011, -0.012, -0.011): "no: other sign",
        (0.001, -0.001, 0.002, 0.0): "no: none seen",
        (0.0, 0.02, 0.04, 0.02): "undecided",
        (0.024, 0.025, 0.027): "undecided",
        (0.02,): "undecided",
        (0.02, math.nan): "–",
        (): "–",
    }
    got = {values: claims.compare(Difference(values), 0.026) for values in expected}
    assert got == expected
    # An interval that is narrow enough and holds both zero and the report decides nothing.
    assert claims.compare(Difference((-0.001, 0.004, 0.004, 0.003)), 0.004) == "undecided"


def test_claims_are_those_of_the_committed_results(made) -> None:
    _, out = made
    page = (out.parent / "reproduce.md").read_text()
    kernels = json.loads((ROOT / "docs" / "kernels.json").read_text())
    ms = {(r["m"], r["k"], r["residual"], r["variant"]): r["ms"] for r in kernels["rows"]}
    ratio = {
        key[:3]: ms[(*key[:3], "compile")] / value
        for key, value in ms.items()
        if key[3] == "ours_p2_folded"
    }
    large, added = (
        [v for (m, _, residual), v in ratio.items() if m == 16384 and residual == which]
        for which in (False, True)
    )
    alone = ms[16384, 4096, False, "compile"] / ms[16384, 4096, False, "inductor_p2_folded"]
    assert (
        f"by torch.compile alone {alone:.2f}x at 16384 x 4096; our kernel "
        f"{ratio[16384, 4096, False]:.2f}x, from 16384 rows on {min(large):.2f} to "
        f"{max(large):.2f}, with residual {min(added):.2f} to {max(added):.2f}; NVIDIA H200"
    ) in page
    assert f"; up to {max(large):.2f}x by our kernel, on another chip | " in page
    assert "; the interval holds neither: same sign, smaller." in page
    # 16384 x 4096 rows in 2 bytes, out in 1 and a scale per 32, rstd in 4; 8 TB/s.
    elements = 16384 * 4096
    ours = (elements * (3 + 1 / 32) + 4 * 16384) / 8e12
    counts = [r for r in kernels["ncu"] if r["kernel"].startswith("triton_")]
    assert len(counts) == 2
    # The first kernel reads the rows again and writes a root each; both are bound by instructions.
    moved = ours + (2 * elements + 4 * 16384) / 8e12
    issued = sum(r["instructions_per_element"] for r in counts) * elements / 32
    theirs = issued / (148 * 4 * 1.85e9)
    assert f"By the longer: {theirs / ours:.2f}x. By bytes alone: {moved / ours:.2f}x." in page
    # There the second one alone is, at 1.98 GHz of 132 multiprocessors.
    there = (2 * elements + 4 * 16384) / 4.8e12
    there += counts[1]["instructions_per_element"] * elements / 32 / (132 * 4 * 1.98e9)
    assert f"the same arithmetic says {there * 4.8 / 8 / ours:.2f}x" in page
    layer = json.loads((ROOT / "docs" / "layer.json").read_text())["entries"]
    steps = {(e["kind"], e["backend"]): e["steps"] for e in layer}
    both = [steps["training", b]["forward and backward"]["ms"] for b in ("inductor", "mxnorm")]
    assert f"{both[0] / both[1] - 1:+.1%} in training" in page
    assert "316 times lower" in page and "an RMS of 0.302, theirs with 0.990" in page
    with (ROOT / "docs" / "data" / "theory.csv").open() as file:
        rows = list(csv.DictReader(file))
    for k in ("1", "128"):
        (r2,) = (float(r["measured"]) for r in rows
                 if (r["dist"], r["k"], r["name"]) == ("MXFP8 RCEIL", k, "r2"))  # fmt: skip
        assert f"{r2:.4f} (" in page
    assert len(page.split()) < 1400  # five minutes
    table = page[page.index("| claim |") : page.index("\n## ")].strip().splitlines()[2:]
    assert len(table) == 16
    for line in table:
        script = line.split("|")[-2].strip()
        links = re.findall(r"\]\(\.\./(\S+)\)", script)
        assert all((ROOT / name).is_file() for name in links), line
        assert bool(links) != (script == "–"), line
        # Without a script there is no number of ours.
        assert script != "–" or "| not measured |" in line, line


def test_pages_are_those_of_the_committed_runs(capsys, monkeypatch) -> None:
    """Byte for byte; figures with the pinned matplotlib alone."""
    if not version("matplotlib").startswith("3.11."):
        monkeypatch.setattr(
            figures, "render", lambda p: {n: (ROOT / "docs/img" / n).read_text() for n in p}
        )
    assert train.main(["document", "--check"]) == 0, capsys.readouterr().out
    assert reproduce.main(["--check"]) == 0, capsys.readouterr().out
