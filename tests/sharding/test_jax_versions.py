"""What releases of JAX name differently is looked up name by name, since names moved one by one."""

import runpy

import jax
import jax.experimental
import pytest

from jax_ucp.sharding import jax_versions

OLD = {"enable_x64": (jax.experimental, "enable_x64"), "set_mesh": (jax.sharding, "use_mesh")}


# None of them before 0.7.1, `set_mesh` alone in 0.7.1 and 0.7.2, both since 0.8
@pytest.mark.parametrize("new", [(), ("set_mesh",), ("enable_x64", "set_mesh")], ids=str)
def test_a_name_that_is_new_is_taken_and_else_the_old_one(monkeypatch, new):
    want = {}
    for name, (home, before) in OLD.items():
        want[name] = f"jax's {name}" if name in new else before
        if name in new:
            monkeypatch.setattr(jax, name, want[name], raising=False)
            monkeypatch.delattr(home, before, raising=False)
        else:
            monkeypatch.delattr(jax, name, raising=False)
            monkeypatch.setattr(home, before, before, raising=False)
    found = runpy.run_path(str(jax_versions.__file__))
    assert {name: found[name] for name in OLD} == want
