"""Elements that are copied into memory of other strides are all there, in their places."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_ucp.files import copying
from jax_ucp.files.copying import copy_into


@given(
    st.lists(st.integers(0, 70), min_size=0, max_size=4).flatmap(
        lambda shape: st.tuples(
            st.just(shape),
            st.permutations(range(len(shape))),
            st.permutations(range(len(shape))),
            st.sampled_from(["u1", "f2", "f4", "c8", "c16"]),
        )
    )
)
def test_a_copy_into_any_order_of_axes_has_every_element_in_its_place(case):
    shape, order, other, dtype = case
    if np.prod(shape) > 1 << 18:
        shape = [min(n, 20) for n in shape]
    elements = (np.arange(np.prod(shape, dtype=int)) % 2048).astype(dtype)
    elements = elements.reshape(shape).transpose(order)
    room = np.zeros([elements.shape[axis] for axis in other], dtype)
    copy_into(room.transpose(np.argsort(other)), elements)
    np.testing.assert_array_equal(room.transpose(np.argsort(other)), elements)


@pytest.mark.parametrize("step", [1, -1, 3])
@pytest.mark.parametrize("shape", [(1000, 3000), (5000, 70), (70, 5000), (3, 400, 400)])
def test_windows_that_do_not_divide_the_array_lose_nothing(monkeypatch, shape, step):
    monkeypatch.setattr(copying, "_WINDOW_BYTES", 64 << 10)
    elements = np.arange(np.prod(shape), dtype=np.uint32).reshape(shape)
    room = np.zeros((*shape[::-1][:-1], shape[0] * 3), np.uint32)
    out = room.T[: shape[0] * abs(step) : abs(step)][:: int(np.sign(step))]
    copy_into(out, elements)
    np.testing.assert_array_equal(out, elements)
    assert np.count_nonzero(room) == np.count_nonzero(elements)
