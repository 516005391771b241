"""Sharding of any pytree inside `jax.pmap`: jax, flax and optax only."""
