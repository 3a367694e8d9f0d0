"""`python -m jax_ucp` is `jax-ucp`."""

from jax_ucp.cli.main import main

main()
