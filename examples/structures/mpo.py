"""MPO's structure as in ACME: dual variables with an optimizer of their own, both clipped; target networks by `where`.

The norms of both gradients are logged before they are clipped.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import jax_utils
from jax import lax

DEVICES = jax.devices()


def clipped_adam(rate):
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adam(rate))


policy_optimizer = clipped_adam(2.0**-7)
dual_optimizer = clipped_adam(2.0**-5)


class TrainingState(NamedTuple):
    params: Any
    target_params: Any
    dual_params: Any
    policy_opt_state: Any
    dual_opt_state: Any
    steps: Any
    norms: Any  # of the last gradients


def create_state():
    rng = np.random.default_rng(0)
    policy, critic = rng.normal(size=(6, 16)), rng.normal(size=(22, 1)) / 4
    params = {"policy": policy.astype(np.float32), "critic": critic.astype(np.float32)}
    dual_params = {"log_temperature": np.zeros(1, np.float32), "log_alpha": np.zeros(16, np.float32)}
    opt_states = policy_optimizer.init(params), dual_optimizer.init(dual_params)
    return TrainingState(params, params, dual_params, *opt_states, np.int32(0), np.zeros(2, np.float32))


def to_devices(state):
    return jax_utils.replicate(state, DEVICES)


def to_host(state):
    return jax_utils.unreplicate(state)


def loss_fn(params, dual_params, target_params, observation, actions):
    inputs = jnp.concatenate([jnp.broadcast_to(observation, (*actions.shape[:2], 6)), actions], -1)
    values = (inputs @ target_params["critic"])[..., 0]
    temperature, alpha = jnp.exp(dual_params["log_temperature"])[0], jnp.exp(dual_params["log_alpha"])
    weights = lax.stop_gradient(jax.nn.softmax(values / temperature, 0))
    dual_loss = temperature * (0.1 + jax.nn.logsumexp(values / temperature, 0)).mean()
    mean, old = observation @ params["policy"], observation @ target_params["policy"]
    policy_loss = jnp.square(weights[..., None] * (actions - mean[None])).sum((0, -1)).mean()
    trust = jnp.square(mean - old).mean(0)
    penalty = (lax.stop_gradient(alpha) * trust + alpha * (0.1 - lax.stop_gradient(trust))).mean()
    critic_loss = jnp.square((inputs @ params["critic"])[..., 0] - jnp.square(actions).mean(-1)).mean()
    return policy_loss + critic_loss + penalty + dual_loss


@partial(jax.pmap, axis_name="i", devices=DEVICES)
def train_step(state, batch):
    actions = state.target_params["policy"].sum(0)[None, None] + batch[:, :, :16]
    inputs = (state.target_params, batch[0, :, :6], actions)
    loss, grads = jax.value_and_grad(loss_fn, (0, 1))(state.params, state.dual_params, *inputs)
    grads, dual_grads = lax.pmean(grads, "i")
    norms = jnp.stack([optax.tree.norm(grads), optax.tree.norm(dual_grads)])
    updates, policy_opt_state = policy_optimizer.update(grads, state.policy_opt_state, state.params)
    dual_updates, dual_opt_state = dual_optimizer.update(dual_grads, state.dual_opt_state, state.dual_params)
    params = optax.apply_updates(state.params, updates)
    dual_params = optax.apply_updates(state.dual_params, dual_updates)
    is_due = (state.steps + 1) % 2 == 0
    target_params = jax.tree.map(partial(jnp.where, is_due), params, state.target_params)
    opt_states = policy_opt_state, dual_opt_state
    new = TrainingState(params, target_params, dual_params, *opt_states, state.steps + 1, norms)
    return new, lax.pmean(loss, "i")


def batch(step):
    return np.random.default_rng(step).normal(size=(len(DEVICES), 5, 4, 16)).astype(np.float32)
