"""Sharding of any pytree inside `jax.pmap`: jax and optax only; Flax where one of its modules is lifted."""
