"""The universal checkpoint language: how shards form a parameter, in YAML or in Python.

    extends: megatron              # rules of a spec of the package, for parameters not claimed here
    sizes: {kv_rows: query_groups * head_dim}  # names for numbers, from those the checkpoint gives
    shards:
    # `*` is any text, `{layer}` one part of the name between dots
    - param: "*.linear_qkv.weight"
      pattern: {fused: {axis: 0, parts: {q: heads * head_dim, k: kv_rows, v: kv_rows}}}
    - param: "*word_embeddings.weight"
      pattern: {sharded: 0, padded: {axis: 0, to: vocab, from: padded_vocab}}
    - param: "*.linear_fc1.weight"
      when: not swiglu
      pattern: {sharded: 0}

Three stages, each with errors of its own: `notation` reads a text as a `Spec`; `rules` makes its
sentences patterns, once sizes are known; and makes those `layouts`, from the shapes of shards.
"""
