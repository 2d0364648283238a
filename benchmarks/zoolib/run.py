"""Many architectures in worker processes, one result file each; what exists is not run again."""

from __future__ import annotations

import gc
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import IO, Any

MARK = "@zoo "
AGAIN = "MXNORM_ZOO_AGAIN"
"""Environment variable of a worker that takes the place of one that lost its GPU."""


class OutOfTime(Exception):
    """An architecture took longer than its limit."""


def load(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Results by name and kind."""
    found = {}
    for file in sorted(folder.glob("*.json")):
        result = json.loads(file.read_text())
        found[result["name"], result["kind"]] = result
    return found


def run_one(name: str, kind: str, folder: Path, limit: int) -> dict[str, Any]:
    """Check one architecture in this process and write its result; an error is a result."""
    from zoolib.check import check

    def expire(_: int, __: FrameType | None) -> None:
        raise OutOfTime(f"more than {limit} s")

    start = time.perf_counter()
    previous = signal.signal(signal.SIGALRM, expire)
    signal.alarm(limit)
    try:
        result = check(name, kind).to_json()
    except Exception as error:
        result = failure(name, kind, error)
        result["seconds"] = time.perf_counter() - start
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
    write(folder, result)
    return result


def failure(name: str, kind: str, error: BaseException) -> dict[str, Any]:
    """The result of a check that raised; torch.compile wraps what a backend raises."""
    while (inner := getattr(error, "inner_exception", None)) is not None:
        error = inner.with_traceback(error.__traceback__)
    text = str(error).strip().splitlines() or [""]
    frames = traceback.extract_tb(error.__traceback__)
    where = next((f for f in reversed(frames) if "transformers/models" in f.filename), None)
    at = f" ({Path(where.filename).name}:{where.lineno})" if where else ""
    line = text[0]
    if "validator" in line and len(text) > 1:
        line = text[1].strip()
    return {
        "name": name,
        "kind": kind,
        "error": f"{type(error).__name__}: {line[:200]}{at}",
        "traceback": "".join(traceback.format_exception(error))[-6000:],
        "stage": stage(error),
    }


def stage(error: BaseException) -> str:
    """How far it came: the model was not built, did not run, or was not compiled."""
    names = {f.name for f in traceback.extract_tb(error.__traceback__)}
    if "trace" in names:
        return "compile"
    return "forward" if "select" in names or "watch" in names or "quantise_" in names else "build"


def write(folder: Path, result: dict[str, Any]) -> None:
    """One file per architecture and kind, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result['name']}.{result['kind']}.json"
    part = path.with_suffix(".part")
    part.write_text(json.dumps(result, indent=1))
    part.replace(path)


def worker(folder: Path, limit: int) -> None:
    """Serve names from standard input until it ends; one marked line per result."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    # Tens of thousands of objects per compile and few cycles: collecting takes a fifth of the time.
    gc.freeze()
    gc.disable()
    if not os.environ.pop(AGAIN, None):
        print(MARK + "ready", flush=True)
    for line in sys.stdin:
        name, kind = line.split()
        result = run_one(name, kind, folder, limit)
        gc.collect()
        print(MARK + summary(result), flush=True)
        if lost_gpu():
            os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, AGAIN: "1"})


def lost_gpu() -> bool:
    """Whether a failed assertion on the GPU has left this process without it."""
    import torch

    if torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            return True
    return False


def summary(result: dict[str, Any]) -> str:
    """One line about a result."""
    head = f"{result['name']:32} {result['kind']:5}"
    if "error" in result:
        return f"{head} {result['stage']} failed: {result['error']}"
    worst = [verdict(result[part]) for part in ("outputs", "gradients")]
    return (
        f"{head} {result['cls']}: {len(result['pairs'])} true, {len(result['rewritten'])} "
        f"rewritten, {len(result['declined'])} declined, {len(result['missed'])} missed, "
        f"{len(result['false'])} false; outputs {worst[0]}, gradients {worst[1]}; "
        f"{result['graphs']} graph(s), {result['seconds']:.0f} s"
    )


def verdict(compared: dict[str, Any]) -> str:
    """``bitwise``, the worst ratio in dB, or - where nothing was compared."""
    if not compared["total"]:
        return "-"
    if not compared["different"]:
        return "bitwise"
    worst = compared["worst"]
    return f"{worst:.0f} dB" if isinstance(worst, (int, float)) else f"{worst} dB"


class Worker(threading.Thread):
    """A thread that keeps one worker process busy and replaces it when it dies or hangs."""

    def __init__(self, jobs: queue.Queue[tuple[str, str]], folder: Path, limit: int) -> None:
        super().__init__(daemon=True)
        self.jobs, self.folder, self.limit = jobs, folder, limit
        self.process: subprocess.Popen[str] | None = None
        self.lines: queue.Queue[str | None] = queue.Queue()

    def run(self) -> None:
        while True:
            try:
                name, kind = self.jobs.get_nowait()
            except queue.Empty:
                break
            print(self.serve(name, kind), flush=True)
        if self.process is not None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            self.process.wait()

    def serve(self, name: str, kind: str) -> str:
        """One job; its summary."""
        process = self.process if self.process and self.process.poll() is None else self.start_one()
        assert process.stdin is not None
        try:
            process.stdin.write(f"{name} {kind}\n")
            process.stdin.flush()
            # The process limits itself; this is for one that hangs in native code.
            line = self.lines.get(timeout=2 * self.limit + 60)
        except (BrokenPipeError, queue.Empty):
            line = None
        if line is not None:
            return line
        process.kill()
        code = process.wait()
        result = failure(name, kind, RuntimeError(f"the process died or hung ({code})"))
        write(self.folder, result)
        return summary(result)

    def start_one(self) -> subprocess.Popen[str]:
        """A fresh worker process that is ready."""
        script = Path(__file__).parents[1] / "zoo.py"
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        command = [sys.executable, str(script), "--worker"]
        self.process = subprocess.Popen(
            [*command, "--results", str(self.folder), "--limit", str(self.limit)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=env,
        )
        self.lines = queue.Queue()
        assert self.process.stdout is not None
        threading.Thread(target=pump, args=(self.process.stdout, self.lines), daemon=True).start()
        self.lines.get(timeout=300)
        return self.process


def pump(stream: IO[str], lines: queue.Queue[str | None]) -> None:
    """Marked lines of a process, then None when it ends; whatever else it prints is dropped."""
    for line in stream:
        if line.startswith(MARK):
            lines.put(line[len(MARK) :].rstrip("\n"))
    lines.put(None)


def run_all(todo: list[tuple[str, str]], folder: Path, jobs: int, limit: int) -> None:
    """Run all of ``todo``; results are in the folder."""
    waiting: queue.Queue[tuple[str, str]] = queue.Queue()
    for job in todo:
        waiting.put(job)
    workers = [Worker(waiting, folder, limit) for _ in range(min(jobs, max(1, len(todo))))]
    for one in workers:
        one.start()
    for one in workers:
        one.join()
