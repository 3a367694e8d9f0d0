"""One rank of a torch process group: `torch_worker.py RANK RANKS FILE`; a request in JSON per line
of stdin.

`{"do": "save" | "load", "path": ..., "count": ..., "shape": [...], "axis": 0 | 1, "threads": 1}`
"""

import json
import os
import resource
import shutil
import sys
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

rank, ranks, file = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # gloo prints its ranks on stdout
dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=ranks)
mesh = init_device_mesh("cpu", (ranks,))
state: dict[str, DTensor] = {}


def tensors(count: int, shape: list[int], axis: int, make) -> dict[str, DTensor]:
    local = list(shape)
    local[axis] //= ranks
    return {
        f"w{i:05}": DTensor.from_local(make(local), mesh, [Shard(axis)], run_check=False)
        for i in range(count)
    }


def page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


for line in sys.stdin:
    request = json.loads(line)
    what = (request["count"], request["shape"], request["axis"])
    path = request["path"]
    if request["do"] == "save" and not state:
        state = tensors(*what, torch.randn)
    if request["do"] == "save" and rank == 0:
        shutil.rmtree(path, ignore_errors=True)
    dist.barrier()
    begun, cpu, faults = time.perf_counter(), time.process_time(), page_faults()
    if request["do"] == "save":
        dcp.save(state, storage_writer=dcp.FileSystemWriter(path, thread_count=request["threads"]))
    else:
        dcp.load(tensors(*what, torch.empty), storage_reader=dcp.FileSystemReader(path))
    dist.barrier()
    took = {
        "wall_s": time.perf_counter() - begun,
        "cpu_s": time.process_time() - cpu,
        "page_faults": page_faults() - faults,
    }
    print(json.dumps(took), file=answers, flush=True)
dist.destroy_process_group()
