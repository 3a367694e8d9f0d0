"""Rotary halves and pairs, variants of a mapping, and whole training runs through one: bit for bit."""

import jax
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jax_ucp as ucp
from jax_ucp.errors import LayoutError, SpecError, TreeMismatch

ROTATED = """\
sizes: {heads: 2}
leaves:
- {param: q, axes: (heads d:halves) e, leaf: {q: e heads d:pairs}}
- {param: k, axes: e (heads (n + d:pairs)), leaf: {k: heads (n + d:halves) e}}
"""


@given(half=st.integers(1, 4), embed=st.integers(1, 3), other=st.integers(1, 3))
def test_halves_become_pairs_and_come_back(half, embed, other):
    rng = np.random.default_rng(0)
    q = rng.normal(size=(2 * 2 * half, embed)).astype(np.float32)
    k = rng.normal(size=(embed, 2 * (other + 2 * half))).astype(np.float32)
    checkpoint = ucp.Checkpoint.of({"param": {"q": q, "k": k}})
    mapping = ucp.Mapping.parse(ROTATED)
    mapped = checkpoint.map(mapping, sizes={"n": other})
    leaves = mapped.restore()["param"]
    want = q.reshape(2, 2, half, embed).transpose(3, 0, 2, 1).reshape(embed, 2, 2 * half)
    np.testing.assert_array_equal(leaves["q"], want)
    rotated = k.reshape(embed, 2, -1)[:, :, other:].reshape(embed, 2, half, 2)
    halves = rotated.transpose(1, 3, 2, 0).reshape(2, 2 * half, embed)
    np.testing.assert_array_equal(leaves["k"][:, other:], halves)
    back = mapped.map(mapping.inverse()).restore()["param"]
    np.testing.assert_array_equal(back["q"], q)
    np.testing.assert_array_equal(back["k"], k)


def test_an_odd_number_of_features_is_not_rotated():
    mapping = ucp.Mapping.parse("leaves:\n- {param: q, axes: 'd:halves', leaf: {q: 'd:pairs'}}")
    checkpoint = ucp.Checkpoint.of({"param": {"q": np.zeros(3, np.float32)}})
    with pytest.raises(LayoutError, match="d = 3 features are rotated in pairs"):
        checkpoint.map(mapping)
    with pytest.raises(SpecError, match="d:thirds"):
        ucp.Mapping.parse("leaves:\n- {param: q, axes: 'd:thirds', leaf: {q: d}}")


SCANNED = """\
sizes: {block: layers // 2}
variants:
  unscanned: {"net/blocks/{i}": "net/layers_{2*block+i}"}
leaves:
- {param: embed, axes: vocab e, leaf: net/embed}
- param: h.{2*block+i}.w
  axes: m e
  leaf: {"net/blocks/{i}/mlp/w": e block m}
- param: h.{2*block+i}.b
  axes: m
  leaf: {"net/blocks/{i}/mlp/b": m block}
"""


def hugging_face_tree(layers=6):
    rng = np.random.default_rng(1)
    tree = {"embed": rng.normal(size=(5, 3)).astype(np.float32)}
    for i in range(layers):
        tree[f"h.{i}.w"] = rng.normal(size=(4, 3)).astype(np.float32)
        tree[f"h.{i}.b"] = rng.normal(size=4).astype(np.float32)
    return tree


def scanned_and_not(tmp_path):
    path = tmp_path / "scanned.yaml"
    path.write_text(SCANNED)
    checkpoint, config = ucp.Checkpoint.of({"param": hugging_face_tree()}), {"layers": 6}
    mapped = (checkpoint.map(f"{path}{variant}", config=config) for variant in ("", ":unscanned"))
    trees = [one.restore()["param"] for one in mapped]
    return path, *trees


def test_a_variant_has_the_same_elements_in_layers_of_their_own(tmp_path):
    _, scanned, unscanned = scanned_and_not(tmp_path)
    assert scanned["net"].keys() == {"embed", "blocks"}
    for layer in range(6):
        w = scanned["net"]["blocks"][str(layer % 2)]["mlp"]["w"][:, layer // 2]
        np.testing.assert_array_equal(unscanned["net"][f"layers_{layer}"]["mlp"]["w"], w)


def equal(tree, other):
    assert jax.tree.structure(tree) == jax.tree.structure(other)
    jax.tree.map(np.testing.assert_array_equal, tree, other)


def trained(params):
    """A run's state after two updates of Adam."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    state = tx.init(params)
    for _ in range(2):
        gradients = jax.tree.map(lambda x: 0.3 * x + 0.1, params)
        updates, state = tx.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
    return {"step": 2, "params": params, "opt_state": state}


def test_a_run_with_its_moments_is_unrolled_and_scanned_again_in_one_map(tmp_path):
    path, scanned, unscanned = scanned_and_not(tmp_path)
    run, want = trained(scanned), trained(unscanned)
    ucp.Checkpoint.of(run).save(tmp_path / "run")
    unroll = ucp.Mapping.load(f"{path}:to-unscanned")
    mapped = ucp.open(tmp_path / "run").map(unroll, params="params", sizes={"layers": 6})
    mapped.save(tmp_path / "unrolled")
    again = ucp.open(tmp_path / "unrolled")
    got = again.restore(want)
    assert got["step"] == want["step"]
    # clipping sums in another order
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, want)
    back = again.map(unroll.inverse(), params="params").restore(run)
    equal(jax.tree.map(np.asarray, back), jax.tree.map(np.asarray, run))


@pytest.mark.parametrize("params", [None, "param", "opt_state", "step", "params/net"])
def test_a_wrong_label_of_the_parameters_is_answered_with_the_right_one(tmp_path, params):
    path, _, unscanned = scanned_and_not(tmp_path)
    run = ucp.Checkpoint.of(trained(unscanned))
    mapping = ucp.Mapping.load(f"{path}:unscanned").inverse()
    with pytest.raises(ValueError, match=r"perhaps params='params' \(--params params\)") as error:
        run.map(mapping, params=params)
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="has nothing at 'x'"):
        ucp.Checkpoint.of({"a": {"b": np.ones(2)}}).map(mapping, params="x")


def test_weights_are_taken_out_of_a_run_by_their_label(tmp_path):
    path, scanned, _ = scanned_and_not(tmp_path)
    ucp.Checkpoint.of(trained(scanned)).save(tmp_path / "run")
    checkpoint = ucp.open(tmp_path / "run")
    weights = checkpoint.weights("params")
    assert {leaf.path[0].name for leaf in weights.leaves} == {"param"}
    assert any("are left out" in note for note in weights.notes)
    back = weights.map(ucp.Mapping.load(path).inverse(), config={"layers": 6})
    assert back.restore()["param"].keys() == hugging_face_tree().keys()
    for label in ("model", "params/nothing"):
        with pytest.raises(TreeMismatch, match="nothing at"):
            checkpoint.weights(label)
    with pytest.raises(TreeMismatch, match="--params"):
        checkpoint.map(path, config={"layers": 6})


@pytest.mark.parametrize(("variants", "said"), [
    ("{flat: {blocks: layers}}", "no leaf of .* begins with blocks/"),
    ("{flat: {}}", "a variant has a name"),
    ("[1]", "a variant has a name"),
    ("{'a b': {net: x}}", "a variant has a name"),
    ("{flat: {'net/blocks/{i}': net/b}}", "but no leaf has just these"),
])  # fmt: skip
def test_variants_that_are_none_are_refused_when_the_mapping_is_read(variants, said):
    own = 'variants:\n  unscanned: {"net/blocks/{i}": "net/layers_{2*block+i}"}'
    text = SCANNED.replace(own, f"variants: {variants}")
    with pytest.raises(SpecError, match=said):
        ucp.Mapping.parse(text)
    with pytest.raises(SpecError, match="has no variant 'other'; it has unscanned"):
        ucp.Mapping.parse(SCANNED).variant("other")
