"""gguf-py's side of `benchmarks/gguf.py`: what one dequantisation takes, on one thread.

python gguf_worker.py FILE
"""

from __future__ import annotations

import json
import sys
import time

sys.path.pop(0)  # this folder, in which `gguf` is another module

from gguf import GGUFReader, quants


def dequantize(file: str) -> None:
    (tensor,) = GGUFReader(file).tensors
    quants.dequantize(tensor.data, tensor.tensor_type)


if __name__ == "__main__":
    dequantize(sys.argv[1])  # imports, and warms
    wall, cpu = time.perf_counter(), time.process_time()
    dequantize(sys.argv[1])
    print(json.dumps({"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}))
