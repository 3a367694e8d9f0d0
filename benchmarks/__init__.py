"""What jax_ucp costs, measured beside the tools it stands beside. `python -m benchmarks --help`
lists them.
"""
