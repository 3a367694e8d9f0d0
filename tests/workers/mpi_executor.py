"""The main program of `mpiexec python -m mpi4py.futures`: argv[1] saved to argv[2] and exported to
argv[3] by the other ranks, which say then what they have imported.
"""

import sys

import mpi4py.futures

import jax_ucp as ucp

if __name__ == "__main__":
    source, saved, weights = sys.argv[1:]
    checkpoint = ucp.open(source)
    with mpi4py.futures.MPIPoolExecutor() as executor:
        checkpoint.save(saved, executor=executor)
        checkpoint.export(weights, "safetensors", executor=executor)
        assert list(checkpoint.verify(executor=executor)) == list(checkpoint.verify())
        modules = executor.submit(eval, "sorted(__import__('sys').modules)").result()
        print(executor.num_workers, *modules)
