"""Plain optax transforms whose state takes one byte per element, exact on shards."""

from zero.partition.quantised_optimizers import quantised_adamw as adamw
from zero.partition.quantised_optimizers import quantised_lion as lion
from zero.partition.quantised_optimizers import round_stochastically

__all__ = ["adamw", "lion", "round_stochastically"]
