"""The universal format in buckets: saved, converted, opened, and read by others."""

from helpers import restored_equal  # noqa
