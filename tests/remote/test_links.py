"""Links in buckets: the index is above the files, and nothing is copied."""

import orbax.checkpoint as ocp
import pytest

import jax_ucp as ucp
from cases import Case
from handler_cases import stock_warns
from helpers import faults_of
from jax_ucp.errors import CorruptData, UnsupportedPath
from jax_ucp.files.path import file_path
from remote_files import uploaded
from workers.stock import digests

LLAMA = Case("torch/hf_llama")
FILE = "model-00002-of-00004.safetensors"


def test_a_link_above_the_files_of_a_bucket_is_the_checkpoint(store):
    uploaded(LLAMA.path, f"{store.url}/hf")
    source = ucp.open(f"{store.url}/hf")
    with pytest.raises(UnsupportedPath, match="the files of a link lie below it"):
        source.link(f"{store.url}/link")
    link = source.link(store.url, checksum=True)
    assert LLAMA.wrong(link) == []
    assert faults_of(link) == []
    file = file_path(f"{store.url}/hf/{FILE}")
    file.files.write(file.key, [file.read_bytes()[:-1]], durable=True)
    with pytest.raises(CorruptData, match=f"{FILE} was replaced"):
        ucp.open(store.url)


@stock_warns
def test_stock_orbax_restores_a_linked_step_from_google(gcs):
    uploaded(LLAMA.path, f"{gcs.url}/run/3/default/hf")
    link = ucp.open(f"{gcs.url}/run/3/default/hf").link(f"{gcs.url}/run", step=3)
    with ocp.CheckpointManager(f"{gcs.url}/run") as manager:
        restored = manager.restore(manager.latest_step(), args=ocp.args.PyTreeRestore())
    assert digests(restored) == digests(link.restore())
