from collections.abc import Callable
from pathlib import Path

import pytest

from cases import Case

Copy = Callable[[str], Path]


@pytest.fixture
def copy_of(tmp_path: Path) -> Copy:
    """Makes a copy of a case by its label, which a test may damage."""
    return lambda label: Case(label).copied(tmp_path / Case(label).name)


@pytest.fixture
def deepspeed_copy(copy_of: Copy) -> Copy:
    """Makes a copy of a DeepSpeed case by its name, and gives its step."""
    return lambda name: copy_of(f"deepspeed/{name}") / "global_step5"


@pytest.fixture
def megatron_copy(copy_of: Copy) -> Copy:
    """Makes a copy of a Megatron case by its name, and gives its iteration."""
    return lambda name: copy_of(f"megatron/{name}") / "iter_0000003"
