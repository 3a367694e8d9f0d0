import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

from hypothesis import settings

# Programs that tests start in processes of their own, and one that needs torch to write cases anew.
collect_ignore = ["workers", "write_pairing_cases.py"]

settings.register_profile("default", deadline=None, max_examples=100)
settings.load_profile("default")
