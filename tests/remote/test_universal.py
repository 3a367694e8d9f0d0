"""The universal format in buckets: saved, converted, opened, and read by others."""

import jax
import numpy as np
import pytest
from helpers import restored_equal  # noqa
