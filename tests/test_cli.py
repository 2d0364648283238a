"""The shell: usage errors in one line, JSON alone on stdout, exit statuses, doctor, bisect."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import mxnorm_pass
from mxnorm_pass import bisect, reference
from mxnorm_pass.cli import bisect as bisect_command
from mxnorm_pass.cli import main

Config = Callable[..., str]
SHELL = Path(__file__).parents[1] / "docs" / "shell.md"


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Writes a config.json and returns its path."""

    def write(**values: object) -> str:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(values))
        return str(path)

    return write


def fails(argv: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Status and message of a command that must say one line on stderr and nothing on stdout."""
    try:
        status = main(argv)
    except SystemExit as stop:
        assert isinstance(stop.code, int)
        status = stop.code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1 and err.startswith("mxnorm")
    return status, err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["explain"], "either script.py:function or --config"),
        (["explain", "x.py:f", "--config", "c.json"], "either script.py:function or --config"),
        (["explain", "--config", "c.json", "--train", "--infer"], "exclude each other"),
        (["explain", "--config", "c.json", "--chip", "h900"], "'h100', 'h200', 'b200'"),
        (["explain", "--config", "c.json", "--format", "int8"], "'mxfp8', 'mxfp8_e5m2'"),
        (["explain", "--config", "c.json", "--seq", "0"], "expected a whole number >= 1"),
        (["explain", "--config", "/no/such.json"], "/no/such.json: No such file"),
        (["explain", "x.py:f", "--chip", "b200"], "--chip goes with --config"),
        (["explain", "no_such_module:f"], "expected script.py:function"),
        (["explain", "nothing"], "expected script.py:function"),
        (["explain", "json:nothing"], "has no function 'nothing'"),
        (["explain", "x.py:f", "--html", "no/such/x.html"], "the folder no/such does not exist"),
        (["explain", "x.py:f", "--html", "/"], "is a folder"),
        (["explain", "x.py:f", "--p", "3"], "p=3: allowed are 1, 2"),
        (["explain", "x.py:f", "--off", "norm"], "'<norm path>#<n>'"),
        (["constants", "--p", "0"], "p"),
        (["bisect", "/no/such.py"], "readable script"),
        (["frobnicate"], "invalid choice"),
    ],
)
def test_usage_errors_name_what_is_allowed(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, message = fails(argv, capsys)
    assert status == 2
    assert said in message


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--train", "--format", "nvfp4"], "allowed with --train: mxfp8, mxfp8_e5m2"),
        (["--infer", "--dtype", "fp32"], "allowed with --infer: bf16"),
        (["--train", "--tokens", "33"], "a multiple of 32"),
        (["--tokens", "32", "--seq", "32"], "give either"),
    ],
)
def test_what_torchao_cannot_do_is_said(
    options: list[str], said: str, config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    status, message = fails(["explain", "--config", config(model_type="llama"), *options], capsys)
    assert status == 2
    assert said in message


def test_a_config_that_is_none(
    tmp_path: Path, config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken.json"
    for text, said in (("{", "not JSON"), ("[]", "expected a JSON object"), ("{}", "model_type")):
        broken.write_text(text)
        status, message = fails(["explain", "--config", str(broken)], capsys)
        assert status == 2 and said in message
    status, message = fails(["explain", "--config", config(model_type="lama")], capsys)
    assert status == 2 and "near: llama" in message
    remote = config(model_type="mine", auto_map={"AutoConfig": "mine.Config"})
    status, message = fails(["explain", "--config", remote], capsys)
    assert status == 2 and "auto_map" in message and "script.py:function" in message
    # A refusal in several lines: the one that says why is among them.
    wrong = config(model_type="llama", hidden_size="big")
    status, message = fails(["explain", "--config", wrong], capsys)
    assert status == 2 and "expected int, got str" in message
    # No such head size: transformers itself refuses.
    odd = config(model_type="llama", hidden_size=100, num_attention_heads=3)
    status, message = fails(["explain", "--config", odd], capsys)
    assert status in (2, 3) and "hidden" in message


def test_a_script_that_fails_is_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "own_model.py"
    script.write_text(
        "import own_helper\ndef fails(): raise KeyError('boom')\ndef odd(): return 1\n"
    )
    status, message = fails(["explain", f"{script}:fails"], capsys)
    assert status == 3 and "own_helper" in message
    # A neighbour of the script can be imported, as when python runs it.
    (tmp_path / "own_helper.py").write_text("")
    status, message = fails(["explain", f"{script}:fails"], capsys)
    assert status == 3 and "KeyError: 'boom'" in message
    # Whatever status code of the user's wants to exit with is none of the command's.
    script.write_text(
        "import sys, torch\n"
        "def builds(): sys.exit(0)\n"
        "class Leaves(torch.nn.Module):\n"
        "    def forward(self, x): sys.exit(7)\n"
        "def runs(): return Leaves(), torch.ones(2)\n"
        "def odd(): return 1\n"
    )
    for name, said in (("builds", "builds raised SystemExit: 0"), ("runs", "SystemExit: 7")):
        status, message = fails(["explain", f"{script}:{name}", "--require", "1"], capsys)
        assert status == 3 and said in message
    (tmp_path / "own_leaving_module.py").write_text("raise SystemExit")
    monkeypatch.syspath_prepend(tmp_path)
    status, message = fails(["explain", "own_leaving_module:f"], capsys)
    assert status == 3 and "own_leaving_module raised SystemExit" in message
    status, message = fails(["explain", f"{script}:odd"], capsys)
    assert status == 2 and "must return (model, inputs)" in message


def test_what_cannot_be_traced_is_said_with_its_cause(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "untraceable_model.py"
    script.write_text(
        "import torch\n"
        "def misfit(): return torch.nn.RMSNorm(256), torch.ones(3, 5)\n"
        "from torchao.prototype.mx_formats import inference_workflow as mx\n"
        "from torchao.quantization import quantize_\n"
        "from torchao.quantization.quantize_.common.kernel_preference import KernelPreference\n"
        "def served():\n"
        "    linear = torch.nn.Linear(64, 64, bias=False)\n"
        "    model = torch.nn.Sequential(torch.nn.RMSNorm(64), linear).bfloat16()\n"
        "    emulated = KernelPreference.EMULATED\n"
        "    cast = mx.MXDynamicActivationMXWeightConfig(kernel_preference=emulated)\n"
        "    quantize_(model, cast)\n"
        "    return model, torch.ones(32, 64, dtype=torch.bfloat16)\n"
        "def caused():\n"
        "    try: {}['size']\n"
        "    except KeyError as error: raise ValueError('no such model') from error\n"
    )
    status, message = fails(["explain", f"{script}:misfit"], capsys)
    assert status == 3 and "normalized_shape=[256]" in message and "[3, 5]" in message
    assert message.endswith("(all of it: --traceback)\n")
    status, message = fails(["explain", f"{script}:caused"], capsys)
    assert status == 3 and "ValueError: no such model (from KeyError: 'size')" in message
    # Only a backward that fails has to do with the mode.
    hint = "a model quantised for inference wants training=False (--infer"
    assert hint not in message
    status, message = fails(["explain", f"{script}:served"], capsys)
    assert status == 3 and "cannot be traced: AssertionError; " in message and hint in message
    assert main(["explain", f"{script}:served", "--infer", "--require", "1"]) == 0


def test_bisect_of_a_script_that_fails_by_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "b.py"
    script.write_text("def check(:")
    status, message = fails(["bisect", f"{script}:check"], capsys)
    assert status == 3 and "b.py raised SyntaxError" in message
    status, message = fails(["bisect", f"{script}:"], capsys)
    assert status == 2 and "expected script.py or script.py:check" in message
    script.write_text("def check(): pass")
    assert main(["bisect", f"{script}:nope"]) == 2
    assert capsys.readouterr().err.endswith("b.py has no function 'nope'\n")


def test_json_is_all_that_stdout_gets(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "talkative_model.py").write_text(
        "import os, torch\n"
        "def model():\n"
        "    print('building'); os.write(1, b'from below\\n')\n"
        "    return torch.nn.RMSNorm(64), torch.ones(2, 64)\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["explain", "talkative_model:model", "--infer", "--json", "--require", "1"]) == 1
    out, err = capfd.readouterr()
    assert json.loads(out)["graphs"][0]["sites"] == []
    assert "building" in err and "from below" in err
    assert err.endswith("mxnorm: 0 of 1 required sites are rewritten\n")
    for argv in (["constants", "--json"], ["reasons", "--json"]):
        assert main(argv) == 0
        out, _ = capfd.readouterr()
        assert isinstance(json.loads(out), dict)


def test_help_says_what_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["explain", "--help"])
    words = " ".join(capsys.readouterr().out.split())
    assert "--train trace with gradients: the default with --config" in words


@pytest.mark.parametrize(
    "command", [[], ["explain"], ["constants"], ["reasons"], ["doctor"], ["bisect"]]
)
def test_help_has_the_exit_statuses_of_the_docs(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([*command, "--help"])
    words = " ".join(capsys.readouterr().out.split())
    rows = re.findall(r"^\| (\d) \| ([^;|]+)", SHELL.read_text(), re.M)
    assert [status for status, _ in rows] == ["0", "1", "2", "3"]
    for status, what in rows:
        what = what.strip().replace("`", "")
        assert f"{status} {what}" in words


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"mxnorm {mxnorm_pass.__version__}\n"


def doctor(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, str]]:
    """Status, and the status of each finding."""
    status = main(["doctor", "--json", *argv])
    content = json.loads(capsys.readouterr().out)
    assert content["healthy"] is (status == 0)
    return status, {f["name"]: f["status"] + " " + f["detail"] for f in content["findings"]}


def test_doctor_compiles_and_compares(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    status, found = doctor(capsys)
    assert status == 0, found
    assert found["self-check"].startswith("ok 1 of 1 site rewritten")
    assert found['backend="mxnorm"'].startswith("ok")
    assert torch.__version__ in found["torch"]
    # A root that is off by 5% is far outside what the order of a sum can do.
    true = reference.rstd
    monkeypatch.setattr(reference, "rstd", lambda *a, **k: 1.05 * true(*a, **k))
    torch._dynamo.reset()
    status, found = doctor(capsys)
    assert status == 1
    assert found["self-check"].startswith("bad 1 of 1 site rewritten")


def test_doctor_names_the_switches(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert doctor(capsys, "--quick")[0] == 0
    file = tmp_path / "file"
    file.write_text("")
    for name, value, expected, status in (
        ("MXNORM_DISABLE", "1", "bad =1: the pass is switched off", 1),
        ("MXNORM_KERNEL", "cuda", "bad MXNORM_KERNEL='cuda': allowed are", 1),
        ("MXNORM_KERNEL", "aten", "note =aten", 0),
        ("MXNORM_OFF", "layers.0.norm", "bad off='layers.0.norm'", 1),
        ("MXNORM_OFF", "layers.0.norm#0", "note =layers.0.norm#0", 0),
        ("MXNORM_DUMP", str(file / "below"), "bad ", 1),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            got, found = doctor(capsys, "--quick")
        assert found[name].startswith(expected)
        assert got == status


def test_doctor_fits_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    assert main(["doctor", "--quick"]) == 0
    lines = capsys.readouterr().out.splitlines()
    # A path has no place to break.
    assert all(len(line) <= 50 or " " not in line.strip() for line in lines)
    assert lines[-1] == "healthy"


def test_bisect_says_what_it_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = {}

    def found(target: str, args: list[str], **options: object) -> bisect.Bisection:
        seen.update(target=target, args=args, timeout=options["timeout"])
        return bisect.Bisection(["layers.3.norm#0"], 7, ["layers.2.norm#0", "layers.3.norm#0"])

    monkeypatch.setattr(bisect_command, "bisect", found)
    assert main(["bisect", "train.py", "--timeout", "9", "--", "--steps", "3"]) == 0
    assert seen == {"target": "train.py", "args": ["--steps", "3"], "timeout": 9.0}
    assert "  layers.3.norm#0\n" in capsys.readouterr().out
    assert main(["bisect", "train.py", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sites"] == ["layers.3.norm#0"]

    def none(*args: object, **options: object) -> bisect.Bisection:
        raise bisect.BisectError("the check passes with every site rewritten")

    monkeypatch.setattr(bisect_command, "bisect", none)
    assert main(["bisect", "train.py", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["error"].startswith("the check passes")


@pytest.mark.slow
def test_a_reader_that_goes_away_is_no_error() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "mxnorm_pass", "reasons"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 0
