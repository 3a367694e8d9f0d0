"""Any model under any parallelism, laid out as Megatron lays it out, is read again as it was.

Buffers are written here by the description of the format and with numpy alone; `test_megatron_dist`
has what Megatron itself wrote.
"""

import argparse
import itertools
import math
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import MemoryStore, faults_of, in_lanes, numbered
from jax_ucp.arrays.checks import verdicts
from jax_ucp.arrays.dtypes import same_bits
from jax_ucp.arrays.evaluate import expressions, read
from jax_ucp.codecs.torch_file import TorchFile
from jax_ucp.errors import FormatError, LayoutError
from jax_ucp.files.path import file_path
from jax_ucp.formats.megatron import dist_flat
from jax_ucp.formats.megatron.buffers import cut_of
from jax_ucp.formats.megatron.dist import read_files
from jax_ucp.formats.megatron.dist_files import DistFiles, DistTensor, StoredObject
from jax_ucp.formats.megatron.dist_flat import part_of
from jax_ucp.formats.megatron.dist_names import StoredRun, flattened_runs
from jax_ucp.formats.megatron.model import ParamPart, stage_chunks
from jax_ucp.formats.megatron.run import Args
from jax_ucp.layout.box import Box
from jax_ucp.options import Options
from megatron_model import BF16, EXPERTS, HIDDEN, LAYERS, STATES, args_of, arrays_of, shard
from torch_writer import save


@st.composite
def ranges(draw: st.DrawFn, size: int) -> list[tuple[int, int]]:
    """Ranges that tile `size` elements, cut anywhere."""
    cuts = draw(st.sets(st.integers(1, max(1, size - 1)), max_size=6))
    edges = [0, *sorted(cut for cut in cuts if cut < size), size]
    return list(itertools.pairwise(edges))


@given(st.data(), st.booleans())
def test_a_part_of_a_buffer_that_is_cut_anywhere_is_joined_again(data, transposed):
    axes = st.lists(st.integers(1, 6), min_size=2 if transposed else 1, max_size=2)
    shape = tuple(data.draw(axes))
    before, at, after = (data.draw(st.integers(0, 9)) for _ in range(3))
    memory = numbered(shape)
    buffer = np.full(before + at + memory.size + after, -1)
    buffer[before + at : before + at + memory.size] = memory.ravel()
    pieces = data.draw(ranges(buffer.size))
    store = MemoryStore({str(i): buffer[a:b] for i, (a, b) in enumerate(pieces)})
    arrays = [(a, expressions(store)[str(i)]) for i, (a, _) in enumerate(pieces)]
    part = part_of("w", ParamPart("w", at, shape, transposed), before, arrays)
    whole = memory.T if transposed else memory
    np.testing.assert_array_equal(read(part, Box.whole(whole.shape)), whole)


def test_boxes_that_are_no_equal_parts_of_the_ranks_are_refused():
    for boxes in ([Box((0,), (5,)), Box((5,), (8,))], [Box((i,), (i + 2,)) for i in (0, 2, 4)]):
        with pytest.raises(LayoutError, match="not equal parts of 2 tensor-parallel ranks"):
            cut_of((boxes[-1].stop[0],), boxes, ranks=2)


@given(st.data(), st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4)), min_size=1, max_size=3))
def test_flattened_fragments_that_are_cut_anywhere_are_joined_again(data, axes):
    grid, local = [g for g, _ in axes], [n for _, n in axes]
    shape = tuple(g * n for g, n in axes)
    whole, runs, store = numbered(shape), [], {}
    for i, place in enumerate(itertools.product(*map(range, grid))):
        spans = zip(place, local, strict=True)
        block = whole[tuple(slice(at * n, (at + 1) * n) for at, n in spans)].ravel()
        for a, b in data.draw(ranges(block.size)):
            target = Box((*place, a), (*(at + 1 for at in place), b))
            store[f"{i}.{a}"] = block[a:b]
            runs.append(StoredRun(f"{i}.{a}", 0, target))
    out = np.full(shape, -1)
    for run in flattened_runs(shape, (*grid, math.prod(local)), runs):
        assert (out[run.target.index] == -1).all()
        part = store[run.key][run.start : run.start + run.target.size]
        out[run.target.index] = part.reshape(run.target.shape)
    np.testing.assert_array_equal(out, whole)


@given(
    st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 9), st.integers(1, 9)
)
def test_stages_hold_every_layer_once_in_order_of_chunk_then_stage(p, v, each, first, last):
    degrees = {"pipeline_model_parallel_size": p, "virtual_pipeline_model_parallel_size": v}
    even = layers_of_chunks({**degrees, "num_layers": p * v * each})
    assert [n for layers in even for n in layers] == list(range(p * v * each))
    assert {len(layers) for layers in even} == {each}
    ends = {"decoder_first_pipeline_num_layers": first, "decoder_last_pipeline_num_layers": last}
    if p > 2:
        total = first + last + (p - 2) * each
        found = layers_of_chunks({"pipeline_model_parallel_size": p, "num_layers": total, **ends})
        assert [len(layers) for layers in found] == [first, *[each] * (p - 2), last]
    if p > 1 and p * v * each > 2:
        accounts = {f"account_for_{part}_in_pipeline_split": True for part in ("embedding", "loss")}
        found = layers_of_chunks({**degrees, "num_layers": p * v * each - 2, **accounts})
        sizes = [each] * (p * v)
        sizes[0] -= 1
        sizes[-1] -= 1
        assert [len(layers) for layers in found] == sizes


def layers_of_chunks(fields: dict) -> list[range]:
    return [chunk.layers for chunk in stage_chunks(Args(fields)).values()]


@pytest.mark.parametrize(("layout", "p", "sizes"), [
    ("Et*3|(tt|)*4,m|L", 7, [3, 2, 2, 2, 2, 0, 0]),
    ("Et|tt|t|L", 2, [1, 2, 1, 0]),
    ([["embedding", "decoder"], ["decoder"] * 2 + ["mtp", "loss"]], 2, [1, 2]),
    ("E|(t|)*3 L", 5, [0, 1, 1, 1, 0]),
])  # fmt: skip
def test_a_layout_says_the_layers_of_each_chunk(layout, p, sizes):
    fields = {"pipeline_model_parallel_size": p, "pipeline_model_parallel_layout": layout}
    chunks = stage_chunks(Args(fields))
    assert [len(chunk.layers) for chunk in chunks.values()] == sizes
    assert [n for chunk in chunks.values() for n in chunk.layers] == list(range(sum(sizes)))
    assert [chunk.embedding for chunk in chunks.values()] == [True] + [False] * (len(sizes) - 1)
    assert [chunk.output for chunk in chunks.values()] == [False] * (len(sizes) - 1) + [True]
    assert list(chunks) == [(i // p, i % p) for i in range(len(sizes))]


@pytest.mark.parametrize(("pattern", "p", "sizes"), [
    ("M|*-EM|G/*M/*M", 3, [1, 4, 1]), ("M|*-|-M*|M", 2, [1, 2, 3, 1]), ("M*|/M", 2, [2, 0]),
    ("M*-E/M", 2, [2, 2]),
])  # fmt: skip
def test_a_pattern_of_a_hybrid_model_says_the_layers_of_each_chunk(pattern, p, sizes):
    fields = {"pipeline_model_parallel_size": p, "hybrid_layer_pattern": pattern}
    found = layers_of_chunks({"num_layers": sum(sizes), **fields})
    assert [len(layers) for layers in found] == sizes
    assert [n for layers in found for n in layers] == list(range(sum(sizes)))


@pytest.mark.parametrize("layers", [-1, 1 << 40])
def test_a_number_of_layers_that_no_model_has_is_refused(layers):
    with pytest.raises(FormatError, match="num_layers"):
        stage_chunks(Args({"num_layers": layers, "mtp_num_layers": 1 << 60}))


@pytest.mark.parametrize(
    "layout", ["Et|x|L", "tt|L", "Et|tL|L", "Et*999999|(t*999999)*999999L", {"E": 1}, [[1], ["L"]]]
)
def test_a_layout_that_is_none_is_refused_by_name(layout):
    fields = {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": layout}
    with pytest.raises(FormatError, match="pipeline_model_parallel_layout"):
        stage_chunks(Args(fields))


Buckets = Iterator[list[tuple[int, np.ndarray]]]


def buckets_of(modules: list[tuple[bool, list[np.ndarray]]], limit: int | None) -> Buckets:
    """The buckets of a buffer: tensors with their starts, from the last module to the first."""
    bucket, at = list[tuple[int, np.ndarray]](), 0
    for shared, memory in reversed(modules):
        at = -(-at // 64) * 64
        if shared and bucket:
            yield [*bucket, (at, np.empty(0, np.float32))]
            bucket, at = [], 0
        flat = np.concatenate([array.ravel() for array in memory])
        bucket.append((at, flat))
        at += flat.size
        if shared or (limit is not None and at >= limit):
            yield bucket
            bucket, at = [], 0
    if bucket:
        yield bucket


class Writer:
    """What a run with these degrees stores, in memory."""

    def __init__(self, folder: Path, t: int, p: int, v: int, e: int, etp: int, kind: str, *, gated=True, moe=False,
                 tied=False, grouped=False, buckets=None, hidden=HIDDEN):  # fmt: skip
        self.folder, self.kind, self.gated = folder, kind, gated
        self.t, self.p, self.v, self.e, self.etp = t, p, v, e, etp
        self.whole = arrays_of(gated, moe, tied, hidden)
        self.args = args_of(t, p, v, e, etp, moe=moe, tied=tied, hidden_size=hidden, use_distributed_optimizer=True,
            overlap_grad_reduce=buckets is not None, ddp_bucket_size=buckets, transformer_impl="local",
            moe_grouped_gemm=grouped)  # fmt: skip
        self.arrays: dict[str, np.ndarray] = {}
        self.tensors: dict[str, DistTensor] = {}
        self.objects: dict[str, StoredObject] = {}
        for name, array in self.whole["param"].items():
            self._weight(name, array.astype(BF16))
        for chain, expert in enumerate((False, True) if e > 1 else (None,)):
            prefix = f"chained_{chain}." if e > 1 else ""
            axes = (range(e), range(etp)) if expert else ([0], range(t))
            ranks = itertools.product(range(p), *axes)
            for group, (pp, ep, rank) in enumerate(ranks):
                place = argparse.Namespace(pp=pp, ep=ep, rank=rank)
                at = f"{prefix}optimizer.distributed.dp_group_idx_{group}"
                self._rank(at, place, expert, buckets, grouped, tied)

    def _weight(self, name: str, array: np.ndarray) -> None:
        runs, ranks = [], self.etp if ".experts." in name else self.t
        ranks = shard(name, array, ranks, self.gated)
        pieces = {id(piece): piece for rank in ranks for piece in rank}
        for i, piece in enumerate(pieces.values()):
            begins = [x.__array_interface__["data"][0] for x in (piece, array)]
            start = (begins[0] - begins[1]) // 2
            corner = np.unravel_index(start, array.shape)
            stop = (int(a) + n for a, n in zip(corner, piece.shape, strict=True))
            box = Box(tuple(map(int, corner)), tuple(stop))
            self.arrays[f"f:{name}@{i}"] = piece
            runs.append(StoredRun(f"f:{name}@{i}", 0, box))
        self.tensors[name] = DistTensor(array.shape, array.dtype, tuple(runs))

    def _modules(self, state: str, place, c: int, expert: bool | None, grouped: bool, tied: bool):
        """What the rank has in a chunk, in module order: is it a shared embedding, and memory."""
        per, found = LAYERS // (self.p * self.v), []
        for name, array in self.whole[state].items():
            words = name.split(".")
            is_expert = "experts" in words
            ranks = self.etp if is_expert else self.t
            layer = int(words[2]) if words[1] == "layers" else None
            first = layer is None and words[0] == "embedding"
            where = (place.pp, c) == ((0, 0) if first else (self.p - 1, self.v - 1))
            if layer is not None:
                where = layer // per == c * self.p + place.pp
            if not where or (expert is not None and is_expert != expert):
                continue
            rank = place.ep if self.e > 1 else 0
            if is_expert and int(words[5]) // (EXPERTS // self.e) != rank:
                continue
            pieces = shard(name, array, ranks, self.gated)[place.rank]
            local = np.concatenate(pieces) if len(pieces) > 1 else pieces[0]
            group = (layer, words[6]) if is_expert and grouped else None
            if group is not None:
                local = local.T
            if group is not None and (group in [g for g, *_ in found]):
                next(memory for g, _, memory in found if g == group).append(local)
            else:
                is_shared = tied and self.p > 1 and name == "embedding.word_embeddings.weight"
                found.append((group, is_shared, [local]))
        if tied and self.p > 1 and (place.pp, c) == (self.p - 1, self.v - 1) and not expert:
            copy = self.whole[state]["embedding.word_embeddings.weight"]
            found.append((None, True, [np.split(copy, self.t)[place.rank]]))
        return [(shared, memory) for _, shared, memory in found]

    def _rank(self, at: str, place, expert, limit: int | None, grouped: bool, tied: bool):
        sizes: list[dict] = []
        param_state: dict = {"buckets_coalesced": True}
        for c in range(self.v):
            buffer: dict = {}
            sizes.append({})
            for state in STATES:
                modules = self._modules(state, place, c, expert, grouped, tied)
                if not modules:
                    continue
                own = limit if place.pp == c == 0 else None
                flats = []
                for k, bucket in enumerate(buckets_of(modules, own)):
                    end = max(start + flat.size for start, flat in bucket)
                    data, runs = np.full(end, np.nan, np.float32), list[StoredRun]()
                    key = f"{at}.gbuf_idx_{c}.dtype_(torch.bfloat16, torch.float32).bucket_idx_{k}.{state}"
                    shard_size = -(-end // 128) * 64  # two data-parallel ranks
                    edges = {0, end, *(n for n in (shard_size,) if n < end)}
                    for start, flat in bucket:
                        data[start : start + flat.size] = flat
                        edges |= {start, start + flat.size}
                    for a, b in itertools.pairwise(sorted(edges)):
                        self.arrays[f"f:{key}@{a}"] = data[a:b]
                        runs.append(StoredRun(f"f:{key}@{a}", 0, Box((a,), (b,))))
                    flats.append(data)
                    if self.kind == "dp_reshardable":
                        self.tensors[key] = DistTensor((end,), data.dtype, tuple(runs))
                    else:
                        for run in runs:
                            del self.arrays[run.key]
                dtypes = BF16, np.dtype(np.float32)
                sizes[c][dtypes] = [flat.size for flat in flats]
                buffer[state] = np.concatenate(flats)
            if buffer:
                buffer = {**buffer, "numel_unpadded": buffer["param"].size}
                param_state[c] = {(BF16, np.dtype(np.float32)): buffer}
        groups = [{"wd_mult": decay, "step": 5} for decay in (1.0, 0.0)]
        self._object(f"{at}.optimizer", [{"param_groups": groups}])
        if self.kind == "dp_reshardable":
            self._object(f"{at}.per_bucket_numel_unpadded", [sizes])
        else:
            self._object(f"{at}.param_state", [param_state])

    def _object(self, name: str, value) -> None:
        path = self.folder / f"{len(self.objects)}.pt"
        save(value, path)
        self.objects[f"{name}/shard_0_1"] = StoredObject(path.name, lambda: TorchFile(path))

    def files(self) -> DistFiles:
        save({"args": argparse.Namespace(**self.args), "iteration": 7}, self.folder / "common.pt")
        common = TorchFile(self.folder / "common.pt")
        store, tree = MemoryStore(self.arrays), dict(common.tree)
        names = [path.name for path in self.folder.iterdir()]
        args = Args(self.args)
        folder = file_path(self.folder)
        said = {"folder": folder, "args": args, "common": common, "tree": tree}
        return DistFiles(self.tensors, self.objects, store, names, **said)


@pytest.mark.parametrize("kind", ["dp_reshardable", "dp_zero"])
@pytest.mark.parametrize(
    ("t", "p", "v", "e", "etp", "how"),
    in_lanes([(1, 1, 1, 1, 1, {}), (4, 1, 1, 1, 4, {}), (2, 2, 1, 1, 2, {"tied": True}), (2, 2, 2, 1, 2, {"tied": True}),
     (1, 4, 1, 1, 1, {"buckets": 700}), (2, 2, 1, 1, 2, {"buckets": 300, "tied": True, "gated": False}),
     (1, 1, 1, 1, 1, {"moe": True}), (1, 2, 2, 2, 1, {"moe": True}), (2, 1, 1, 2, 1, {"moe": True}),
     (2, 2, 1, 2, 2, {"moe": True, "buckets": 900}), (2, 2, 1, 4, 1, {"moe": True, "gated": False}),
     (1, 1, 1, 2, 1, {"moe": True, "grouped": True}), (2, 2, 1, 2, 2, {"moe": True, "grouped": True})]),
)  # fmt: skip
def test_flat_buffers_of_any_parallelism_are_read(tmp_path, kind, t, p, v, e, etp, how):
    writer = Writer(tmp_path, t, p, v, e, etp, kind, **how)
    contents = read_files(writer.files(), Options())
    names = {leaf.label: leaf.name for leaf in contents.leaves}
    assert set(names) == {f"{s}/{n}" for s in (*STATES, "step") for n in writer.whole["param"]}
    for state, arrays in writer.whole.items():
        for name, array in arrays.items():
            got = contents.arrays.read(names[f"{state}/{name}"], Box.whole(array.shape))
            assert same_bits(np.ascontiguousarray(got), array), f"{state}/{name}"
            assert contents.arrays.read(names[f"step/{name}"], Box((), ())) == 5
    assert faults_of(contents) == []
    assert all(item.reason != "not understood" for item in contents.inventory)


SIZES = r"has buckets of \[.*modules lie in another order"


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [("dp_reshardable", {"ddp_bucket_size": 400}, SIZES), ("dp_zero", {"ddp_bucket_size": 400}, SIZES),
     ("dp_reshardable", {"pipeline_model_parallel_size": 1}, SIZES), ("dp_zero", {"moe_grouped_gemm": True}, SIZES),
     ("dp_zero", {"decoder_first_pipeline_num_layers": 1}, SIZES),
     ("dp_reshardable", {"tensor_model_parallel_size": 1}, SIZES),
     ("dp_zero", {"tensor_model_parallel_size": 4}, "not equal parts of 4 tensor-parallel ranks"),
     ("dp_zero", {"untie_embeddings_and_output_weights": False}, SIZES),
     ("dp_zero", {"pipeline_model_parallel_size": 4}, "no buffer of its|" + SIZES)],
)  # fmt: skip
def test_args_by_which_buffers_would_hold_others_are_refused(tmp_path, kind, change, message):
    writer = Writer(tmp_path, 2, 2, 1, 2, 2, kind, moe=True, buckets=900)
    read_files(writer.files(), Options())
    writer.args.update(change)
    with pytest.raises((FormatError, LayoutError), match=message):
        read_files(writer.files(), Options())


@pytest.mark.parametrize("kind", ["dp_reshardable", "dp_zero"])
def test_where_sizes_fit_one_order_of_modules_alone_it_is_that_one(tmp_path, kind):
    writer = Writer(tmp_path, 2, 2, 1, 2, 2, kind, moe=True, buckets=900)
    writer.args["transformer_impl"] = "transformer_engine"
    contents = read_files(writer.files(), Options())
    names = {leaf.label: leaf.name for leaf in contents.leaves}
    for name, array in writer.whole["param"].items():
        got = contents.arrays.read(names[f"param/{name}"], Box.whole(array.shape))
        assert same_bits(np.ascontiguousarray(got), array), name
    assert faults_of(contents) == []


def test_an_order_that_fits_in_every_size_is_refused_by_the_masters(tmp_path):
    writer = Writer(tmp_path, 1, 1, 1, 1, 1, "dp_zero", hidden=64)
    read_files(writer.files(), Options())
    writer.args["transformer_impl"] = "transformer_engine"
    for options in (Options(), Options(on_conflict="copy")):
        contents = read_files(writer.files(), options)
        faults = [fault for _, fault in verdicts(contents.checks("sample")) if fault]
        words = r"input_layernorm\.weight.* the master .*modules in another order"
        assert any(re.search(words, fault) for fault in faults)
    alone = read_files(writer.files(), Options(weights_only=True))
    assert not any(fault for _, fault in verdicts(alone.checks("sample")))


@pytest.mark.parametrize("kind", ["dp_reshardable", "dp_zero"])
def test_buffers_of_shards_of_generalized_tensor_parallelism_are_refused(tmp_path, kind):
    writer = Writer(tmp_path, 1, 1, 1, 1, 1, kind)
    writer.args["expert_tensor_parallel_num_weight_shards"] = 2
    with pytest.raises(FormatError, match=r"generalized tensor parallelism.*weights_only"):
        read_files(writer.files(), Options())
    weights = read_files(writer.files(), Options(weights_only=True))
    assert {leaf.label.partition("/")[0] for leaf in weights.leaves} == {"param"}


def test_buffers_of_more_ranks_than_the_args_know_are_refused(tmp_path):
    writer = Writer(tmp_path, 1, 1, 1, 1, 1, "dp_zero")
    key, *_ = [key for key in writer.objects if "param_state" in key]
    writer.objects[key.replace("group_idx_0", "group_idx_1")] = writer.objects[key]
    with pytest.raises(FormatError, match=r"group 1, chunk 0, bfloat16\) belongs to no rank"):
        read_files(writer.files(), Options())


def test_states_that_either_order_of_a_hybrid_model_has_moved_are_suspect(monkeypatch):
    """Before 0.19 the norm and the first weight of this layer lie behind padding, since then not."""
    degrees = ("tensor_model", "pipeline_model", "expert_model", "data", "context")
    args = Args(
        dict.fromkeys((f"{kind}_parallel_size" for kind in degrees), 1)
        | {"num_layers": 1, "world_size": 1, "overlap_grad_reduce": True, "ddp_bucket_size": 12_000}
        | {"hybrid_layer_pattern": "M", "untie_embeddings_and_output_weights": True}
    )
    mixer = {
        **dict.fromkeys(("dt_bias", "A_log", "D"), (4,)),
        "in_proj.layer_norm_weight": (64,), "in_proj.weight": (300, 64), "norm.weight": (136,),
        "conv1d.weight": (700, 1, 4), "conv1d.bias": (700,), "out_proj.weight": (64, 136),
    }  # fmt: skip
    shapes = {f"decoder.layers.0.mixer.{name}": shape for name, shape in mixer.items()}
    shapes |= {"embedding.word_embeddings.weight": (100, 64), "output_layer.weight": (2, 64)}
    shapes["decoder.final_norm.weight"] = (64,)
    cuts = {name: cut_of(shape, [Box.whole(shape)], 1) for name, shape in shapes.items()}
    ranks = SimpleNamespace(cuts=cuts, dtypes=dict.fromkeys(shapes, "bf16"), copies={})
    monkeypatch.setattr(dist_flat, "_rank_tensors", lambda *_: ranks)
    moved = dist_flat._moved(SimpleNamespace(args=args), SimpleNamespace(states={}))
    assert "decoder.layers.0.mixer.in_proj.weight" in moved
