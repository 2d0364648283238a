"""bisect: a planted bad site is found, through real processes; the search itself, as a property."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mxnorm_pass.bisect import BisectError, Bisection, ScriptError, _Search, bisect

# Three norms; what feeds the last has one channel a thousand times the others: there the estimate
# of the RMS is more than twice too large. (A factor at an earlier one is taken out by the next
# norm.) Compared with the same op and the true RMS.
SCRIPT = """
import sys
import torch, mxnorm_pass
from torchao.prototype.mx_formats.inference_workflow import MXDynamicActivationMXWeightConfig
from torchao.quantization import quantize_
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

def model():
    torch.manual_seed(0)
    layers = []
    for i in range(3):
        layers += [torch.nn.RMSNorm(256), torch.nn.Linear(256, 256, bias=False)]
    net = torch.nn.Sequential(*layers).bfloat16()
    with torch.no_grad():
        net[3].weight[17] *= 1000
    quantize_(net, MXDynamicActivationMXWeightConfig(kernel_preference=KernelPreference.EMULATED))
    return net

def check():
    net, x = model(), torch.randn(64, 256, dtype=torch.bfloat16)
    outs = []
    for rms in ("mx", "exact"):
        torch.compiler.reset()
        compiled = torch.compile(net, backend=mxnorm_pass.backend(rms=rms, inner="eager"))
        with torch.no_grad():
            outs.append(compiled(x).float())
    return float((outs[0] - outs[1]).norm() / outs[1].norm()) < 0.3
"""


@pytest.mark.long
def test_finds_a_planted_bad_site(tmp_path: Path) -> None:
    script = tmp_path / "a script.py"
    script.write_text(SCRIPT)
    lines: list[str] = []
    found = bisect(f"{script}:check", progress=lines.append)
    assert found.all_sites == ["0#0", "2#0", "4#0"]
    assert found.sites == ["4#0"]
    # off, on, all off; then the halves, and the halves of the one that fails.
    assert found.tried == len(lines) <= 7
    assert "MXNORM_OFF=4#0" in found.advice


@pytest.mark.parametrize(
    ("target", "args", "error"),
    [
        ("nowhere.py:check", [], "expected script.py or script.py:check"),
        ("nowhere.py", [], "expected script.py or script.py:check"),
        (f"{__file__}:", [], "expected script.py or script.py:check"),
        (f"{__file__}:check", ["3"], "takes no arguments"),
    ],
)
def test_bad_targets(target: str, args: list[str], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        bisect(target, args)


def scripted(tmp_path: Path, body: str) -> str:
    """A script in the place of a compile: it reads the switches and leaves a dump, no torch."""
    path = tmp_path / "plain.py"
    path.write_text(
        "import json, os, pathlib, sys\n"
        "off = os.environ.get('MXNORM_OFF', '').replace(',', '\\n').split('\\n')\n"
        "disabled = os.environ.get('MXNORM_DISABLE')\n"
        "sites = [dict(id=f'n{i}#0', status='rewritten') for i in range(9)]\n"
        "if 'MXNORM_DUMP' in os.environ:\n"
        "    folder = pathlib.Path(os.environ['MXNORM_DUMP'], 'rank_0', 'graph_000')\n"
        "    folder.mkdir(parents=True)\n"
        "    (folder / 'sites.json').write_text(json.dumps(dict(graphs=[dict(sites=sites)])))\n"
        f"{body}\n"
    )
    return str(path)


def test_a_timeout_counts_as_a_failure(tmp_path: Path) -> None:
    target = scripted(
        tmp_path, "import time\nif not disabled and 'n5#0' not in off: time.sleep(60)"
    )
    assert bisect(target, timeout=1.0).sites == ["n5#0"]


def test_failures_that_no_site_makes(tmp_path: Path) -> None:
    with pytest.raises(BisectError, match=r"(?s)pass off as well.*broken on its own"):
        bisect(scripted(tmp_path, "sys.exit('broken on its own')"))
    script = scripted(tmp_path, "").removesuffix(".py")
    Path(f"{script}.py").write_text("import sys\ndef check(): return sys.argv[1:] is None")
    with pytest.raises(BisectError, match="pass off as well"):
        bisect(f"{script}.py:check")
    with pytest.raises(BisectError, match="passes with all 9 sites rewritten"):
        bisect(scripted(tmp_path, "sys.exit(sys.argv[1] != '0.9')"), ["0.9"])
    target = scripted(tmp_path, "sys.exit('by itself' if not disabled else 0)")
    with pytest.raises(BisectError, match=r"(?s)all 9 sites off.*by itself"):
        bisect(target)
    target = scripted(tmp_path, "").replace("plain.py", "none.py")
    Path(target).write_text("import os, sys; sys.exit('MXNORM_DISABLE' not in os.environ)")
    with pytest.raises(BisectError, match="no site is rewritten"):
        bisect(target)


def test_a_script_that_does_not_reach_its_check(tmp_path: Path) -> None:
    """As `mxnorm explain` has it: none of this is a check that fails."""
    script = tmp_path / "b.py"
    script.write_text("nothing = 3\ndef check(): pass")
    for name in ("nope", "nothing"):
        with pytest.raises(ValueError, match=f"b.py has no function '{name}'"):
            bisect(f"{script}:{name}")
    for body, said in (
        ("def check(:", "SyntaxError: .*line 1"),
        ("import sys; sys.exit(0)", "SystemExit: 0"),
        ("import no_such_neighbour", "ModuleNotFoundError: No module named 'no_such_neighbour'"),
    ):
        script.write_text(f"{body}\ndef check(): pass")
        with pytest.raises(ScriptError, match=f"b.py raised {said}"):
            bisect(f"{script}:check")
    # Of a script without a function the exit status is the check, but this is none.
    script.write_text("def check(:")
    with pytest.raises(ScriptError, match=r"b\.py raised SyntaxError"):
        bisect(str(script))


def test_no_site_rewritten_is_no_pass_with_every_site(tmp_path: Path) -> None:
    """A check that compiles nothing, or whose sites are all left alone, proves nothing of them."""
    idle = tmp_path / "idle.py"
    idle.write_text("")
    with pytest.raises(BisectError, match="no site was rewritten: does the check compile with b"):
        bisect(str(idle))
    target = scripted(tmp_path, "")
    script = Path(target).read_text()
    Path(target).write_text(script.replace("'rewritten'", "'declined', reason='no_matmul'"))
    with pytest.raises(BisectError, match="no site was rewritten, 9 declined: no_matmul"):
        bisect(target)


def test_switches_set_outside_hide_no_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No run inherits them, and the first line says so."""
    target = scripted(tmp_path, "sys.exit(not disabled and 'n1#0' not in off)")
    for name, value in (("MXNORM_OFF", "n1#0"), ("MXNORM_DISABLE", "1")):
        lines: list[str] = []
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            found = bisect(target, progress=lines.append)
            assert os.environ[name] == value
        assert len(found.all_sites) == 9 and found.sites == ["n1#0"]
        assert lines[0].startswith(f"{name}={value} of the environment is left out")
        assert len(lines) == found.tried + 1


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_search_finds_a_least_set(data: st.DataObject) -> None:
    """Any set of culprits that fail together is found whole, and nothing beside it."""
    count = data.draw(st.integers(1, 70))
    sites = [f"n{i}#0" for i in range(count)]
    culprits = data.draw(st.sets(st.sampled_from(sites), min_size=1, max_size=min(count, 5)))
    search = _Search(__file__, [], None, lambda line: None)
    runs = []

    def passes(changes: dict[str, str], what: str) -> bool:
        off = set(changes["MXNORM_OFF"].splitlines())
        runs.append(off)
        return bool(culprits & off)

    search._passes = passes  # type: ignore[method-assign]
    search.sites = sites
    search.known[frozenset(sites)] = True
    assert set(search._minimise(sites)) == culprits
    assert len({frozenset(off) for off in runs}) == len(runs)
    if len(culprits) == 1:
        assert len(runs) <= 2 * max(count - 1, 1).bit_length()


def test_result_is_plain_data() -> None:
    found = Bisection(["a#0", "b#1"], 9, ["a#0", "b#1", "c#0"])
    assert json.loads(json.dumps(vars(found)))["sites"] == ["a#0", "b#1"]
    assert "off=('a#0', 'b#1',)" in found.advice
