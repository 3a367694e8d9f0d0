"""Drafts of mappings from names and shapes alone."""

import pytest

from jax_ucp.inspection.mapping_draft import mapping_draft


def test_a_name_with_a_sign_where_others_have_a_number_is_a_name_like_others():
    draft = mapping_draft({"a.#": (2,), "a.0": (2,)}, {"x/#": (2,)})
    assert '- param: "a.#"' in draft
    assert "# open: a.{n0of1} [2] fits nothing in the model" in draft


@pytest.mark.parametrize("axes", [9, 40])
def test_an_array_of_more_axes_than_can_be_named_is_left_open(axes):
    draft = mapping_draft({"a": (2**axes,)}, {"b": (2,) * axes})
    assert f"# open: a [{2**axes}] fits nothing in the model" in draft


def test_numbers_that_leave_most_combinations_out_are_names_of_their_own():
    numbers = range(2000)  # of which there are 8e9 combinations
    draft = mapping_draft({f"a.{n}.{n}.{n}": (2,) for n in numbers}, {})
    assert draft.count("# open: ") == len(numbers)
