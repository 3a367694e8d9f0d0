"""Folders of DTensors by rank (verl, SkyRL), and the folders of runs and steps around them and around
DCP: equal to the live state, or refused with the reason.

The cases are written by `tests/generators/torch_folders.py`; that of torch 2.4 by
`distribute_tensor`.
"""

import itertools
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jax_ucp as ucp
import torch_writer
from cases import DATA as CASES_DATA
from cases import Case, assert_accounted_for
from jax_ucp.codecs.tensor_names import DTensor, StoredTensor
from jax_ucp.codecs.unpickle import Record
from jax_ucp.errors import FormatError, NotACheckpoint
from jax_ucp.formats.dtensor_ranks.flat_states import flat_parameters, subsets
from jax_ucp.formats.dtensor_ranks.placements import Split, shard_at
from jax_ucp.formats.dtensor_ranks.specs import spec_of
from jax_ucp.layout.fragments import ParamLayout
from jax_ucp.layout.parts import box_part
from jax_ucp.states.pairing import Undecided

DATA = CASES_DATA / "dtensors"
VERL = DATA / "verl_llama" / "ckpt"
ACTOR = VERL / "global_step_3" / "actor"


def assert_is(checkpoint: ucp.Checkpoint, want: dict[str, np.ndarray]) -> None:
    assert set(checkpoint) == want.keys()
    for label, array in want.items():
        got = checkpoint.read(label)
        assert (got.shape, got.tobytes()) == (array.shape, array.tobytes()), label


def test_inspect_and_notes_name_the_writer_and_extras_have_what_lies_beside():
    checkpoint = ucp.open(VERL)
    assert checkpoint.notes[0] == "a run of verl, opened at global_step_3"
    assert any(note.startswith("written by verl: torch.save") for note in checkpoint.notes)
    assert checkpoint.extras["config.json"]["config"]["model_type"] == "llama"
    assert checkpoint.extras["data.pt"] == {"_snapshot": {"_num_yielded": 3}}
    state = checkpoint.extras["extra_state_world_size_2_rank_1.pt"]
    assert state["lr_scheduler"]["last_epoch"] == 1


def test_one_file_alone_is_refused_with_the_folder_to_open():
    with pytest.raises(FormatError, match=r"is what one of 2 ranks wrote: open its folder"):
        ucp.open(ACTOR / "model_world_size_2_rank_0.pt")


@pytest.mark.parametrize(
    ("case", "file"), [("items_tp_2x2", "model_0.pt"), ("experimental_2", "checkpoint_1.pt")]
)
def test_one_item_of_one_rank_is_refused_with_the_folder_to_open(case, file):
    with pytest.raises(FormatError, match=r"has what one rank had of DTensors, .*open its folder"):
        ucp.open(DATA / case / "ckpt" / file)


def test_items_that_are_not_cut_are_each_ranks_own_and_weights_open_alone():
    ckpt = DATA / "items_tp_2x2" / "ckpt"
    checkpoint = ucp.open(ckpt)
    assert checkpoint.notes[0].startswith("written by torch_checkpointing: torch.save of the DT")
    assert [checkpoint.extras[f"rng_{rank}.pt"]["rank"] for rank in range(4)] == [0, 1, 2, 3]
    assert checkpoint.extras["step_2.pt"]["object"] == 3
    weights = ucp.open(ckpt, weights_only=True)
    assert {label.partition("/")[0] for label in weights} == {"param"}


def test_files_that_number_epochs_are_no_ranks(tmp_path):
    for epoch in range(2):
        torch_writer.save({"w": np.arange(3.0)}, tmp_path / f"model_{epoch}.pt")
    with pytest.raises(NotACheckpoint, match=r"holds model_0.pt, model_1.pt: open one"):
        ucp.open(tmp_path)


# Runs and steps.


def test_a_run_opens_at_the_step_of_its_tracker_or_at_the_one_asked_for(tmp_path):
    run = tmp_path / "run"
    shutil.copytree(VERL, run)
    shutil.copytree(run / "global_step_3", run / "global_step_7")
    assert "global_step_3" in ucp.open(run).path
    assert "global_step_7" in ucp.open(run, step=7).path
    with pytest.raises(NotACheckpoint, match=r"has no finished step 5; it has global_step_3"):
        ucp.open(run, step=5)
    (run / "latest_checkpointed_iteration.txt").write_text("9")
    with pytest.raises(NotACheckpoint, match=r"names the step '9', which is not there"):
        ucp.open(run)
    (run / "latest_checkpointed_iteration.txt").unlink()
    assert "global_step_7" in ucp.open(run).path


def test_of_several_models_one_is_chosen_by_the_name_of_its_folder(tmp_path):
    step = tmp_path / "step"
    shutil.copytree(ACTOR, step / "actor")
    shutil.copytree(DATA / "verl_fsdp1_orig_3" / "ckpt", step / "critic")
    with pytest.raises(NotACheckpoint, match=r"is a step with the models actor, critic: open one"):
        ucp.open(step)
    with pytest.raises(NotACheckpoint, match=r"is a step with the models actor, critic, and no "):
        ucp.open(step, model="x")
    critic = ucp.open(step, model="critic", optimizer_groups="module-order")
    assert_is(critic, Case("dtensors/verl_fsdp1_orig_3").truth())
    assert critic.source["model"] == "critic"
    assert any(item.where == "actor" for item in critic.inventory)


def dcp(name: str) -> Path:
    return DATA / "accelerate_llama" / "ckpt" / name


def test_a_run_of_torchtitan_opens_at_the_last_step_that_is_whole(tmp_path):
    for step in (8, 12):
        shutil.copytree(dcp("pytorch_model_fsdp_0"), tmp_path / f"step-{step}")
    (tmp_path / "step-15").mkdir()
    (tmp_path / "step-15" / "__0_0.distcp").write_bytes(b"unfinished")
    assert ucp.open(tmp_path).notes[0].startswith("a run of torchtitan, opened at step-12; there")
    assert ucp.open(tmp_path, step=8).path.endswith("step-8")


def test_olmo_core_and_automodel_open_from_the_folder_of_the_run(tmp_path):
    want = Case("dtensors/accelerate_llama").truth()
    for i, (step, parts, beside) in enumerate(
        (
            ("step40", {"model_and_optim": "pytorch_model_fsdp_0"}, "train/rank0.pt"),
            (
                "epoch_0_step_9",
                {"model": "pytorch_model_fsdp_0", "optim": "optimizer_0"},
                "step_scheduler.pt",
            ),
        )
    ):
        at = tmp_path / str(i) / step
        for name, source in parts.items():
            shutil.copytree(dcp(source), at / name)
        (at / beside).parent.mkdir(exist_ok=True)
        shutil.copy(dcp("scheduler.bin"), at / beside)
        checkpoint = ucp.open(tmp_path / str(i))
        present = {k: v for k, v in want.items() if k.startswith("param/") or "optim" in parts}
        assert_is(checkpoint, present)
        assert checkpoint.extras[beside]["last_epoch"] == 1
        assert_accounted_for(checkpoint)


def test_a_run_with_a_checkpoint_in_its_own_folder_is_refused(tmp_path):
    shutil.copytree(VERL, tmp_path / "run")
    shutil.copytree(ACTOR, tmp_path / "run", dirs_exist_ok=True)
    with pytest.raises(FormatError, match=r"two checkpoints lie in it. Open the folder of a step"):
        ucp.open(tmp_path / "run")


def test_what_lightning_saves_beside_its_shards_is_kept(tmp_path):
    shutil.copytree(dcp("pytorch_model_fsdp_0"), tmp_path / "epoch=0.ckpt")
    shutil.copy(dcp("scheduler.bin"), tmp_path / "epoch=0.ckpt" / "meta.pt")
    checkpoint = ucp.open(tmp_path / "epoch=0.ckpt")
    assert checkpoint.extras["meta.pt"]["last_epoch"] == 1
    assert not any("not read: meta.pt" in note for note in checkpoint.notes)


def test_an_optimizer_called_after_the_model_that_is_asked_for_is_its():
    path = DATA.parent / "pairings" / "dcp_actor_critic" / "ckpt"
    critic = ucp.open(path, model="critic")
    assert any(label.startswith("momentum_buffer/") for label in critic)
    assert "critic_optim is taken for the optimizer of the model by its name" in critic.notes
    actor = ucp.open(path, model="actor")
    assert not any(label.startswith("momentum_buffer/") for label in actor)


# Placements.


def chunks(n: int, parts: int, part: int, start: int = 0) -> tuple[int, int]:
    size = -(-n // parts)
    return start + min(size * part, n), start + min(size * (part + 1), n)


sizes = st.integers(1, 5)


@given(st.lists(st.integers(0, 12), min_size=1, max_size=3), st.lists(sizes, max_size=3), st.data())
def test_shards_of_any_placements_hold_every_element_once(shape, mesh, data):
    axes = st.sampled_from(range(len(shape)))
    placements = [data.draw(st.one_of(st.none(), axes.map(Split))) for _ in mesh]
    places = np.ndindex(*mesh)
    shards = [shard_at(tuple(shape), tuple(mesh), place, placements)[0] for place in places]
    parts = [box_part(i, *boxes) for i, shard in enumerate(shards) for boxes in shard.blocks]
    layout = ParamLayout(tuple(shape), tuple(s.shape for s in shards), tuple(parts))
    layout.check()
    copies = math.prod(n for n, p in zip(mesh, placements, strict=True) if p is None)
    assert all(len(replicas) == copies for replicas in layout.replicas.values())


@given(st.integers(0, 60), sizes, sizes)
def test_fsdp2_over_tensor_parallelism_is_a_part_of_a_part_wherever_shapes_agree(n, dp, tp):
    splits = Split(0, tp), Split(0)
    ways = [shard_at((n,), (dp, tp), place, splits) for place in np.ndindex(dp, tp)]
    for place, (_, ordered) in zip(np.ndindex(dp, tp), ways, strict=True):
        start, stop = chunks(n, tp, place[1])
        want = chunks(stop - start, dp, place[0], start)
        got = [(target.start[0], target.stop[0]) for _, target in ordered.blocks]
        assert got == ([want] if want[0] < want[1] else [])
    if all(left.shape == ordered.shape for left, ordered in ways):
        assert all(left == ordered for left, ordered in ways)


# Specs.


def stored(array: np.ndarray) -> StoredTensor:
    return StoredTensor("", array.shape, array.dtype, "0", 0, (1,) * array.ndim)


def dtensor(mesh: dict, placements: tuple, shape: tuple[int, ...] = (4, 3)) -> DTensor:
    meta = Record("torch.distributed.tensor._dtensor_spec.TensorMeta", (shape,))
    spec = {"mesh": Record("DeviceMesh", (), mesh), "placements": placements, "tensor_meta": meta}
    local = stored(np.zeros(shape, np.float32))
    return DTensor(shape, np.dtype(np.float32), local, Record("DTensorSpec", (), spec))


def placed(kind: str, **fields: int) -> Record:
    return Record(f"torch.distributed.tensor.placement_types.{kind}", (), fields)


GRID = np.array([[4, 5, 6], [7, 8, 9]])
LAYOUTS = [
    {"mesh": stored(GRID)},
    {"_rank_map": stored(GRID.ravel()), "_layout": Record("_MeshLayout", (), {
        "axes": tuple(Record("_FlatLayout", (), {"shape": (n,), "stride": (step,)})
                      for n, step in ((2, 3), (3, 1)))})},
    {"_rank_map": stored(GRID.ravel()), "_layout": Record("_MeshLayout", (), {
        "shape": (2, 3), "stride": (3, 1)})},
]  # fmt: skip


def read(tensor: StoredTensor) -> np.ndarray:
    return GRID.reshape(tensor.shape)


@pytest.mark.parametrize("mesh", LAYOUTS)
def test_the_mesh_of_every_version_of_torch_says_which_rank_is_where(mesh):
    placements = placed("Replicate"), placed("Shard", dim=0)
    tensor = dtensor({**mesh, "_coordinate_on_dim": (1, 2)}, placements)
    spec = spec_of(tensor, 9, read)
    assert (spec.mesh.shape, spec.mesh.ranks) == ((2, 3), (4, 5, 6, 7, 8, 9))
    assert spec.placements == (None, Split(0))
    with pytest.raises(FormatError, match=r"which is called that of rank 5|not in its mesh|leads"):
        spec_of(tensor, 5, read)


@pytest.mark.parametrize(("placements", "match"), [
    ((placed("Partial"), placed("Replicate")), "each rank has a summand of it"),
    ((placed("Replicate"), placed("Shard", dim=2)), "sharded on axis 2, but has 2"),
    ((placed("Replicate"), placed("_StridedShard", dim=0, split_factor=0)), "split factor of 0"),
    ((placed("Replicate"),), "needs as many placements"),
    ((placed("Replicate"), 3), "should be a Shard or Replicate"),
])  # fmt: skip
def test_placements_that_cannot_be_put_together_are_refused(placements, match):
    tensor = dtensor({"mesh": stored(GRID), "_coordinate_on_dim": [0, 0]}, placements)
    with pytest.raises(FormatError, match=match):
        spec_of(tensor, 4, read)


# Flat parameters.


@given(st.integers(1, 4), st.integers(1, 3), st.lists(st.integers(1, 40), min_size=3, max_size=3))
@settings(max_examples=60)
def test_flat_parameters_are_those_of_the_wrapped_modules_or_undecided(layers, parts, numbers):
    names = {"embed.w": numbers[0]}
    own = {"a.w": numbers[1], "b.w": 7}
    names |= {f"layers.{i}.{name}": n for i in range(layers) for name, n in own.items()}
    names["head.w"] = numbers[2]
    shapes = {name: (n,) for name, n in names.items()}
    units = [["embed.w", "head.w"]]
    units += [[f"layers.{i}.a.w", f"layers.{i}.b.w"] for i in range(layers)]
    lengths = [-(-sum(names[name] for name in unit) // parts) for unit in units]
    try:
        found = flat_parameters(shapes, parts, lengths)
    except Undecided:
        found = units
    assert found == units
    with pytest.raises(Undecided, match="no way"):
        flat_parameters(shapes, parts, [*lengths, 10_000])


@given(st.lists(st.integers(1, 4), max_size=6), st.integers(0, 12))
def test_choices_of_kinds_are_all_that_have_as_many_modules_or_one_fewer_each_once(sizes, most):
    kinds = {str(i): size for i, size in enumerate(sizes)}
    choices = [itertools.combinations(kinds, count) for count in range(len(kinds) + 1)]
    every = itertools.chain.from_iterable(choices)
    want = [each for each in every if most - 1 <= sum(map(kinds.__getitem__, each)) <= most]
    assert sorted(map(tuple, subsets([*kinds.items()], most))) == sorted(want)
