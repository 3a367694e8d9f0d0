import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import megatron_cases


@pytest.fixture
def megatron_copy(tmp_path: Path) -> Callable[[str], Path]:
    """Makes a copy of a Megatron case, which a test may damage."""

    def make(case: str) -> Path:
        shutil.copytree(megatron_cases.DATA / case / "ckpt", tmp_path / case)
        return tmp_path / case / "iter_0000003"

    return make
