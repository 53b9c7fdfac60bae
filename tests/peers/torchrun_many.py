"""Runs the real torchrun any number of times with one import of torch.

It reads one job per line on standard input, as JSON with `argv`, `env`, `cwd`, `stdout` and `stderr`, and prints the
exit code of each. A job runs in a forked child with exactly that environment, so it differs from the command
`torchrun` only in that it does not import torch again.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable


def main() -> None:
    import torch.distributed.run

    for line in iter(sys.stdin.readline, ""):
        pid = os.fork()
        if pid == 0:
            run_torchrun(torch.distributed.run.main, json.loads(line))
        status = os.waitpid(pid, 0)[1]
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


def run_torchrun(run: Callable[[], None], job: dict[str, Any]) -> NoReturn:
    code: object = 1
    try:
        os.chdir(job["cwd"])
        os.environ.clear()
        os.environ.update(job["env"])
        for fd, path in ((0, os.devnull), (1, job["stdout"]), (2, job["stderr"])):
            opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
            os.dup2(opened, fd)
            os.close(opened)
        sys.argv = ["torchrun", *job["argv"]]
        run()
        code = 0
    except SystemExit as leaving:
        code = leaving.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 0 if code is None else 1)


if __name__ == "__main__":
    main()
