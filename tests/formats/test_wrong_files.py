"""Files of a checkpoint that are missing, exchanged, cut short, damaged, of another step or of
another run.

Each is refused by name, or found by `verify` (and so by a conversion), or provably changes nothing.
Where nothing in the files tells, UNTOLD says so, and docs/formats.md too.
"""

import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from pathlib import Path
from random import Random

import numpy as np
import pytest

import cases
import jax_ucp as ucp
from jax_ucp.arrays.dtypes import same_bits
from jax_ucp.codecs.torch_file import TorchFile
from jax_ucp.errors import FormatError, UCPError
from torch_writer import change, edit, rewrite

DATA = Path(__file__).parent.parent / "data"
CASES = (
    "deepspeed/z1_bf16_dp2",
    "deepspeed/z2_fp32_dp3_roundrobin",
    "deepspeed/z3_fp16_dp2_subgroups",
)
CASES += ("deepspeed/z0_fp32_dp2", "deepspeed/tp2_dp2_z1_bf16_swiglu", "deepspeed/pp2_dp2_z1_fp32")
CASES += (
    "deepspeed/moe_ep2_dp2_z1_bf16",
    "deepspeed/moe_ep2_dp2_z0_fp32",
    "deepspeed/autoep2_dp4_z3_fp32",
)
CASES += ("deepspeed_universal/tp2_dp1_z1_fp32_gqa", "megatron/legacy_tp2_dp2_distopt_bf16")
CASES += ("megatron/legacy_tp1_pp2_vpp2_fp32", "megatron/legacy_ep2_moe_seq_distopt_fp32")

# What no file tells. ZeRO-3 stores no second copy, and its ranks' files do not say whose they are
# unless there are experts. ZeRO-0 has everything once, in one file or in that of an expert. An
# atom's name is that of its folder.
ONLY_COPY = r"zero_pp_rank_\d+_mp_rank_\d+_optim_states\.pt"
UNTOLD = {
    ("exchanged", "deepspeed/z3_fp16_dp2_subgroups"): ONLY_COPY,
    ("of another run", "deepspeed/z3_fp16_dp2_subgroups"): ONLY_COPY,
    ("of another run", "deepspeed/autoep2_dp4_z3_fp32"): ONLY_COPY,
    ("of another run", "deepspeed/z0_fp32_dp2"): "mp_rank_00_model_states.pt",
    (
        "of another run",
        "deepspeed/moe_ep2_dp2_z0_fp32",
    ): r"layer_0_expert_\d_mp_rank_00_model_states\.pt",
    # Moments, and what the tensor-parallel ranks of Megatron-DeepSpeed average, have no copy in the
    # module.
    ("exchanged", "deepspeed_universal/tp2_dp1_z1_fp32_gqa"): r"exp_avg(_sq)?\.pt|.*norm.*fp32\.pt",
    (
        "of another run",
        "deepspeed_universal/tp2_dp1_z1_fp32_gqa",
    ): r"exp_avg(_sq)?\.pt|.*(norm|dense).*fp32\.pt",
}


class Case:
    """A copy of a checkpoint, its arrays, and a verdict on what became of it."""

    def __init__(self, name: str, folder: Path):
        self.name, self.folder = name, folder
        cases.Case(name).copied(folder)
        self.word = cases.Case(name).options if name.startswith("deepspeed") else {}
        self.whole = self.arrays(ucp.open(folder, **self.word))

    def files(self, most: int = 16) -> list[Path]:
        """Its torch files, or some of them, always the same, where there are many."""
        paths = sorted(self.folder.rglob("*.pt"))
        return paths if len(paths) <= most else sorted(Random(0).sample(paths, most))

    @staticmethod
    def arrays(checkpoint: ucp.Checkpoint) -> dict[str, tuple[object, ...]]:
        read = {leaf.label: checkpoint.read(leaf.label) for leaf in checkpoint.leaves}
        return {label: (array.shape, array.dtype, array.tobytes()) for label, array in read.items()}

    def verdict(self) -> tuple[str, str]:
        """What the checkpoint now is: refused (why), contradicting itself (where), the same, or
        another.
        """
        try:
            checkpoint = ucp.open(self.folder, **self.word)
            if faults := [fault for _, fault in checkpoint.verify() if fault]:
                return "contradicts itself", "\n".join(faults)
            return ("the same", "") if self.arrays(checkpoint) == self.whole else ("another", "")
        except UCPError as error:
            return "refused", str(error)

    def check(self, what: str, paths: Sequence[Path]) -> None:
        """Put the files that were changed to the test, and back."""
        names = [path.name for path in paths]
        verdict, why = self.verdict()
        if verdict in ("refused", "contradicts itself"):
            # One of them, by its name, or by its kind where the missing one cannot be known.
            known = [part for name in names for part in (name, re.sub(r"\d+", "*", name, count=1))]
            assert any(name in why for name in known), (
                f"{what} {names}: {verdict}, but not by name: {why}"
            )
        elif verdict == "another":
            untold = UNTOLD.get((what, self.name), "nothing")
            for path in paths:
                assert re.search(f"({untold})$", path.as_posix()), f"{what} {names}: not seen"


@pytest.fixture(params=CASES)
def case(request, tmp_path) -> Case:
    return Case(request.param, tmp_path / "case")


def changed(path: Path, how: Callable[[Path], object]) -> Iterator[None]:
    before = path.read_bytes()
    how(path)
    yield
    path.write_bytes(before)


def test_a_missing_file_is_named(case):
    for path in case.files():
        for _ in changed(path, Path.unlink):
            case.check("missing", [path])


def test_a_file_cut_short_is_named(case):
    for path in case.files(8):
        data = path.read_bytes()
        for kept in (0, len(data) // 3, len(data) - 1):
            for _ in changed(
                path, lambda path, kept=kept, data=data: path.write_bytes(data[:kept])
            ):
                assert case.verdict()[0] == "refused"
                case.check("cut short", [path])


def kind(path: Path) -> str:
    return re.sub(r"\d+", "#", path.as_posix())


def test_two_files_exchanged_are_seen(case):
    pairs = [(a, b) for a, b in combinations(case.files(40), 2) if kind(a) == kind(b)]
    for a, b in pairs if len(pairs) <= 30 else Random(0).sample(pairs, 30):
        data = a.read_bytes(), b.read_bytes()
        a.write_bytes(data[1])
        b.write_bytes(data[0])
        case.check("exchanged", [a, b])
        a.write_bytes(data[0])
        b.write_bytes(data[1])


def other_values(path: Path) -> None:
    """Make every number of the file another one nearby, with CRCs to match: what the same rank
    of another run wrote.
    """

    def change(name: str, data: bytes) -> bytes:
        if "/data/" not in name or len(data) < 16:
            return data
        return (np.frombuffer(data[: len(data) // 2 * 2], np.uint16) ^ 0x40).tobytes() + data[
            len(data) // 2 * 2 :
        ]

    rewrite(path, change)


def test_a_file_of_another_run_of_the_same_shapes_is_seen(case):
    for path in case.files():
        for _ in changed(path, other_values):
            case.check("of another run", [path])


def step_before(path: Path) -> None:
    """Make every step that the file tells one less."""
    counter = rb"((?:global_steps|iteration|step)(?:q.|r....|\x94)?K)(.)"

    def number(name: str, data: bytes) -> bytes:
        less = lambda found: found[1] + bytes([max(found[2][0] - 1, 0)])  # noqa: E731
        return re.sub(counter, less, data, flags=re.DOTALL) if name.endswith("data.pkl") else data

    def less(array: np.ndarray) -> None:
        array -= 1

    rewrite(path, number)
    change(path, {key: less for key in TorchFile(path).arrays() if key.split("/")[-1] == "step"})


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("deepspeed/z1_bf16_dp2", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"),
        ("deepspeed/z3_fp16_dp2_subgroups", "zero_pp_rank_1_mp_rank_00_optim_states.pt"),
        ("deepspeed/z3_fp16_dp2_subgroups", "zero_pp_rank_0_mp_rank_00_model_states.pt"),
        ("deepspeed/tp2_dp2_z1_bf16_swiglu", "bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt"),
        ("deepspeed/tp2_dp2_z1_bf16_swiglu", "mp_rank_01_model_states.pt"),
        ("deepspeed/pp2_dp2_z1_fp32", "zero_pp_rank_1_mp_rank_01_optim_states.pt"),
        ("deepspeed/moe_ep2_dp2_z1_bf16", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"),
        ("deepspeed/autoep2_dp4_z3_fp32", "zero_pp_rank_2_mp_rank_00_optim_states.pt"),
        ("deepspeed_universal/tp2_dp1_z1_fp32_gqa", "mp_rank_01_model_states.pt"),
        ("megatron/legacy_tp2_dp2_distopt_bf16", "mp_rank_01/model_optim_rng.pt"),
        ("megatron/legacy_tp1_pp2_vpp2_fp32", "mp_rank_00_001/model_optim_rng.pt"),
    ],
)
def test_a_rank_of_another_step_is_refused(name, file, tmp_path):
    case = Case(name, tmp_path / "case")
    (path,) = case.folder.rglob(file)
    step_before(path)
    verdict, why = case.verdict()
    # there each rank has steps of its own
    assert verdict == ("contradicts itself" if "vpp2" in name else "refused")
    assert re.search(r"step|iteration", why)
    assert Path(file).name in why


def test_a_bit_of_metadata_that_changed_is_seen(case):
    """Bits of the pickle and of the zip's headers; CRCs and twofold headers cover what a reader
    needs.
    """
    rng = Random(1)
    for path in rng.sample(case.files(), min(3, len(case.files()))):
        data = path.read_bytes()
        stored = {
            at
            for m in TorchFile(path)._storages.values()
            for at in range(m.offset, m.offset + m.size)
        }
        outside = [at for at in range(len(data)) if at not in stored]
        for at in rng.sample(outside, 8):
            flipped = data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
            for _ in changed(path, lambda path, flipped=flipped: path.write_bytes(flipped)):
                case.check("one bit", [path])


# One file of each kind of run and of each of its kinds of files, to be put where another belongs.
DONORS = (
    "z1_bf16_dp2/*/mp_rank_00_model_states.pt",
    "z2_fp32_dp4_tinygroup/*/*zero_pp_rank_3*_optim_states.pt",
    "z1_fp32_dp2_elastic/*/*zero_pp_rank_1*_optim_states.pt",
    "z3_bf16_dp2/*/zero_pp_rank_1*_model_states.pt",
    "z3_bf16_dp3_offload/*/*zero_pp_rank_1*_optim_states.pt",
    "autoep2_dp4_z3_fp32/*/zero_pp_rank_3*_optim_states.pt",
    "pp2_dp2_z1_fp32/*/layer_00-model_states.pt",
    "autoep2_dp2_z1_bf16/*/layer_0_expert_1_*_model_states.pt",
    "moe_ep2_dp2_z1_bf16/*/layer_0_expert_1_*_model_states.pt",
    "moe_ep2_dp2_z1_bf16/*/*zero_pp_rank_1*_optim_states.pt",
    "moe_ep2_dp2_z0_fp32/*/expp_rank_1_*_optim_states.pt",
)


def donor(pattern: str) -> Path:
    (path,) = (DATA / "deepspeed").glob(pattern)
    return path


def refusal(folder: Path, weights_only: bool) -> str:
    """The error that a checkpoint cannot be opened with, or nothing."""
    try:
        ucp.open(folder, weights_only=weights_only)
    except UCPError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", ["autoep2_dp4_z3_fp32", "moe_ep2_dp2_z0_fp32", "z3_bf16_dp2"])
@pytest.mark.parametrize("weights_only", [False, True])
def test_a_file_of_another_model_is_told_apart(name, weights_only, tmp_path):
    """No error of a mistaken file speaks of metadata in general."""
    folder = tmp_path / name
    shutil.copytree(DATA / "deepspeed" / name, folder)
    last_of_kind = {kind(path.relative_to(folder)): path for path in sorted(folder.rglob("*.pt"))}
    for path in last_of_kind.values():
        for pattern in DONORS:
            for _ in changed(path, lambda path, p=pattern: shutil.copyfile(donor(p), path)):
                why = refusal(folder, weights_only)
                assert "not as expected" not in why, f"{path.name} is {pattern}: {why}"


def test_an_optimizer_file_of_another_stage_is_named(tmp_path):
    folder, file = tmp_path / "case", "global_step5/zero_pp_rank_3_mp_rank_00_optim_states.pt"
    shutil.copytree(DATA / "deepspeed" / "autoep2_dp4_z3_fp32", folder)
    shutil.copyfile(donor("z2_fp32_dp4_tinygroup/*/*zero_pp_rank_3*"), folder / file)
    with pytest.raises(UCPError, match=f"{file} has .*of ZeRO-3: the file is of another run"):
        ucp.open(folder)


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("autoep2_dp2_z1_bf16", "moe_ep2_dp2_z1_bf16/*/layer_0_expert_1_*"),
        ("moe_ep2_dp2_z1_bf16", "autoep2_dp2_z1_bf16/*/layer_0_expert_1_*"),
        ("moe_ep2_dp2_z0_fp32", "autoep2_dp2_z1_bf16/*/layer_0_expert_1_*"),
        ("moe_ep2_dp2_z0_fp32", "moe_ep2_dp2_z1_bf16/*/layer_0_expert_1_*"),
    ],
)
@pytest.mark.parametrize("weights_only", [False, True])
def test_an_expert_of_another_run_is_named(name, pattern, weights_only, tmp_path):
    """Its names, shapes and dtypes are not those of the layer's other experts."""
    folder, file = tmp_path / "case", "layer_0_expert_1_mp_rank_00_model_states.pt"
    shutil.copytree(DATA / "deepspeed" / name, folder)
    shutil.copyfile(donor(pattern), folder / "global_step5" / file)
    with pytest.raises(UCPError, match=f"{file} has .* belongs to another run"):
        ucp.open(folder, weights_only=weights_only)


def test_experts_that_are_all_of_another_run_are_named(tmp_path):
    folder = tmp_path / "case"
    shutil.copytree(DATA / "deepspeed" / "autoep2_dp2_z1_bf16", folder)
    for path in (folder / "global_step5").glob("layer_0_expert_*"):
        shutil.copyfile(donor(f"moe_ep2_dp2_z1_bf16/*/{path.name}"), path)
    with pytest.raises(UCPError, match=r"layer_0_expert_.*there is no such parameter"):
        ucp.open(folder)


def test_an_expert_too_few_names_those_that_are_there(tmp_path):
    folder = tmp_path / "case"
    shutil.copytree(DATA / "deepspeed" / "moe_ep2_dp2_z1_bf16", folder)
    experts = sorted((folder / "global_step5").glob("layer_0_expert_*"))
    experts[0].rename(experts[0].with_name("layer_0_expert_7_mp_rank_00_model_states.pt"))
    with pytest.raises(
        UCPError, match=r"expert_0_.* is missing.*expert_1_mp_rank_00_.*expert_7_mp"
    ):
        ucp.open(folder)


LOST_MASTERS = {
    path.relative_to(DATA / "deepspeed").parts[0]: path
    for path in sorted((DATA / "deepspeed").rglob("*zero_pp_rank_0_mp_rank_00_optim_states.pt"))
}


@pytest.mark.parametrize("name", LOST_MASTERS)
def test_weights_without_masters_have_the_same_names_and_shapes(name, tmp_path):
    """Where an optimizer file cannot be used, the module's own weights take the masters' places,
    or it is refused.
    """
    folder = tmp_path / name
    shutil.copytree(DATA / "deepspeed" / name, folder)
    intact = ucp.open(DATA / "deepspeed" / name, weights_only=True)
    (folder / LOST_MASTERS[name].relative_to(DATA / "deepspeed" / name)).unlink()
    if why := refusal(folder, weights_only=True):
        assert LOST_MASTERS[name].name in why
        assert re.search("_z3_|^z3_|pp2_", name), why
        return
    module = ucp.open(folder, weights_only=True)
    assert "the weights are the module's own" in " ".join(module.notes)
    assert shapes(module) == shapes(intact)
    assert not [fault for _, fault in module.verify() if fault]
    stored_as = {leaf.label: leaf.dtype for leaf in module.leaves}
    for label in shapes(module):
        rounded = intact.read(label).astype(stored_as[label])
        assert same_bits(module.read(label), rounded), label


def shapes(checkpoint: ucp.Checkpoint) -> dict[str, tuple[int, ...]]:
    return {leaf.label: leaf.shape for leaf in checkpoint.leaves}


UNIVERSAL = "deepspeed_universal"
OPTIMIZERS = {"zero3": "z3_bf16_dp2_frozen_tied", "experts": "autoep2_dp4_z3_fp32"}
OPTIMIZERS["zero1"] = "tp2_dp1_z1_fp32_gqa"


@pytest.mark.parametrize("donor", OPTIMIZERS.values())
@pytest.mark.parametrize("name", OPTIMIZERS.values())
def test_an_optimizer_state_of_another_run_is_refused(name, donor, tmp_path):
    case = Case(f"{UNIVERSAL}/{name}", tmp_path / "case")
    (path,) = case.folder.rglob("optimizer_state.pt")
    (other,) = (DATA / UNIVERSAL / donor).rglob("optimizer_state.pt")
    shutil.copy(other, path)
    verdict, why = case.verdict()
    assert verdict == ("the same" if name == donor else "refused")
    assert name == donor or (str(path) in why and "of another run" in why)


def without_a_group(tree: dict) -> None:
    del tree["param_groups"][1]


def without_a_state(tree: dict) -> None:
    del tree["optimizer_state_dict"]["state"][1]


def on_more_ranks(tree: dict) -> None:
    counts = tree["partition_count"]
    tree["partition_count"] = [2 for _ in counts] if isinstance(counts, list) else counts * 2


def with_fewer_parameters(tree: dict) -> None:
    tree["param_alignment_paddings"][0].pop()


@pytest.mark.parametrize(
    ("name", "how", "match"),
    [
        ("zero1", without_a_group, r"has settings of the groups \[0\], but .* 2 groups"),
        ("zero3", without_a_group, r"has settings of the groups \[0\], but .* 2 groups"),
        ("zero3", without_a_state, r"has states of the groups \[0\], but .* 2 groups"),
        ("zero1", on_more_ranks, "is of 2 data-parallel ranks, .* of 1"),
        ("zero3", on_more_ranks, "is of 4 data-parallel ranks, .* of 2"),
        (
            "zero1",
            with_fewer_parameters,
            r"is of \[9, 19\] parameters in its groups, .* of \[10, 19\]",
        ),
    ],
)
def test_an_optimizer_state_that_does_not_fit_the_model_states_is_refused(
    name, how, match, tmp_path
):
    case = Case(f"{UNIVERSAL}/{OPTIMIZERS[name]}", tmp_path / "case")
    (path,) = case.folder.rglob("optimizer_state.pt")
    edit(path, how)
    verdict, why = case.verdict()
    assert verdict == "refused"
    assert re.search(rf"^{re.escape(str(path))} {match}", why), why


@pytest.mark.parametrize("family", ["deepspeed", UNIVERSAL])
@pytest.mark.parametrize("exchange", [True, False], ids=["exchanged", "copied"])
@pytest.mark.parametrize(("a", "b"), list(combinations(range(4), 2)))
def test_model_states_of_another_expert_rank_are_refused(family, a, b, exchange, tmp_path):
    """Also where the name that is written inside is that of the file."""
    case = Case(f"{family}/autoep2_dp4_z3_fp32", tmp_path / "case")
    first, second = (
        next(case.folder.rglob(f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"))
        for rank in (a, b)
    )
    stems = first.stem.encode(), second.stem.encode()
    data = first.read_bytes(), second.read_bytes()
    second.write_bytes(data[0].replace(*stems))
    if exchange:
        first.write_bytes(data[1].replace(*reversed(stems)))
    named = first if exchange else second
    for weights_only in (False, True):
        with pytest.raises(UCPError, match=rf"{named.name}: ds_autoep_layers says that it is of"):
            ucp.open(case.folder, weights_only=weights_only)


def test_experts_on_neighbouring_ranks_have_their_own_order(tmp_path):
    """Under use_data_before_expert_parallelism, where ranks 1 and 2 have changed their parts."""
    case = Case("deepspeed_universal/autoep2_dp4_z3_fp32", tmp_path / "case")
    one, two = (
        next(case.folder.rglob(f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"))
        for rank in (1, 2)
    )
    one_data, two_data = one.read_bytes(), two.read_bytes()
    one.write_bytes(two_data)
    two.write_bytes(one_data)
    for path in case.folder.rglob("*_model_states.pt"):
        edit(path, lambda t: t["ds_config"].update(use_data_before_expert_parallelism=True))
    assert case.arrays(ucp.open(case.folder)) == case.whole


ZARR = "megatron/old0153_tp2_zarr_fp32"


@pytest.mark.parametrize("clutter", ["._1.0.0", "._.zarray", ".DS_Store", "Thumbs.db"])
@pytest.mark.parametrize("kind", ["chunks", "objects"])
def test_what_file_managers_leave_in_a_folder_of_zarr_is_skipped(kind, clutter, tmp_path):
    case = Case(ZARR, tmp_path / "case")
    pattern = "*weight/.zarray" if kind == "chunks" else "rng_state/shard_*.pt"
    folder = min(case.folder.rglob(pattern)).parent
    (folder / clutter).write_bytes(b"\0\5\26\7" + bytes(100))
    checkpoint = ucp.open(case.folder, **case.word)
    skipped = {item.where for item in checkpoint.inventory if item.status == "skipped"}
    assert f"{folder.name}/{clutter}" in skipped
    assert case.arrays(checkpoint) == case.whole


@pytest.mark.parametrize("copy", ["{} (1)", "{} copy", "{} 2", "Copy of {}"])
def test_a_second_copy_of_an_object_of_zarr_is_named(copy, tmp_path):
    case = Case(ZARR, tmp_path / "case")
    path = min(case.folder.rglob("rng_state/shard_*.pt"))
    other = path.with_stem(copy.format(path.stem))
    shutil.copy(path, other)
    if not other.name.startswith("shard_"):
        checkpoint = ucp.open(case.folder, **case.word)
        assert [i.status for i in checkpoint.inventory if i.where.endswith(other.name)] == [
            "skipped"
        ]
        return
    verdict, why = case.verdict()
    assert verdict == "refused"
    assert why.startswith(f"{other} is not a shard of rng_state")


def test_flat_buffers_of_another_number_of_optimizers_are_of_another_run(tmp_path):
    case = Case("megatron/legacy_ep2_moe_seq_distopt_fp32", tmp_path / "case")
    other = min((DATA / "megatron/legacy_pp2_dp2_distopt_buckets_fp32").rglob("distrib_optim.pt"))
    path = min(case.folder.rglob("distrib_optim.pt"))
    shutil.copy(other, path)
    verdict, why = case.verdict()
    assert verdict == "refused"
    assert str(path) in why
    assert "of another run or model" in why


@pytest.mark.parametrize("weights_only", [False, True])
def test_an_optimizer_of_a_run_without_zero_beside_files_of_zero_is_refused(weights_only, tmp_path):
    folder = tmp_path / "step"
    shutil.copytree(DATA / "deepspeed/autoep2_dp2_z1_bf16/global_step5", folder)
    for file in (DATA / "deepspeed/z0_fp16_dp2_frozen/global_step5").iterdir():
        shutil.copy(file, folder)
    with pytest.raises(FormatError, match=r"(?s)mp_rank_00_model_states.*files of two runs"):
        ucp.open(folder, weights_only=weights_only)


def test_a_renamed_weight_of_which_there_are_states_is_missed(tmp_path):
    folder = tmp_path / "case"
    shutil.copytree(DATA / "megatron/old0153_tp2_zarr_fp32/ckpt", folder)
    name = "embedding.word_embeddings.weight"
    (weight,) = folder.glob(f"iter_*/{name}")
    weight.rename(weight.with_name(f"{name}.1"))
    with pytest.raises(FormatError, match=rf"{name}, but the model has no such tensor"):
        ucp.open(folder)


@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.parametrize("of", ["", "optimizer.state.exp_avg."])
def test_a_tensor_whose_name_lost_its_case_is_named(of, weights_only, tmp_path):
    folder = tmp_path / "case"
    shutil.copytree(DATA / "megatron/old0153_tp2_zarr_fp32/ckpt", folder)
    name = f"{of}output_layer.weight"
    (tensor,) = folder.glob(f"iter_*/{name}")
    tensor.rename(tensor.with_name(name.upper()))
    with pytest.raises(FormatError, match=rf"{name.upper()} is in capitals"):
        ucp.open(folder, weights_only=weights_only)
