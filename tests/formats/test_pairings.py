"""Optimizers whose states go by numbers: paired with the truth, or kept apart."""

import json
import re
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jax_ucp as ucp
from cases import DATA as CASES_DATA
from cases import Case, assert_accounted_for, faults_of
from commands import run, run_json
from dcp_writer import Writer
from jax_ucp.arrays.dtypes import same_bits
from jax_ucp.errors import FormatError
from jax_ucp.layout.box import Box
from torch_writer import Storage, Tensor, save

DATA, DEEPSPEED = CASES_DATA / "pairings", CASES_DATA / "deepspeed"
NAMES = [f"layers.{i}.{kind}" for i in (0, 1, 2, 10) for kind in ("weight", "bias")]
NAMES.insert(0, "embed.weight")
NAMES += ["norm.weight", "norm.bias", "head.weight"]
SHAPES = [(2,), (3,), (2, 3), (3, 2), (3, 3), ()]
ORDERS = {"module": lambda names: names, "sorted": sorted, "reversed": lambda names: names[::-1]}


@dataclass
class Run:
    """A training run of a random model: weights, what its optimizer has, and whose states."""

    model: dict[str, np.ndarray]
    groups: list[list[str]]
    states: dict[str, dict[str, Any]]
    ordered: bool
    numbers: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = (name for group in self.groups for name in group)
        self.numbers = {name: i for i, name in enumerate(names)}

    def optimizer(self, named: bool = False) -> dict[str, Any]:
        """As torch saves it."""
        groups = []
        for i, names in enumerate(self.groups):
            groups.append({"lr": 0.5**i, "params": [self.numbers[name] for name in names]})
            if named:
                groups[-1]["param_names"] = list(names)
        states = {self.numbers[name]: state for name, state in self.states.items()}
        return {"state": states, "param_groups": groups}

    def truth(self) -> dict[str, np.ndarray]:
        found = {f"param/{name}": array for name, array in self.model.items()}
        for name, states in self.states.items():
            found |= {f"{state}/{name}": np.asarray(value) for state, value in states.items()}
        return found


def states_of(kind: str, shape: tuple[int, ...], i: int) -> dict[str, np.ndarray]:
    """What an optimizer has for a parameter; every number says whose it is."""
    number = np.float32(i + 1)
    if kind == "sgd":
        return {"momentum_buffer": np.full(shape, number)}
    if kind == "unknown":
        return {"step": np.full((), number), "z": np.full(shape or (1,), number)}
    if kind == "adafactor" and len(shape) > 1:
        row, column = shape[:-1], shape[:-2] + shape[-1:]
        columns = np.full(column, number + 0.5)
        return {"exp_avg_sq_row": np.full(row, number), "exp_avg_sq_col": columns}
    if kind == "adafactor":
        return {"exp_avg_sq": np.full(shape, number)}
    moments = {"exp_avg": np.full(shape, number), "exp_avg_sq": np.full(shape, number / 4)}
    return {"step": np.full((), number), **moments}


@st.composite
def runs(draw, kinds=("adam", "sgd", "adafactor", "unknown"), buffers: bool = True) -> Run:
    """Frozen parameters and buffers are in no group; parameters never stepped have no state."""
    names = [name for name in NAMES if draw(st.booleans())] or ["embed.weight"]
    shapes = [draw(st.sampled_from(SHAPES)) for _ in names]
    model = {n: np.full(shapes[i], 100 + i, np.float32) for i, n in enumerate(names)}
    owned = [name for name in names if draw(st.integers(0, 5))] or names[:1]
    stepped = [name for name in owned if draw(st.integers(0, 7))]
    order = draw(st.sampled_from([*ORDERS, "any"]))
    listed = draw(st.permutations(owned)) if order == "any" else ORDERS[order](owned)
    match draw(st.sampled_from(["one", "decay", "layers", "cut"])):
        case "one":
            groups = [list(listed)]
        case "decay":
            bare = [name for name in listed if model[name].ndim <= 1]
            groups = [[name for name in listed if name not in bare], bare]
        case "layers":
            by_layer: dict[str, list[str]] = {}
            for name in listed:
                by_layer.setdefault(name.rpartition(".")[0], []).append(name)
            groups = [*by_layer.values()]
        case _:
            cut = draw(st.integers(0, len(listed)))
            groups = [list(listed[:cut]), list(listed[cut:])]
    kind = draw(st.sampled_from(kinds))
    states = {name: states_of(kind, model[name].shape, names.index(name)) for name in stepped}
    ordered = all(group == sorted(group, key=names.index) for group in groups)
    return Run(model, groups, states, ordered)


def assert_true(checkpoint: ucp.Checkpoint, truth: dict[str, np.ndarray], whole=False) -> None:
    """Everything but `other` is the truth; with `whole`, everything of the truth is there."""
    found = {leaf.label: checkpoint.read(leaf.label) for leaf in checkpoint.leaves}

    def true(x):
        return x in truth and equal(found[x], truth[x], x)

    wrong = [label for label in found if not label.startswith("other/") and not true(label)]
    assert wrong == []
    if whole:
        assert set(truth) <= set(found)
    assert_accounted_for(checkpoint)


def equal(array: np.ndarray, want: np.ndarray, label: str) -> bool:
    """The same bits; of steps, which some truths hold as integers, the same number."""
    return float(array) == float(want) if label.startswith("step/") else same_bits(array, want)


def assert_told(checkpoint: ucp.Checkpoint, run: Run) -> None:
    """What groups say of parameters is what the optimizer was told."""
    told = {name: group.settings["lr"] for group in checkpoint.groups for name in group.params}
    want = {name: 0.5**i for i, names in enumerate(run.groups) for name in names}
    assert told.items() <= want.items()


def or_refusal(open_with, **said) -> ucp.Checkpoint | str:
    """The checkpoint, or why it is refused."""
    try:
        return open_with(**said)
    except FormatError as error:
        return str(error)


def follow(open_with, run: Run, lists: list[list[str]]) -> None:
    """Open without a word, and with true ones: no pair is wrong, and lists of names pair."""
    truth = run.truth()
    checkpoint = open_with()
    assert_true(checkpoint, truth)
    assert_told(checkpoint, run)
    apart = any(leaf.label.startswith("other/") for leaf in checkpoint.leaves)
    assert any("optimizer_groups=[[...], ...]" in note for note in checkpoint.notes) or not apart
    if run.states:
        said = open_with(optimizer_groups=lists)
        assert_true(said, truth, whole=True)
        assert said.source["optimizer_groups"] == tuple(map(tuple, lists))
        assert any("nothing in the files proves it" in note for note in said.notes)
    ordered = or_refusal(open_with, optimizer_groups="module-order")
    if isinstance(ordered, str):
        assert "optimizer_groups" in ordered
        assert not any("module-order" in note for note in checkpoint.notes)
    elif run.ordered:
        assert_true(ordered, truth, whole=True)
        assert_told(ordered, run)
    else:  # a word that is not true still has to fit the shapes
        for param in ordered.params.values():
            moments = [s for x, s in param.states.items() if x in ("exp_avg", "momentum_buffer")]
            assert all(leaf.shape == param.shape for leaf in moments)


@settings(max_examples=120)
@given(runs(), st.booleans())
def test_a_file_of_torch_pairs_the_truth_or_nothing(tmp_path_factory, run, tied):
    path = tmp_path_factory.mktemp("law") / "run.pt"
    model = dict(run.model)
    if tied:  # the last name is the first one's tensor too, as a head that is tied to an embedding
        first, array = next(iter(run.model.items()))
        storage = Storage("tied", array.reshape(-1))
        strides = tuple(s // 4 for s in array.strides)
        both = [Tensor(storage, 0, array.shape, strides) for _ in range(2)]
        model |= {first: both[0], "tied.weight": both[1]}
        run.model["tied.weight"] = array
    save({"model": OrderedDict(model), "optimizer": run.optimizer(), "epoch": 3}, path)
    follow(lambda **said: ucp.open(path, **said), run, run.groups)


@settings(max_examples=100)
@given(
    runs(), runs(), st.sampled_from(["copy", "other"]), st.booleans(), st.booleans(), st.booleans()
)
def test_no_model_gets_the_others_states(tmp_path_factory, run, second, what, named, both, mine):
    """A generator and a critic, a teacher and a student, an average; either optimizer or both."""
    path = tmp_path_factory.mktemp("law") / "run.pt"
    # of the same class, or of another, with values of its own
    base = run if what == "copy" else second
    states = {}
    for name, own in base.states.items():
        states[name] = {state: np.asarray(value + 50) for state, value in own.items()}
    other = {name: np.asarray(v + 500) for name, v in base.model.items()}
    second = Run(other, base.groups, states, base.ordered)
    tree: dict[str, Any] = {"model": run.model, "critic": second.model}
    if mine or both:
        tree["optimizer"] = run.optimizer(named)
    if not mine or both:
        tree["critic_optimizer"] = second.optimizer(named)
    save(tree, path)
    truth = run.truth() if mine or both else {f"param/{name}": v for name, v in run.model.items()}
    for said in ({}, {"optimizer_groups": "module-order"}):
        checkpoint = or_refusal(lambda **said: ucp.open(path, **said), **said)
        if isinstance(checkpoint, str):
            assert said, checkpoint
            continue
        # Names in the states may say that the critic is the model.
        of = truth if is_model(checkpoint, run) else second.truth()
        if not said or (run.ordered and second.ordered):
            assert_true(checkpoint, of)
    if (mine or both) and run.states:
        lists = [[f"model.{name}" for name in group] for group in run.groups]
        lists += [[] for _ in second.groups] if both and second.states else []
        found = or_refusal(lambda **said: ucp.open(path, **said), optimizer_groups=lists)
        if isinstance(found, str):
            # then names settle it already, or one of the two that the lists are for
            assert named, found
        else:
            assert_true(found, truth, whole=True)


def is_model(checkpoint: ucp.Checkpoint, run: Run) -> bool:
    params = {name: param.read() for name, param in checkpoint.params.items()}
    return all(n in run.model and same_bits(array, run.model[n]) for n, array in params.items())


def zero0(folder: Path, module: dict[str, np.ndarray], optimizer: dict[str, Any]) -> Path:
    """A checkpoint of DeepSpeed without ZeRO, of one rank."""
    (folder / "global_step3").mkdir()
    about = {
        "ds_config": {}, "ds_version": "0.19.8", "dp_world_size": 1, "mp_world_size": 1, "buffer_names": [],
    }  # fmt: skip
    tree = {"module": module, "optimizer": optimizer, **about}
    save(tree, folder / "global_step3" / "mp_rank_00_model_states.pt")
    return folder / "global_step3"


@settings(max_examples=120)
@given(runs())
def test_zero_0_pairs_the_truth_or_nothing(tmp_path_factory, run):
    folder = zero0(tmp_path_factory.mktemp("law"), run.model, run.optimizer())
    follow(lambda **said: ucp.open(folder, **said), run, run.groups)


@settings(max_examples=60)
@given(runs(kinds=("adam",)), st.booleans(), st.data())
def test_zero_0_in_half_precision_pairs_by_bits_or_not_at_all(tmp_path_factory, run, fused, data):
    """Masters that are alike when rounded, as norms that hardly moved from one, tell nothing."""
    # all alike, alike when rounded, or different
    spread = data.draw(st.sampled_from([0.0, 1e-6, 1.0]))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    noise = {name: spread * rng.normal(size=a.shape) for name, a in run.model.items()}
    masters = {name: np.asarray(1 + array, np.float32) for name, array in noise.items()}
    module = {name: array.astype(ml_dtypes.bfloat16) for name, array in masters.items()}
    groups = [group for group in run.groups if group]
    owned = [name for group in groups for name in group]
    values = {name: np.full(masters[name].shape, i, np.float32) for i, name in enumerate(owned)}
    moments = {name: {"step": 3, "exp_avg": array} for name, array in values.items()}
    if fused:
        kept = [np.concatenate([masters[n].ravel() for n in group]) for group in groups]
        flat = [np.concatenate([moments[n]["exp_avg"].ravel() for n in group]) for group in groups]
        states = {g: {"step": 3, "exp_avg": array} for g, array in enumerate(flat)}
        told = [{"lr": 0.5**g, "params": [g]} for g in range(len(groups))]
    else:
        kept = [[masters[n] for n in group] for group in groups]
        states = {run.numbers[name]: moments[name] for name in owned}
        numbers = [[run.numbers[name] for name in group] for group in groups]
        told = [{"lr": 0.5**g, "params": own} for g, own in enumerate(numbers)]
    inner = {"state": states, "param_groups": told}
    optimizer = {"optimizer_state_dict": inner, "clip_grad": 1.0}
    optimizer["fp32_groups_flat" if fused else "fp32_groups"] = kept
    folder = zero0(tmp_path_factory.mktemp("law"), module, optimizer)
    paired = {f"param/{n}": masters[n] if n in owned else array for n, array in module.items()}
    for name, some in moments.items():
        paired |= {f"exp_avg/{name}": some["exp_avg"], f"step/{name}": np.asarray(3, np.int32)}
    checkpoint = ucp.open(folder)
    apart = any(leaf.label.startswith("other/") for leaf in checkpoint.leaves)
    alone = {f"param/{name}": array for name, array in module.items()}
    assert_true(checkpoint, alone if apart else paired)
    assert apart == any("are kept under `other`" in note for note in checkpoint.notes)
    if spread == 1.0 and all(array.size > 3 for array in masters.values()):
        assert not apart
    rates = {name: 0.5**g for g, group in enumerate(groups) for name in group}
    found = {name: group.settings["lr"] for group in checkpoint.groups for name in group.params}
    assert apart or found == rates
    assert_true(ucp.open(folder, optimizer_groups=groups), paired, whole=True)
    assert faults_of(ucp.open(folder, optimizer_groups=groups)) == []
    in_order = all(group == [name for name in run.model if name in group] for group in groups)
    ordered = or_refusal(lambda **said: ucp.open(folder, **said), optimizer_groups="module-order")
    if isinstance(ordered, str):
        assert "optimizer_groups does not fit" in ordered
        assert not any("module-order" in note for note in checkpoint.notes)
    elif in_order:
        assert_true(ordered, paired, whole=True)


@settings(max_examples=40)
@given(runs())
def test_dcp_pairs_the_truth_or_nothing(tmp_path_factory, run):
    folder = tmp_path_factory.mktemp("law") / "dcp"
    writer = Writer(folder)
    for name, array in run.model.items():
        put(writer, ("model", name), array)
    for name, states in run.states.items():
        for state, value in states.items():
            put(writer, ("optimizer", "state", str(run.numbers[name]), state), value)
    for i, group in enumerate(run.optimizer()["param_groups"]):
        for key, value in group.items():
            path = ("optimizer", "param_groups", i, key)
            writer.paths[".".join(map(str, path))] = path
            writer.object(".".join(map(str, path)), "__0_0.distcp", value)
    writer.finish()
    follow(lambda **said: ucp.open(folder, **said), run, run.groups)


def put(writer: Writer, path: tuple[str, ...], array: np.ndarray) -> None:
    fqn = ".".join(path)
    writer.paths[fqn] = path
    writer.tensor(fqn, array, [("__0_0.distcp", Box.whole(array.shape))])


@pytest.mark.parametrize("fused", [False, True])
def test_masters_that_begin_alike_are_told_by_all_of_their_bits(tmp_path, fused):
    """Rows of zeros at the head of each matrix; and a vector that is the beginning of another."""
    masters = {f"p{i}": np.zeros((50, 3), np.float32) for i in range(4)}
    for i, array in enumerate(masters.values()):
        array[-1] = i + 1
    masters["v"] = np.zeros(64, np.float32)
    module = {name: array.astype(ml_dtypes.bfloat16) for name, array in masters.items()}
    order = ["p2", "p0", "v", "p3", "p1"]
    moments = {name: np.full(masters[name].shape, i, np.float32) for i, name in enumerate(masters)}
    if fused:
        states = {0: {"exp_avg": np.concatenate([moments[n].ravel() for n in order])}}
        kept = {"fp32_groups_flat": [np.concatenate([masters[n].ravel() for n in order])]}
    else:
        states = {i: {"exp_avg": moments[n]} for i, n in enumerate(order)}
        kept = {"fp32_groups": [[masters[n] for n in order]]}
    inner = {"state": states, "param_groups": [{"params": [*states]}]}
    checkpoint = ucp.open(zero0(tmp_path, module, {"optimizer_state_dict": inner, **kept}))
    truth = {f"param/{name}": array for name, array in masters.items()}
    truth |= {f"exp_avg/{name}": array for name, array in moments.items()}
    assert_true(checkpoint, truth, whole=True)
    assert checkpoint.notes == [note for note in checkpoint.notes if "in one way only" in note]


@pytest.mark.parametrize("deepspeed", [False, True])
def test_a_shape_that_fits_is_no_proof_where_the_optimizer_has_fewer(tmp_path, deepspeed):
    """The centers of a loss, with an own optimizer and the shape of the model's last weight."""
    model = {"body": np.ones((2, 3), np.float32), "last": np.ones((4, 2), np.float32)}
    states = {0: {"momentum_buffer": np.ones((4, 2), np.float32)}}
    optimizer = {"state": states, "param_groups": [{"params": [0]}]}
    if deepspeed:
        checkpoint = ucp.open(zero0(tmp_path, model, optimizer))
    else:
        save({"model": model, "optimizer": optimizer}, tmp_path / "run.pt")
        checkpoint = ucp.open(tmp_path / "run.pt")
    assert {leaf.label.partition("/")[0] for leaf in checkpoint.leaves} == {"param", "other"}
    assert any("there are 1 of them for 2" in note for note in checkpoint.notes)


def test_a_tied_weight_is_one_parameter_under_two_names(tmp_path):
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    both = [Tensor(Storage("tied", array.reshape(-1)), 0, (2, 3), (3, 1)) for _ in range(2)]
    states = {0: {"exp_avg": array + 1}, 1: {"exp_avg": np.ones(4, np.float32)}}
    tree = {"model": OrderedDict(embed=both[0], bias=np.zeros(4, np.float32), head=both[1])}
    optimizer = {"state": states, "param_groups": [{"params": [0, 1]}]}
    save({**tree, "optimizer": optimizer}, tmp_path / "run.pt")
    proved = ucp.open(tmp_path / "run.pt")
    assert {x for x in proved if x.startswith("exp_avg/")} == {"exp_avg/embed", "exp_avg/bias"}
    assert same_bits(proved.read("exp_avg/embed"), array + 1)
    said = ucp.open(tmp_path / "run.pt", optimizer_groups=[["head", "bias"]])
    assert same_bits(said.read("exp_avg/head"), array + 1)
    del states[1]
    optimizer = {"state": states, "param_groups": [{"params": [0, 1]}]}
    save({**tree, "optimizer": optimizer}, tmp_path / "run.pt")
    with pytest.raises(FormatError, match="two names for optimizer are one tensor"):
        ucp.open(tmp_path / "run.pt", optimizer_groups=[["head", "embed"]])


# Real runs.


@pytest.mark.slow
def test_the_order_of_the_module_is_right_where_it_is_true_and_refused_where_shapes_leave_several_ways():
    for case in ("torch_plain", "lt_plain"):
        checkpoint = ucp.open(DATA / case / "ckpt.pt", optimizer_groups="module-order")
        assert_true(checkpoint, Case(f"pairings/{case}").truth(), whole=True)
        assert checkpoint.source["optimizer_groups"] == "module-order"
    for case, why in (
        ("torch_reversed", "in the order of the model they fit it in no way"),
        ("torch_buffers", "in the order of the model they fit it in several ways"),
        ("torch_by_module", "in the order of the model they fit it in several ways"),
        (
            "torch_two_models",
            "optimizer could be the optimizer of other tensors than the model's, such as critic",
        ),
    ):
        with pytest.raises(FormatError, match=f"optimizer_groups does not fit: {why}"):
            ucp.open(DATA / case / "ckpt.pt", optimizer_groups="module-order")
        assert not any("module-order" in note for note in ucp.open(DATA / case / "ckpt.pt").notes)


@pytest.mark.parametrize(("case", "why"), [
    ("ts_gan_model_disc", "30 optimizer states in disc_optimizer .* fit disc and model alike"),
    ("ts_teacher_student", "30 optimizer states in optimizer .* fit model and student alike"),
    ("ts_ema", "30 optimizer states in optimizer .* fit model and model_ema alike"),
    ("ts_gan_shapes", r"exp_avg of 0\.weight has shape \[6, 8\], but .* has \[16, 8\]; they fit disc"),
    ("ts_fairseq", r"30 optimizer states in last_optimizer_state .* \(there are 10 of them for 12 tensors\)"),
    ("dcp_raw_numbered", "27 optimizer states in optimizer .* they go by numbers"),
    ("dcp_actor_critic", "4 optimizer states in critic_optim .*nothing decides which dict is the model"),
])  # fmt: skip
def test_of_real_files_that_leave_it_open_the_states_stay_apart(case, why):
    path = DATA / case / ("ckpt" if case.startswith("dcp") else "ckpt.pt")
    checkpoint = ucp.open(path)
    assert {leaf.label.partition("/")[0] for leaf in checkpoint.leaves} <= {"param", "other"}
    assert any(re.search(why, note) for note in checkpoint.notes), checkpoint.notes
    assert_accounted_for(checkpoint)
    assert not checkpoint.groups


def test_an_average_beside_the_model_is_excluded_by_full_names():
    path = DATA / "ts_ema" / "ckpt.pt"
    names = [label[8:] for label in Case("pairings/ts_ema").truth() if label.startswith("exp_avg/")]
    checkpoint = ucp.open(path, optimizer_groups=[[f"model.{name}" for name in names]])
    assert_true(checkpoint, Case("pairings/ts_ema").truth(), whole=True)
    with pytest.raises(FormatError, match="model and model_ema have these names; say which is"):
        ucp.open(path, optimizer_groups=[names])
    with pytest.raises(FormatError, match="no optimizer goes by numbers"):
        ucp.open(path, optimizer_groups="module-order")
    averaged = ucp.open(path, optimizer_groups=[[f"model_ema.{name}" for name in names]])
    assert {leaf.label.partition("/")[0] for leaf in averaged.leaves} == {"param", "other"}
    with pytest.raises(FormatError, match="is said to be what optimizer itself calls"):
        ucp.open(path, optimizer_groups=[[f"model.{name}" for name in reversed(names)]])


def decay_lists(case: str) -> list[list[str]]:
    """The groups of a run of DeepSpeed: with weight decay, without, and experts' behind."""
    about = Case(f"deepspeed/{case}").about["parameters"]
    found = []
    for experts in (False, True):
        some = [param for param in about if ("deepspeed_moe.experts" in param["name"]) == experts]
        found += [[one["name"] for one in some if one["decay"] == decay] for decay in (True, False)]
    return [names for names in found if names]


def test_lists_of_names_pair_what_deepspeed_numbers_experts_of_all_ranks_in_one_list():
    case = Case("deepspeed/moe_ep2_dp2_z0_fp32")
    checkpoint = ucp.open(case.path, optimizer_groups=decay_lists(case.name))
    assert_true(checkpoint, case.truth(), whole=True)
    assert faults_of(checkpoint) == []


@pytest.mark.parametrize(("case", "change", "why"), [
    ("z0_fp32_dp2", lambda lists: lists[:1], r"1 lists for 2 groups \(groups of 11 \+ 20 parameters\)"),
    ("z0_fp32_dp2",
     lambda lists: [lists[0], lists[1][1:]], "the group from number 11 on has 20 parameters, but 19 names"),
    ("z0_fp32_dp2", lambda lists: [lists[0], ["lost", *lists[1][1:]]], "lost is not a parameter here"),
    ("z0_fp32_dp2", lambda lists: [lists[0][::-1], lists[1]], r"exp_avg of number 1 has shape \[8, 16\]"),
    ("moe_ep2_dp2_z0_fp32",
     lambda lists: [*lists[:3], lists[3][1:]], "the group from number 32 on has 4 parameters, but 3 names"),
    ("moe_ep2_dp2_z0_fp32",
     lambda lists: [*lists[1::-1], *lists[2:]], "the group from number 0 on has 10 .*, but 18 names"),
])  # fmt: skip
def test_lists_for_deepspeed_that_do_not_fit_say_where(case, change, why):
    with pytest.raises(FormatError, match=rf"_states\.pt: optimizer_groups does not fit: .*{why}"):
        ucp.open(DEEPSPEED / case, optimizer_groups=change(decay_lists(case)))


@pytest.mark.parametrize(("lists", "why"), [
    ([["a", "b"], []], r"2 lists for 1 groups"),
    ([["a"]],          r"group 0 has 5 elements, the parameters listed for it 2"),
    ([["a", "c"]],     r"c is not a parameter of the module"),
    ([["b", "a"]],     r"group 0 does not have the master of b at 0 of its 5"),
])  # fmt: skip
def test_lists_for_a_buffer_of_masters_that_do_not_fit_say_where(tmp_path, lists, why):
    masters = {"a": np.full(2, 1, np.float32), "b": np.full(3, 2, np.float32)}
    module = {name: array.astype(ml_dtypes.bfloat16) for name, array in masters.items()}
    inner = {"state": {0: {"exp_avg": np.zeros(5, np.float32)}}, "param_groups": [{"params": [0]}]}
    flat = [np.concatenate([*masters.values()])]
    optimizer = {"optimizer_state_dict": inner, "fp32_groups_flat": flat}
    folder = zero0(tmp_path, module, optimizer)
    with pytest.raises(FormatError, match=f"optimizer_groups does not fit: {why}"):
        ucp.open(folder, optimizer_groups=lists)
    assert same_bits(ucp.open(folder, optimizer_groups=[["a", "b"]]).read("param/b"), masters["b"])


def test_norms_that_are_all_ones_in_16_bits_are_not_told_by_the_order_of_the_module(tmp_path):
    """An optimizer of sorted names, layers.10 before layers.2: only their masters differ."""
    names = [f"layers.{i}.norm.weight" for i in range(12)]
    masters = {name: np.full(4, 1 + 1e-6 * i, np.float32) for i, name in enumerate(names)}
    module = {name: array.astype(ml_dtypes.bfloat16) for name, array in masters.items()}
    order = sorted(names)
    moments = np.concatenate([np.full(4, names.index(name), np.float32) for name in order])
    kept = [np.concatenate([masters[name] for name in order])]
    inner = {"state": {0: {"step": 1, "exp_avg": moments}}, "param_groups": [{"params": [0]}]}
    folder = zero0(tmp_path, module, {"optimizer_state_dict": inner, "fp32_groups_flat": kept})
    checkpoint = ucp.open(folder)
    assert_true(checkpoint, {f"param/{name}": array for name, array in module.items()})
    assert any("parameters are the module's 16-bit weights" in note for note in checkpoint.notes)
    said = ucp.open(folder, optimizer_groups=[order])
    for i, name in enumerate(names):
        assert same_bits(said.read(f"param/{name}"), masters[name])
        assert said.read(f"exp_avg/{name}")[0] == i


@pytest.mark.parametrize("momentum", [False, True])
def test_two_optimizers_of_one_file_are_not_of_different_runs(tmp_path, momentum):
    """A second one, of another phase or a model not in the file, was told other rates."""
    model = {"a": np.ones(2, np.float32), "b": np.zeros(3, np.float32)}
    optimizers = {}
    for name, rate in (("first", 0.5), ("second", 0.25)):
        shapes = [array.shape for array in model.values() if momentum]
        states = {i: states_of("sgd", shape, i) for i, shape in enumerate(shapes)}
        groups = [{"lr": rate, "params": [0, 1], "param_names": ["a", "b"]}]
        optimizers[name] = {"state": states, "param_groups": groups}
    save({"model": model, **optimizers}, tmp_path / "run.pt")
    checkpoint = ucp.open(tmp_path / "run.pt")
    assert_true(checkpoint, {f"param/{name}": array for name, array in model.items()})
    assert not checkpoint.groups
    if momentum:
        assert all("another optimizer has states of the" in note for note in checkpoint.notes[:2])
        said = ucp.open(tmp_path / "run.pt", optimizer_groups=[[], ["a", "b"]])
        assert [group.settings for group in said.groups] == [{"lr": 0.25}]
        assert same_bits(said.read("momentum_buffer/b"), np.full(3, 2, np.float32))


# The word.


def test_what_was_said_is_kept_in_the_result_and_is_part_of_what_a_conversion_is(tmp_path):
    path = DATA / "torch_plain" / "ckpt.pt"
    said = ucp.open(path, optimizer_groups="module-order")
    converted = said.save(tmp_path / "out")
    assert converted.source["optimizer_groups"] == "module-order"
    assert set(converted) == set(said)
    lists = [[name for name in said.params if not name.startswith("head")]]
    other = ucp.open(path, optimizer_groups=lists)
    assert set(other) == set(said)
    stopped = tmp_path / "stopped"

    class Killed(BaseException):
        pass

    def kill(_: object) -> None:
        raise Killed

    with pytest.raises(Killed):
        said.save(stopped, progress=kill)
    with pytest.raises(FormatError, match="belongs to a conversion of another source"):
        other.save(stopped)
    assert said.save(stopped).source["optimizer_groups"] == "module-order"


@pytest.mark.parametrize(("case", "options", "why"), [
    ("deepspeed/z1_bf16_dp2",             {}, "no optimizer here has states whose parameters are not known"),
    ("deepspeed/z0_fp32_dp2",             {"weights_only": True}, "weights_only leaves the optimizer aside"),
    ("torch/dcp_named_optimizer/ckpt",    {}, "no optimizer here"),
    ("torch/hf_llama/ckpt",               {}, "no optimizer here"),
    ("megatron/legacy_tp1_pp1_fp32/ckpt", {}, "no optimizer here"),
    ("pairings/torch_plain/ckpt.pt",      {"weights_only": True}, "weights_only leaves the optimizer aside"),
])  # fmt: skip
def test_a_word_that_would_change_nothing_is_refused(case, options, why):
    for word in ("module-order", [["a"]]):
        with pytest.raises(FormatError, match=f"optimizer_groups has no effect, because {why}"):
            ucp.open(DATA.parent / case, optimizer_groups=word, **options)


def test_a_universal_checkpoint_needs_no_word(tmp_path):
    path = DATA / "torch_plain" / "ckpt.pt"
    ucp.open(path, optimizer_groups="module-order").save(tmp_path / "out")
    with pytest.raises(FormatError, match="optimizer_groups has no effect"):
        ucp.open(tmp_path / "out", optimizer_groups="module-order")


@pytest.mark.parametrize(("change", "why"), [
    (lambda names: [names[:-1]], r"group 0 .*has 27 parameters, but 26 names"),
    (lambda names: [names, []], r"2 lists for the groups of optimizer has 27"),
    (lambda names: [["model.nothing", *names[1:]]], r"model\.nothing is not a parameter of the model"),
    (
        lambda names: [[*names[1:], names[0]]],
        r"exp_avg of 0 in optimizer has shape \[6, 4\], but layers\.0\.",
    ),
    (lambda names: [[*names[:-1], "head.weight"]], r"has shape|two names for optimizer are one tensor"),
])  # fmt: skip
def test_lists_that_do_not_fit_say_where(change, why):
    names = Case("pairings/torch_plain").options["optimizer_groups"][0]
    with pytest.raises(FormatError, match=rf"ckpt\.pt: optimizer_groups does not fit: .*({why})"):
        ucp.open(DATA / "torch_plain" / "ckpt.pt", optimizer_groups=change(names))


def test_the_command_line_takes_an_order_or_a_file_of_lists(tmp_path):
    path, groups = str(DATA / "torch_sorted" / "ckpt.pt"), tmp_path / "groups.json"
    groups.write_text(json.dumps(Case("pairings/torch_sorted").options["optimizer_groups"]))
    run("convert", path, tmp_path / "out", "--optimizer-groups", groups)
    assert_true(ucp.open(tmp_path / "out"), Case("pairings/torch_sorted").truth(), whole=True)
    run_json("inspect", path, "--optimizer-groups", "module-order")
    for word in ("modul-order", tmp_path):
        text = run("inspect", path, "--optimizer-groups", word, code=2)
        assert "neither module-order nor hf-decay nor a file that can be" in " ".join(text.split())
    for text in ("{", '{"a": 1}', "[[1]]", '["a"]', '[["a"], ["a"]]', "[]", "[" * 100_000):
        groups.write_text(text)
        code = 1 if text in ("[]", '[["a"], ["a"]]') else 2
        run("inspect", path, "--optimizer-groups", groups, code=code)
