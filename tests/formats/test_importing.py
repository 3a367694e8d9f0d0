"""What every importer shares: nothing is put in a place twice, and files of a checkpoint agree."""

import itertools

import numpy as np
import pytest

from helpers import contents_of
from jax_ucp.errors import FormatError
from jax_ucp.formats.assemble import ContentsBuilder


@pytest.fixture
def found(tmp_path):
    return ContentsBuilder("test", tmp_path, contents_of({"f:a": {"x": np.zeros(2)}}).arrays)


def tensor(found):
    (key,) = found.stored
    found.parameter("param", "w", found.array(key), "a tensor")


def constant(found):
    found.constant("param", "w", np.zeros(()), "f:b")


@pytest.mark.parametrize(("first", "second"), list(itertools.product([tensor, constant], repeat=2)))
def test_a_state_of_a_parameter_is_there_once(found, first, second):
    first(found)
    with pytest.raises(FormatError, match=r"param of w is stored twice, in f:\w+"):
        second(found)


def test_files_agree_in_what_their_groups_say(found):
    found.hyperparameters("w", {"lr": 0.1, "params": [0]})
    found.hyperparameters("w", {"lr": 0.1, "params": [1]})
    with pytest.raises(FormatError, match=r"for w some param_groups have lr=0.1, others 0.2"):
        found.hyperparameters("w", {"lr": 0.2})
