import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

from hypothesis import settings

collect_ignore = ["workers"]  # programs that tests start in processes of their own

settings.register_profile("default", deadline=None, max_examples=100)
settings.load_profile("default")
