"""Names that tell what parts are, where nobody asks yet for the weight that they stand for."""

from __future__ import annotations

GGML = "ggml "  # how the schemes of its blocks begin
# Scales of what flows into a layer or out of it: they change no weight.
_OF_INPUTS = {"input_global_scale", "input_scale", "input_scale_ub", "input_zero_point"}
ABOUT_ACTIVATIONS = frozenset(
    _OF_INPUTS | {"activation_scale", "k_scale", "output_scale", "v_scale"}
)
