"""Every scheme, on shapes that its blocks and words do not divide: what it gives is what its rule
gives element by element, and any box of it is that box of the whole.
"""

import contextlib

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_ucp.arrays.dtypes import same_bits
from jax_ucp.arrays.rounding import round_into
from jax_ucp.errors import FormatError, UCPError
from jax_ucp.formats.quantized.bits import FP4, FP6_E2M3, FP6_E3M2, Packing, exponents
from jax_ucp.formats.quantized.stored import leading
from jax_ucp.layout.box import Box
from quantized_cases import SCHEMES, Draw, Made, packed, weight_of

DTYPES = [np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]


@st.composite
def boxes(draw: Draw, shape: tuple[int, ...]) -> Box:
    starts = [draw(st.integers(0, n - 1)) for n in shape]
    stops = [draw(st.integers(start + 1, n)) for start, n in zip(starts, shape, strict=True)]
    return Box(tuple(starts), tuple(stops))


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("scheme", SCHEMES)
@settings(max_examples=40)
@given(data=st.data())
def test_a_weight_is_what_its_rule_gives_and_any_boxes_of_it_those_of_the_whole(scheme, data):
    """Boxes are also read several at once, in small pieces, into memory of any strides."""
    made: Made = data.draw(SCHEMES[scheme])
    dtype = data.draw(st.sampled_from(DTYPES))
    view = made.view(dtype)
    want = made.want.astype(dtype)
    assert same_bits(view.read("w", Box.whole(want.shape)), want)
    wanted = data.draw(st.lists(boxes(want.shape), min_size=1, max_size=4))
    outs = [np.zeros((*box.shape, 2), dtype)[..., 0] for box in wanted]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jax_ucp.arrays.evaluate.PIECE_SIDE", data.draw(st.integers(1, 20)))
        view.read_into("w", wanted, outs)
    for box, out in zip(wanted, outs, strict=True):
        part = np.ascontiguousarray(want[box.index])
        assert same_bits(np.ascontiguousarray(out), part)
        assert same_bits(view.read("w", box), part)


@pytest.mark.parametrize("scheme", SCHEMES)
@settings(max_examples=20)
@given(data=st.data())
def test_of_a_box_inside_another_no_part_is_needed_outside_what_the_other_needs(scheme, data):
    weight = weight_of(data.draw(SCHEMES[scheme]).view(), "w")
    assert weight is not None
    outer = data.draw(boxes(weight.shape))
    inner = data.draw(boxes(outer.shape)).shift(outer.start)
    around = weight.boxes(outer)
    for role, box in weight.boxes(inner).items():
        assert box.within(around[role])
        assert box.within(Box.whole(weight.parts[role].shape))
    assert weight.boxes(inner).keys() == weight.parts.keys()


@given(
    st.integers(1, 8), st.sampled_from([np.uint8, np.int32]), st.integers(0, 1), st.integers(1, 70),
    st.integers(1, 5), st.data(),
)  # fmt: skip
def test_codes_of_any_bits_leave_words_as_they_went_in(bits, dtype, axis, length, lines, data):
    shape = (length, lines) if axis == 0 else (lines, length)
    codes = np.random.default_rng(bits + length).integers(0, 1 << bits, shape)
    stored = packed(codes, bits, axis, dtype)
    packing = Packing(bits, 8 * np.dtype(dtype).itemsize, axis)
    assert packing.shape(shape) == stored.shape
    box = data.draw(boxes(shape))
    got = packing.unpack(stored[packing.box(box, shape).index], box)
    assert np.array_equal(got, codes[box.index])


def test_narrow_floats_are_those_of_the_ocp():
    assert FP4.tolist()[:8] == [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert np.signbit(FP4[8:]).all()
    assert np.array_equal(-FP4[8:], FP4[:8])
    assert (FP6_E2M3[1], FP6_E2M3[:32].max()) == (0.125, 7.5)
    assert (FP6_E3M2[1], FP6_E3M2[:32].max()) == (0.0625, 28.0)
    powers = [2.0 ** (e - 127) for e in range(255)]
    assert exponents(np.arange(255, dtype=np.uint8)).tolist() == powers


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lower", [0, 1, 0xFFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_rounding_is_that_of_numpy_for_every_upper_half_in_any_order(lower, dtype):
    values = (np.arange(1 << 16, dtype=np.uint32) << 16 | lower).view(np.float32)
    small = values[np.abs(values) < 65520]
    for found in (values, small, small[:-1]):
        assert same_bits(_into(np.empty(found.shape, dtype), found), found.astype(dtype))
    square = values.reshape(4, 128, 128)
    want = square.astype(dtype).swapaxes(-1, -2).copy()
    assert same_bits(_into(np.empty(want.shape, dtype), square.swapaxes(-1, -2)), want)
    turned = _into(np.empty((4, 128, 128), dtype).swapaxes(-1, -2), square)
    assert same_bits(turned.swapaxes(-1, -2), want)
    odd = _into(np.empty((4, 127, 128), dtype).swapaxes(-1, -2), square[..., :127])
    assert same_bits(odd.swapaxes(-1, -2), want[..., :127, :].copy())


def _into(out: np.ndarray, values: np.ndarray) -> np.ndarray:
    round_into(out, values)
    return out


def other_shapes(array: np.ndarray) -> list[np.ndarray]:
    """The same elements in other shapes, and with two axes exchanged."""
    turned = [np.swapaxes(array, -1, -2)] if array.ndim > 1 else []
    flat = array.reshape(-1)
    shapes = [(1, -1), (-1, 1), (1, 1, -1), (-1,), (1, -1, 1), (*array.shape, 1), (1, *array.shape)]
    return [*turned, *[flat.reshape(shape) for shape in shapes]]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("scheme", [scheme for scheme in SCHEMES if scheme != "ggml"])
@settings(max_examples=60)
@given(data=st.data())
def test_parts_whose_axes_are_others_are_refused_even_where_the_lengths_agree(scheme, data):
    """Scales of (1, n) are for columns, of (n, 1) or (n,) for rows: the scheme says which."""
    made: Made = data.draw(SCHEMES[scheme])
    roles = sorted(
        role
        for role in made.parts
        if role.endswith(
            (
                "scale", "scales", "biases", "scale_inv", "SCB", "absmax", "map", "zero_point", "qzeros", "scale_2",
                "g_idx",
            )
        )
    )  # fmt: skip
    role = data.draw(st.sampled_from(roles))
    array = made.parts[role]
    made.parts[role] = changed = data.draw(st.sampled_from(other_shapes(array)))
    is_flat = scheme == "torchao, in tiles" and len(leading(changed.shape)) == 1
    meant = [leading(array.shape)]
    if "FP8_BLOCK_SCALES" in str(made.settings):  # (rows, columns) or (rows, 1, columns, 1)
        rows, columns = array.shape if array.ndim == 2 else array.shape[::2]
        meant = [leading((rows, columns)), leading((rows, 1, columns, 1))]
    if leading(changed.shape) not in meant and not is_flat:
        with pytest.raises(UCPError):
            made.view()
    elif np.array_equal(changed.reshape(-1), array.reshape(-1)):
        with contextlib.suppress(UCPError):
            got = made.view().read("w", Box.whole(made.want.shape))
            assert np.array_equal(got, made.want.astype(np.float32), equal_nan=True)


SIZED = dict.fromkeys(("GPTQ", "AWQ", "MLX", "ModelOpt, NVFP4"), "group_size")
SIZED["block fp8"] = "weight_block_size"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("scheme", [*SIZED, "plain codes", "packed integers", "NVFP4 and MXFP4"])
@settings(max_examples=100)
@given(data=st.data())
def test_blocks_of_another_size_in_the_config_are_refused_or_mean_the_same(scheme, data):
    made: Made = data.draw(SCHEMES[scheme])
    size = data.draw(st.integers(1, 70))
    if scheme in SIZED:
        pair = [size, data.draw(st.integers(1, 70))]
        made.settings[SIZED[scheme]] = pair if scheme == "block fp8" else size
    else:
        args = made.settings["config_groups"]["group_0"]["weights"]
        args |= {"group_size": size, "block_structure": [size, data.draw(st.integers(1, 70))]}
    try:
        view = made.view()
        got = view.read("w", Box.whole(made.want.shape))
    except UCPError:
        return
    assert np.array_equal(got, made.want.astype(np.float32), equal_nan=True)


def test_groups_of_mlx_that_leave_part_of_a_word_empty_are_refused():
    """Two groups of 64 codes of 2 bits fill 8 words; of 57 codes they would need no more."""
    parts = {"codes": np.zeros((1, 8), np.uint32), "scales": np.ones((1, 2), np.float16)}
    parts["biases"] = np.zeros((1, 2), np.float16)
    settings = {"group_size": 64, "bits": 2, "mode": "affine"}
    made = Made("MLX", parts, np.zeros((1, 128), np.float32), settings)
    made.view()
    made.settings["group_size"] = 57
    with pytest.raises(FormatError, match=r"rows of 8 words, and its scales are for 114 codes"):
        made.view()
