"""AlphaZero's structure as in pgx: self-play with a search, then updates by minibatch, each under a pmap of its own.

The game: two players take one to three of up to twelve stones in turn, and who takes the last one wins. The search
looks one move ahead. Parameters and optimizer state are held in a pair.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import jax_utils
from jax import lax

DEVICES = jax.devices()
STONES, MOVES, GAMES, MINIBATCHES = 12, 3, 16, 2
optimizer = optax.chain(optax.add_decayed_weights(2.0**-10), optax.adam(2.0**-6))


def create_state():
    rng = np.random.default_rng(0)
    sizes = {"body": (STONES + 1, 32), "policy": (32, MOVES), "value": (32, 1)}
    params = {name: rng.normal(size=size).astype(np.float32) / size[0] ** 0.5 for name, size in sizes.items()}
    return params, optimizer.init(params)


def to_devices(state):
    return jax_utils.replicate(state, DEVICES)


def to_host(state):
    return jax_utils.unreplicate(jax.device_get(state))


def apply(params, stones):
    """Logits of the moves and the value for the player to move."""
    x = jnp.tanh(jax.nn.one_hot(stones, STONES + 1) @ params["body"])
    return x @ params["policy"], jnp.tanh(x @ params["value"])[..., 0]


def search(params, stones):
    """The policy after a look at each move: `(games, moves)` probabilities."""
    left = stones[:, None] - 1 - jnp.arange(MOVES)[None]
    _, value_of_other = apply(params, jnp.maximum(left, 0))
    value = jnp.where(left == 0, 1.0, -value_of_other)
    logits, _ = apply(params, stones)
    return jax.nn.softmax(jnp.where(left >= 0, logits + 4 * value, -1e9))


@partial(jax.pmap, devices=DEVICES)
def self_play(params, key):
    """Positions, policies of the search, and outcomes for the player to move, of all moves of some games."""

    def move(stones, key):
        policy = search(params, stones)
        taken = jax.random.categorical(key, jnp.log(policy + 1e-9)) + 1
        later = jnp.maximum(stones - taken, 0)
        return later, (stones, policy, later == 0)

    keys = jax.random.split(key, STONES + 1)
    stones = jax.random.randint(keys[0], (GAMES,), 1, STONES + 1)
    _, (positions, policies, is_last) = lax.scan(move, stones, keys[1:])

    def outcome(later, is_last):
        now = jnp.where(is_last, 1.0, -later)
        return now, now

    _, outcomes = lax.scan(outcome, jnp.zeros(GAMES), is_last, reverse=True)
    data = (positions, policies, outcomes, (positions > 0).astype(jnp.float32))
    return jax.tree.map(lambda x: x.reshape(-1, MINIBATCHES, *x.shape[2:]).swapaxes(0, 1), data)


def loss_fn(params, data):
    position, policy, outcome, weight = data
    logits, value = apply(params, position)
    losses = optax.softmax_cross_entropy(logits, policy) + jnp.square(value - outcome)
    return (losses * weight).sum() / weight.sum()


@partial(jax.pmap, axis_name="i", devices=DEVICES)
def update(state, data):
    params, opt_state = state
    loss, grads = jax.value_and_grad(loss_fn)(params, data)
    grads = lax.pmean(grads, axis_name="i")
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), lax.pmean(loss, "i")


def train_step(state, keys):
    data = self_play(state[0], keys)
    for i in range(MINIBATCHES):
        state, loss = update(state, jax.tree.map(lambda x, i=i: x[:, i], data))
    return state, loss


def batch(step):
    return np.asarray(jax.random.split(jax.random.PRNGKey(step), len(DEVICES)))
