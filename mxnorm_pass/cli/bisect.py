"""``mxnorm bisect``: the site whose rewrite makes a check fail."""

from __future__ import annotations

import argparse
import dataclasses
import json

from mxnorm_pass.bisect import BisectError, ScriptError, bisect
from mxnorm_pass.cli.errors import NOT_MET, OK, ModelError
from mxnorm_pass.cli.output import Output


def run(args: argparse.Namespace, out: Output) -> int:
    """Exit status of ``mxnorm bisect``: 0 where a site was found, 1 where there is none to find.

    Raises:
        ModelError: where the script fails before its check is called.
    """
    try:
        found = bisect(args.target, args.script_args, timeout=args.timeout, progress=out.note)
    except ScriptError as error:
        raise ModelError(str(error)) from error
    except BisectError as error:
        message = str(error)
        out.result(lambda: json.dumps({"sites": [], "error": message}, indent=1), message)
        return NOT_MET
    what = "this site" if len(found.sites) == 1 else f"these {len(found.sites)} sites together"
    lines = [
        f"of {len(found.all_sites)} rewritten sites, {what} make the check fail "
        f"({found.tried} runs):"
        if len(found.sites) > 1
        else f"of {len(found.all_sites)} rewritten sites, {what} makes the check fail "
        f"({found.tried} runs):",
        *(f"  {site}" for site in found.sites),
        found.advice,
    ]
    out.result(
        lambda: json.dumps({**dataclasses.asdict(found), "advice": found.advice}, indent=1),
        "\n".join(lines),
    )
    return OK
