"""Programs that a Python of their own runs."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def python(*arguments: object, env: Mapping[str, str] | None = None, **how: Any) -> str:
    """What a Python of its own prints, with settings beside those of this one; it must end well."""
    command = [sys.executable, *map(str, arguments)]
    own = {"capture_output": True, "text": True, "timeout": 300}
    own |= {"env": {**os.environ, **(env or {})}}
    done = subprocess.run(command, **own | how)
    assert done.returncode == 0, done.stderr
    return done.stdout


def killed(job: str, root: Path | str, source: Path | str = "", times=0) -> list[tuple[Any, str]]:
    """Kills at so many random times, and at each moment of the last commit: where, and when."""
    order = {"job": job, "root": str(root), "source": str(source), "times": times, "seed": 0}
    worker = Path(__file__).parent / "workers" / "killed.py"
    env = {"OPENBLAS_NUM_THREADS": "1"}
    kills = json.loads(python(worker, json.dumps(order), env=env, timeout=300 + 10 * times))
    return [(type(root)(kill["root"]), kill["last"]) for kill in kills]
