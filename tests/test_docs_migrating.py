"""The steps of `docs/migrating-from-orbax.md`, on a run that Orbax 0.5.20 saved."""

import re
import shutil
from pathlib import Path

from cases import DATA
from handler_cases import needs_v1
from programs import python

PAGE = (Path(__file__).parents[1] / "docs" / "migrating-from-orbax.md").read_text()
STEPS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@needs_v1
def test_a_run_goes_on_with_ours_and_back_as_the_page_says(tmp_path):
    shutil.copytree(DATA / "jax" / "orbax05-manager_items" / "ckpt", tmp_path / "run")
    assert len(STEPS) == 5
    program = "\n".join([f"RUN = {str(tmp_path)!r}", *STEPS, "print('through')"])
    env = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    printed = python("-W", "ignore", "-c", program, cwd=tmp_path, env=env)
    assert printed.endswith("through\n")
