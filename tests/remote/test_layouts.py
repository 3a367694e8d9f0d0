"""A checkpoint as a step of a run in a bucket, where a framework's own loader looks."""

import warnings

import numpy as np
import orbax.checkpoint as ocp
import pytest

import jax_ucp as ucp
from commands import run
from helpers import memory, numbered, tree_of_files
from jax_ucp.files.path import file_path
from jax_ucp.files.protocol import read_file
from jax_ucp.universal.step import COMMIT_FILE, STEP_FILE

WEIGHTS = {"w": numbered((64, 32), np.float32), "b": numbered((5,), np.float32)}
LAYOUTS = [{"root": "params", "item": "items"}, {"root": "", "variables": True}, {}]
# s3fs and gcsfs leave their sessions to the garbage collector
IGNORED = "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
pytestmark = pytest.mark.filterwarnings(*IGNORED)


def objects(url: str) -> dict[str, bytes]:
    files = file_path(url).folder()
    return {file.name: read_file(files, file.name) for file in files.walk()}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_step_in_a_bucket_has_the_files_of_the_local_one(layout, store, tmp_path):
    source = memory({"param": WEIGHTS})
    here = source.save(tmp_path / "run", step=3, **layout)
    there = source.save(f"{store.url}/run", step=3, **layout)
    assert there.path == f"{store.url}/run/3/{layout.get('item', 'default')}"
    item = here.path.removeprefix(f"{tmp_path}/run/")
    wanted = tree_of_files(tmp_path / "run")
    found = objects(f"{store.url}/run")
    assert found.keys() == wanted.keys() | {f"3/{COMMIT_FILE}", f"{item}/{COMMIT_FILE}"}
    own = {f"3/{STEP_FILE}", f"{item}/ucp.json"}  # which have times
    assert all(found[name] == wanted[name] for name in wanted.keys() - own)
    assert list(there) == list(here)


def test_managers_find_the_step(store):
    root = f"{store.url}/run"
    memory({"param": WEIGHTS}).save(root, step=0, root="params")
    options = ucp.in_bucket(ocp.CheckpointManagerOptions(max_to_keep=3))
    handler = ucp.CheckpointHandler()
    with ocp.CheckpointManager(root, item_handlers=handler, options=options) as manager:
        assert list(manager.all_steps()) == [0]
        restored = manager.restore(0)["params"]
        manager.save(1, args=ucp.args.Save({"params": WEIGHTS}))
    assert all(np.array_equal(restored[name], WEIGHTS[name]) for name in WEIGHTS)
    assert ucp.open(root).path == f"{root}/1/default"


def test_stock_orbax_restores_the_step_from_google_cloud_storage(gcs):
    root = f"{gcs.url}/run"
    memory({"param": WEIGHTS}).save(root, step=0, root="params", item="items")
    target = {"params": {name: np.zeros_like(array) for name, array in WEIGHTS.items()}}
    with ocp.CheckpointManager(root, item_names=("items",)) as stock, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of shardings that nobody gave
        args = ocp.args.Composite(items=ocp.args.StandardRestore(target))
        restored = stock.restore(0, args=args)["items"]["params"]
    assert all(np.array_equal(restored[name], WEIGHTS[name]) for name in WEIGHTS)


def test_a_step_that_is_there_or_begun_is_left_as_it_is(store):
    source, root = memory({"param": WEIGHTS}), f"{store.url}/run"
    source.save(root, step=0)
    file_path(root).folder().write("1/other/ucp.writer.json", [b"{}"], durable=True)
    before = objects(root)
    for step in (0, 1):
        with pytest.raises(FileExistsError, match="give another step"):
            source.save(root, step=step)
    assert objects(root) == before


def test_a_step_that_was_stopped_is_taken_up(s3):
    source, root = memory({"param": WEIGHTS}), f"{s3.url}/run"

    def stop(block) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        source.save(root, step=0, progress=stop)
    assert f"0/{COMMIT_FILE}" not in objects(root)
    source.save(root, step=0)
    assert f"0/{COMMIT_FILE}" in objects(root)


def test_the_command_writes_a_step_into_a_bucket(s3, tmp_path):
    memory({"param": WEIGHTS}).save(tmp_path / "source")
    run("convert", tmp_path / "source", f"{s3.url}/run", "--to-step", 0, "--item", "items")
    assert {f"0/{COMMIT_FILE}", "0/items/ucp.json"} <= objects(f"{s3.url}/run").keys()
