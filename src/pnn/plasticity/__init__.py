"""The plasticity cycle: prune attention heads, measure, grow new ones, learn. A head is a pair (layer, index); every function
returns a model and leaves its input as it was. Importing this registers reorganised models with transformers' Auto classes."""

from pnn.plasticity.heads import Head, heads, masked
from pnn.plasticity.models import load, save
from pnn.plasticity.surgery import prune

__all__ = ["Head", "heads", "load", "masked", "prune", "save"]
