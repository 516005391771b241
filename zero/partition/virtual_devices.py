"""Several virtual CPU devices in one process."""

import os

import jax

IN_ORDER = "--xla_cpu_enable_concurrency_optimized_scheduler=false"


def use_cpu_devices(count: int) -> None:
    """Gives jax's CPU backend `count` devices, and XLA the threads and the scheduler that they need.

    Call it before the first jax operation of the process; a second call with the same count does nothing. It sets
    `jax_num_cpu_devices`; `NPROC`, unless set, to two threads per device, because XLA hangs with fewer once some 32
    steps are dispatched ahead of their results; and a flag in `XLA_FLAGS` that makes mixed-up collectives rarer, which
    `zero.in_order` around a pmapped function prevents (docs/decisions/virtual-devices.md). On a machine with an
    accelerator set `JAX_PLATFORMS=cpu` too.

    Raises:
      RuntimeError: jax has started its backends already, so the settings would have no effect.

    >>> jax.device_count()
    8
    >>> use_cpu_devices(4)
    Traceback (most recent call last):
    RuntimeError: use_cpu_devices(4) comes too late: jax has already started its devices; call it first
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if IN_ORDER in flags and jax.config.values["jax_num_cpu_devices"] == count:
        return
    try:
        for value in (count + 1, count):  # jax accepts its current value even when it is too late
            jax.config.update("jax_num_cpu_devices", value)
    except RuntimeError as error:
        raise RuntimeError(
            f"use_cpu_devices({count}) comes too late: jax has already started its devices; call it first"
        ) from error
    os.environ.setdefault("NPROC", str(max(os.cpu_count() or 1, 2 * count)))
    if IN_ORDER not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {IN_ORDER}".strip()
