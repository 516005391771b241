"""A language model as in run_clm_flax of transformers: every device has a random key of its own in the train state.

The state puts itself on the devices, the mask of weight decay knows the names of GPT-2, and metrics are a dict.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import jax_utils, traverse_util
from flax.training import train_state
from flax.training.common_utils import onehot
from jax import lax

DEVICES = jax.devices()
VOCABULARY, LENGTH, WIDTH = 61, 12, 20


class TrainState(train_state.TrainState):
    dropout_rng: jax.Array  # (devices, 2)

    def replicate(self):
        return jax_utils.replicate(self, DEVICES).replace(dropout_rng=self.dropout_rng)

    def unreplicate(self):
        return jax_utils.unreplicate(self).replace(dropout_rng=jax.device_get(self.dropout_rng))


class Layer(nn.Module):
    deterministic: bool

    @nn.compact
    def __call__(self, x, mask):
        attention = nn.MultiHeadDotProductAttention(
            4, dropout_rate=0.1, deterministic=self.deterministic, name="attention"
        )
        x = x + attention(nn.LayerNorm(name="ln_1")(x), mask=mask)
        hidden = nn.gelu(nn.Dense(4 * WIDTH, name="c_fc")(nn.LayerNorm(name="ln_2")(x)))
        hidden = nn.Dense(WIDTH, name="c_proj")(hidden)
        return x + nn.Dropout(0.1, deterministic=self.deterministic)(hidden)


class LanguageModel(nn.Module):
    @nn.compact
    def __call__(self, input_ids, train=False):
        wte = nn.Embed(VOCABULARY, WIDTH, name="wte")
        x = wte(input_ids) + nn.Embed(LENGTH, WIDTH, name="wpe")(jnp.arange(LENGTH))[None]
        x = nn.Dropout(0.1, deterministic=not train)(x)
        for i in range(2):
            x = Layer(not train, name=f"h_{i}")(x, nn.make_causal_mask(input_ids))
        return wte.attend(nn.LayerNorm(name="ln_f")(x))


def decay_mask_fn(params):
    flat = traverse_util.flatten_dict(params)
    norms = [("ln_1", "scale"), ("ln_2", "scale"), ("ln_f", "scale")]
    return traverse_util.unflatten_dict({path: path[-1] != "bias" and path[-2:] not in norms for path in flat})


model = LanguageModel()
warmup = optax.linear_schedule(0.0, 2.0**-7, 2)
schedule = optax.join_schedules([warmup, optax.linear_schedule(2.0**-7, 0.0, 100)], [2])
optimizer = optax.adamw(schedule, b2=0.99, weight_decay=0.125, mask=decay_mask_fn)


def create_state():
    params = model.init(jax.random.PRNGKey(0), np.zeros((1, LENGTH), np.int32))["params"]
    dropout_rng = np.asarray(jax.random.split(jax.random.PRNGKey(1), len(DEVICES)))
    return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer, dropout_rng=dropout_rng)


def to_devices(state):
    return state.replicate()


def to_host(state):
    return state.unreplicate()


def loss_fn(logits, labels):
    return optax.softmax_cross_entropy(logits[:, :-1], onehot(labels[:, 1:], VOCABULARY)).mean()


def step_fn(state, batch):
    dropout_rng, new_dropout_rng = jax.random.split(state.dropout_rng)

    def compute_loss(params):
        labels = batch.pop("labels")
        logits = state.apply_fn({"params": params}, **batch, train=True, rngs={"dropout": dropout_rng})
        return loss_fn(logits, labels)

    loss, grads = jax.value_and_grad(compute_loss)(state.params)
    grads = lax.pmean(grads, "batch")
    new_state = state.apply_gradients(grads=grads, dropout_rng=new_dropout_rng)
    metrics = {"loss": loss, "learning_rate": schedule(state.step)}
    return new_state, lax.pmean(metrics, "batch")


p_train_step = jax.pmap(step_fn, "batch", devices=DEVICES, donate_argnums=0)


def train_step(state, batch):
    state, metrics = p_train_step(state, batch)
    return state, metrics["loss"]


def batch(step):
    """Rows of numbers that count, in steps of 1 to 3."""
    rng = np.random.default_rng(step)
    start = rng.integers(0, VOCABULARY, (len(DEVICES), 4, 1))
    stride = rng.integers(1, 4, (len(DEVICES), 4, 1))
    input_ids = ((start + stride * np.arange(LENGTH)) % VOCABULARY).astype(np.int32)
    return {"input_ids": input_ids, "labels": input_ids.copy()}
