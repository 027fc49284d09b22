"""Kimi Delta Attention forward for NVIDIA GPUs, compiled at run time; see `cukda.fwd`."""

from cukda import sigmoid_ext
from cukda.decode import step
from cukda.kda import fwd
from cukda.sigmoid_ext import sigmoid

__all__ = ["fwd", "sigmoid", "sigmoid_ext", "step"]
__version__ = "0.1.0"
